// Portable C++: one float a "register". std::fma makes it agree bitwise with the vector files.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernel_table.h"

namespace hytrain {
namespace {

template <class Bits>
Bits load_bits(const void* address) {
    Bits bits;
    std::memcpy(&bits, address, sizeof(bits));
    return bits;
}

template <class Bits>
void store_bits(void* address, Bits bits) {
    std::memcpy(address, &bits, sizeof(bits));
}

float as_float(std::uint32_t bits) { return load_bits<float>(&bits); }
std::uint32_t as_bits(float value) { return load_bits<std::uint32_t>(&value); }

// Round to nearest even, a NaN kept and made quiet.
std::uint16_t to_bf16(float value) {
    const std::uint32_t bits = as_bits(value);
    if (std::isnan(value)) {
        return static_cast<std::uint16_t>((bits >> 16) | 0x0040U);
    }
    return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

float from_f16(std::uint16_t half) {
    const std::uint32_t sign = (half & 0x8000U) << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1FU;
    const std::uint32_t mantissa = half & 0x03FFU;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in fp32
        return as_float(sign | as_bits(static_cast<float>(mantissa) * 0x1p-24F));
    }
    if (exponent == 31) {
        const std::uint32_t quiet = mantissa != 0 ? 0x00400000U : 0U;
        return as_float(sign | 0x7F800000U | quiet | (mantissa << 13));
    }
    return as_float(sign | ((exponent + 112U) << 23) | (mantissa << 13));
}

std::uint16_t to_f16(float value) {
    const std::uint32_t bits = as_bits(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U) {
        return static_cast<std::uint16_t>(sign | 0x7E00U | ((magnitude >> 13) & 0x03FFU));
    }
    if (magnitude >= 0x477FF000U) {  // 65520 and more round to infinity
        return static_cast<std::uint16_t>(sign | 0x7C00U);
    }
    if (magnitude < 0x38800000U) {
        // Below 2^-14 the spacing of fp16 is 2^-24, that of fp32 around 0.5; let the addition
        // round.
        const std::uint32_t rounded = as_bits(as_float(magnitude) + 0.5F) - as_bits(0.5F);
        return static_cast<std::uint16_t>(sign | rounded);
    }
    const std::uint32_t odd = (magnitude >> 13) & 1U;
    const std::uint32_t rounded = (magnitude - (112U << 23) + 0x0FFFU + odd) >> 13;
    return static_cast<std::uint16_t>(sign | rounded);
}

struct Vec {
    using Reg = float;
    using Bits = std::uint32_t;
    using DoubleReg = double;
    static constexpr const char* kName = "scalar";
    static constexpr std::size_t kLanes = 1;
    static constexpr std::size_t kDoubleRegs = 1;
    static constexpr bool kCanStream = false;

    static Reg set(float value) { return value; }
    static Reg sub(Reg a, Reg b) { return a - b; }
    static Reg mul(Reg a, Reg b) { return a * b; }
    static Reg div(Reg a, Reg b) { return a / b; }
    static Reg fma(Reg a, Reg b, Reg c) { return std::fma(a, b, c); }
    static Reg sqrt(Reg a) { return std::sqrt(a); }

    static Reg load_f32(const void* address) { return load_bits<float>(address); }
    static Reg load_bf16(const void* address) {
        return as_float(static_cast<std::uint32_t>(load_bits<std::uint16_t>(address)) << 16);
    }
    static Reg load_f16(const void* address) { return from_f16(load_bits<std::uint16_t>(address)); }

    template <bool kStream>
    static void store_f32(void* address, Reg value) {
        store_bits(address, value);
    }
    template <bool kStream, std::size_t kCount>
    static void store_bf16(void* address, const Reg* values) {
        for (std::size_t j = 0; j < kCount; ++j) {
            store_bits(static_cast<std::uint16_t*>(address) + j, to_bf16(values[j]));
        }
    }
    template <bool kStream>
    static void store_f16(void* address, Reg value) {
        store_bits(address, to_f16(value));
    }
    static void fence() {}

    static Bits bits_of(Reg a) { return as_bits(a); }
    static Reg from_bits(Bits a) { return as_float(a); }
    static Bits set_bits(std::uint32_t a) { return a; }
    static Bits bits_add(Bits a, Bits b) { return a + b; }
    static Bits bits_mul(Bits a, Bits b) { return a * b; }
    static Bits bits_xor(Bits a, Bits b) { return a ^ b; }
    static Bits bits_and(Bits a, Bits b) { return a & b; }
    static Bits bits_min(Bits a, Bits b) { return a < b ? a : b; }
    static Bits bits_max(Bits a, Bits b) { return a > b ? a : b; }
    // Bits of a where the mask has ones, else of b.
    static Bits pick(Bits mask, Bits a, Bits b) { return (mask & a) | (~mask & b); }
    // Bits of b with those of a where the mask has ones; b must have zeros there.
    static Bits put(Bits mask, Bits a, Bits b) { return (mask & a) | b; }
    template <int kCount>
    static Bits shift_left(Bits a) {
        return a << kCount;
    }
    template <int kCount>
    static Bits shift_right(Bits a) {
        return a >> kCount;
    }
    static std::uint32_t largest_lane(Bits a) { return a; }
    static Bits max_where_not_zero(Reg x, Bits a, Bits b) {
        return as_bits(x) != 0U && b > a ? b : a;
    }
    // bf16 of a in the lower half and of b in the upper half, rounded stochastically: each is
    // rounded away from zero with the probability that its lower 16 bits give, by the random bits
    // of its half. Finite values stay below infinity; others are left as they are: a NaN that an
    // operation produced is quiet, so its upper half is a NaN too.
    static Bits rounded_halves(Bits a, Bits b, Bits random) {
        return (rounded(a, random & 0xFFFFU) >> 16) | (rounded(b, random >> 16) & 0xFFFF0000U);
    }
    static bool has_nan(Reg a, Reg b) { return std::isnan(a) || std::isnan(b); }
    static Bits load_halves(const void* low, const void* high) {
        const std::uint32_t upper = load_bits<std::uint16_t>(high);
        return upper << 16 | load_bits<std::uint16_t>(low);
    }
    static void store_halves(void* low, void* high, Bits a) {
        store_bits(low, static_cast<std::uint16_t>(a));
        store_bits(high, static_cast<std::uint16_t>(a >> 16));
    }
    // Bits of a where x is a NaN, else of b.
    static Bits where_nan(Reg x, Bits a, Bits b) { return std::isnan(x) ? a : b; }
    static void store_halves(void* low, void* high, Bits first, Bits second) {
        store_bits(low, (first & 0xFFFFU) | (second << 16));
        store_bits(high, (first >> 16) | (second & 0xFFFF0000U));
    }

   private:
    static Bits rounded(Bits a, Bits random) {
        const Bits magnitude = a & 0x7FFFFFFFU;
        const Bits up = bits_max(bits_min(magnitude + random, 0x7F7FFFFFU), magnitude);
        return (a & 0x80000000U) | up;
    }

   public:
    static DoubleReg zero_double() { return 0.0; }
    static void add_squares(Reg x, DoubleReg* sums) {
        const double wide = static_cast<double>(x);
        sums[0] += wide * wide;
    }
};

#include "adam_kernel.inl"

}  // namespace

const KernelTable kScalarKernels = kTable;

}  // namespace hytrain
