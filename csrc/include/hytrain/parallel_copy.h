// Copies and first touches by several threads: one alone does not reach the memory's bandwidth, nor
// the rate at which the kernel can provide pages.
#pragma once

#include <cstddef>

namespace hytrain {

// Threads that so many bytes are worth: starting more would cost more than it wins.
int copy_threads(std::size_t bytes, int num_threads);

void parallel_copy(void* destination, const void* source, std::size_t bytes, int num_threads);

// As parallel_copy, past the cache: for what nobody reads soon.
void parallel_stream(void* destination, const void* source, std::size_t bytes, int num_threads);

// Backs memory that has only been mapped: touches each of its pages. Contents stay, also where
// another thread writes them meanwhile.
void parallel_touch(void* memory, std::size_t bytes, int num_threads);

}  // namespace hytrain
