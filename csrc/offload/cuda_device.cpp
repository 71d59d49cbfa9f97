// CUDA through the driver library, opened at run time: the extension links against neither CUDA
// nor torch. Streams and events come from torch as raw handles (cudaStream_t is CUstream).
#include <dlfcn.h>

#include <string>

#include "hytrain/device.h"

namespace hytrain {
namespace {

using CuResult = int;
using CuStream = void*;
using CuEvent = void*;
using CuContext = void*;
using CuDevicePtr = unsigned long long;
constexpr CuResult kSuccess = 0;
constexpr CuResult kNotReady = 600;
constexpr unsigned kEventDefault = 0;
constexpr unsigned kEventDisableTiming = 2;

class Driver {
   public:
    Driver() {
        library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library_ == nullptr) {
            throw WorkerError("libcuda.so.1 cannot be opened: is the NVIDIA driver installed?");
        }
        load(init, "cuInit");
        load(device_get, "cuDeviceGet");
        load(primary_context_retain, "cuDevicePrimaryCtxRetain");
        load(primary_context_release, "cuDevicePrimaryCtxRelease_v2");
        load(context_set_current, "cuCtxSetCurrent");
        load(event_create, "cuEventCreate");
        load(event_destroy, "cuEventDestroy_v2");
        load(event_record, "cuEventRecord");
        load(event_query, "cuEventQuery");
        load(event_elapsed_time, "cuEventElapsedTime");
        load(stream_wait_event, "cuStreamWaitEvent");
        load(copy_to_host, "cuMemcpyDtoHAsync_v2");
        load(copy_to_device, "cuMemcpyHtoDAsync_v2");
        load(error_name, "cuGetErrorName");
        check(init(0), "cuInit");
    }

    void check(CuResult result, const char* call) const {
        if (result == kSuccess) return;
        const char* name = nullptr;
        error_name(result, &name);
        throw WorkerError(std::string(call) +
                          " failed: " + (name != nullptr ? name : std::to_string(result)));
    }

    CuResult (*init)(unsigned) = nullptr;
    CuResult (*device_get)(int*, int) = nullptr;
    CuResult (*primary_context_retain)(CuContext*, int) = nullptr;
    CuResult (*primary_context_release)(int) = nullptr;
    CuResult (*context_set_current)(CuContext) = nullptr;
    CuResult (*event_create)(CuEvent*, unsigned) = nullptr;
    CuResult (*event_destroy)(CuEvent) = nullptr;
    CuResult (*event_record)(CuEvent, CuStream) = nullptr;
    CuResult (*event_query)(CuEvent) = nullptr;
    CuResult (*event_elapsed_time)(float*, CuEvent, CuEvent) = nullptr;
    CuResult (*stream_wait_event)(CuStream, CuEvent, unsigned) = nullptr;
    CuResult (*copy_to_host)(void*, CuDevicePtr, std::size_t, CuStream) = nullptr;
    CuResult (*copy_to_device)(CuDevicePtr, const void*, std::size_t, CuStream) = nullptr;
    CuResult (*error_name)(CuResult, const char**) = nullptr;

   private:
    template <typename Function>
    void load(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(library_, name));
        if (function == nullptr) {
            throw WorkerError(std::string("libcuda.so.1 lacks ") + name);
        }
    }

    void* library_ = nullptr;  // never closed: torch keeps the driver loaded as well
};

const Driver& driver() {
    static const Driver instance;
    return instance;
}

class CudaDevice final : public Device {
   public:
    CudaDevice(int ordinal, std::uintptr_t to_host, std::uintptr_t to_device)
        : cuda_(driver()),
          to_host_(reinterpret_cast<CuStream>(to_host)),
          to_device_(reinterpret_cast<CuStream>(to_device)) {
        cuda_.check(cuda_.device_get(&device_, ordinal), "cuDeviceGet");
        cuda_.check(cuda_.primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    }

    ~CudaDevice() override { cuda_.primary_context_release(device_); }

    // CUDA's current context is a thread's own: the worker's thread starts without one.
    void attach_thread() override {
        cuda_.check(cuda_.context_set_current(context_), "cuCtxSetCurrent");
    }

    EventHandle create_event(bool timed) override {
        CuEvent event = nullptr;
        cuda_.check(cuda_.event_create(&event, timed ? kEventDefault : kEventDisableTiming),
                    "cuEventCreate");
        return reinterpret_cast<EventHandle>(event);
    }

    void destroy_event(EventHandle event) noexcept override {
        cuda_.event_destroy(reinterpret_cast<CuEvent>(event));
    }

    void record(EventHandle event, Lane lane) override {
        cuda_.check(cuda_.event_record(reinterpret_cast<CuEvent>(event), stream(lane)),
                    "cuEventRecord");
    }

    void lane_wait(Lane lane, EventHandle event) override {
        if (event == kNoEvent) return;
        cuda_.check(cuda_.stream_wait_event(stream(lane), reinterpret_cast<CuEvent>(event), 0),
                    "cuStreamWaitEvent");
    }

    bool is_complete(EventHandle event) override {
        if (event == kNoEvent) return true;
        const CuResult result = cuda_.event_query(reinterpret_cast<CuEvent>(event));
        if (result == kNotReady) return false;
        cuda_.check(result, "cuEventQuery");
        return true;
    }

    std::int64_t elapsed_ns(EventHandle begin, EventHandle end) override {
        float milliseconds = 0.0F;
        cuda_.check(cuda_.event_elapsed_time(&milliseconds, reinterpret_cast<CuEvent>(begin),
                                             reinterpret_cast<CuEvent>(end)),
                    "cuEventElapsedTime");
        return static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
    }

    void copy(Lane lane, void* destination, const void* source, std::size_t bytes) override {
        if (lane == Lane::kToHost) {
            cuda_.check(cuda_.copy_to_host(destination, reinterpret_cast<CuDevicePtr>(source),
                                           bytes, to_host_),
                        "cuMemcpyDtoHAsync");
        } else {
            cuda_.check(cuda_.copy_to_device(reinterpret_cast<CuDevicePtr>(destination), source,
                                             bytes, to_device_),
                        "cuMemcpyHtoDAsync");
        }
    }

   private:
    CuStream stream(Lane lane) const { return lane == Lane::kToHost ? to_host_ : to_device_; }

    const Driver& cuda_;
    int device_ = 0;
    CuContext context_ = nullptr;
    CuStream to_host_;
    CuStream to_device_;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device(int ordinal, std::uintptr_t to_host,
                                         std::uintptr_t to_device) {
    return std::make_unique<CudaDevice>(ordinal, to_host, to_device);
}

}  // namespace hytrain
