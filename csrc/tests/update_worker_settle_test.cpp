// Settling: what is pending is committed beside training, and no wait for weights knows of it. And
// weights that get other memory between two steps.
#include <stdexcept>
#include <thread>

#include "held_device.h"
#include "worker_bench.h"

namespace {

using hytrain::AdamHyper;
using hytrain::Pass;
using hytrain::WorkerError;
using hytrain::testing::BenchLayer;
using hytrain::testing::check;
using hytrain::testing::HeldDevice;
using hytrain::testing::Hold;
using hytrain::testing::Shape;
using hytrain::testing::WorkerBench;

const AdamHyper kHyper;

std::vector<Shape> two_layers() { return std::vector<Shape>(2, Shape{100, 64}); }

// A step of all layers, clipped or not.
void step(WorkerBench& bench, float scale) {
    bench.worker().begin_step(1e9);
    for (BenchLayer& layer : bench.layers()) {
        bench.make_gradient(layer);
        bench.send(layer, bench.record(1.0F, kHyper), false);
        layer.make_expected_step(scale, kHyper);
    }
    bench.worker().finalize(bench.record(scale, kHyper));
}

void test_what_is_pending_is_committed_once() {
    WorkerBench bench(hytrain::make_host_device(0, 0), two_layers(), 1, 0, 0, 2);
    BenchLayer& layer = bench.layer(0);
    step(bench, 0.5F);
    bench.worker().wait_all();
    check(bench.worker().has_pending(0), "nothing is pending after a step");
    check(!(*layer.state == layer.expected), "a step was committed at once");
    // The second one finds nothing left to commit.
    for (int times = 0; times < 2; ++times) {
        bench.submit(layer, Pass::kSettle);
        bench.worker().wait_settled(0);
        check(!bench.worker().has_pending(0), "settled, and still pending");
        bench.check_state(layer);
        bench.worker().wait_complete(0);
        bench.check_weights(layer);
    }
    check(bench.worker().has_pending(1), "another layer was settled, too");
    // The step behind it has nothing to commit along, and is made of the same state.
    step(bench, 1.0F);
    bench.submit(layer, Pass::kSettle);
    bench.submit(bench.layer(1), Pass::kCommit);
    bench.worker().wait_all();
    for (BenchLayer& each : bench.layers()) {
        bench.check_state(each);
        bench.worker().wait_complete(each.index);
        bench.check_weights(each);
    }
}

// Behind another layer's gradient that has not come: whoever waits for weights goes on.
void test_no_wait_for_weights_waits_for_it() {
    Hold hold;
    WorkerBench bench(std::make_unique<HeldDevice>(hold), two_layers(), 1, 0, 0, 2);
    step(bench, 1.0F);
    bench.worker().wait_all();
    for (BenchLayer& layer : bench.layers()) bench.worker().wait_complete(layer.index);
    hold.on = true;
    bench.worker().begin_step(1e9);
    bench.make_gradient(bench.layer(1));
    bench.send(bench.layer(1), bench.record(1.0F, kHyper), false);
    while (hold.asked < 50) std::this_thread::yield();
    bench.submit(bench.layer(0), Pass::kSettle);
    bench.worker().wait_complete(0);  // a hang, if it waited
    check(bench.worker().has_pending(0), "settled by a worker that was held up");
    bench.check_weights(bench.layer(0));
    // Nor is an update cancelled in its place.
    check(!bench.worker().cancel_update(0), "settling was cancelled as an update");
    hold.on = false;
    bench.worker().wait_settled(0);
    bench.check_state(bench.layer(0));
    bench.layer(1).make_expected_step(1.0F, kHyper);
    bench.worker().finalize(bench.record(1.0F, kHyper));
    bench.worker().wait_all();
}

void test_a_step_that_is_not_final_is_not_committed() {
    WorkerBench bench(hytrain::make_host_device(0, 0), two_layers(), 1, 0, 0, 2);
    bench.worker().begin_step(1e9);
    bench.make_gradient(bench.layer(0));
    bench.send(bench.layer(0), bench.record(1.0F, kHyper), false);
    bench.worker().wait_issued(0);
    bench.submit(bench.layer(0), Pass::kSettle);
    std::string text = "nothing";
    try {
        bench.worker().wait_settled(0);
    } catch (const WorkerError& error) {
        text = error.what();
    }
    check(text.find("not final") != std::string::npos, "not refused: " + text);
    check(*bench.layer(0).state == bench.layer(0).expected, "the state was changed");
}

// Settled at random, held up at every hand-off: bit for bit the serial loop's.
void test_random_lives() {
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
        WorkerBench bench(hytrain::make_host_device(seed, 60), two_layers(), 1, seed, 60, 2);
        for (int steps = 0; steps < 6; ++steps) {
            step(bench, bench.random()() % 2 == 0 ? 1.0F : 0.3F);
            for (BenchLayer& layer : bench.layers()) {
                if (bench.random()() % 2 == 0) bench.submit(layer, Pass::kSettle);
                if (bench.random()() % 2 == 0) {
                    bench.worker().wait_complete(layer.index);
                    bench.check_weights(layer);
                }
            }
            // The gradient's memory is made anew in the next step.
            for (BenchLayer& layer : bench.layers()) bench.worker().wait_issued(layer.index);
        }
        for (BenchLayer& layer : bench.layers()) bench.submit(layer, Pass::kSettle);
        bench.worker().wait_all();
        for (BenchLayer& layer : bench.layers()) {
            bench.worker().wait_settled(layer.index);
            check(!bench.worker().has_pending(layer.index), "something is left pending");
            bench.check_state(layer);
        }
    }
}

