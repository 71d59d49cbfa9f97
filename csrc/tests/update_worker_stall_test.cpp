// A wait in which nothing is finished is told of, once, with the last task of each lane.
#include <chrono>
#include <mutex>
#include <thread>

#include "held_device.h"
#include "worker_bench.h"

namespace {

using hytrain::AdamHyper;
using hytrain::testing::check;
using hytrain::testing::HeldDevice;
using hytrain::testing::Hold;
using hytrain::testing::Shape;
using hytrain::testing::WorkerBench;

const AdamHyper kHyper;
constexpr std::chrono::milliseconds kAfter(20);

// What was told, from whichever thread.
struct Reports {
    void add(const std::string& text) {
        std::lock_guard<std::mutex> lock(mutex);
        texts.push_back(text);
    }
    void clear() {
        std::lock_guard<std::mutex> lock(mutex);
        texts.clear();
    }
    std::vector<std::string> all() {
        std::lock_guard<std::mutex> lock(mutex);
        return texts;
    }
    std::mutex mutex;
    std::vector<std::string> texts;
};

void send(WorkerBench& bench, int layer) {
    bench.make_gradient(bench.layer(layer));
    bench.send(bench.layer(layer), bench.record(1.0F, kHyper), true);
}

void test_a_copy_that_does_not_come() {
    Hold hold;
    Reports reports;
    WorkerBench bench(std::make_unique<HeldDevice>(hold), std::vector<Shape>(2, Shape{100, 64}), 1,
                      0, 0, 2, [&](hytrain::UpdateWorker& worker) {
                          worker.on_stall(kAfter, [&](const std::string& t) { reports.add(t); });
                      });
    bench.worker().begin_step(1e9);
    send(bench, 0);
    bench.worker().wait_issued(0);
    reports.clear();  // of a busy machine, on which that took long
    hold.on = true;
    send(bench, 1);
    std::thread waiter([&] { bench.worker().wait_issued(1); });
    while (reports.all().empty()) std::this_thread::yield();
    std::this_thread::sleep_for(10 * kAfter);  // it goes on waiting, and says no more
    const std::vector<std::string> told = reports.all();
    hold.on = false;
    waiter.join();
    check(told.size() == 1, "told " + std::to_string(told.size()) + " times");
    for (const char* part :
         {"CPU update: direct update of layer 'layer 1', chunk 0, ",
          "waits for its gradient's copy to the host",
          "copies to the host: gradient of layer 'layer 1'",
          "copies to the device: weights of layer 'layer 0', chunk 1", "1 jobs left"}) {
        check(told[0].find(part) != std::string::npos,
              std::string(part) + " is not in: " + told[0]);
    }
    bench.worker().wait_all();
    bench.layer(0).make_expected_step(1.0F, kHyper);
    bench.layer(1).make_expected_step(1.0F, kHyper);
    bench.check_state(bench.layer(0));
    bench.check_state(bench.layer(1));
}

void test_slow_is_no_stall() {
    Reports reports;
    // Some milliseconds a chunk, 1000 of them: more than the limit together, and never in one, not
    // on a busy machine either.
    const auto limit = 75 * kAfter;
    WorkerBench bench(hytrain::make_host_device(1, 1000), {Shape{64'000, 64}}, 1, 1, 1000, 2,
                      [&](hytrain::UpdateWorker& worker) {
                          worker.on_stall(limit, [&](const std::string& t) { reports.add(t); });
                      });
    bench.worker().begin_step(1e9);
    const auto begin = std::chrono::steady_clock::now();
    send(bench, 0);
    bench.worker().wait_complete(0);
    check(std::chrono::steady_clock::now() - begin > limit, "it was not slow");
    check(reports.all().empty(), "a slow worker was told of");
}

}  // namespace

int main() {
    test_a_copy_that_does_not_come();
    test_slow_is_no_stall();
    std::printf("update_worker_stall_test: passed\n");
    return 0;
}
