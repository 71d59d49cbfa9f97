// A copy by several threads: one alone does not reach the memory's bandwidth.
#pragma once

#include <cstddef>

namespace hytrain {

void parallel_copy(void* destination, const void* source, std::size_t bytes, int num_threads);

}  // namespace hytrain