std::vector<void*> chunks_of(std::vector<char>& weights, const Shape& shape) {
    std::vector<void*> addresses;
    for (std::size_t at = 0; at < shape.n; at += shape.chunk) {
        addresses.push_back(weights.data() + at * size_of(shape.weights));
    }
    return addresses;
}

void test_weights_in_other_memory() {
    WorkerBench bench(hytrain::make_host_device(0, 0), two_layers(), 1, 0, 0, 2);
    BenchLayer& layer = bench.layer(0);
    step(bench, 1.0F);
    bench.worker().wait_all();
    bench.worker().wait_complete(0);
    std::vector<char> before = layer.weights;
    layer.weights.swap(before);  // the copy is `before`'s memory no more
    const std::vector<char> old = before;
    bench.worker().move_weights(0, chunks_of(layer.weights, layer.shape));
    step(bench, 1.0F);
    for (BenchLayer& each : bench.layers()) {
        bench.worker().wait_complete(each.index);
        bench.check_weights(each);
    }
    check(before == old, "weights were written to their old memory");
}

template <class Error>
void check_refused(WorkerBench& bench, const std::vector<void*>& addresses, const char* word) {
    std::string text = "nothing";
    try {
        bench.worker().move_weights(0, addresses);
    } catch (const Error& error) {
        text = error.what();
    }
    check(text.find(word) != std::string::npos, "not refused: " + text);
}

void test_weights_that_are_still_to_be_written_stay() {
    Hold hold;
    WorkerBench bench(std::make_unique<HeldDevice>(hold), two_layers(), 1, 0, 0, 2);
    std::vector<char> other(bench.layer(0).weights.size());
    std::vector<void*> addresses = chunks_of(other, bench.layer(0).shape);
    hold.on = true;
    bench.worker().begin_step(1e9);
    bench.make_gradient(bench.layer(0));
    bench.send(bench.layer(0), bench.record(1.0F, kHyper), false);
    check_refused<std::logic_error>(bench, addresses, "still to be written");
    hold.on = false;
    bench.layer(0).make_expected_step(1.0F, kHyper);
    bench.worker().finalize(bench.record(1.0F, kHyper));
    bench.worker().wait_complete(0);
    bench.check_weights(bench.layer(0));
    addresses.pop_back();
    check_refused<std::invalid_argument>(bench, addresses, "number of chunks");
}

}  // namespace

int main() {
    test_what_is_pending_is_committed_once();
    test_no_wait_for_weights_waits_for_it();
    test_a_step_that_is_not_final_is_not_committed();
    test_random_lives();
    test_weights_in_other_memory();
    test_weights_that_are_still_to_be_written_stay();
    std::printf("update_worker_settle_test: passed\n");
    return 0;
}
