// One thread that owns the CPU update of a rank: it fetches final gradients, runs the optimizer's
// passes chunk by chunk, and sends the new training copy back, while the caller goes on.
//
// Life of a layer's step (docs/internals.md, "Why clipping stays exact"):
//   submit_update   commit the pending gradient of the previous step, preview the new one
//   finalize        the clip coefficient is known: the new gradient becomes pending with its final
//                   scale; layers previewed with another scale are previewed again
//   drop            the step is skipped: the new gradient is forgotten, the old weights published
//   submit_withdraw the step is not taken yet: the gradient returns to the device, likewise
// A gradient stays pending in its pinned slot until the next update, or a flush, commits it.
//
// Where master weights are split on the host, the training copy is one half of a weight and the
// state holds the other: nothing is previewed, and no gradient stays pending between steps.
//   submit_update   fetches the new gradient into its slot
//   finalize        the copy is fetched into an outgoing buffer, a commit with the final scale
//                   writes the new one there (kLate), and it is sent back
//
// Between two steps a layer's state may move: submit_move. A pending gradient is committed before
// the state leaves; a layer that arrives has none. The weights stay where they are, so no forward
// waits for a move. kSettle commits a pending gradient in the background: from then on the state is
// that of the last step, until the update of the step after the next one.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hytrain/adam.h"
#include "hytrain/device.h"
#include "hytrain/span_ring.h"

namespace hytrain {

// A shard's state: master weights, fp32 or the remainders of SplitWeights, and the moments as
// Moments keeps them; on the host or on the device.
struct StateArrays {
    void* p = nullptr;
    void* m = nullptr;
    void* v = nullptr;
    MomentKind kind = MomentKind::kFloat32;
    std::uint8_t* m_exponents = nullptr;
    std::uint8_t* v_exponents = nullptr;
    std::uint64_t seed = 0;
    bool split = false;  // p: remainders
    std::size_t weight_bytes() const { return split ? 2 : 4; }
};

// The part of a layer's state that a copy between host and device carries: an array in the form
// that both sides keep, or one half of weights that are whole on the host and split on the device.
enum class StatePart { kAsKept, kRemainders, kCopy };

// A fixed-size piece of one parameter group's run within a layer's shard.
struct Chunk {
    std::size_t n = 0;
    std::size_t shard_offset = 0;  // elements from the start of the layer's shard
    void* weights = nullptr;       // the training copy, on the device
    bool weights_on_host = false;  // or on the host: the kernel writes it in place
    DType weights_dtype = DType::kFloat32;
    int group = 0;                // index into StepRecord::hyper
    int slot_class = 0;           // which pool of pinned slots holds its gradient
    int slot = -1;                // the slot of the pending gradient, -1: none
    std::vector<MomentRun> runs;  // its parameters; empty where moments are fp32
};

// How a step applies its gradient: scale = clip coefficient / loss scale, one entry a group.
struct StepRecord {
    float scale = 1.0F;
    std::vector<AdamHyper> hyper;
    bool operator==(const StepRecord& other) const;
};

enum class Pass {
    kUpdate,
    kDirect,
    kLate,  // the commit of a split layer's gradient, once the step's outcome is known
    kPreview,
    kCommit,
    kSettle,  // the same as kCommit, but no weights depend on it: no forward waits for it
    kPublish,
    kDrop,
    kWithdraw,
    kLeave,    // the layer's state moves to the device
    kArrive,   // and back
    kCapture,  // a copy of the state is taken while there is nothing else to do
};

struct Job {
    Pass pass = Pass::kUpdate;
    int layer = 0;
    std::int64_t sequence = 0;
    const char* gradient = nullptr;  // device: the layer's gradient shard
    EventHandle gradient_ready = kNoEvent;
    const void* sum_of_squares = nullptr;  // device: one float64, or none
    char* withdraw_to = nullptr;           // device: where kWithdraw returns the gradient
    StateArrays device_state;              // kLeave's destination, kArrive's source
    StateArrays host_state;                // kArrive's destination
    EventHandle moved = kNoEvent;          // kLeave records it behind its last copy
    StepRecord record;
    std::int32_t step = 0;  // for traces
    // Set by the worker, under its mutex.
    bool split = false;      // the layer's master weights are split on the host
    bool picked = false;     // its gradient is being fetched
    bool started = false;    // its first chunk has been passed over
    bool cancelled = false;  // withdrawn by cancel_update before it started
    bool final = false;      // `record` is the step's outcome, not a speculation
};

// The times of one job of a layer: the monotonic clock, in ns.
struct JobSpan {
    int layer = 0;
    int pass = 0;
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    std::int64_t kernel_ns = 0;
    std::int64_t wait_gradient_ns = 0;
    bool final = false;      // the step's outcome was known when it began
    bool committed = false;  // it also committed the gradient of an earlier step
};

struct WorkerStatistics {
    std::int64_t kernel_ns = 0;         // inside the optimizer's passes
    std::int64_t wait_gradient_ns = 0;  // waiting for a gradient to arrive on the host
    std::int64_t wait_outgoing_ns = 0;  // waiting for an outgoing buffer
    std::int64_t issue_ns = 0;          // queueing copies on the device
    std::int64_t elements = 0;          // elements passed over
    std::int64_t jobs = 0;
    // Time of the copies themselves on their lanes, and their bytes.
    std::int64_t to_host_ns = 0;
    std::int64_t to_host_bytes = 0;
    std::int64_t to_device_ns = 0;
    std::int64_t to_device_bytes = 0;
};

class UpdateWorker {
   public:
    UpdateWorker(std::unique_ptr<Device> device, int num_threads, std::uint64_t delay_seed,
                 unsigned max_delay_us);
    ~UpdateWorker();

