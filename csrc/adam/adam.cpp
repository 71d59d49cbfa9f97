// The passes of hytrain/adam.h: constants once, then blocks of the range over an OpenMP team.
#include "hytrain/adam.h"

#include <omp.h>

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "hytrain/dispatch.h"
#include "kernel_table.h"

namespace hytrain {
namespace {

Tuning g_tuning;

// Set by the thread that starts passes; the threads of its team write to it.
thread_local ThreadTime* t_times = nullptr;

// A team's start costs some microseconds, about what this many elements take on one thread.
constexpr std::size_t kSerialElements = 16384;

// A short range has blocks below the largest, so that each thread gets this many of them, but no
// block is shorter than the least: a block's first elements have not been prefetched.
constexpr std::size_t kBlocksPerThread = 16;
constexpr std::size_t kLeastBlock = 16384;

std::size_t block_of(std::size_t n, int num_threads) {
    const std::size_t shares =
        kBlocksPerThread * static_cast<std::size_t>(std::max(num_threads, 1));
    const std::size_t share = (n / shares + 63) / 64 * 64;
    return std::min(g_tuning.block_elements, std::max(share, kLeastBlock));
}

// Fixed, so that the order of the sum depends on n alone.
constexpr std::size_t kSumBlock = 16384;

AdamConstants constants_of(const GradientStep& step) {
    const AdamHyper& h = step.hyper;
    const auto t = static_cast<double>(h.step);
    const double correction1 = h.bias_correction ? 1.0 - std::pow(h.beta1, t) : 1.0;
    const double correction2 = h.bias_correction ? 1.0 - std::pow(h.beta2, t) : 1.0;
    AdamConstants c{};
    c.scale = step.scale;
    c.l2 = h.decoupled_decay ? 0.0F : static_cast<float>(h.weight_decay);
    c.decay = h.decoupled_decay ? static_cast<float>(1.0 - h.lr * h.weight_decay) : 1.0F;
    c.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
    c.beta2 = static_cast<float>(h.beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
    c.inv_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction2));
    c.eps = static_cast<float>(h.eps);
    c.neg_step_size = static_cast<float>(-h.lr / correction1);
    return c;
}

// A program may have set its threads to flush subnormals or to another rounding mode, and threads
// inherit that at different times. The passes always run under the default, so that neither the
// number of threads nor their choice can change a result.
class DefaultFloatingPoint {
   public:
    DefaultFloatingPoint() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
    DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
    DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

   private:
    std::fenv_t saved_{};
};

// Records when one thread of a pass begins and ends, if that was asked for.
class ThreadClock {
   public:
    ThreadClock(ThreadTime* times, int thread)
        : time_(times == nullptr ? nullptr : times + thread) {
        if (time_ != nullptr) time_->begin_ns = now_ns();
    }
    ~ThreadClock() {
        if (time_ != nullptr) time_->end_ns = now_ns();
    }
    ThreadClock(const ThreadClock&) = delete;
    ThreadClock& operator=(const ThreadClock&) = delete;

   private:
    static std::int64_t now_ns() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }
    ThreadTime* time_;
};

// Calls body(begin, count, index) for each block of [0, n); blocks start at multiples of
// `block`, whatever the number of threads.
template <class Body>
void for_blocks(std::size_t n, std::size_t block, int num_threads, const Body& body) {
    const auto num_blocks = static_cast<std::int64_t>((n + block - 1) / block);
    const auto run = [&](std::int64_t index) {
        const std::size_t begin = static_cast<std::size_t>(index) * block;
        body(begin, std::min(block, n - begin), static_cast<std::size_t>(index));
    };
    if (num_threads <= 1 || n <= kSerialElements) {
        const DefaultFloatingPoint guard;
        const ThreadClock clock(t_times, 0);
        for (std::int64_t index = 0; index < num_blocks; ++index) {
            run(index);
        }
        return;
    }
    // No two blocks share an element, so the loops need no barrier of their own (nowait); the one
    // at the end of the parallel region is needed: the caller sends the result at once.
    const auto team = static_cast<int>(std::min<std::int64_t>(num_threads, num_blocks));
    const bool dynamic = g_tuning.dynamic_schedule;
    ThreadTime* const times = t_times;  // read here: the team's threads have their own t_times
#pragma omp parallel num_threads(team)
    {
        const DefaultFloatingPoint guard;
        const ThreadClock clock(times, times == nullptr ? 0 : omp_get_thread_num());
        if (dynamic) {
#pragma omp for schedule(dynamic, 1) nowait
            for (std::int64_t index = 0; index < num_blocks; ++index) {
                run(index);
            }
        } else {
#pragma omp for schedule(static) nowait
            for (std::int64_t index = 0; index < num_blocks; ++index) {
                run(index);
            }
        }
    }
}

