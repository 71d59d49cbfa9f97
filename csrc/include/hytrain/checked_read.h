// Reads a file of which each block has a sum: by several threads, without the GIL. What is checked
// is the reader's own copy, so that no later change of the file reaches it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hytrain {

// Bytes of a file and the sums of the blocks that they are in.
struct CheckedRange {
    std::uint64_t file_bytes;         // of the whole file, when it was written
    std::uint64_t begin, end;         // of what is read, within the file
    std::vector<std::uint32_t> sums;  // of each block of SummedFile::kBlockBytes from begin's on
};

// Fills `target` with the range's bytes; null: they are checked only.
//
// Returns the blocks, by their place in the file, that are not what was written; of these `target`
// has some bytes as well. Throws std::system_error where the file cannot be read,
// std::invalid_argument where the sums are not those of the range.
std::vector<std::size_t> read_checked(int descriptor, const CheckedRange& range, char* target,
                                      int threads);

}  // namespace hytrain
