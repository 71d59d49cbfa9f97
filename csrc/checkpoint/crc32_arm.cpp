// CRC-32 by Arm's instruction for it: eight bytes at a time. Compiled for CPUs that have it; chosen
// in crc32.cpp.
#include <arm_acle.h>

#include <cstring>

#include "crc32_steps.h"

namespace hytrain {

std::uint32_t remainder_by_instruction(std::uint32_t rest, const unsigned char* at,
                                       std::size_t bytes) {
    for (; bytes >= sizeof(std::uint64_t); at += sizeof(std::uint64_t)) {
        std::uint64_t word = 0;
        std::memcpy(&word, at, sizeof(word));
        rest = __crc32d(rest, word);
        bytes -= sizeof(word);
    }
    for (; bytes != 0; ++at, --bytes) rest = __crc32b(rest, *at);
    return rest;
}

}  // namespace hytrain
