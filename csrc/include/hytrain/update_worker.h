// One thread that owns the CPU update of a rank: it fetches final gradients, runs the optimizer's
// passes chunk by chunk, and sends the new training copy back, while the caller goes on.
//
// Life of a layer's step (DESIGN "preview and commit"):
//   submit_update   commit the pending gradient of the previous step, preview the new one
//   finalize        the clip coefficient is known: the new gradient becomes pending with its final
//                   scale; layers previewed with another scale are previewed again
//   drop            the step is skipped: the new gradient is forgotten, the old weights published
//   submit_withdraw the step is not taken yet: the gradient returns to the device, likewise
// A gradient stays pending in its pinned slot until the next update, or a flush, commits it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hytrain/adam.h"
#include "hytrain/device.h"

namespace hytrain {

// A fixed-size piece of one parameter group's run within a layer's shard.
struct Chunk {
    float* p = nullptr;
    float* m = nullptr;
    float* v = nullptr;
    std::size_t n = 0;
    std::size_t shard_offset = 0;  // elements from the start of the layer's gradient shard
    void* weights = nullptr;       // the training copy on the device
    DType weights_dtype = DType::kFloat32;
    int group = 0;       // index into StepRecord::hyper
    int slot_class = 0;  // which pool of pinned slots holds its gradient
    int slot = -1;       // the slot of the pending gradient, -1: none
};

// How a step applies its gradient: scale = clip coefficient / loss scale, one entry a group.
struct StepRecord {
    float scale = 1.0F;
    std::vector<AdamHyper> hyper;
    bool operator==(const StepRecord& other) const;
};

enum class Pass { kUpdate, kDirect, kPreview, kCommit, kPublish, kDrop, kWithdraw };

struct Job {
    Pass pass = Pass::kUpdate;
    int layer = 0;
    std::int64_t sequence = 0;
    const char* gradient = nullptr;  // device: the layer's gradient shard
    EventHandle gradient_ready = kNoEvent;
    const void* sum_of_squares = nullptr;  // device: one float64, or none
    char* withdraw_to = nullptr;           // device: where kWithdraw returns the gradient
    StepRecord record;
    // The worker's, under its mutex.
    bool picked = false;     // its gradient is being fetched
    bool started = false;    // its first chunk has been passed over
    bool cancelled = false;  // withdrawn by cancel_update before it started
    bool final = false;      // `record` is the step's outcome, not a speculation
};

// What one job of a layer took, on the monotonic clock in ns.
struct JobSpan {
    int layer = 0;
    int pass = 0;
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    std::int64_t kernel_ns = 0;
};

struct WorkerStatistics {
    std::int64_t kernel_ns = 0;         // inside the optimizer's passes
    std::int64_t wait_gradient_ns = 0;  // waiting for a gradient to arrive on the host
    std::int64_t wait_outgoing_ns = 0;  // waiting for an outgoing buffer
    std::int64_t issue_ns = 0;          // handing copies to the device
    std::int64_t elements = 0;          // elements passed over
    std::int64_t jobs = 0;
};

class UpdateWorker {
   public:
    UpdateWorker(std::unique_ptr<Device> device, int num_threads, std::uint64_t delay_seed,
                 unsigned max_delay_us);
    ~UpdateWorker();

    // -- Set-up, before start() ------------------------------------------------------------
    // Pinned slots for gradients; returns the class's index. `count` includes the ring's spares.
    int add_slot_class(char* base, std::size_t slot_bytes, int count);
    // Buffers that carry the outgoing copy, and one pinned float64 a layer.
    void set_outgoing(char* base, std::size_t slot_bytes, int count);
    // `ready` is recorded when a job of the layer has been issued; kNoEvent: the worker makes one.
    int add_layer(std::string name, DType gradient_dtype, EventHandle ready, double* norm_slot,
                  std::vector<Chunk> chunks);
    void start();
    // Does nothing in a forked child, which has none of the threads.
    void close() noexcept;
    bool in_own_process() const;

    // -- One step --------------------------------------------------------------------------
    // Previews stop once this rank's own sum of squares exceeds the limit (they would be wasted).
    void begin_step(double sum_of_squares_limit);
    void submit(Job job);
    // Removes a layer's update that has not begun; its gradient may be released after wait().
    bool cancel_update(int layer);
    // The step's outcome is known. Returns the number of layers that must be previewed again.
    int finalize(const StepRecord& record);