GradientRange at(const GradientRange& gradient, std::size_t begin) {
    const char* data = static_cast<const char*>(gradient.data);
    return {data + begin * size_of(gradient.dtype), gradient.dtype, gradient.constants};
}

OutRange at(const Outgoing& out, std::size_t begin) {
    if (out.data == nullptr) {
        return {nullptr, out.dtype, false};
    }
    return {static_cast<char*>(out.data) + begin * size_of(out.dtype), out.dtype, out.non_temporal};
}

SplitRange at(const SplitWeights& weights, std::size_t begin) {
    return {static_cast<char*>(weights.copy) + 2 * begin,
            reinterpret_cast<char*>(weights.remainder + begin)};
}

GradientRange whole(const GradientStep& step) {
    return {step.gradient, step.dtype, constants_of(step)};
}

// The finalizer of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
// generators"), one word absorbed at a time.
std::uint64_t absorb(std::uint64_t state, std::uint64_t word) {
    std::uint64_t z = (state ^ word) + 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

// Key of the random bits of one step and parameter; `high` is the upper half of an element's index
// (hytrain/kernels/moments.py has the same).
std::uint32_t rounding_key(std::uint64_t seed, std::uint64_t parameter, std::int64_t step,
                           std::uint64_t high) {
    std::uint64_t state = absorb(0, seed);
    state = absorb(state, parameter);
    state = absorb(state, static_cast<std::uint64_t>(step));
    return static_cast<std::uint32_t>(absorb(state, high) >> 32);
}

MomentRange at(const Moments& moments, std::size_t begin) {
    const std::size_t offset = begin * moment_bytes(moments.kind);
    MomentRange range{};
    range.kind = moments.kind;
    range.m = static_cast<char*>(moments.m) + offset;
    range.v = static_cast<char*>(moments.v) + offset;
    if (moments.kind == MomentKind::kEightBit) {
        range.m_exponents = moments.m_exponents + begin / kMomentBlock;
        range.v_exponents = moments.v_exponents + begin / kMomentBlock;
    }
    return range;
}

// Calls body(moments of the part, begin, count) for the parts of one block that share a key: it
// changes with the parameter, and with the upper half of the index.
template <class Body>
void for_keys(const Moments& moments, std::int64_t step, std::size_t begin, std::size_t count,
              const Body& body) {
    constexpr std::uint64_t kPeriod = std::uint64_t{1} << 32;
    const std::size_t end = begin + count;
    const auto& runs = moments.runs;
    auto next = std::upper_bound(runs.begin(), runs.end(), begin,
                                 [](std::size_t i, const MomentRun& run) { return i < run.begin; });
    while (begin < end) {
        const MomentRun& run = *(next - 1);
        const std::uint64_t index = run.first_index + (begin - run.begin);
        std::size_t stop = next == runs.end() ? end : std::min(end, next->begin);
        stop = std::min<std::size_t>(stop, begin + (kPeriod - index % kPeriod));
        MomentRange range = at(moments, begin);
        range.first_index = static_cast<std::uint32_t>(index);
        range.key = rounding_key(moments.seed, run.parameter, step, index >> 32);
        body(range, begin, stop - begin);
        begin = stop;
        if (next != runs.end() && begin == next->begin) ++next;
    }
}

// Calls body(moments of the part, begin, count) for each block of [0, n). `stores`: the pass stores
// moments; unless they are fp32, blocks are cut into parts whose moments are rounded by one key.
template <class Body>
void for_moments(const Moments& moments, bool stores, std::int64_t step, std::size_t n,
                 int num_threads, const Body& body) {
    const bool rounds = stores && moments.kind != MomentKind::kFloat32;
    for_blocks(n, block_of(n, num_threads), num_threads,
               [&](std::size_t begin, std::size_t count, std::size_t) {
                   if (rounds) {
                       for_keys(moments, step, begin, count, body);
                   } else {
                       body(at(moments, begin), begin, count);
                   }
               });
}

}  // namespace

