// The update worker's processing of a chunk: the optimizer's passes and the copies around them.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "hytrain/clock.h"
#include "hytrain/update_worker.h"

namespace hytrain {

template <typename Function>
void UpdateWorker::timed(SpanKind kind, const Chunk& chunk, const Outgoing& out,
                         Function function) {
    SpanRing* const trace = trace_.load(std::memory_order_acquire);
    if (trace != nullptr && traces_threads_) {
        thread_times_.assign(static_cast<std::size_t>(num_threads_), ThreadTime{});
        set_thread_times(thread_times_.data());
    }
    const std::int64_t begin = now_ns();
    function();
    const std::int64_t end = now_ns();
    job_statistics_.kernel_ns += end - begin;
    span_.kernel_ns += end - begin;
    if (trace != nullptr) trace_pass(*trace, kind, chunk, out.data != nullptr, begin, end);
}

GradientStep UpdateWorker::gradient_step(const Layer& layer, const Chunk& chunk, int slot,
                                         const StepRecord& record) const {
    if (slot < 0) throw std::logic_error("a pending gradient has no slot");
    GradientStep step;
    step.gradient = slots_[static_cast<std::size_t>(chunk.slot_class)]
                        .slots.addresses[static_cast<std::size_t>(slot)];
    step.dtype = layer.gradient_dtype;
    step.scale = record.scale;
    step.hyper = record.hyper.at(static_cast<std::size_t>(chunk.group));
    return step;
}

float* UpdateWorker::master(const Layer& layer, const Chunk& chunk) {
    if (layer.state.split) throw std::logic_error("split weights are not fp32");
    return static_cast<float*>(layer.state.p) + chunk.shard_offset;
}

// A chunk's moments; a chunk begins at a block of 8-bit codes.
Moments UpdateWorker::moments(const Layer& layer, const Chunk& chunk) {
    const StateArrays& state = layer.state;
    const std::size_t offset = chunk.shard_offset * moment_bytes(state.kind);
    Moments result;
    result.kind = state.kind;
    result.m = static_cast<char*>(state.m) + offset;
    result.v = static_cast<char*>(state.v) + offset;
    if (state.kind == MomentKind::kEightBit) {
        result.m_exponents = state.m_exponents + chunk.shard_offset / kMomentBlock;
        result.v_exponents = state.v_exponents + chunk.shard_offset / kMomentBlock;
    }
    result.seed = state.seed;
    result.runs = chunk.runs;
    return result;
}

void UpdateWorker::run_pass(Layer& layer, Chunk& chunk, const Work& work) {
    switch (work.job->pass) {
        case Pass::kUpdate:
            run_update(layer, chunk, work.slot);
            break;
        case Pass::kDirect:
            run_direct(layer, chunk, work);
            break;
        case Pass::kLate:
            run_late(layer, chunk, work);
            break;
        case Pass::kPreview: {
            const GradientStep step = gradient_step(layer, chunk, chunk.slot, current_);
            float* const p = master(layer, chunk);
            const Moments m = moments(layer, chunk);
            const Target target = next_target(chunk);
            timed(SpanKind::kPreview, chunk, target.out,
                  [&] { adam_preview(p, m, chunk.n, step, target.out, num_threads_); });
            send(chunk, target);
            break;
        }
        case Pass::kCommit:
        case Pass::kSettle:
            run_commit(layer, chunk);
            break;
        case Pass::kPublish:
            run_publish(layer, chunk);
            break;
        case Pass::kDrop:
            release_slot(chunk);
            run_publish(layer, chunk);
            break;
        case Pass::kWithdraw:
            return_gradient(layer, chunk, *work.job);
            release_slot(chunk);
            run_publish(layer, chunk);
            break;
        case Pass::kCapture:
            run_commit(layer, chunk);
            break;
        case Pass::kLeave:
            run_commit(layer, chunk);
            send_state(layer, chunk, *work.job);
            break;
        case Pass::kArrive:
            fetch_state(chunk, *work.job);
            break;
    }
    job_statistics_.elements += static_cast<std::int64_t>(chunk.n);
}

namespace {

// Elements [begin, begin + n) of a chunk without runs.
Chunk block_of(const Chunk& chunk, std::size_t begin, std::size_t n) {
    Chunk block = chunk;
    block.n = n;
    block.shard_offset += begin;
    return block;
}

Outgoing shifted(const Outgoing& out, std::size_t begin) {
    if (out.data == nullptr) return out;
    return {static_cast<char*>(out.data) + begin * size_of(out.dtype), out.dtype, out.non_temporal};
}

GradientStep shifted(GradientStep step, std::size_t begin) {
    step.gradient = static_cast<const char*>(step.gradient) + begin * size_of(step.dtype);
    return step;
}

}  // namespace

// Runs pass(block, begin) over a chunk and makes the copy that is owed. A thread's part of a block
// stays in its cache between the two, so that the copy adds only stores to the memory traffic.
// Moments other than fp32 have runs that begin at parameters: their passes are not cut into blocks.
template <typename Function>
void UpdateWorker::in_blocks(const Layer& layer, const Chunk& chunk, Function pass) {
    constexpr std::size_t kThreadElements = 1U << 16U;
    const auto run = [&](const Chunk& block, std::size_t begin) {
        if (taking_ == Taking::kBefore) take_copy(layer, block);
        pass(block, begin);
        if (taking_ == Taking::kAfter) take_copy(layer, block);
    };
    if (taking_ == Taking::kNo || layer.state.kind != MomentKind::kFloat32) {
        run(chunk, 0);
        return;
    }
    const std::size_t most = kThreadElements * static_cast<std::size_t>(num_threads_);
    for (std::size_t begin = 0; begin < chunk.n; begin += most) {
        run(block_of(chunk, begin, std::min(most, chunk.n - begin)), begin);
    }
}

void UpdateWorker::run_update(const Layer& layer, Chunk& chunk, int slot) {
    const GradientStep current = gradient_step(layer, chunk, slot, current_);
    const Target target = holding_ ? Target{} : next_target(chunk);
    if (previous_) {
        const GradientStep previous = gradient_step(layer, chunk, chunk.slot, *previous_);
        in_blocks(layer, chunk, [&](const Chunk& block, std::size_t begin) {
            float* const p = master(layer, block);
            const Moments m = moments(layer, block);
            const GradientStep old = shifted(previous, begin);
            const Outgoing to = shifted(target.out, begin);
            timed(holding_ ? SpanKind::kCommit : SpanKind::kCommitThenPreview, block, to, [&] {
                if (holding_) {
                    adam_commit(p, m, block.n, old, to, num_threads_);
                } else {
                    adam_commit_then_preview(p, m, block.n, old, shifted(current, begin), to,
                                             num_threads_);
                }
            });
        });
    } else if (!holding_) {
        float* const p = master(layer, chunk);
        const Moments m = moments(layer, chunk);
        timed(SpanKind::kPreview, chunk, target.out,
              [&] { adam_preview(p, m, chunk.n, current, target.out, num_threads_); });
    }
    // Slots are swapped, not copied: the new gradient is the pending one from here on. The old slot
    // is released after the pass that reads it: the next fetch may be copied into it at once.
    release_slot(chunk);
    chunk.slot = slot;
    if (!holding_) send(chunk, target);
}

void UpdateWorker::run_direct(const Layer& layer, Chunk& chunk, const Work& work) {
    const GradientStep step = gradient_step(layer, chunk, work.slot, current_);
    if (layer.state.split) {
        commit_split(layer, chunk, work, step);
        free_slot(chunk.slot_class, work.slot);
        return;
    }
    const Target target = next_target(chunk);
    in_blocks(layer, chunk, [&](const Chunk& block, std::size_t begin) {
        float* const p = master(layer, block);
        const Moments m = moments(layer, block);
        const Outgoing to = shifted(target.out, begin);
        timed(SpanKind::kCommit, block, to,
              [&] { adam_commit(p, m, block.n, shifted(step, begin), to, num_threads_); });
    });
    // After the pass, for the same reason as in run_update.
    free_slot(chunk.slot_class, work.slot);
    send(chunk, target);
}

// Commits the gradient of a step whose outcome is known.
void UpdateWorker::run_late(const Layer& layer, Chunk& chunk, const Work& work) {
    commit_split(layer, chunk, work, gradient_step(layer, chunk, chunk.slot, current_));
    release_slot(chunk);
}

// One step of split weights. Their upper halves are the training copy, which is on the host or was
// fetched into an outgoing buffer: there it is updated in place and sent back. The buffer is then
// in the caches when it is written, and no second one is needed.
void UpdateWorker::commit_split(const Layer& layer, const Chunk& chunk, const Work& work,
                                const GradientStep& step) {
    const Target target = target_of(chunk, work.copy);
    const SplitWeights weights{target.out.data,
                               static_cast<std::uint16_t*>(layer.state.p) + chunk.shard_offset};
    const Moments m = moments(layer, chunk);
    timed(SpanKind::kCommit, chunk, target.out,
          [&] { adam_commit(weights, m, chunk.n, step, num_threads_); });
    send(chunk, target);
}

// Applies the pending gradient, if there is one.
void UpdateWorker::run_commit(const Layer& layer, Chunk& chunk) {
    GradientStep step;
    if (previous_) step = gradient_step(layer, chunk, chunk.slot, *previous_);
    in_blocks(layer, chunk, [&](const Chunk& block, std::size_t begin) {
        if (!previous_) return;
        float* const p = master(layer, block);
        const Moments m = moments(layer, block);
        timed(SpanKind::kCommit, block, Outgoing{},
              [&] { adam_commit(p, m, block.n, shifted(step, begin), Outgoing{}, num_threads_); });
    });
    if (previous_) release_slot(chunk);
}

void UpdateWorker::run_publish(const Layer& layer, const Chunk& chunk) {
    if (layer.state.split) return;  // the copy has never been ahead of the state
    const Target target = next_target(chunk);
    const float* p = master(layer, chunk);
    timed(SpanKind::kPublish, chunk, target.out,
          [&] { adam_publish(p, chunk.n, target.out, num_threads_); });
    send(chunk, target);
}

void UpdateWorker::return_gradient(const Layer& layer, const Chunk& chunk, const Job& job) {
    if (chunk.slot < 0) throw std::logic_error("a withdrawn gradient has no slot");
    const Buffers& slots = slots_[static_cast<std::size_t>(chunk.slot_class)].slots;
    const EventHandle event = slots.ends[static_cast<std::size_t>(chunk.slot)];
    const std::size_t size = size_of(layer.gradient_dtype);
    // Without this wait the copy could overwrite what the compute stream still reads: the memory
    // was allocated in its order.
    device_->lane_wait(Lane::kToDevice, job.gradient_ready);
    const EventHandle begin = slots.begins[static_cast<std::size_t>(chunk.slot)];
    device_->record(begin, Lane::kToDevice);
    device_->copy(Lane::kToDevice, job.withdraw_to + chunk.shard_offset * size,
                  slots.addresses[static_cast<std::size_t>(chunk.slot)], chunk.n * size);
    device_->record(event, Lane::kToDevice);
    // The slot is released next: without this wait the next gradient could be copied into it while
    // this one is still being read.
    wait_event(event);
    trace_copy(SpanKind::kGradientToDevice, place_, begin, event,
               static_cast<std::int64_t>(chunk.n * size));
}

// Without the wait, weights that the copy engine has not read yet could be overwritten.
int UpdateWorker::take_outgoing() {
    if (free_outgoing_.empty()) throw std::logic_error("there is no free outgoing buffer");
    const int buffer = free_outgoing_.front();
    free_outgoing_.pop_front();
    waits_for_ = "an earlier copy to the device";
    job_statistics_.wait_outgoing_ns +=
        wait_event(outgoing_.ends[static_cast<std::size_t>(buffer)]);
    waits_for_ = nullptr;
    account_sent(buffer);
    return buffer;
}

// The buffer's latest copy has completed.
void UpdateWorker::account_sent(int buffer) {
    const auto index = static_cast<std::size_t>(buffer);
    Sent& sent = outgoing_sent_[index];
    if (sent.bytes == 0) return;
    const EventHandle begin = outgoing_.begins[index], end = outgoing_.ends[index];
    job_statistics_.to_device_ns += device_->elapsed_ns(begin, end);
    job_statistics_.to_device_bytes += sent.bytes;
    trace_copy(sent.kind, sent.place, begin, end, std::exchange(sent.bytes, 0));
    // Last: whoever waits for it takes the trace then.
    if (sent.traced) traced_copies_.fetch_sub(1, std::memory_order_release);
}

UpdateWorker::Target UpdateWorker::next_target(const Chunk& chunk) {
    return target_of(chunk, chunk.weights_on_host ? -1 : take_outgoing());
}

UpdateWorker::Target UpdateWorker::target_of(const Chunk& chunk, int buffer) const {
    // In place, without a wait: gathers that read the old weights here complete before the layer's
    // gradient is final. Non-temporal: it is not read again soon.
    if (chunk.weights_on_host) return {{chunk.weights, chunk.weights_dtype, true}, -1};
    // Through the cache: the copy engine reads the buffer soon after.
    char* const data = outgoing_.addresses.at(static_cast<std::size_t>(buffer));
    return {{data, chunk.weights_dtype, false}, buffer};
}

void UpdateWorker::send(const Chunk& chunk, const Target& target) {
    delay();
    if (target.buffer < 0) return;
    send_outgoing(target.buffer, chunk.weights, chunk.n * size_of(chunk.weights_dtype),
                  SpanKind::kWeightsToDevice);
}

void UpdateWorker::send_outgoing(int buffer, void* destination, std::size_t bytes, SpanKind kind) {
    const std::int64_t begin = now_ns();
    const auto index = static_cast<std::size_t>(buffer);
    device_->record(outgoing_.begins[index], Lane::kToDevice);
    device_->copy(Lane::kToDevice, destination, outgoing_.addresses[index], bytes);
    device_->record(outgoing_.ends[index], Lane::kToDevice);
    note(kToDeviceTask,
         kind == SpanKind::kWeightsToDevice
             ? "weights"
             : (kind == SpanKind::kStateToDevice ? "state" : "gradient"),
         place_, outgoing_.ends[index]);
    const bool traced = trace_.load(std::memory_order_acquire) != nullptr;
    if (traced) traced_copies_.fetch_add(1, std::memory_order_relaxed);
    outgoing_sent_[index] = Sent{static_cast<std::int64_t>(bytes), kind, place_, traced};
    free_outgoing_.push_back(buffer);
    job_statistics_.issue_ns += now_ns() - begin;
}

void UpdateWorker::release_slot(Chunk& chunk) {
    if (chunk.slot < 0) return;
    free_slot(chunk.slot_class, chunk.slot);
    chunk.slot = -1;
}

}  // namespace hytrain
