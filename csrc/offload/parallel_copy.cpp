#include "hytrain/parallel_copy.h"

#include <algorithm>
#include <cstring>

namespace hytrain {

void parallel_copy(void* destination, const void* source, std::size_t bytes, int num_threads) {
    // Whole cache lines a thread, and nothing so small that starting threads costs more.
    constexpr std::size_t kLine = 64;
    constexpr std::size_t kLeast = 1U << 18U;
    const std::size_t most = std::max<std::size_t>(1, bytes / kLeast);
    const int threads = static_cast<int>(
        std::min<std::size_t>(most, static_cast<std::size_t>(std::max(1, num_threads))));
    const std::size_t share = (bytes / static_cast<std::size_t>(threads) / kLine + 1) * kLine;
    // The team's barrier at the end is needed: callers pass the destination on at once.
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int i = 0; i < threads; ++i) {
        const std::size_t begin = std::min(bytes, static_cast<std::size_t>(i) * share);
        const std::size_t end = std::min(bytes, begin + share);
        std::memcpy(static_cast<char*>(destination) + begin,
                    static_cast<const char*>(source) + begin, end - begin);
    }
}

void parallel_touch(void* memory, std::size_t bytes, int num_threads) {
    constexpr std::size_t kPage = 4096;
    const auto pages = static_cast<std::ptrdiff_t>((bytes + kPage - 1) / kPage);
    auto* first = static_cast<volatile char*>(memory);
    // In runs of 2 MiB, so that no huge page is faulted by two threads.
#pragma omp parallel for num_threads(std::max(1, num_threads)) schedule(static, 512)
    for (std::ptrdiff_t page = 0; page < pages; ++page) {
        first[static_cast<std::size_t>(page) * kPage] = 0;
    }
}

}  // namespace hytrain
