// The passes of one instruction set over one range of memory, on the calling thread.
//
// Only plain data crosses this interface. The files that implement it are compiled with their
// own -m flags, so nothing here may be an inline function or a template from a shared header:
// the linker would keep one copy of it, perhaps the one that this CPU cannot run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hytrain/adam.h"

namespace hytrain {

// Hyper-parameters of one step as the fp32 constants of the arithmetic, each computed in
// double and rounded once.
//
//   g' = scale * g + l2 * p
//   m' = m + one_minus_beta1 * (g' - m)
//   v' = beta2 * v + one_minus_beta2 * g' * g'
//   p' = p * decay + neg_step_size * m' / (sqrt(v') * inv_sqrt_correction2 + eps)
struct AdamConstants {
    float scale;
    float l2;
    float decay;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float inv_sqrt_correction2;
    float eps;
    float neg_step_size;
};

struct GradientRange {
    const void* data;
    DType dtype;
    AdamConstants constants;
};

struct OutRange {
    void* data;  // nullptr: no outgoing copy
    DType dtype;
    bool non_temporal;
};

// Split master weights of a range: see SplitWeights in hytrain/adam.h.
struct SplitRange {
    char* copy;
    char* remainder;
};

// Moments of a range whose element indices differ in their lower 32 bits only.
struct MomentRange {
    MomentKind kind;
    char* m;
    char* v;
    std::uint8_t* m_exponents;
    std::uint8_t* v_exponents;
    std::uint32_t first_index;  // lower half
    std::uint32_t key;          // of the random bits that round what is stored
};

struct KernelTable {
    const char* name;
    void (*commit)(float* p, const MomentRange& moments, std::size_t n,
                   const GradientRange& gradient, const OutRange& out,
                   std::size_t prefetch_elements);
    void (*commit_split)(const SplitRange& weights, const MomentRange& moments, std::size_t n,
                         const GradientRange& gradient, std::size_t prefetch_elements);
    void (*preview)(const float* p, const MomentRange& moments, std::size_t n,
                    const GradientRange& gradient, const OutRange& out,
                    std::size_t prefetch_elements);
    void (*commit_then_preview)(float* p, const MomentRange& moments, std::size_t n,
                                const GradientRange& previous, const GradientRange& current,
                                const OutRange& out, std::size_t prefetch_elements);
    void (*publish)(const float* p, std::size_t n, const OutRange& out,
                    std::size_t prefetch_elements);
    double (*sum_of_squares)(const void* data, DType dtype, std::size_t n);
    void (*read_write)(float* p, const MomentRange& moments, std::size_t n,
                       std::size_t prefetch_elements);
};

extern const KernelTable kScalarKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kNeonKernels;

// The table in use; chosen at first use (dispatch.cpp).
const KernelTable& active_kernels();

}  // namespace hytrain
