// Shared by the kernels' tests: buffers that end where their elements end, and values to fill them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "hytrain/adam.h"

namespace kernel_buffers {

inline void check(bool condition, const std::string& what) {
    if (!condition) {
        std::fprintf(stderr, "FAILED: %s\n", what.c_str());
        std::exit(1);
    }
}

// n elements of a dtype or a size, `offset` elements into an allocation that ends where they end.
class Buffer {
   public:
    Buffer(std::size_t n, hytrain::DType dtype, std::size_t offset)
        : Buffer(n, hytrain::size_of(dtype), offset) {}
    Buffer(std::size_t n, std::size_t size, std::size_t offset)
        : size_(size), bytes_((n + offset) * size_), start_(offset * size_) {}
    char* data() { return bytes_.data() + start_; }
    float* floats() { return reinterpret_cast<float*>(data()); }
    const std::vector<char>& bytes() const { return bytes_; }

   private:
    std::size_t size_;
    std::vector<char> bytes_;
    std::size_t start_;
};

// A small deterministic generator: values in (-1, 1).
inline float next_value(std::uint32_t& seed) {
    seed = seed * 1664525U + 1013904223U;
    return static_cast<float>(static_cast<std::int32_t>(seed)) / 2147483648.0F;
}

}  // namespace kernel_buffers