Tuning tuning() { return g_tuning; }

void set_thread_times(ThreadTime* times) { t_times = times; }

void set_tuning(const Tuning& tuning) {
    if (tuning.block_elements == 0 || tuning.block_elements % 64 != 0) {
        throw std::invalid_argument("block_elements must be a positive multiple of 64, not " +
                                    std::to_string(tuning.block_elements));
    }
    g_tuning = tuning;
}

void adam_commit(float* p, const Moments& moments, std::size_t n, const GradientStep& step,
                 const Outgoing& out, int num_threads) {
    const KernelTable& kernels = active_kernels();
    const GradientRange gradient = whole(step);
    const std::size_t ahead = g_tuning.prefetch_elements;
    for_moments(moments, true, step.hyper.step, n, num_threads,
                [&](const MomentRange& m, std::size_t i, std::size_t count) {
                    kernels.commit(p + i, m, count, at(gradient, i), at(out, i), ahead);
                });
}

void adam_commit(const SplitWeights& weights, const Moments& moments, std::size_t n,
                 const GradientStep& step, int num_threads) {
    const KernelTable& kernels = active_kernels();
    const GradientRange gradient = whole(step);
    const std::size_t ahead = g_tuning.prefetch_elements;
    for_moments(moments, true, step.hyper.step, n, num_threads,
                [&](const MomentRange& m, std::size_t i, std::size_t count) {
                    kernels.commit_split(at(weights, i), m, count, at(gradient, i), ahead);
                });
}

void adam_preview(const float* p, const Moments& moments, std::size_t n, const GradientStep& step,
                  const Outgoing& out, int num_threads) {
    const KernelTable& kernels = active_kernels();
    const GradientRange gradient = whole(step);
    const std::size_t ahead = g_tuning.prefetch_elements;
    for_moments(moments, false, 0, n, num_threads,
                [&](const MomentRange& m, std::size_t i, std::size_t count) {
                    kernels.preview(p + i, m, count, at(gradient, i), at(out, i), ahead);
                });
}

void adam_commit_then_preview(float* p, const Moments& moments, std::size_t n,
                              const GradientStep& previous, const GradientStep& current,
                              const Outgoing& out, int num_threads) {
    const KernelTable& kernels = active_kernels();
    const GradientRange before = whole(previous);
    const GradientRange now = whole(current);
    const std::size_t ahead = g_tuning.prefetch_elements;
    // Only the commit stores moments, so they are rounded with the previous step's number.
    for_moments(moments, true, previous.hyper.step, n, num_threads,
                [&](const MomentRange& m, std::size_t i, std::size_t count) {
                    kernels.commit_then_preview(p + i, m, count, at(before, i), at(now, i),
                                                at(out, i), ahead);
                });
}

void adam_publish(const float* p, std::size_t n, const Outgoing& out, int num_threads) {
    const KernelTable& kernels = active_kernels();
    const std::size_t ahead = g_tuning.prefetch_elements;
    for_blocks(n, block_of(n, num_threads), num_threads,
               [&](std::size_t i, std::size_t count, std::size_t) {
                   kernels.publish(p + i, count, at(out, i), ahead);
               });
}

double sum_of_squares(const void* data, DType dtype, std::size_t n, int num_threads) {
    const KernelTable& kernels = active_kernels();
    const char* bytes = static_cast<const char*>(data);
    std::vector<double> partial((n + kSumBlock - 1) / kSumBlock);
    for_blocks(n, kSumBlock, num_threads, [&](std::size_t i, std::size_t count, std::size_t index) {
        partial[index] = kernels.sum_of_squares(bytes + i * size_of(dtype), dtype, count);
    });
    double sum = 0.0;
    for (const double value : partial) {
        sum += value;
    }
    return sum;
}

void read_write(float* p, const Moments& moments, std::size_t n, int num_threads) {
    const KernelTable& kernels = active_kernels();
    const std::size_t ahead = g_tuning.prefetch_elements;
    for_moments(moments, false, 0, n, num_threads,
                [&](const MomentRange& m, std::size_t i, std::size_t count) {
                    kernels.read_write(p + i, m, count, ahead);
                });
}

}  // namespace hytrain
