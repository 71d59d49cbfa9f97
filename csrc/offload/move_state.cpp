// Moving a layer's state between host and device, chunk by chunk through the outgoing buffers: the
// state itself is pageable, and copies to or from pageable memory would block.
//
// Weights may be whole on the host and split on the device. The training copy is the same on both
// sides, so only the remainders are sent; on the way back they are joined with the training copy.
#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "hytrain/parallel_copy.h"
#include "hytrain/update_worker.h"

namespace hytrain {

namespace {

struct Run {
    char* host = nullptr;
    char* device = nullptr;
    std::size_t bytes = 0;  // on the device
    StatePart part = StatePart::kAsKept;
    // Host address of the piece that begins `begin` bytes into the run on the device.
    char* host_at(std::size_t begin) const {
        return host + (part == StatePart::kAsKept ? begin : 2 * begin);
    }
};

Run run_of(void* host, void* device, std::size_t begin, std::size_t bytes) {
    return {static_cast<char*>(host) + begin, static_cast<char*>(device) + begin, bytes};
}

bool changes_form(const StateArrays& host, const StateArrays& device) {
    return device.split && !host.split;
}

// The arrays of a chunk's state on both sides.
std::vector<Run> runs(const StateArrays& host, const StateArrays& device, const Chunk& chunk) {
    const std::size_t at = chunk.shard_offset, size = moment_bytes(host.kind);
    const std::size_t host_size = host.weight_bytes(), device_size = device.weight_bytes();
    std::vector<Run> found{
        Run{static_cast<char*>(host.p) + at * host_size,
            static_cast<char*>(device.p) + at * device_size, chunk.n * device_size,
            changes_form(host, device) ? StatePart::kRemainders : StatePart::kAsKept},
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

constexpr std::uint32_t kSign = 0x80000000U, kHalf = 0x8000U;

template <class Bits>
Bits load(const char* from, std::size_t i) {
    Bits bits;
    std::memcpy(&bits, from + i * sizeof(Bits), sizeof(Bits));
    return bits;
}

template <class Bits>
void store(char* to, std::size_t i, Bits bits) {
    std::memcpy(to + i * sizeof(Bits), &bits, sizeof(Bits));
}

// Writes the first `bytes` of a piece in the form that the device keeps.
void pack(char* to, const char* from, std::size_t bytes, StatePart part, int num_threads) {
    if (part == StatePart::kAsKept) return parallel_copy(to, from, bytes, num_threads);
#pragma omp parallel for num_threads(copy_threads(bytes, num_threads)) schedule(static)
    for (std::size_t i = 0; i < bytes / 2; ++i) {
        const auto bits = load<std::uint32_t>(from, i);
        const bool is_nan = (bits & ~kSign) > 0x7F800000U;
        store(to, i, static_cast<std::uint16_t>(is_nan ? kHalf : bits + kHalf));
    }
}

// The reverse of pack. A weight is only its remainder until its copy has arrived.
void unpack(char* to, const char* from, std::size_t bytes, StatePart part, int num_threads) {
    if (part == StatePart::kAsKept) return parallel_copy(to, from, bytes, num_threads);
#pragma omp parallel for num_threads(copy_threads(bytes, num_threads)) schedule(static)
    for (std::size_t i = 0; i < bytes / 2; ++i) {
        std::uint32_t bits = load<std::uint16_t>(from, i);
        if (part == StatePart::kCopy) {
            const std::uint32_t copy = bits << 16, both = copy | load<std::uint32_t>(to, i);
            bits = (std::max(both & ~kSign, kHalf) - kHalf) | (copy & kSign);
        }
        store(to, i, bits);
    }
}

}  // namespace

void UpdateWorker::send_state(const Layer& layer, const Chunk& chunk, const Job& job) {
    const std::size_t most = outgoing_.bytes;
    for (const Run& run : runs(layer.state, job.device_state, chunk)) {
        for (std::size_t at = 0; at < run.bytes; at += most) {
            const std::size_t bytes = std::min(most, run.bytes - at);
            delay();
            const int buffer = take_outgoing();
            pack(outgoing_.addresses[static_cast<std::size_t>(buffer)], run.host_at(at), bytes,
                 run.part, num_threads_);
            send_outgoing(buffer, run.device + at, bytes, SpanKind::kStateToDevice);
        }
    }
}

void UpdateWorker::fetch_state(const Chunk& chunk, const Job& job) {
    const std::size_t most = outgoing_.bytes;
    std::deque<StatePiece> flying;
    std::vector<Run> found = runs(job.host_state, job.device_state, chunk);
    const Run copy{found[0].host, static_cast<char*>(chunk.weights), 2 * chunk.n, StatePart::kCopy};
    const bool joins = changes_form(job.host_state, job.device_state);
    // After the remainders that it is joined with. It was last written by the update before the
    // move.
    if (joins && !chunk.weights_on_host) found.push_back(copy);
    for (const Run& run : found) {
        for (std::size_t at = 0; at < run.bytes; at += most) {
            const std::size_t bytes = std::min(most, run.bytes - at);
            // All buffers are in flight: the oldest piece is copied to its place first.
            if (free_outgoing_.empty()) {
                land_piece(flying.front());
                flying.pop_front();
            }
            delay();
            const int buffer = take_outgoing();
            fetch_to(outgoing_, buffer, run.device + at, bytes, "state", place_);
            flying.push_back(StatePiece{buffer, run.host_at(at), bytes, run.part});
        }
    }
    for (const StatePiece& piece : flying) land_piece(piece);
    // The copy on the host is complete: the update that wrote it came before the move.
    if (joins && chunk.weights_on_host) {
        unpack(copy.host, copy.device, copy.bytes, copy.part, num_threads_);
    }
}

void UpdateWorker::land_piece(const StatePiece& piece) {
    // Without this wait the buffer would be read while the device still writes it.
    const auto index = static_cast<std::size_t>(piece.buffer);
    wait_event(outgoing_.ends[index]);
    trace_copy(SpanKind::kStateToHost, place_, outgoing_.begins[index], outgoing_.ends[index],
               static_cast<std::int64_t>(piece.bytes));
    unpack(piece.destination, outgoing_.addresses[index], piece.bytes, piece.part, num_threads_);
    free_outgoing_.push_back(piece.buffer);
}

}  // namespace hytrain
