// The end of a step while a layer still has the dropped gradient of the step before: held up, so
// that it is no matter of luck.
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

// Two layers; the first one's gradient has been previewed and dropped, and the worker, which waits
// for the second one's next gradient, cannot begin to give it up.
class Held {
   public:
    Held() : bench(std::make_unique<HeldDevice>(hold_), shapes(), 1, 0, 0, 2) {
        bench.worker().begin_step(1e9);
        send(first());
        bench.worker().wait_issued(0);
        hold_.on = true;
        send(second());
        // Once or twice it looks for the next job, and from then on for this one's gradient.
        while (hold_.asked < 50) std::this_thread::yield();
        bench.submit(first(), Pass::kDrop);
    }
    BenchLayer& first() { return bench.layer(0); }
    BenchLayer& second() { return bench.layer(1); }
    void let_go() { hold_.on = false; }

    // The outcome of the second step, with a scale that calls for another preview.
    int finalize() {
        second().make_expected_step(0.5F, hyper_);
        return bench.worker().finalize(bench.record(0.5F, hyper_));
    }

   private:
    static std::vector<Shape> shapes() { return std::vector<Shape>(2, Shape{100, 64}); }
    void send(BenchLayer& layer) {
        bench.make_gradient(layer);
        bench.send(layer, bench.record(1.0F, hyper_), false);
    }

    Hold hold_;
    AdamHyper hyper_;

   public:
    WorkerBench bench;
};

void test_a_dropped_layer_has_no_part_in_the_next_step() {
    Held held;
    check(held.finalize() == 0, "a gradient that was dropped is previewed again");
    held.let_go();
    for (BenchLayer* layer : {&held.first(), &held.second()}) {
        held.bench.worker().wait_complete(layer->index);
        held.bench.check_weights(*layer);
    }
    check(!held.bench.worker().has_pending(0), "a gradient that was dropped is pending");
    check(held.bench.worker().has_pending(1), "a gradient is lost");
    held.bench.submit(held.second(), Pass::kCommit);
    held.bench.worker().wait_all();
    held.bench.check_state(held.first());
    held.bench.check_state(held.second());
}

template <class Call>
void check_refused(Call call) {
    std::string text = "nothing";
    try {
        call();
    } catch (const WorkerError& error) {
        text = error.what();
    }
    check(text.find("'layer 0' moves") != std::string::npos &&
              text.find("dropped") != std::string::npos,
          "not refused: " + text);
}

void test_a_dropped_layer_that_leaves_is_waited_for() {
    Held held;
    const auto old = held.bench.move(held.first(), hytrain::kNoEvent);
    check_refused([&] { held.finalize(); });
    // Whatever is called afterwards says so, too.
    check_refused([&] { held.bench.worker().wait_moved(0); });
    check_refused([&] { held.bench.worker().check_error(); });
    held.let_go();
    held.bench.worker().close();
}

void test_a_layer_that_was_waited_for_is_no_fault() {
    Held held;
    const auto old = held.bench.move(held.first(), hytrain::kNoEvent);
    held.let_go();
    held.bench.worker().wait_moved(0);
    held.finalize();
    held.bench.check_state(held.first());
    held.bench.worker().wait_complete(1);
    held.bench.check_weights(held.second());
}

}  // namespace

int main() {
    test_a_dropped_layer_has_no_part_in_the_next_step();
    test_a_dropped_layer_that_leaves_is_waited_for();
    test_a_layer_that_was_waited_for_is_no_fault();
    std::printf("update_worker_finalize_test: passed\n");
    return 0;
}
