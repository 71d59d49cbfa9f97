// Copies and first touches by several threads: one alone does not reach the memory's bandwidth, nor
// the rate at which the kernel can provide pages.
#pragma once

#include <cstddef>

namespace hytrain {

void parallel_copy(void* destination, const void* source, std::size_t bytes, int num_threads);

// Backs memory that has only been mapped: writes a zero to each of its pages.
void parallel_touch(void* memory, std::size_t bytes, int num_threads);

}  // namespace hytrain
