// Copies that are owed: whenever they are taken, they are the state as of the step at which they
// were asked for, and no later step waits for them.
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "held_device.h"
#include "worker_bench.h"

namespace {

using hytrain::AdamHyper;
using hytrain::EventHandle;
using hytrain::kNoEvent;
using hytrain::Pass;
using hytrain::testing::BenchLayer;
using hytrain::testing::check;
using hytrain::testing::HeldDevice;
using hytrain::testing::Hold;
using hytrain::testing::kOneThreadPasses;
using hytrain::testing::Shape;
using hytrain::testing::State;
using hytrain::testing::WorkerBench;

const AdamHyper kHyper;

std::vector<Shape> three_layers() { return std::vector<Shape>(3, Shape{100, 64}); }

// A step of the layers that are on the host, clipped or not, or skipped.
void step(WorkerBench& bench, float scale, bool direct = false, bool skipped = false) {
    bench.worker().begin_step(1e9);
    for (BenchLayer& layer : bench.layers()) {
        if (layer.away) continue;
        // The gradient's memory is made anew.
        bench.worker().wait_issued(layer.index);
        bench.make_gradient(layer);
        bench.send(layer, bench.record(1.0F, kHyper), direct);
        if (!skipped) layer.make_expected_step(direct ? 1.0F : scale, kHyper);
    }
    if (direct) return;
    if (!skipped) {
        bench.worker().finalize(bench.record(scale, kHyper));
        return;
    }
    for (BenchLayer& layer : bench.layers()) {
        if (layer.away || bench.worker().cancel_update(layer.index)) continue;
        bench.submit(layer, Pass::kDrop);
    }
}

// A copy that is owed, beside what it is to be.
struct Owed {
    int layer;
    State expected;
    std::unique_ptr<State> copy;
};

Owed ask(WorkerBench& bench, BenchLayer& layer) {
    Owed owed{layer.index, layer.expected, std::make_unique<State>(layer.shape.n)};
    bench.worker().capture(layer.index, owed.copy->arrays());
    return owed;
}

void check_copy(WorkerBench& bench, const Owed& owed) {
    bench.worker().wait_captured(owed.layer);
    check(*owed.copy == owed.expected, "a copy is not of the step it was asked for at");
}

void test_an_idle_worker_takes_it() {
    WorkerBench bench(hytrain::make_host_device(0, 0), three_layers(), 1, 0, 0, 2);
    step(bench, 0.5F);
    check_copy(bench, ask(bench, bench.layer(1)));
    check(!bench.worker().has_pending(1), "what was pending is not in the copy");
    check_copy(bench, ask(bench, bench.layer(1)));  // with nothing pending
    step(bench, 1.0F);
    bench.worker().wait_all();
    for (BenchLayer& layer : bench.layers()) {
        bench.submit(layer, Pass::kCommit);
        bench.worker().wait_all();
        bench.check_state(layer);
    }
}

// A worker that stands before a gradient: the copy of another layer is asked for and taken by the
// passes that would change it, since no pass is ever idle.
void test_passes_take_it_in_time() {
    Hold hold;
    WorkerBench bench(std::make_unique<HeldDevice>(hold), three_layers(), 1, 0, 0, 2);
    step(bench, 0.5F);
    bench.worker().wait_all();
    hold.on = true;
    bench.worker().begin_step(1e9);
    for (BenchLayer& layer : bench.layers()) {
        bench.make_gradient(layer);
        bench.send(layer, bench.record(1.0F, kHyper), false);
    }
    // It waits in the first update's copy to the host, and takes none meanwhile.
    while (hold.asked < 50) std::this_thread::yield();
    std::vector<Owed> owed;
    hold.on = false;
    for (BenchLayer& layer : bench.layers()) layer.make_expected_step(1.0F, kHyper);
    bench.worker().finalize(bench.record(1.0F, kHyper));
    for (BenchLayer& layer : bench.layers()) owed.push_back(ask(bench, layer));
    for (int steps = 0; steps < 3; ++steps) step(bench, 1.0F);
    for (const Owed& each : owed) check_copy(bench, each);
}

void test_a_forgotten_one_is_not_written() {
    WorkerBench bench(hytrain::make_host_device(3, 100), three_layers(), 1, 3, 100, 2);
    for (int times = 0; times < 20; ++times) {
        step(bench, 1.0F);
        const Owed owed = ask(bench, bench.layer(0));
        bench.worker().forget_capture(0);
        const State seen = *owed.copy;
        step(bench, 1.0F);
        bench.worker().wait_all();
        check(*owed.copy == seen, "written after it was forgotten");
    }
}

// Asked for at random, between steps that are clipped, skipped or settled, and layers that move.
void test_random_lives(bool direct) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
        WorkerBench bench(hytrain::make_host_device(seed, 60), three_layers(), 1, seed, 60, 2);
        std::vector<Owed> owed;
        std::vector<std::unique_ptr<State>> old;
        for (int steps = 0; steps < 8; ++steps) {
            step(bench, bench.random()() % 2 == 0 ? 1.0F : 0.3F, direct,
                 !direct && bench.random()() % 4 == 0);
            if (owed.empty() && bench.random()() % 2 == 0) {
                for (BenchLayer& layer : bench.layers()) {
                    if (!layer.away) owed.push_back(ask(bench, layer));
                }
            }
            BenchLayer& layer = bench.layer(static_cast<int>(bench.random()() % 3));
            if (!layer.away && bench.random()() % 3 == 0) bench.submit(layer, Pass::kSettle);
            if (bench.random()() % 3 == 0) {
                bench.worker().wait_moved(layer.index);
                bench.wait(layer.moved);  // its copies to the "device" have been issued, no more
                old.push_back(bench.move(layer, layer.moved));
            }
            if (bench.random()() % 4 == 0) {
                for (const Owed& each : owed) check_copy(bench, each);
                owed.clear();
            }
        }
        for (const Owed& each : owed) check_copy(bench, each);
        for (BenchLayer& layer : bench.layers()) {
            if (!layer.away) bench.submit(layer, Pass::kCommit);
        }
        bench.worker().wait_all();
        for (BenchLayer& layer : bench.layers()) {
            if (layer.away) continue;
            bench.check_state(layer);
            bench.worker().wait_complete(layer.index);
            bench.check_weights(layer);
        }
    }
}

// Blocks: a chunk of more elements than one thread's part of a block.
void test_large_chunks() {
    for (int threads = 1; threads < (kOneThreadPasses ? 2 : 3); ++threads) {
        const Shape large{300'001, 280'000};
        WorkerBench bench(hytrain::make_host_device(0, 0), {large}, threads, 0, 0, 2);
        step(bench, 0.7F);
        const Owed first = ask(bench, bench.layer(0));
        step(bench, 1.0F);
        step(bench, 0.9F);
        check_copy(bench, first);
        bench.submit(bench.layer(0), Pass::kCommit);
        bench.worker().wait_all();
        bench.check_state(bench.layer(0));
    }
}

}  // namespace

int main() {
    test_an_idle_worker_takes_it();
    test_passes_take_it_in_time();
    test_a_forgotten_one_is_not_written();
    test_random_lives(false);
    test_random_lives(true);
    test_large_chunks();
    std::printf("update_worker_capture_test: passed\n");
    return 0;
}