    // -- Set-up, before start() ------------------------------------------------------------
    // A pool of equally large pinned slots for gradients; returns its index.
    int add_slot_class(std::size_t slot_bytes);
    // `ready` is recorded when a job of the layer has been issued; kNoEvent: the worker makes one.
    // `norm_slot` is a pinned float64; `state` is empty for a layer whose state is on the device.
    int add_layer(std::string name, DType gradient_dtype, EventHandle ready, double* norm_slot,
                  const StateArrays& state, std::vector<Chunk> chunks);
    void start();
    // More pinned memory, at any time: slots of a class, which keep pending gradients and take new
    // ones; or, for kOutgoing, buffers of `bytes` that carry the training copy and moving state.
    static constexpr int kOutgoing = -1;
    void add_slots(int slot_class, char* base, std::size_t bytes, int count);
    // Retires the slots in [base, base + bytes): they take no new gradient, and a slot that holds a
    // pending one is freed by the update that commits it. The class must keep as many other slots
    // as the layers on the host need.
    void retire_slots(int slot_class, const char* base, std::size_t bytes);
    // Whether a job may still use one of the slots that were retired with this `base`. If not, no
    // copy of one is in flight either, and the caller may unmap the memory.
    bool is_retiring(const char* base);
    // Points the layer's chunks to other memory for the training copy: one address per chunk, in
    // their order. Throws if a job of the layer is left, which would write to the old memory.
    void move_weights(int layer, const std::vector<void*>& addresses);
    // Does nothing in a forked child, which has none of the threads.
    void close() noexcept;
    bool in_own_process() const;

    // -- One step --------------------------------------------------------------------------
    // Previews stop once this rank's own sum of squares exceeds the limit (they would be wasted).
    void begin_step(double sum_of_squares_limit);
    void submit(Job job);
    // Queues the move of a layer's state (kLeave, kArrive) behind all jobs so far and before all
    // later ones. The step must be final. Waits for weights do not wait for moves.
    void submit_move(Job job);
    // Removes a layer's update that has not begun; its gradient may be released after wait().
    bool cancel_update(int layer);
    // The step's outcome is known. Returns the number of layers that must be previewed again.
    // Throws, and the worker has failed, if a layer is leaving the host while its last gradient is
    // still to be taken back: wait_moved must come before a layer's next update.
    int finalize(const StepRecord& record);

