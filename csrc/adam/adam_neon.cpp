// NEON (Advanced SIMD): four floats a register. Every 64-bit Arm CPU has it, so no flag is needed.
#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "kernel_table.h"

namespace hytrain {
namespace {

struct Vec {
    using Reg = float32x4_t;
    using Bits = uint32x4_t;
    using DoubleReg = float64x2_t;
    static constexpr const char* kName = "neon";
    static constexpr std::size_t kLanes = 4;
    static constexpr std::size_t kDoubleRegs = 2;
    // Arm cores detect a run of stores and stop reading the lines that it overwrites; the
    // non-temporal pair STNP is only a hint, which they may ignore.
    static constexpr bool kCanStream = false;

    static Reg set(float value) { return vdupq_n_f32(value); }
    static Reg sub(Reg a, Reg b) { return vsubq_f32(a, b); }
    static Reg mul(Reg a, Reg b) { return vmulq_f32(a, b); }
    static Reg div(Reg a, Reg b) { return vdivq_f32(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
    static Reg sqrt(Reg a) { return vsqrtq_f32(a); }

    static Reg load_f32(const void* address) {
        return vld1q_f32(static_cast<const float*>(address));
    }
    static Reg load_bf16(const void* address) {
        return from_bits(vshll_n_u16(load_64(address), 16));
    }
    static Reg load_f16(const void* address) {
        return vcvt_f32_f16(vreinterpret_f16_u16(load_64(address)));
    }

    template <bool kStream>
    static void store_f32(void* address, Reg value) {
        vst1q_f32(static_cast<float*>(address), value);
    }
    template <bool kStream, std::size_t kCount>
    static void store_bf16(void* address, const Reg* values) {
        auto* to = static_cast<std::uint16_t*>(address);
        for (std::size_t j = 0; j < kCount; ++j) {
            vst1_u16(to + j * kLanes, to_bf16(values[j]));
        }
    }
    template <bool kStream>
    static void store_f16(void* address, Reg value) {
        vst1_u16(static_cast<std::uint16_t*>(address), vreinterpret_u16_f16(vcvt_f16_f32(value)));
    }
    static void fence() {}

    static Bits bits_of(Reg a) { return vreinterpretq_u32_f32(a); }
    static Reg from_bits(Bits a) { return vreinterpretq_f32_u32(a); }
    static Bits set_bits(std::uint32_t a) { return vdupq_n_u32(a); }
    static Bits bits_add(Bits a, Bits b) { return vaddq_u32(a, b); }
    static Bits bits_mul(Bits a, Bits b) { return vmulq_u32(a, b); }
    static Bits bits_xor(Bits a, Bits b) { return veorq_u32(a, b); }
    static Bits bits_and(Bits a, Bits b) { return vandq_u32(a, b); }
    static Bits bits_max(Bits a, Bits b) { return vmaxq_u32(a, b); }
    // Bits of a where the mask has ones, else of b.
    static Bits pick(Bits mask, Bits a, Bits b) { return vbslq_u32(mask, a, b); }
    // Bits of b with those of a where the mask has ones; b must have zeros there.
    static Bits put(Bits mask, Bits a, Bits b) { return vbslq_u32(mask, a, b); }
    template <int kCount>
    static Bits shift_left(Bits a) {
        return vshlq_n_u32(a, kCount);
    }
    template <int kCount>
    static Bits shift_right(Bits a) {
        return vshrq_n_u32(a, kCount);
    }
    static std::uint32_t largest_lane(Bits a) { return vmaxvq_u32(a); }
    // The larger of a and b where x is not zero, else a.
    static Bits max_where_not_zero(Reg x, Bits a, Bits b) {
        const Bits bits = bits_of(x);
        return vmaxq_u32(a, vandq_u32(vtstq_u32(bits, bits), b));
    }
    // The rounding of adam_scalar.cpp on all halves at once; a carry is found by a comparison.
    static Bits rounded_halves(Bits a, Bits b, Bits random) {
        const uint16x8_t upper = vtrn2q_u16(words_of(a), words_of(b));
        const uint16x8_t lower = vtrn1q_u16(words_of(a), words_of(b));
        const uint16x8_t carry = vcltq_u16(vaddq_u16(lower, words_of(random)), lower);
        // Finite values stay finite; others are left as they are.
        const uint16x8_t magnitude = vandq_u16(upper, vdupq_n_u16(0x7FFF));
        const uint16x8_t finite = vcltq_u16(magnitude, vdupq_n_u16(0x7F7F));
        return vreinterpretq_u32_u16(vsubq_u16(upper, vandq_u16(carry, finite)));
    }
    // Bits of a where x is a NaN, else of b.
    static Bits where_nan(Reg x, Bits a, Bits b) { return vbslq_u32(vceqq_f32(x, x), b, a); }
    static bool has_nan(Reg a, Reg b) {
        return vminvq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))) == 0;
    }
    // A register of which the lower halves are at one address, the upper ones at the other.
    static Bits load_halves(const void* low, const void* high) {
        return vorrq_u32(vshll_n_u16(load_64(high), 16), vmovl_u16(load_64(low)));
    }
    static void store_halves(void* low, void* high, Bits a) {
        vst1_u16(static_cast<std::uint16_t*>(low), vmovn_u32(a));
        vst1_u16(static_cast<std::uint16_t*>(high), vshrn_n_u32(a, 16));
    }
    // The lower halves of two registers to one address, the upper ones to the other.
    static void store_halves(void* low, void* high, Bits first, Bits second) {
        const uint16x8_t a = words_of(first);
        const uint16x8_t b = words_of(second);
        vst1q_u16(static_cast<std::uint16_t*>(low), vuzp1q_u16(a, b));
        vst1q_u16(static_cast<std::uint16_t*>(high), vuzp2q_u16(a, b));
    }

    static DoubleReg zero_double() { return vdupq_n_f64(0.0); }
    static void add_squares(Reg x, DoubleReg* sums) {
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(x));
        const float64x2_t high = vcvt_high_f64_f32(x);
        sums[0] = vfmaq_f64(sums[0], low, low);
        sums[1] = vfmaq_f64(sums[1], high, high);
    }

   private:
    static uint16x4_t load_64(const void* address) {
        return vld1_u16(static_cast<const std::uint16_t*>(address));
    }
    static uint16x8_t words_of(Bits a) { return vreinterpretq_u16_u32(a); }
    // Round to nearest even on the bits, a NaN kept and made quiet.
    static uint16x4_t to_bf16(Reg value) {
        const Bits bits = bits_of(value);
        const Bits odd = vandq_u32(vshrq_n_u32(bits, 16), set_bits(1));
        const Bits even = vaddq_u32(vaddq_u32(bits, set_bits(0x7FFF)), odd);
        const Bits quiet = vorrq_u32(bits, set_bits(0x00400000));
        return vshrn_n_u32(where_nan(value, quiet, even), 16);
    }
};

#include "adam_kernel.inl"

}  // namespace

const KernelTable kNeonKernels = kTable;

}  // namespace hytrain
