// AVX2 with FMA and F16C: eight floats a register. Compiled with -mavx2 -mfma -mf16c.
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "kernel_table.h"

namespace hytrain {
namespace {

struct Vec {
    using Reg = __m256;
    using Bits = __m256i;
    using DoubleReg = __m256d;
    static constexpr const char* kName = "avx2";
    static constexpr std::size_t kLanes = 8;
    static constexpr std::size_t kDoubleRegs = 2;
    static constexpr bool kCanStream = true;

    static Reg set(float value) { return _mm256_set1_ps(value); }
    static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static Reg sqrt(Reg a) { return _mm256_sqrt_ps(a); }

    static Reg load_f32(const void* address) {
        return _mm256_loadu_ps(static_cast<const float*>(address));
    }
    static Reg load_bf16(const void* address) {
        const __m256i wide = _mm256_cvtepu16_epi32(load_128(address));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static Reg load_f16(const void* address) { return _mm256_cvtph_ps(load_128(address)); }

    template <bool kStream>
    static void store_f32(void* address, Reg value) {
        if constexpr (kStream) {
            _mm256_stream_ps(static_cast<float*>(address), value);
        } else {
            _mm256_storeu_ps(static_cast<float*>(address), value);
        }
    }
    template <bool kStream, std::size_t kCount>
    static void store_bf16(void* address, const Reg* values) {
        char* to = static_cast<char*>(address);
        for (std::size_t j = 0; j + 1 < kCount; j += 2) {
            store_256<kStream>(to + j * sizeof(__m128i), to_bf16(values[j], values[j + 1]));
        }
        if constexpr (kCount % 2 != 0) {
            store_128<kStream>(to + (kCount - 1) * sizeof(__m128i),
                               pack_halves(to_bf16(values[kCount - 1])));
        }
    }
    template <bool kStream>
    static void store_f16(void* address, Reg value) {
        store_128<kStream>(address, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    static void fence() { _mm_sfence(); }

    static Bits bits_of(Reg a) { return _mm256_castps_si256(a); }
    static Reg from_bits(Bits a) { return _mm256_castsi256_ps(a); }
    static Bits set_bits(std::uint32_t a) { return _mm256_set1_epi32(static_cast<int>(a)); }
    static Bits bits_add(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
    static Bits bits_mul(Bits a, Bits b) { return _mm256_mullo_epi32(a, b); }
    static Bits bits_xor(Bits a, Bits b) { return _mm256_xor_si256(a, b); }
    static Bits bits_and(Bits a, Bits b) { return _mm256_and_si256(a, b); }
    static Bits bits_max(Bits a, Bits b) { return _mm256_max_epu32(a, b); }
    // Bits of a where the mask has ones, else of b.
    static Bits pick(Bits mask, Bits a, Bits b) {
        return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
    }
    // Bits of b with those of a where the mask has ones; b must have zeros there.
    static Bits put(Bits mask, Bits a, Bits b) {
        return _mm256_or_si256(_mm256_and_si256(mask, a), b);
    }
    template <int kCount>
    static Bits shift_left(Bits a) {
        return _mm256_slli_epi32(a, kCount);
    }
    template <int kCount>
    static Bits shift_right(Bits a) {
        return _mm256_srli_epi32(a, kCount);
    }
    static std::uint32_t largest_lane(Bits a) {
        __m128i most = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
        most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
        return static_cast<std::uint32_t>(_mm_cvtsi128_si32(most));
    }
    static Bits max_where_not_zero(Reg x, Bits a, Bits b) {
        const Bits zero = _mm256_cmpeq_epi32(bits_of(x), _mm256_setzero_si256());
        return bits_max(a, _mm256_andnot_si256(zero, b));
    }
    // As adam_scalar.cpp says, on all halves at once, where a carry is a comparison: of signed
    // numbers, so with 0x8000 added.
    static Bits rounded_halves(Bits a, Bits b, Bits random) {
        const Bits upper = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA);
        const Bits lower = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xAA);
        const Bits biased = _mm256_add_epi16(lower, _mm256_set1_epi16(-0x8000));
        const Bits carry = _mm256_cmpgt_epi16(biased, _mm256_add_epi16(biased, random));
        // Finite values stay finite; others are left as they are.
        const Bits magnitude = bits_and(upper, set_bits(0x7FFF7FFFU));
        const Bits finite = _mm256_cmpgt_epi16(_mm256_set1_epi16(0x7F7F), magnitude);
        return _mm256_sub_epi16(upper, bits_and(carry, finite));
    }
    // Bits of a where x is a NaN, else of b.
    static Bits where_nan(Reg x, Bits a, Bits b) {
        return pick(_mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)), a, b);
    }
    static bool has_nan(Reg a, Reg b) {
        return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
    }
    // A register of which the lower halves are at one address, the upper ones at the other.
    static Bits load_halves(const void* low, const void* high) {
        const __m128i lower = load_128(low);
        const __m128i upper = load_128(high);
        return _mm256_set_m128i(_mm_unpackhi_epi16(lower, upper), _mm_unpacklo_epi16(lower, upper));
    }
    static void store_halves(void* low, void* high, Bits a) {
        store_128<false>(low, pack_halves(bits_and(a, set_bits(0xFFFFU))));
        store_128<false>(high, pack_halves(_mm256_srli_epi32(a, 16)));
    }
    static void store_halves(void* low, void* high, Bits first, Bits second) {
        const Bits mask = set_bits(0xFFFFU);
        store_256<false>(low, pack_halves(bits_and(first, mask), bits_and(second, mask)));
        store_256<false>(high,
                         pack_halves(_mm256_srli_epi32(first, 16), _mm256_srli_epi32(second, 16)));
    }

