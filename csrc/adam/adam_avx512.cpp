// AVX-512 (F, BW, VL, DQ): sixteen floats a register. Compiled with the matching -m flags.
// The bf16 extension is not used: not every AVX-512 CPU has it, and it flushes subnormals.
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "kernel_table.h"

namespace hytrain {
namespace {

struct Vec {
    using Reg = __m512;
    using Bits = __m512i;
    using DoubleReg = __m512d;
    static constexpr const char* kName = "avx512";
    static constexpr std::size_t kLanes = 16;
    static constexpr std::size_t kDoubleRegs = 2;
    static constexpr bool kCanStream = true;

    static Reg set(float value) { return _mm512_set1_ps(value); }
    static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static Reg sqrt(Reg a) { return _mm512_sqrt_ps(a); }

    static Reg load_f32(const void* address) { return _mm512_loadu_ps(address); }
    static Reg load_bf16(const void* address) {
        // Each 16 bits to the upper half of a lane: one shuffle does what widening and a shift do.
        const __m512i words = _mm512_castsi256_si512(load_256(address));
        const __m512i index = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0,
                                               7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
        return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAU, index, words));
    }
    static Reg load_f16(const void* address) { return _mm512_cvtph_ps(load_256(address)); }

    template <bool kStream>
    static void store_f32(void* address, Reg value) {
        if constexpr (kStream) {
            _mm512_stream_ps(static_cast<float*>(address), value);
        } else {
            _mm512_storeu_ps(address, value);
        }
    }
    // NaNs almost never occur, and checking each number for one takes two more operations.
    template <bool kStream, std::size_t kCount>
    static void store_bf16(void* address, const Reg* values) {
        char* to = static_cast<char*>(address);
        bool any_nan = false;
        for (std::size_t j = 0; j < kCount; j += 2) {
            any_nan |= has_nan(values[j], values[j + 1 < kCount ? j + 1 : j]);
        }
        if (__builtin_expect(any_nan, 0)) {
            for (std::size_t j = 0; j < kCount; ++j) {
                store_256<kStream>(to + j * sizeof(__m256i), to_bf16(values[j]));
            }
        } else {
            for (std::size_t j = 0; j < kCount; ++j) {
                store_256<kStream>(to + j * sizeof(__m256i), number_to_bf16(values[j]));
            }
        }
    }
    template <bool kStream>
    static void store_f16(void* address, Reg value) {
        store_256<kStream>(address, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    static void fence() { _mm_sfence(); }

    static Bits bits_of(Reg a) { return _mm512_castps_si512(a); }
    static Reg from_bits(Bits a) { return _mm512_castsi512_ps(a); }
    static Bits set_bits(std::uint32_t a) { return _mm512_set1_epi32(static_cast<int>(a)); }
    static Bits bits_add(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
    static Bits bits_mul(Bits a, Bits b) { return _mm512_mullo_epi32(a, b); }
    static Bits bits_xor(Bits a, Bits b) { return _mm512_xor_si512(a, b); }
    static Bits bits_and(Bits a, Bits b) { return _mm512_and_si512(a, b); }
    static Bits bits_max(Bits a, Bits b) { return _mm512_max_epu32(a, b); }
    // Bits of a where the mask has ones, else of b.
    static Bits pick(Bits mask, Bits a, Bits b) {
        return _mm512_ternarylogic_epi32(a, b, mask, 0xE4);
    }
    // Bits of b with those of a where the mask has ones; b must have zeros there.
    static Bits put(Bits mask, Bits a, Bits b) {
        return _mm512_ternarylogic_epi32(a, b, mask, 0xEC);
    }
    template <int kCount>
    static Bits shift_left(Bits a) {
        return _mm512_slli_epi32(a, kCount);
    }
    template <int kCount>
    static Bits shift_right(Bits a) {
        return _mm512_srli_epi32(a, kCount);
    }
    static std::uint32_t largest_lane(Bits a) { return _mm512_reduce_max_epu32(a); }
    // The larger of a and b where x is not zero, else a.
    static Bits max_where_not_zero(Reg x, Bits a, Bits b) {
        const Bits bits = bits_of(x);
        return _mm512_mask_max_epu32(a, _mm512_test_epi32_mask(bits, bits), a, b);
    }
    // bf16 of a in the lower and of b in the upper halves, rounded as adam_scalar.cpp says: on
    // all halves at once, where a carry is a comparison.
    static Bits rounded_halves(Bits a, Bits b, Bits random) {
        const Bits upper = _mm512_mask_blend_epi16(kOddWords, _mm512_srli_epi32(a, 16), b);
        const Bits lower = _mm512_mask_blend_epi16(kOddWords, a, _mm512_slli_epi32(b, 16));
        // Finite values stay finite; others are left as they are.
        const Bits magnitude = _mm512_add_epi16(upper, upper);
        const __mmask32 finite =
            _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(static_cast<short>(0xFEFE)));
        const Bits sum = _mm512_add_epi16(lower, random);
        const __mmask32 carry = _mm512_mask_cmplt_epu16_mask(finite, sum, lower);
        return _mm512_mask_sub_epi16(upper, carry, upper, _mm512_set1_epi16(-1));
    }
    // Bits of a where x is a NaN, else of b.
    static Bits where_nan(Reg x, Bits a, Bits b) {
        return _mm512_mask_mov_epi32(b, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), a);
    }
    static bool has_nan(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }
    // A register of which the lower halves are at one address, the upper ones at the other.
    static Bits load_halves(const void* low, const void* high) {
        const __m512i index =
            _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                             38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        return _mm512_permutex2var_epi16(_mm512_castsi256_si512(load_256(low)), index,
                                         _mm512_castsi256_si512(load_256(high)));
    }
    static void store_halves(void* low, void* high, Bits a) {
        store_256<false>(low, _mm512_cvtepi32_epi16(a));
        store_256<false>(high, upper_words(a));
    }
    // The lower halves of two registers to one address, the upper ones to the other.
    static void store_halves(void* low, void* high, Bits first, Bits second) {
        _mm512_storeu_si512(low, _mm512_permutex2var_epi16(first, even_words(), second));
        _mm512_storeu_si512(high, _mm512_permutex2var_epi16(first, odd_words(), second));
    }

    static DoubleReg zero_double() { return _mm512_setzero_pd(); }
    static void add_squares(Reg x, DoubleReg* sums) {
        const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
        const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        sums[0] = _mm512_fmadd_pd(low, low, sums[0]);
        sums[1] = _mm512_fmadd_pd(high, high, sums[1]);
    }

   private:
    static constexpr __mmask32 kOddWords = 0xAAAAAAAAU;
    // The even 16-bit words of one register, then those of another.
    static __m512i even_words() {
        return _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30,
                                28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    }
    // The odd 16-bit words of one register, then those of another.
    static __m512i odd_words() {
        return _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    }
    static __m256i load_256(const void* address) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(address));
    }
    template <bool kStream>
    static void store_256(void* address, __m256i value) {
        if constexpr (kStream) {
            _mm256_stream_si256(static_cast<__m256i*>(address), value);
        } else {
            _mm256_storeu_si256(static_cast<__m256i*>(address), value);
        }
    }
    // Round to nearest even on the bits: of what is no NaN, and with a NaN kept and made quiet.
    static Bits nearest_even(Bits bits) {
        const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x00010000));
        const Bits sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
        return _mm512_mask_sub_epi32(sum, odd, sum, _mm512_set1_epi32(-1));
    }
    static __m256i upper_words(Bits a) {
        return _mm512_castsi512_si256(_mm512_permutexvar_epi16(odd_words(), a));
    }
    static __m256i number_to_bf16(Reg value) { return upper_words(nearest_even(bits_of(value))); }
    static __m256i to_bf16(Reg value) {
        const Bits bits = bits_of(value);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        return upper_words(
            _mm512_mask_or_epi32(nearest_even(bits), is_nan, bits, _mm512_set1_epi32(0x00400000)));
    }
};

#include "adam_kernel.inl"

}  // namespace

const KernelTable kAvx512Kernels = kTable;

}  // namespace hytrain
