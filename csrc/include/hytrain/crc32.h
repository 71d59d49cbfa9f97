// CRC-32 as zlib's, many times as fast where the CPU multiplies without carries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hytrain {

// The sum of bytes that follow those whose sum is `sum` (0: there are none).
std::uint32_t crc32(std::uint32_t sum, const void* data, std::size_t bytes);

// The same by tables, which any CPU can.
std::uint32_t crc32_portable(std::uint32_t sum, const void* data, std::size_t bytes);

// The sum of two runs of bytes, one behind the other, from the sum of each.
std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::size_t second_bytes);

}  // namespace hytrain
