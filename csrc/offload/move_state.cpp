// Moving a layer's state between host and device, chunk by chunk through the outgoing buffers: the
// state itself is pageable, and copies to or from pageable memory would block.
#include <algorithm>
#include <array>
#include <deque>

#include "hytrain/parallel_copy.h"
#include "hytrain/update_worker.h"

namespace hytrain {

namespace {

struct Run {
    float* host = nullptr;
    float* device = nullptr;
};

// The three arrays of a chunk's state on both sides.
std::array<Run, 3> runs(const StateArrays& host, const StateArrays& device) {
    return {Run{host.p, device.p}, Run{host.m, device.m}, Run{host.v, device.v}};
}

}  // namespace

void UpdateWorker::send_state(const Layer& layer, const Chunk& chunk, const Job& job) {
    const std::size_t most = outgoing_.bytes / sizeof(float);
    for (const Run& run :
         runs(layer.state.at(chunk.shard_offset), job.device_state.at(chunk.shard_offset))) {
        for (std::size_t at = 0; at < chunk.n; at += most) {
            const std::size_t bytes = std::min(most, chunk.n - at) * sizeof(float);
            delay();
            const std::size_t buffer = take_outgoing();
            parallel_copy(outgoing_.addresses[buffer], run.host + at, bytes, num_threads_);
            send_outgoing(buffer, run.device + at, bytes, SpanKind::kStateToDevice);
        }
    }
}

void UpdateWorker::fetch_state(const Chunk& chunk, const Job& job) {
    const std::size_t most = outgoing_.bytes / sizeof(float);
    std::deque<StatePiece> flying;
    for (const Run& run :
         runs(job.host_state.at(chunk.shard_offset), job.device_state.at(chunk.shard_offset))) {
        for (std::size_t at = 0; at < chunk.n; at += most) {
            const std::size_t bytes = std::min(most, chunk.n - at) * sizeof(float);
            // All buffers are in flight: the next copy would overwrite the oldest piece before it
            // has been copied to its place.
            if (flying.size() == outgoing_.addresses.size()) {
                land_piece(flying.front());
                flying.pop_front();
            }
            delay();
            const std::size_t buffer = take_outgoing();
            device_->record(outgoing_.begins[buffer], Lane::kToHost);
            device_->copy(Lane::kToHost, outgoing_.addresses[buffer], run.device + at, bytes);
            device_->record(outgoing_.ends[buffer], Lane::kToHost);
            note(kToHostTask, "state", place_, outgoing_.ends[buffer]);
            flying.push_back(StatePiece{buffer, run.host + at, bytes});
        }
    }
    for (const StatePiece& piece : flying) land_piece(piece);
}

void UpdateWorker::land_piece(const StatePiece& piece) {
    // Without this wait the buffer would be read while the device still writes it.
    wait_event(outgoing_.ends[piece.buffer]);
    trace_copy(SpanKind::kStateToHost, place_, outgoing_.begins[piece.buffer],
               outgoing_.ends[piece.buffer], static_cast<std::int64_t>(piece.bytes));
    parallel_copy(piece.destination, outgoing_.addresses[piece.buffer], piece.bytes, num_threads_);
}

}  // namespace hytrain
