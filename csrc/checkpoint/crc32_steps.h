// Declarations shared by the implementations of CRC-32. Remainders are those of division by its
// polynomial, bits reflected as in zlib, without the inversions at both ends.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hytrain {

constexpr std::uint32_t kPolynomial = 0x04C11DB7;  // without x^32
constexpr std::uint32_t kReflectedPolynomial = 0xEDB88320;
constexpr std::size_t kLeastFolded = 64;

std::uint32_t remainder_by_tables(std::uint32_t rest, const unsigned char* at, std::size_t bytes);

// By carry-less multiplication (x86-64); for at least kLeastFolded bytes.
std::uint32_t remainder_by_folding(std::uint32_t rest, const unsigned char* at, std::size_t bytes);

// By the CRC-32 instruction (64-bit Arm).
std::uint32_t remainder_by_instruction(std::uint32_t rest, const unsigned char* at,
                                       std::size_t bytes);

}  // namespace hytrain
