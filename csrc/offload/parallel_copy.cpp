#include "hytrain/parallel_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace hytrain {

namespace {

// Non-temporal stores save the memory one transfer: no line is read only to be overwritten.
void stream_copy(char* to, const char* from, std::size_t bytes) {
#ifdef __SSE2__
    constexpr std::size_t kWord = sizeof(__m128i), kLine = 4 * kWord;
    const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(to) % kLine);
    std::memcpy(to, from, head);
    std::size_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
        for (std::size_t word = at; word < at + kLine; word += kWord) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + word),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + word)));
        }
    }
    std::memcpy(to + at, from + at, bytes - at);
    // Without the fence other threads could see later stores before these.
    _mm_sfence();
#else
    std::memcpy(to, from, bytes);
#endif
}

template <typename Copy>
void in_parallel(void* destination, const void* source, std::size_t bytes, int num_threads,
                 Copy copy) {
    // Each thread gets whole cache lines.
    constexpr std::size_t kLine = 64;
    const int threads = copy_threads(bytes, num_threads);
    const std::size_t share = (bytes / static_cast<std::size_t>(threads) / kLine + 1) * kLine;
    // The team's barrier at the end is needed: callers pass the destination on at once.
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int i = 0; i < threads; ++i) {
        const std::size_t begin = std::min(bytes, static_cast<std::size_t>(i) * share);
        const std::size_t end = std::min(bytes, begin + share);
        copy(static_cast<char*>(destination) + begin, static_cast<const char*>(source) + begin,
             end - begin);
    }
}

}  // namespace

int copy_threads(std::size_t bytes, int num_threads) {
    constexpr std::size_t kLeast = 1U << 18U;
    const std::size_t most = std::max<std::size_t>(1, bytes / kLeast);
    return static_cast<int>(std::min(most, static_cast<std::size_t>(std::max(1, num_threads))));
}

void parallel_copy(void* destination, const void* source, std::size_t bytes, int num_threads) {
    in_parallel(destination, source, bytes, num_threads,
                [](char* to, const char* from, std::size_t n) { std::memcpy(to, from, n); });
}

void parallel_stream(void* destination, const void* source, std::size_t bytes, int num_threads) {
    in_parallel(destination, source, bytes, num_threads, stream_copy);
}

void parallel_touch(void* memory, std::size_t bytes, int num_threads) {
    constexpr std::size_t kPage = 4096;
    const auto pages = static_cast<std::ptrdiff_t>((bytes + kPage - 1) / kPage);
    auto* first = static_cast<unsigned char*>(memory);
    // In runs of 2 MiB, so that no huge page is faulted by two threads.
#pragma omp parallel for num_threads(std::max(1, num_threads)) schedule(static, 512)
    for (std::ptrdiff_t page = 0; page < pages; ++page) {
        // Atomic: another thread may write there at the same time, and its data must stay.
        __atomic_fetch_or(first + static_cast<std::size_t>(page) * kPage, 0, __ATOMIC_RELAXED);
    }
}

}  // namespace hytrain
