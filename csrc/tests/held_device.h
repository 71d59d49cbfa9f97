// A device that can be held up, so that what a test provokes is no matter of luck.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "hytrain/device.h"

namespace hytrain::testing {

// Whether the device is held, and how often the worker has asked it since.
struct Hold {
    std::atomic<bool> on{false};
    std::atomic<int> asked{0};
};

// The host's device, on which nothing is complete for the worker while it is held.
class HeldDevice final : public Device {
   public:
    explicit HeldDevice(Hold& hold) : hold_(hold) {}
    void attach_thread() override {}
    EventHandle create_event(bool timed) override { return host_->create_event(timed); }
    void destroy_event(EventHandle event) noexcept override { host_->destroy_event(event); }
    void record(EventHandle event, Lane lane) override { host_->record(event, lane); }
    void lane_wait(Lane lane, EventHandle event) override { host_->lane_wait(lane, event); }
    bool is_complete(EventHandle event) override {
        if (hold_.on && std::this_thread::get_id() != owner_) {
            ++hold_.asked;
            return false;
        }
        return host_->is_complete(event);
    }
    std::int64_t elapsed_ns(EventHandle begin, EventHandle end) override {
        return host_->elapsed_ns(begin, end);
    }
    void copy(Lane lane, void* destination, const void* source, std::size_t bytes) override {
        host_->copy(lane, destination, source, bytes);
    }
    void stop() noexcept override { host_->stop(); }

   private:
    std::unique_ptr<Device> host_ = hytrain::make_host_device(0, 0);
    std::thread::id owner_ = std::this_thread::get_id();
    Hold& hold_;
};

}  // namespace hytrain::testing
