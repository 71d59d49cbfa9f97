// Copies of layers' states for saves: requested, made before the state changes, cancelled.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>

#include "hytrain/clock.h"
#include "hytrain/parallel_copy.h"
#include "hytrain/update_worker.h"

namespace hytrain {

void UpdateWorker::capture(int layer, const StateArrays& target) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        throw_if_failed();
        Layer& captured = layers_.at(static_cast<std::size_t>(layer));
        if (captured.capture.wanted || captured.capture.running) {
            throw std::logic_error("layer '" + captured.name + "' is being copied already");
        }
        captured.capture.target = target;
        captured.capture.sequence = sequence_++;
        captured.capture.wanted = true;
        ++owed_;
    }
    wake_.notify_one();
}

void UpdateWorker::forget_capture(int layer) {
    std::unique_lock<std::mutex> lock(mutex_);
    Capture& forgotten = layers_.at(static_cast<std::size_t>(layer)).capture;
    if (forgotten.wanted) --owed_;
    forgotten.wanted = false;
    // A failed worker never finishes the copy.
    changed_.wait(lock, [&] { return !forgotten.running || !error_.empty(); });
    forgotten.running = false;
    lock.unlock();
    changed_.notify_all();  // whoever waits for the copy
}

// Under mutex_. Whether the copy can be made now: no job of the layer is left, so that its state is
// the one to be copied, with the pending gradient if that was sent before the copy was asked for;
// its step must then be final.
bool UpdateWorker::can_capture(const Layer& layer) {
    if (!layer.capture.wanted) return false;
    if (layer.outstanding != 0 || layer.moving != 0 || layer.settling != 0) return false;
    const bool commits = layer.pending && layer.pending_sequence < layer.capture.sequence;
    return !(commits && layer.tentative);
}

// Under mutex_. A job for a copy that can be made now: of the last such layer, since its update
// comes first.
std::shared_ptr<Job> UpdateWorker::owed_capture() {
    if (owed_ == 0) return nullptr;
    for (std::size_t i = layers_.size(); i-- > 0;) {
        if (!can_capture(layers_[i])) continue;
        auto job = std::make_shared<Job>();
        job->pass = Pass::kCapture;
        job->layer = static_cast<int>(i);
        job->sequence = sequence_++;
        job->step = trace_step_;
        ++layers_[i].capturing;
        jobs_.push_back(job);
        return job;
    }
    return nullptr;
}

// Under mutex_. Whether a job makes the copy that is owed: before it changes the state that is to
// be copied, or after it has produced that state.
UpdateWorker::Taking UpdateWorker::taking(const Job& job, const Layer& layer) {
    if (!layer.capture.wanted) return Taking::kNo;
    const std::int64_t sequence = layer.capture.sequence;
    const bool commits_later = layer.pending && layer.pending_sequence >= sequence;
    switch (job.pass) {
        case Pass::kUpdate:
        case Pass::kCommit:
        case Pass::kSettle:
            return commits_later ? Taking::kBefore : Taking::kNo;
        case Pass::kDirect:
            return job.sequence >= sequence ? Taking::kBefore : Taking::kNo;
        case Pass::kLeave:  // the state's host memory is given back
            return commits_later ? Taking::kBefore : Taking::kAfter;
        case Pass::kCapture:
            return Taking::kAfter;
        default:
            return Taking::kNo;
    }
}

// Copies a chunk's state to where it is to be saved from.
void UpdateWorker::take_copy(const Layer& layer, const Chunk& chunk) {
    const std::int64_t from = now_ns();
    delay();
    const StateArrays &state = layer.state, &target = layer.capture.target;
    const std::size_t at = chunk.shard_offset, n = chunk.n, size = moment_bytes(state.kind);
    const auto copy = [&](void* to, const void* source, std::size_t offset, std::size_t bytes) {
        parallel_stream(static_cast<char*>(to) + offset, static_cast<const char*>(source) + offset,
                        bytes, num_threads_);
    };
    copy(target.p, state.p, at * state.weight_bytes(), n * state.weight_bytes());
    copy(target.m, state.m, at * size, n * size);
    copy(target.v, state.v, at * size, n * size);
    if (state.kind == MomentKind::kEightBit) {
        copy(target.m_exponents, state.m_exponents, at / kMomentBlock, n / kMomentBlock);
        copy(target.v_exponents, state.v_exponents, at / kMomentBlock, n / kMomentBlock);
    }
    // These spans measure the passes alone: a save is rare, so its copy is left out.
    span_.begin_ns += now_ns() - from;
}

}  // namespace hytrain
