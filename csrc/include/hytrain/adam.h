// The CPU optimizer's passes (docs/internals.md: why clipping stays exact), on raw pointers.
//
// State is S = (p, m, v): fp32 master weights, first and second moment, each n elements.
// One AdamW step A maps (S, gradient, hyper-parameters) to a new S. The passes are
//
//   commit               S <- A(S, g, h);  optionally w <- cast(p)
//   preview              w <- cast of the p that commit would produce; S untouched
//   commit_then_preview  commit(previous), then preview(current), in one sweep over memory
//   publish              w <- cast(p)
//
// Every pass is elementwise with one fixed arithmetic (fused multiply-add, true division and
// square root, in every instruction set), so results are bitwise equal for any length,
// alignment, thread count and instruction set; commit followed by publish equals preview.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hytrain {

enum class DType : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

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

// Arguments are not checked here (the bindings do that): n may be 0; pointers need only their
// element's natural alignment; num_threads >= 1 is an upper bound on the OpenMP team.
void adam_commit(float* p, float* m, float* v, std::size_t n, const GradientStep& step,
                 const Outgoing& out, int num_threads);
void adam_preview(const float* p, const float* m, const float* v, std::size_t n,
                  const GradientStep& step, const Outgoing& out, int num_threads);
void adam_commit_then_preview(float* p, float* m, float* v, std::size_t n,
                              const GradientStep& previous, const GradientStep& current,
                              const Outgoing& out, int num_threads);
void adam_publish(const float* p, std::size_t n, const Outgoing& out, int num_threads);

// Sum of squares accumulated in float64, in an order that depends on n alone (not on the thread
// count). Finite exactly when every element is finite.
double sum_of_squares(const void* data, DType dtype, std::size_t n, int num_threads);

// When a thread of a pass's team began and ended, on the monotonic clock; 0: it had no part.
struct ThreadTime {
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
};

// From now on each thread of the passes that the calling thread starts writes its times there, to
// the entry of its number; as many entries as passes have threads. nullptr: none does.
void set_thread_times(ThreadTime* times);

}  // namespace hytrain