    // -- Waiting (all throw the worker's error, if any) -------------------------------------
    // Until every job of the layer has been issued; the layer's `ready` event then covers it.
    void wait_issued(int layer);
    // As wait_issued, and until the copies have completed.
    void wait_complete(int layer);
    void wait_all();
    // True once the layer's gradient has left the device (its memory may be reused).
    bool is_fetched(int layer);
    bool has_pending(int layer);
    void check_error();

    WorkerStatistics take_statistics();
    std::vector<JobSpan> take_spans();
    // Tests: the next pass over this layer throws.
    void fail_at(int layer) { fail_at_ = layer; }

   private:
    struct Layer {
        std::string name;
        DType gradient_dtype = DType::kFloat32;
        EventHandle ready = kNoEvent;
        double* norm_slot = nullptr;
        std::vector<Chunk> chunks;
        std::optional<StepRecord> pending;
        bool tentative = false;  // pending belongs to a step that is not final
        bool held = false;       // tentative and not previewed
        StepRecord previewed;
        int outstanding = 0;
        bool fetched = true;
    };
    // One chunk of a picked job, in processing order.
    struct Work {
        std::shared_ptr<Job> job;
        std::size_t chunk = 0;
        int slot = -1;
        bool last = false;
    };
    struct SlotClass {
        char* base = nullptr;
        std::size_t bytes = 0;
        std::vector<EventHandle> events;
        std::vector<int> free;
        char* address(int slot) const { return base + static_cast<std::size_t>(slot) * bytes; }
    };

    void run();
    std::shared_ptr<Job> pick_job();
    bool is_ready(const Job& job);
    bool issue_next();
    void process(const Work& work);
    bool has_job();
    void begin_job(Job& job, Layer& layer);
    void run_pass(Layer& layer, Chunk& chunk, const Work& work);
    void run_update(const Layer& layer, Chunk& chunk, int slot);
    void run_direct(const Layer& layer, Chunk& chunk, int slot);
    void run_publish(const Chunk& chunk);
    void return_gradient(const Layer& layer, const Chunk& chunk, const Job& job);
    GradientStep gradient_step(const Layer& layer, const Chunk& chunk, int slot,
                               const StepRecord& record) const;
    template <typename Function>
    void timed(Function function);
    void release_slot(Chunk& chunk);
    void finish_job(const Work& work);
    void send(const Chunk& chunk, const Outgoing& out);
    Outgoing next_outgoing(const Chunk& chunk);
    std::int64_t wait_event(EventHandle event);
    void delay();
    void fail(const std::string& message);
    void throw_if_failed();
    template <typename Predicate>
    void wait_for(Predicate predicate);

    std::unique_ptr<Device> device_;
    int num_threads_;
    std::vector<Layer> layers_;
    std::vector<SlotClass> slots_;
    SlotClass outgoing_;
    std::vector<EventHandle> own_events_;
    std::size_t next_outgoing_ = 0;

    // Shared with callers, under mutex_.
    std::mutex mutex_;
    std::condition_variable wake_;           // for the worker: there is a job, or the end
    std::condition_variable changed_;        // for callers: a layer or the error has changed
    std::deque<std::shared_ptr<Job>> jobs_;  // all that are not finished
    std::int64_t sequence_ = 0;
    std::atomic<bool> stop_{false};
    std::string error_;
    double limit_ = 0.0;
    double running_sum_ = 0.0;
    WorkerStatistics statistics_;  // of the jobs that have finished
    std::vector<JobSpan> spans_;

    // The worker's own.
    std::deque<Work> active_;
    std::shared_ptr<Job> fetching_;
    std::size_t fetching_chunk_ = 0;
    std::optional<StepRecord> previous_;  // what the running job commits
    StepRecord current_;                  // what the running job previews
    bool holding_ = false;
    JobSpan span_;
    WorkerStatistics job_statistics_;
    std::mt19937_64 random_;
    unsigned max_delay_us_;
    std::atomic<int> fail_at_{-1};
    long process_ = 0;  // that made the threads
    std::thread thread_;
};

}  // namespace hytrain