    // -- Waiting (all throw the worker's error, if any) -------------------------------------
    // Until every job of the layer has been issued; the layer's `ready` event then covers it.
    void wait_issued(int layer);
    // The same, and until the copies have completed.
    void wait_complete(int layer);
    void wait_all();
    // Until the copies of a layer's moves have been issued (leaving) or completed (arriving).
    void wait_moved(int layer);
    bool is_moving(int layer);
    // True once the layer's gradient has left the device (its memory may be reused).
    bool is_fetched(int layer);
    // Until the gradient of at least one of these layers has left the device.
    void wait_fetched(const std::vector<int>& layers);
    bool has_pending(int layer);
    // Until no kSettle of the layer is left: its state is that of the last step.
    void wait_settled(int layer);
    // Copies the layer's state, as all jobs submitted so far leave it, to `target`, which has the
    // state's layout; the step must be final. One copy at a time: wait for an earlier one first.
    void capture(int layer, const StateArrays& target);
    // Until the copy is there (or has been forgotten).
    void wait_captured(int layer);
    // Cancels the copy. When this returns, its target is not written to any more.
    void forget_capture(int layer);
    void check_error();
    // To be called before start(). If the worker finishes no chunk for `after` during a wait, the
    // waiting thread calls `report` once, with a description of the last task of each lane.
    void on_stall(std::chrono::milliseconds after, std::function<void(const std::string&)> report);

    WorkerStatistics take_statistics();
    std::vector<JobSpan> take_spans();

    /// Threads of the kernel and of copies, from the next chunk on; at least one. No result depends
    /// on it.
    void set_num_threads(int num_threads);

    // -- A trace: every pass and every copy, in a ring ----------------------------------------
    // Starts tracing; the first call makes the ring, with `capacity` spans (a power of two).
    // `threads`: one span for each thread of a pass instead of one for the pass.
    void start_trace(std::size_t capacity, bool threads);
    // Waits until no job is left and all copies sent while tracing are complete and in the ring.
    void wait_traced();
    void stop_trace();
    // Sets the step that jobs submitted from now on belong to, whether or not tracing is on.
    void set_trace_step(std::int32_t step);
    // Sets the anchor that converts device times to host times (Device::completed_ns). When this
    // returns, the previous anchor is not used any more.
    void set_trace_anchor(EventHandle anchor, std::int64_t at_ns);
    // The spans since the last call; returns how many more there were, which were overwritten.
    std::uint64_t take_trace(std::vector<Span>& spans);

    // Tests: the next pass over this layer throws.
    void fail_at(int layer) { fail_at_ = layer; }

   private:
    // A copy of a layer's state that was asked for, or is being made.
    struct Capture {
        StateArrays target;
        std::int64_t sequence =
            0;  // gradients of jobs before it belong to the copy, later ones not
        bool wanted = false;
        bool running = false;  // the job that takes it has begun
    };
    struct Layer {
        std::string name;
        DType gradient_dtype = DType::kFloat32;
        EventHandle ready = kNoEvent;
        double* norm_slot = nullptr;
        StateArrays state;
        bool split = false;  // its state on the host, which may still be about to arrive
        std::vector<Chunk> chunks;
        std::optional<StepRecord> pending;
        std::int64_t pending_sequence = 0;  // of the job that sent it
        bool tentative = false;             // pending belongs to a step that is not final
        bool held = false;                  // tentative and not previewed
        StepRecord previewed;
        int outstanding = 0;  // jobs that the weights depend on
        int moving = 0;       // moves of the state
        int settling = 0;     // commits that no weights depend on
        int capturing = 0;    // jobs that only take a copy
        bool fetched = true;
        Capture capture;
    };
    // A piece of a layer's state on its way to the host.
    struct StatePiece {
        int buffer = 0;
        char* destination = nullptr;
        std::size_t bytes = 0;
        StatePart part = StatePart::kAsKept;
    };
    // The step, layer and chunk of a pass or copy.
    struct Place {
        std::int32_t step = 0;
        std::int32_t layer = 0;
        std::int32_t chunk = 0;
    };
    // The latest copy out of an outgoing buffer.
    struct Sent {
        std::int64_t bytes = 0;  // 0: none since the buffer was last accounted for
        SpanKind kind = SpanKind::kWeightsToDevice;
        Place place;
        bool traced = false;  // sent while there was a trace
    };
    // The last task given to a lane.
    struct Task {
        std::string what;  // empty: nothing yet
        Place place;
        std::int64_t since_ns = 0;
        EventHandle end = kNoEvent;
    };
    // Whether the running job copies the layer's state, before or after its pass.
    enum class Taking { kNo, kBefore, kAfter };
    enum TaskLane { kUpdates, kToHostTask, kToDeviceTask, kTaskLanes };
    // One chunk of a picked job, in processing order.
    struct Work {
        std::shared_ptr<Job> job;
        std::size_t chunk = 0;
        int slot = -1;
        int copy = -1;  // the outgoing buffer with the training copy, updated in place there
        bool last = false;
    };
    // Where a pass writes a chunk's new training copy.
    struct Target {
        Outgoing out;
        int buffer = -1;  // the outgoing buffer; -1: written in place, nothing is sent
    };
    // Pinned buffers of one size, each with the events around its latest copy.
    struct Buffers {
        std::size_t bytes = 0;
        std::vector<char*> addresses;
        std::vector<EventHandle> begins;
        std::vector<EventHandle> ends;
    };
    struct SlotClass {
        Buffers slots;
        std::vector<int> free;
        std::vector<bool> retired;  // one per slot
    };
    // Slots that are being retired. `used` is valid once `taken` is set by the worker.
    struct Retirement {
        int slot_class = 0;
        const char* base = nullptr;
        std::size_t bytes = 0;
        bool taken = false;
        int used = 0;
        bool holds(const char* address) const { return address >= base && address < base + bytes; }
    };
    struct Growth {
        int slot_class = 0;
        Buffers buffers;
    };