    static DoubleReg zero_double() { return _mm256_setzero_pd(); }
    static void add_squares(Reg x, DoubleReg* sums) {
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
        sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
    }

   private:
    // Lanes of at most 16 bits of two registers, as such.
    static __m256i pack_halves(__m256i a, __m256i b) {
        return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xD8);
    }
    template <bool kStream>
    static void store_256(void* address, __m256i value) {
        if constexpr (kStream) {
            _mm256_stream_si256(static_cast<__m256i*>(address), value);
        } else {
            _mm256_storeu_si256(static_cast<__m256i*>(address), value);
        }
    }
    // Lanes of at most 16 bits, as such.
    static __m128i pack_halves(__m256i a) {
        // packus works within 128-bit halves, so the two wanted quarters are apart.
        const __m256i packed = _mm256_packus_epi32(a, a);
        return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    }
    static __m128i load_128(const void* address) {
        return _mm_loadu_si128(static_cast<const __m128i*>(address));
    }
    template <bool kStream>
    static void store_128(void* address, __m128i value) {
        if constexpr (kStream) {
            _mm_stream_si128(static_cast<__m128i*>(address), value);
        } else {
            _mm_storeu_si128(static_cast<__m128i*>(address), value);
        }
    }
    // Round to nearest even on the bits, into the lower half of a lane: of what is no NaN, and with
    // a NaN kept and made quiet.
    static Bits number_to_bf16(Reg value) {
        const Bits bits = bits_of(value);
        const Bits odd = bits_and(_mm256_srli_epi32(bits, 16), set_bits(1));
        return _mm256_srli_epi32(bits_add(bits_add(bits, set_bits(0x7FFF)), odd), 16);
    }
    static Bits to_bf16(Reg value) {
        const Bits quiet = _mm256_or_si256(_mm256_srli_epi32(bits_of(value), 16), set_bits(0x0040));
        return where_nan(value, quiet, number_to_bf16(value));
    }
    // A NaN is as good as never there, and each number checked for it takes two operations more.
    static __m256i to_bf16(Reg first, Reg second) {
        if (__builtin_expect(has_nan(first, second), 0)) {
            return pack_halves(to_bf16(first), to_bf16(second));
        }
        return pack_halves(number_to_bf16(first), number_to_bf16(second));
    }
};

#include "adam_kernel.inl"

}  // namespace

const KernelTable kAvx2Kernels = kTable;

}  // namespace hytrain
