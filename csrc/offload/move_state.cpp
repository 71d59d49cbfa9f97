// Moving a layer's state between host and device, chunk by chunk through the outgoing buffers: the
// state itself is pageable, and copies to or from pageable memory would block.
#include <algorithm>
#include <deque>
#include <vector>

#include "hytrain/parallel_copy.h"
#include "hytrain/update_worker.h"

namespace hytrain {

namespace {

struct Run {
    char* host = nullptr;
    char* device = nullptr;
    std::size_t bytes = 0;
};

Run run_of(void* host, void* device, std::size_t begin, std::size_t bytes) {
    return {static_cast<char*>(host) + begin, static_cast<char*>(device) + begin, bytes};
}

// The arrays of a chunk's state on both sides, moved as they are kept.
std::vector<Run> runs(const StateArrays& host, const StateArrays& device, const Chunk& chunk) {
    const std::size_t at = chunk.shard_offset, size = moment_bytes(host.kind);
    std::vector<Run> found{
        run_of(host.p, device.p, at * host.weight_bytes(), chunk.n * host.weight_bytes()),
        run_of(host.m, device.m, at * size, chunk.n * size),
        run_of(host.v, device.v, at * size, chunk.n * size),
    };
    if (host.kind == MomentKind::kEightBit) {
        const std::size_t begin = at / kMomentBlock, blocks = chunk.n / kMomentBlock;
        found.push_back(run_of(host.m_exponents, device.m_exponents, begin, blocks));
        found.push_back(run_of(host.v_exponents, device.v_exponents, begin, blocks));
    }
    return found;
}

}  // namespace

void UpdateWorker::send_state(const Layer& layer, const Chunk& chunk, const Job& job) {
    const std::size_t most = outgoing_.bytes;
    for (const Run& run : runs(layer.state, job.device_state, chunk)) {
        for (std::size_t at = 0; at < run.bytes; at += most) {
            const std::size_t bytes = std::min(most, run.bytes - at);
            delay();
            const std::size_t buffer = take_outgoing();
            parallel_copy(outgoing_.addresses[buffer], run.host + at, bytes, num_threads_);
            send_outgoing(buffer, run.device + at, bytes, SpanKind::kStateToDevice);
        }
    }
}

void UpdateWorker::fetch_state(const Chunk& chunk, const Job& job) {
    const std::size_t most = outgoing_.bytes;
    std::deque<StatePiece> flying;
    for (const Run& run : runs(job.host_state, job.device_state, chunk)) {
        for (std::size_t at = 0; at < run.bytes; at += most) {
            const std::size_t bytes = std::min(most, run.bytes - at);
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
