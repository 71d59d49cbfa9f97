// The CPU optimizer's passes (docs/internals.md: why clipping stays exact), on raw pointers.
//
// State is S = (p, m, v): fp32 master weights, first and second moment, each n elements. Moments
// are kept in fp32, in bf16, or in 8-bit codes; the arithmetic is fp32 for all (docs/internals.md).
// One AdamW step A maps (S, gradient, hyper-parameters) to a new S. The passes are
//
//   commit               S <- A(S, g, h);  optionally w <- cast(p)
//   preview              w <- cast of the p that commit would produce; S untouched
//   commit_then_preview  commit(previous), then preview(current), in one sweep over memory
//   publish              w <- cast(p)
//
// Every pass has one fixed arithmetic (fused multiply-add, true division and square root, in every
// instruction set) and is elementwise, but for the exponent that a block of 8-bit codes shares. So
// results are bitwise equal for any length, alignment, thread count and instruction set; commit
// followed by publish equals preview.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hytrain {

// kBFloat16Away is for outgoing copies only: bf16 with the rounding of SplitWeights. So fp32
// weights that become split ones elsewhere, and back, keep every bit, and their copy does not
// change.
enum class DType : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kBFloat16Away = 3 };

inline std::size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Hyper-parameters of one Adam step, as the user wrote them.
struct AdamHyper {
    double lr = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double eps = 1e-8;
    double weight_decay = 0.0;
    std::int64_t step = 1;        // 1 for the first step of the parameter group
    bool decoupled_decay = true;  // true: AdamW; false: Adam with L2 added to the gradient
    bool bias_correction = true;
};

// One gradient and how to apply it: the update uses scale * gradient.
struct GradientStep {
    const void* gradient = nullptr;  // n elements of `dtype`
    DType dtype = DType::kFloat32;
    float scale = 1.0F;  // clip coefficient / loss scale
    AdamHyper hyper;
};

// Outgoing copy of the weights; data == nullptr means none.
struct Outgoing {
    void* data = nullptr;  // n elements of `dtype`
    DType dtype = DType::kFloat32;
    bool non_temporal = false;  // hint: bypass the cache where the instruction set can
};

enum class MomentKind : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kEightBit = 2 };

inline std::size_t moment_bytes(MomentKind kind) {
    return kind == MomentKind::kFloat32 ? 4 : kind == MomentKind::kBFloat16 ? 2 : 1;
}

// Elements that share the exponent of their 8-bit codes, counted from a parameter's start.
constexpr std::size_t kMomentBlock = 64;

// Where a parameter's elements begin in a range; they end where the next run begins.
struct MomentRun {
    std::size_t begin = 0;          // in the range, a multiple of kMomentBlock
    std::uint64_t parameter = 0;    // unique among the model's parameters
    std::uint64_t first_index = 0;  // of that element in its parameter: a multiple of kMomentBlock
};

// Both moments of n elements. Kinds other than fp32 are rounded stochastically when a pass stores
// them, by bits that depend on the seed, the parameter, the number of the step and the element's
// index in its parameter, and on nothing else.
struct Moments {
    MomentKind kind = MomentKind::kFloat32;
    void* m = nullptr;  // n elements of float or bf16; 8-bit: kMomentBlock bytes a block, also if
    void* v = nullptr;  // it is short, the code of element 16 b + w at byte 4 w + b
    std::uint8_t* m_exponents = nullptr;  // 8-bit: one for each kMomentBlock elements or part of it
    std::uint8_t* v_exponents = nullptr;
    std::uint64_t seed = 0;
    // Ascending, the first from 0 on; not used with fp32, nor by a preview, which stores none.
    std::vector<MomentRun> runs;
};

// Only preview takes constant moments; it writes none.
inline Moments fp32_moments(const float* m, const float* v) {
    Moments moments;
    moments.m = const_cast<float*>(m);
    moments.v = const_cast<float*>(v);
    return moments;
}

// Master weights in 16 + 16 bits: of bits(p) + 0x8000 the upper half is the training copy in bf16
// and the lower one the remainder. So the copy is p rounded to nearest, ties away from zero, and
// both together are p, bit for bit, for every finite p and infinity. (Ties to even would not do:
// 65,537 values share an even copy, and 16 bits tell 65,536 apart.) A NaN becomes the quiet NaN of
// its sign. A copy with the remainder 0x8000 is the copy's value.
struct SplitWeights {
    void* copy = nullptr;                // n elements of bf16
    std::uint16_t* remainder = nullptr;  // n
};

// Arguments are not checked here (the bindings do that): n may be 0; pointers need only their
// element's natural alignment; num_threads >= 1 is an upper bound on the OpenMP team.
void adam_commit(float* p, const Moments& moments, std::size_t n, const GradientStep& step,
                 const Outgoing& out, int num_threads);
void adam_commit(const SplitWeights& weights, const Moments& moments, std::size_t n,
                 const GradientStep& step, int num_threads);
void adam_preview(const float* p, const Moments& moments, std::size_t n, const GradientStep& step,
                  const Outgoing& out, int num_threads);
void adam_commit_then_preview(float* p, const Moments& moments, std::size_t n,
                              const GradientStep& previous, const GradientStep& current,
                              const Outgoing& out, int num_threads);
void adam_publish(const float* p, std::size_t n, const Outgoing& out, int num_threads);

// The same with moments in fp32.
inline void adam_commit(float* p, float* m, float* v, std::size_t n, const GradientStep& step,
                        const Outgoing& out, int num_threads) {
    adam_commit(p, fp32_moments(m, v), n, step, out, num_threads);
}
inline void adam_preview(const float* p, const float* m, const float* v, std::size_t n,
                         const GradientStep& step, const Outgoing& out, int num_threads) {
    adam_preview(p, fp32_moments(m, v), n, step, out, num_threads);
}
inline void adam_commit_then_preview(float* p, float* m, float* v, std::size_t n,
                                     const GradientStep& previous, const GradientStep& current,
                                     const Outgoing& out, int num_threads) {
    adam_commit_then_preview(p, fp32_moments(m, v), n, previous, current, out, num_threads);
}

// Sum of squares accumulated in float64, in an order that depends on n alone (not on the thread
// count). Finite exactly when every element is finite.
double sum_of_squares(const void* data, DType dtype, std::size_t n, int num_threads);

// When a thread of a pass's team began and ended, on the monotonic clock; 0: it did no work.
struct ThreadTime {
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
};

// From now on the threads of passes that the calling thread starts write their times to `times`, by
// thread number; it needs one entry per thread of a pass. nullptr: no times are written.
void set_thread_times(ThreadTime* times);

}  // namespace hytrain
