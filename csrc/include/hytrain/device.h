// The update worker's interface to a device: two copy lanes and events. A lane is an ordered queue
// of copies (a CUDA stream, or a thread on a machine without a GPU).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace hytrain {

/// A job, or a call of the device's driver, has failed: the worker cannot go on. Every later call
/// of the worker throws it again; Python sees hytrain.errors.WorkerError.
class WorkerError : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

enum class Lane : int { kToHost = 0, kToDevice = 1 };

// A CUevent, or a HostEvent's address. kNoEvent is always complete.
using EventHandle = std::uintptr_t;
constexpr EventHandle kNoEvent = 0;

class Device {
   public:
    virtual ~Device() = default;
    Device() = default;
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // Makes the device usable from the calling thread.
    virtual void attach_thread() = 0;
    // Timed events can be passed to elapsed_ns.
    virtual EventHandle create_event(bool timed) = 0;
    virtual void destroy_event(EventHandle event) noexcept = 0;
    virtual void record(EventHandle event, Lane lane) = 0;
    // Work queued on the lane from now on waits for the event's latest record.
    virtual void lane_wait(Lane lane, EventHandle event) = 0;
    // True when the latest record has completed (or there was none).
    virtual bool is_complete(EventHandle event) = 0;
    // Time between the latest records of two timed events, both complete.
    virtual std::int64_t elapsed_ns(EventHandle begin, EventHandle end) = 0;
    // When the latest record of a timed event, which must be complete, completed: on the monotonic
    // clock, in ns. A device with its own clock counts from `anchor`, which completed at
    // `anchor_ns`.
    virtual std::int64_t completed_ns(EventHandle event, EventHandle anchor,
                                      std::int64_t anchor_ns) {
        return anchor_ns + elapsed_ns(anchor, event);
    }
    virtual void copy(Lane lane, void* destination, const void* source, std::size_t bytes) = 0;
    // Waits for the copies queued so far and ends the lanes; nothing may be queued any more. On
    // CUDA the owner of the streams does it.
    virtual void stop() noexcept {}
};

// Copy threads on the host. Each operation sleeps a random time up to max_delay_us where that is
// not 0: the tests' way to expose a missing wait.
std::unique_ptr<Device> make_host_device(std::uint64_t seed, unsigned max_delay_us);

// `to_host` and `to_device` are CUstream handles of the device's primary context. The driver
// library is opened at run time, so this extension needs no CUDA to build or to load.
std::unique_ptr<Device> make_cuda_device(int ordinal, std::uintptr_t to_host,
                                         std::uintptr_t to_device);

}  // namespace hytrain
