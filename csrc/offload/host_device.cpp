// The device on a machine without a GPU: "device memory" is host memory, lanes are threads.
// It is as asynchronous as a GPU, so CPU tests exercise the same ordering rules.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "hytrain/clock.h"
#include "hytrain/device.h"

namespace hytrain {
namespace {

// Counters, not flags, because an event is recorded again in every step: a wait is for the latest
// record at the time it is queued, and must not be satisfied by the completion of an older one.
struct HostEvent {
    std::atomic<std::uint64_t> recorded{0};
    std::atomic<std::uint64_t> completed{0};
    std::atomic<std::int64_t> completed_ns{0};  // when the latest record completed
};

HostEvent* as_event(EventHandle handle) { return reinterpret_cast<HostEvent*>(handle); }

class LaneThread {
   public:
    LaneThread(std::uint64_t seed, unsigned max_delay_us)
        : random_(seed), max_delay_us_(max_delay_us), thread_([this] { run(); }) {}

    ~LaneThread() { stop(); }

    // Ends the thread after all that is queued. May be called twice.
    void stop() {
        {
            // Without the lock the thread could test stop_ before and sleep after the notification,
            // and join() would never return.
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

    LaneThread(const LaneThread&) = delete;
    LaneThread& operator=(const LaneThread&) = delete;

    void push(std::function<void()> operation) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            operations_.push_back(std::move(operation));
        }
        wake_.notify_one();
    }

    // Waits until the queue is empty and nothing runs: an empty queue alone would miss a copy that
    // was taken from it and is still writing.
    void drain() {
        std::unique_lock<std::mutex> lock(mutex_);
        idle_.wait(lock, [this] { return stop_ || (operations_.empty() && !busy_); });
    }

    bool stopping() const { return stop_; }

   private:
    void run() {
        for (;;) {
            std::function<void()> operation;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [this] { return stop_ || !operations_.empty(); });
                if (operations_.empty()) return;
                operation = std::move(operations_.front());
                operations_.pop_front();
                busy_ = true;
            }
            if (max_delay_us_ != 0) {
                std::this_thread::sleep_for(
                    std::chrono::microseconds(random_() % (max_delay_us_ + 1)));
            }
            operation();  // without the lock: callers must be able to queue meanwhile
            {
                std::lock_guard<std::mutex> lock(mutex_);
                busy_ = false;
            }
            idle_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable idle_;
    bool busy_ = false;  // an operation is being carried out
    std::deque<std::function<void()>> operations_;
    std::atomic<bool> stop_{false};
    std::mt19937_64 random_;
    unsigned max_delay_us_;
    std::thread thread_;  // last: it starts when everything above exists
};

class HostDevice final : public Device {
   public:
    HostDevice(std::uint64_t seed, unsigned max_delay_us)
        : to_host_(seed, max_delay_us), to_device_(seed + 1, max_delay_us) {}

    void attach_thread() override {}

    EventHandle create_event(bool) override { return reinterpret_cast<EventHandle>(new HostEvent); }

    void destroy_event(EventHandle event) noexcept override { delete as_event(event); }

    void record(EventHandle event, Lane lane) override {
        HostEvent* e = as_event(event);
        const std::uint64_t generation = ++e->recorded;
        lane_thread(lane).push([e, generation] {
            // The time is set first: a thread that sees the completion may read it at once.
            e->completed_ns.store(now_ns());
            e->completed.store(generation);
        });
    }

    void lane_wait(Lane lane, EventHandle event) override {
        if (event == kNoEvent) return;
        HostEvent* e = as_event(event);
        // Read now, as CUDA does: a later record of the same event must not be waited for, since it
        // may be queued behind this very wait.
        const std::uint64_t generation = e->recorded.load();
        LaneThread& thread = lane_thread(lane);
        thread.push([e, generation, &thread] {
            // A lane that is being shut down must not wait for a record that will not come.
            while (e->completed.load() < generation && !thread.stopping()) {
                std::this_thread::sleep_for(std::chrono::microseconds(10));
            }
        });
    }

    bool is_complete(EventHandle event) override {
        if (event == kNoEvent) return true;
        return as_event(event)->completed.load() >= as_event(event)->recorded.load();
    }

    std::int64_t elapsed_ns(EventHandle begin, EventHandle end) override {
        return as_event(end)->completed_ns.load() - as_event(begin)->completed_ns.load();
    }

    std::int64_t completed_ns(EventHandle event, EventHandle, std::int64_t) override {
        return as_event(event)->completed_ns.load();
    }

    void copy(Lane lane, void* destination, const void* source, std::size_t bytes) override {
        lane_thread(lane).push(
            [destination, source, bytes] { std::memcpy(destination, source, bytes); });
    }

    void stop() noexcept override {
        // A lane that is told to stop waits for no event any more: both must be idle first.
        to_host_.drain();
        to_device_.drain();
        to_host_.stop();
        to_device_.stop();
    }

   private:
    LaneThread& lane_thread(Lane lane) { return lane == Lane::kToHost ? to_host_ : to_device_; }

    LaneThread to_host_;
    LaneThread to_device_;
};

}  // namespace

std::unique_ptr<Device> make_host_device(std::uint64_t seed, unsigned max_delay_us) {
    return std::make_unique<HostDevice>(seed, max_delay_us);
}

}  // namespace hytrain
