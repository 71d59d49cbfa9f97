// What the two ways to sum share. Remainders are those of division by the polynomial of CRC-32,
// bits reflected as zlib has them, without the inversions at both ends.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hytrain {

constexpr std::uint32_t kPolynomial = 0x04C11DB7;  // without x^32
constexpr std::uint32_t kReflectedPolynomial = 0xEDB88320;
constexpr std::size_t kLeastFolded = 64;

std::uint32_t remainder_by_tables(std::uint32_t rest, const unsigned char* at, std::size_t bytes);

// With carry-less multiplication (x86-64); at least kLeastFolded bytes.
std::uint32_t remainder_by_folding(std::uint32_t rest, const unsigned char* at, std::size_t bytes);

// With the instruction for it (64-bit Arm).
std::uint32_t remainder_by_instruction(std::uint32_t rest, const unsigned char* at,
                                       std::size_t bytes);

}  // namespace hytrain
