// Copies and first touches by several threads: one thread alone reaches neither the memory's
// bandwidth nor the rate at which the kernel can provide pages.
#pragma once

#include <cstddef>

namespace hytrain {

// Number of threads worth using for `bytes`: starting more would cost more than it gains.
int copy_threads(std::size_t bytes, int num_threads);

void parallel_copy(void* destination, const void* source, std::size_t bytes, int num_threads);

// parallel_copy with non-temporal stores: for memory that is not read soon.
void parallel_stream(void* destination, const void* source, std::size_t bytes, int num_threads);

// Touches every page of memory that has only been mapped, so that it is backed. Contents are kept,
// even if another thread writes them at the same time.
void parallel_touch(void* memory, std::size_t bytes, int num_threads);

}  // namespace hytrain
