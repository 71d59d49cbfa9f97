// A lock-free ring of timed spans for traces: any thread writes, one reads. Writers never wait:
// when the ring is full the oldest spans are overwritten, and the reader counts how many were lost.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace hytrain {

enum class SpanKind : std::uint16_t {
    kPreview,
    kCommit,
    kCommitThenPreview,
    kPublish,
    // Copies, on their lane.
    kGradientToHost,
    kGradientToDevice,  // withdrawn
    kWeightsToDevice,
    kStateToHost,  // a layer's state moves
    kStateToDevice,
    kWeightsToHost,  // halves of split master weights
};

// One pass over a chunk, a thread's part of it, or one copy.
struct Span {
    SpanKind kind = SpanKind::kPreview;
    std::uint16_t thread = 0;  // of the pass's team; 0 for a whole pass
    std::int32_t layer = 0;
    std::int32_t chunk = 0;
    std::int32_t step = 0;  // the step that the gradient belongs to
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    std::int64_t bytes = 0;     // copied; for a pass, read from and written to memory
    std::int64_t elements = 0;  // for a pass
    std::int32_t slot = -1;     // the memory that a copy fills; unique among copies in flight
};

class SpanRing {
   public:
    // `capacity` is a power of two.
    explicit SpanRing(std::size_t capacity)
        : mask_(capacity - 1), cells_(std::make_unique<Cell[]>(capacity)) {
        if (capacity < 2 || (capacity & mask_) != 0) {
            throw std::invalid_argument("a ring's capacity must be a power of two above 1");
        }
    }

    // From any thread.
    void write(const Span& span) {
        const std::uint64_t ticket = next_.fetch_add(1, std::memory_order_relaxed);
        Cell& cell = cells_[ticket & mask_];
        // Another writer at this cell is a whole ring behind or ahead. Waiting for it could mean
        // waiting for a thread that has lost its core, so this span is dropped instead. And a late
        // writer must not put an old span over a newer one, which would be lost as well.
        std::uint64_t seen = cell.turn.load(std::memory_order_relaxed);
        if (seen % 2 != 0 || seen > 2 * ticket ||
            !cell.turn.compare_exchange_strong(seen, 2 * ticket + 1, std::memory_order_acquire,
                                               std::memory_order_relaxed)) {
            return;
        }
        const std::uint64_t words[kWords] = {
            static_cast<std::uint64_t>(span.begin_ns),
            static_cast<std::uint64_t>(span.end_ns),
            static_cast<std::uint64_t>(span.bytes),
            static_cast<std::uint64_t>(span.elements),
            pack(span.layer, span.chunk),
            pack(span.step, static_cast<std::int32_t>(static_cast<std::uint32_t>(span.kind) << 16U |
                                                      span.thread)),
            pack(span.slot, 0),
        };
        for (std::size_t i = 0; i < kWords; ++i) {
            // Release: a reader that sees the word also sees the odd turn that says "being
            // written".
            cell.words[i].store(words[i], std::memory_order_release);
        }
        cell.turn.store(2 * ticket + 2, std::memory_order_release);
    }

    // From one thread at a time. Appends the spans written since the last call, oldest first, and
    // returns how many were lost. A span that is being written is left for the next call; in the
    // `last` call, when nobody writes any more, an unfinished span counts as lost.
    std::uint64_t take(std::vector<Span>& spans, bool last = false) {
        const std::uint64_t end = next_.load(std::memory_order_acquire);
        const std::uint64_t capacity = mask_ + 1;
        std::uint64_t lost = 0;
        if (end - read_ > capacity) {
            lost = end - read_ - capacity;
            read_ = end - capacity;
        }
        for (; read_ != end; ++read_) {
            Span span;
            switch (read(read_, span)) {
                case Found::kWhole:
                    spans.push_back(span);
                    break;
                case Found::kUnfinished:
                    // Its writer is still at it, or has dropped it. Once half a ring of newer spans
                    // is there, it counts as dropped.
                    if (!last && end - read_ < capacity / 2) return lost;
                    [[fallthrough]];
                case Found::kLost:
                    ++lost;
                    break;
            }
        }
        return lost;
    }

   private:
    static constexpr std::size_t kWords = 7;
    // Words are atomic because a reader may read them while they are overwritten; `turn` then tells
    // it that what it has read is not a whole span.
    struct Cell {
        std::atomic<std::uint64_t> turn{0};  // 2 * ticket + 1: being written; + 2: whole
        std::atomic<std::uint64_t> words[kWords]{};
    };
    enum class Found { kWhole, kUnfinished, kLost };

    static std::uint64_t pack(std::int32_t high, std::int32_t low) {
        return static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32U |
               static_cast<std::uint32_t>(low);
    }

    Found read(std::uint64_t ticket, Span& span) const {
        const Cell& cell = cells_[ticket & mask_];
        const std::uint64_t turn = cell.turn.load(std::memory_order_acquire);
        if (turn > 2 * ticket + 2) return Found::kLost;
        if (turn < 2 * ticket + 2) return Found::kUnfinished;
        std::uint64_t words[kWords];
        for (std::size_t i = 0; i < kWords; ++i) {
            // Acquire: `turn` is read again after the words, and shows if one was of a newer span.
            words[i] = cell.words[i].load(std::memory_order_acquire);
        }
        if (cell.turn.load(std::memory_order_relaxed) != turn) return Found::kLost;
        const auto high = [](std::uint64_t word) { return static_cast<std::int32_t>(word >> 32U); };
        const auto low = [](std::uint64_t word) {
            return static_cast<std::uint32_t>(word & 0xFFFFFFFFU);
        };
        span.begin_ns = static_cast<std::int64_t>(words[0]);
        span.end_ns = static_cast<std::int64_t>(words[1]);
        span.bytes = static_cast<std::int64_t>(words[2]);
        span.elements = static_cast<std::int64_t>(words[3]);
        span.layer = high(words[4]);
        span.chunk = static_cast<std::int32_t>(low(words[4]));
        span.step = high(words[5]);
        span.kind = static_cast<SpanKind>(low(words[5]) >> 16U);
        span.thread = static_cast<std::uint16_t>(low(words[5]) & 0xFFFFU);
        span.slot = high(words[6]);
        return Found::kWhole;
    }

    std::uint64_t mask_;
    std::unique_ptr<Cell[]> cells_;
    std::atomic<std::uint64_t> next_{0};
    std::uint64_t read_ = 0;  // the reader's own
};

}  // namespace hytrain
