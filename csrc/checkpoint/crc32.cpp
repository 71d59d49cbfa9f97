// CRC-32 by tables, and the choice of the implementation (hytrain/crc32.h).
#include "hytrain/crc32.h"

#if defined(HYTRAIN_ARM_KERNELS)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "crc32_steps.h"

namespace hytrain {
namespace {

constexpr std::size_t kTables = 8;

struct Tables {
    std::uint32_t of[kTables][256];
};

// of[k][b]: the contribution of byte b to the remainder if k more bytes follow it.
constexpr Tables make_tables() {
    Tables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t rest = byte;
        for (int bit = 0; bit < 8; ++bit) {
            rest = (rest >> 1) ^ ((rest & 1) != 0 ? kReflectedPolynomial : 0);
        }
        tables.of[0][byte] = rest;
    }
    for (std::size_t k = 1; k < kTables; ++k) {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = tables.of[k - 1][byte];
            tables.of[k][byte] = (before >> 8) ^ tables.of[0][before & 0xFF];
        }
    }
    return tables;
}

constexpr Tables kTable = make_tables();

// The product of two polynomials modulo CRC-32's, all reflected: bit 31 is x^0.
constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) {
    std::uint32_t sum = 0;
    for (; a != 0; a <<= 1) {
        if (a >> 31 != 0) sum ^= b;
        b = (b >> 1) ^ ((b & 1) != 0 ? kReflectedPolynomial : 0);
    }
    return sum;
}

constexpr int kSquares = 32;

struct Squares {
    std::uint32_t of[kSquares];
};

// of[k]: x^(2^k). Higher powers repeat these, because x^(2^32 - 1) is 1.
constexpr Squares make_squares() {
    Squares squares{};
    squares.of[0] = std::uint32_t{1} << 30;
    for (int k = 1; k < kSquares; ++k) {
        squares.of[k] = product(squares.of[k - 1], squares.of[k - 1]);
    }
    return squares;
}

constexpr Squares kSquare = make_squares();

std::uint32_t little_endian(const unsigned char* at) {
    return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8 |
           static_cast<std::uint32_t>(at[2]) << 16 | static_cast<std::uint32_t>(at[3]) << 24;
}

}  // namespace

std::uint32_t remainder_by_tables(std::uint32_t rest, const unsigned char* at, std::size_t bytes) {
    for (; bytes >= kTables; at += kTables, bytes -= kTables) {
        const std::uint32_t low = rest ^ little_endian(at), high = little_endian(at + 4);
        rest = kTable.of[7][low & 0xFF] ^ kTable.of[6][low >> 8 & 0xFF] ^
               kTable.of[5][low >> 16 & 0xFF] ^ kTable.of[4][low >> 24] ^
               kTable.of[3][high & 0xFF] ^ kTable.of[2][high >> 8 & 0xFF] ^
               kTable.of[1][high >> 16 & 0xFF] ^ kTable.of[0][high >> 24];
    }
    for (; bytes != 0; ++at, --bytes) {
        rest = (rest >> 8) ^ kTable.of[0][(rest ^ *at) & 0xFF];
    }
    return rest;
}

// The inversions at both ends of each sum cancel.
std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::size_t second_bytes) {
    for (int k = 3; second_bytes != 0; ++k, second_bytes >>= 1) {  // 8 bits a byte
        if ((second_bytes & 1) != 0) first = product(kSquare.of[k % kSquares], first);
    }
    return first ^ second;
}

std::uint32_t crc32_portable(std::uint32_t sum, const void* data, std::size_t bytes) {
    return ~remainder_by_tables(~sum, static_cast<const unsigned char*>(data), bytes);
}

std::uint32_t crc32(std::uint32_t sum, const void* data, std::size_t bytes) {
#if defined(HYTRAIN_X86_KERNELS)
    static const bool can_multiply =
        __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
    if (can_multiply && bytes >= kLeastFolded) {
        return ~remainder_by_folding(~sum, static_cast<const unsigned char*>(data), bytes);
    }
#elif defined(HYTRAIN_ARM_KERNELS)
    static const bool has_instruction = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
    if (has_instruction) {
        return ~remainder_by_instruction(~sum, static_cast<const unsigned char*>(data), bytes);
    }
#endif
    return crc32_portable(sum, data, bytes);
}

}  // namespace hytrain
