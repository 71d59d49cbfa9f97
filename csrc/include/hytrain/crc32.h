// CRC-32 as in zlib, many times faster on CPUs with carry-less multiplication.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hytrain {

// Continues a checksum: `sum` is that of the bytes before (0: there are none).
std::uint32_t crc32(std::uint32_t sum, const void* data, std::size_t bytes);

// The same by tables, for any CPU.
std::uint32_t crc32_portable(std::uint32_t sum, const void* data, std::size_t bytes);

// The checksum of two runs of bytes, one after the other, from the checksums of both.
std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::size_t second_bytes);

}  // namespace hytrain