    std::vector<bool> layers_taken_back();
    void push_pass(Pass pass, std::size_t layer);
    void run();
    std::shared_ptr<Job> pick_job();
    std::shared_ptr<Job> owed_capture();
    static bool can_capture(const Layer& layer);
    static Taking taking(const Job& job, const Layer& layer);
    void take_copy(const Layer& layer, const Chunk& chunk);
    template <typename Function>
    void in_blocks(const Layer& layer, const Chunk& chunk, Function pass);
    bool is_ready(const Job& job);
    static int& count(Layer& layer, Pass pass);
    bool is_far_ahead() const;
    bool issue_next();
    void process(const Work& work);
    bool has_job();
    void begin_job(Job& job, Layer& layer);
    void run_pass(Layer& layer, Chunk& chunk, const Work& work);
    void run_update(const Layer& layer, Chunk& chunk, int slot);
    void run_direct(const Layer& layer, Chunk& chunk, const Work& work);
    void run_late(const Layer& layer, Chunk& chunk, const Work& work);
    void commit_split(const Layer& layer, const Chunk& chunk, const Work& work,
                      const GradientStep& step);
    void run_commit(const Layer& layer, Chunk& chunk);
    void run_publish(const Layer& layer, const Chunk& chunk);
    static float* master(const Layer& layer, const Chunk& chunk);
    static Moments moments(const Layer& layer, const Chunk& chunk);
    void return_gradient(const Layer& layer, const Chunk& chunk, const Job& job);
    void send_state(const Layer& layer, const Chunk& chunk, const Job& job);
    void fetch_state(const Chunk& chunk, const Job& job);
    void land_piece(const StatePiece& piece);
    void absorb_growth();
    void absorb(const Growth& growth);
    void absorb(Retirement& retirement);
    void free_slot(int slot_class, int slot);
    void slot_gone(const SlotClass& slots, int slot);
    bool take_memory(const Chunk& chunk, Work& work);
    bool can_take_outgoing();
    void fetch(const Layer& layer, const Chunk& chunk, const Work& work);
    void fetch_to(const Buffers& buffers, int number, const void* from, std::size_t bytes,
                  const char* what, const Place& place);
    // `slot`: the memory's number in a trace; outgoing buffers are numbered after all slot classes.
    void arrived(const Buffers& buffers, int number, std::size_t bytes, SpanKind kind,
                 std::int32_t slot);
    // Takes the free buffer whose copy was sent first, and waits for that copy. send_outgoing
    // returns it to free_outgoing_; so must whoever does not send it.
    int take_outgoing();
    void send_outgoing(int buffer, void* destination, std::size_t bytes, SpanKind kind);
    void account_sent(int buffer);
    bool trace_sent();
    void trace_pass(SpanRing& trace, SpanKind kind, const Chunk& chunk, bool sends,
                    std::int64_t begin_ns, std::int64_t end_ns);
    void trace_copy(SpanKind kind, const Place& place, EventHandle begin, EventHandle end,
                    std::int64_t bytes, std::int32_t slot = -1);
    GradientStep gradient_step(const Layer& layer, const Chunk& chunk, int slot,
                               const StepRecord& record) const;
    template <typename Function>
    void timed(SpanKind kind, const Chunk& chunk, const Outgoing& out, Function function);
    void release_slot(Chunk& chunk);
    void finish_job(const Work& work);
    void send(const Chunk& chunk, const Target& target);
    Target next_target(const Chunk& chunk);
    Target target_of(const Chunk& chunk, int buffer) const;
    std::int64_t wait_event(EventHandle event);
    void delay();
    void note(TaskLane lane, std::string what, const Place& place, EventHandle end);
    std::string describe_tasks(std::size_t jobs_left);
    void fail(const std::string& message);
    void throw_if_failed();
    template <typename Predicate>
    void wait_for(Predicate predicate);

