// CRC-32 by carry-less multiplication: 16 bytes are folded into those that follow them, which
// leaves the remainder as it was. Compiled for CPUs that have PCLMULQDQ; chosen in crc32.cpp.
#include <immintrin.h>

#include "crc32_steps.h"

namespace hytrain {
namespace {

constexpr std::size_t kBytes = sizeof(__m128i);
constexpr std::size_t kLanes = 4;  // multiplications take a few cycles each, and overlap

// x^n modulo the polynomial, reflected; one place to the left, as the product of two reflected
// factors has its bits one place to the right.
constexpr std::int64_t power(int n) {
    std::uint32_t rest = 1;
    for (int i = 0; i < n; ++i) {
        rest = (rest << 1) ^ ((rest >> 31) != 0 ? kPolynomial : 0);
    }
    std::int64_t reflected = 0;
    for (int bit = 0; bit < 32; ++bit) {
        if ((rest >> bit & 1) != 0) reflected |= std::int64_t{1} << (31 - bit);
    }
    return reflected << 1;
}

// The factors that move 16 bytes by a number of bits: the first 8 bytes, which are the higher
// powers, move 64 bits further than the others. 32 is subtracted because a factor of 32 bits stands
// at the upper end of its 64.
template <int kBits>
__m128i factors() {
    constexpr std::int64_t first = power(kBits + 32), second = power(kBits - 32);
    return _mm_set_epi64x(second, first);
}

__m128i load(const unsigned char* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

__m128i fold(__m128i value, __m128i by, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(value, by, 0x00);
    const __m128i high = _mm_clmulepi64_si128(value, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

}  // namespace

std::uint32_t remainder_by_folding(std::uint32_t rest, const unsigned char* at, std::size_t bytes) {
    const __m128i all = factors<8 * kLanes * kBytes>(), one = factors<8 * kBytes>();
    __m128i lanes[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = load(at + i * kBytes);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(rest)));
    at += kLanes * kBytes;
    bytes -= kLanes * kBytes;
    for (; bytes >= kLanes * kBytes; at += kLanes * kBytes, bytes -= kLanes * kBytes) {
        for (std::size_t i = 0; i < kLanes; ++i)
            lanes[i] = fold(lanes[i], all, load(at + i * kBytes));
    }
    __m128i left = lanes[0];
    for (std::size_t i = 1; i < kLanes; ++i) left = fold(left, one, lanes[i]);
    for (; bytes >= kBytes; at += kBytes, bytes -= kBytes) left = fold(left, one, load(at));
    // 16 bytes are left, with the same remainder as all bytes that were folded into them.
    alignas(kBytes) unsigned char last[kBytes];
    _mm_store_si128(reinterpret_cast<__m128i*>(last), left);
    return remainder_by_tables(remainder_by_tables(0, last, kBytes), at, bytes);
}

}  // namespace hytrain