    std::unique_ptr<Device> device_;
    int num_threads_;  // for the current chunk; only the worker's thread uses it
    std::atomic<int> wanted_threads_;
    std::vector<Layer> layers_;
    std::vector<SlotClass> slots_;
    Buffers outgoing_;
    std::vector<Sent> outgoing_sent_;  // one per buffer
    std::vector<EventHandle> own_events_;
    std::deque<int> free_outgoing_;  // ordered by when their last copies were sent

    // Shared with callers, under mutex_.
    std::mutex mutex_;
    std::condition_variable wake_;           // for the worker: a new job, or stop_
    std::condition_variable changed_;        // for callers: a layer or the error has changed
    std::deque<std::shared_ptr<Job>> jobs_;  // all that are not finished
    std::int64_t sequence_ = 0;
    std::atomic<bool> stop_{false};
    std::string error_;
    double limit_ = 0.0;
    double running_sum_ = 0.0;
    WorkerStatistics statistics_;  // of the jobs that have finished
    std::vector<JobSpan> spans_;
    int owed_ = 0;  // copies asked for and not begun
    std::vector<Growth> growth_;
    std::vector<Retirement> retirements_;
    std::vector<std::pair<EventHandle, EventHandle>> spare_events_;  // of retired slots
    std::atomic<bool> has_growth_{false};                            // or a retirement
    std::int32_t trace_step_ = 0;

    std::function<void(const std::string&)> stall_report_;
    std::chrono::milliseconds stall_after_{0};
    std::atomic<std::uint64_t> chunks_done_{0};
    std::atomic<const char*> waits_for_{nullptr};  // what the worker's thread is waiting for
    std::mutex tasks_mutex_;
    Task tasks_[kTaskLanes];

    std::unique_ptr<SpanRing> ring_;         // made once, and kept: the worker may be writing to it
    std::atomic<SpanRing*> trace_{nullptr};  // the ring, while there is a trace
    std::atomic<bool> traces_threads_{false};
    static constexpr std::chrono::microseconds kTracePoll{200};  // interval of polling copies
    std::atomic<int> traced_copies_{0};  // of outgoing_sent_, those sent while there was a trace
    std::mutex anchor_mutex_;
    EventHandle anchor_ = kNoEvent;
    std::int64_t anchor_ns_ = 0;

    // Used by the worker's thread only.
    std::deque<Work> active_;
    std::shared_ptr<Job> fetching_;
    std::size_t fetching_chunk_ = 0;
    std::optional<StepRecord> previous_;  // what the running job commits
    StepRecord current_;                  // what the running job previews
    bool holding_ = false;
    Taking taking_ = Taking::kNo;
    JobSpan span_;
    WorkerStatistics job_statistics_;
    Place place_;                             // the chunk being processed
    DType gradient_dtype_ = DType::kFloat32;  // of its layer
    std::vector<ThreadTime> thread_times_;
    std::mt19937_64 random_;
    unsigned max_delay_us_;
    std::atomic<int> fail_at_{-1};
    long process_ = 0;  // id of the process that owns the threads
    std::thread thread_;
};

}  // namespace hytrain
