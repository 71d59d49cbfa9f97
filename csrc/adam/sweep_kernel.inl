// Sweeps over memory that are not optimizer passes; included by adam_kernel.inl, with its rules.

// ---- sum of squares ---------------------------------------------------------------------------

// The sum runs in kSumLanes interleaved float64 sums whatever the width of a register, then in
// one fixed tree. A square of a float is exact in float64, so fused or not makes no difference.
constexpr std::size_t kSumLanes = 32;
constexpr std::size_t kRegsPerGroup = kSumLanes / kLanes;

template <class G>
double sum_loop(const void* data, std::size_t n) {
    typename Vec::DoubleReg sums[kRegsPerGroup * Vec::kDoubleRegs];
    for (auto& sum : sums) {
        sum = Vec::zero_double();
    }
    std::size_t i = 0;
    for (; i + kSumLanes <= n; i += kSumLanes) {
        for (std::size_t r = 0; r < kRegsPerGroup; ++r) {
            Vec::add_squares(G::load(data, i + r * kLanes), sums + r * Vec::kDoubleRegs);
        }
    }
    if (i < n) {
        float rest[kSumLanes];
        std::memset(rest, 0, sizeof(rest));
        std::memcpy(rest, static_cast<const char*>(data) + i * G::kBytes, (n - i) * G::kBytes);
        for (std::size_t r = 0; r < kRegsPerGroup; ++r) {
            Vec::add_squares(G::load(rest, r * kLanes), sums + r * Vec::kDoubleRegs);
        }
    }
    double lanes[kSumLanes];
    std::memcpy(lanes, sums, sizeof(lanes));
    for (std::size_t width = kSumLanes / 2; width > 0; width /= 2) {
        for (std::size_t j = 0; j < width; ++j) {
            lanes[j] += lanes[j + width];
        }
    }
    return lanes[0];
}

double sum_of_squares_range(const void* data, DType dtype, std::size_t n) {
    double sum = 0.0;
    with_in(dtype, [&](auto in) { sum = sum_loop<decltype(in)>(data, n); });
    return sum;
}

// ---- the loop to compare against --------------------------------------------------------------

// Adds zero to each word; the compiler does not know that it is zero: it would drop a plain load
// and store.
template <std::size_t kWords>
inline void touch(void* words, Bits zero) {
    for (std::size_t j = 0; j < kWords; j += kLanes) {
        char* address = static_cast<char*>(words) + j * sizeof(float);
        const Bits bits = Vec::bits_of(Vec::load_f32(address));
        Vec::template store_f32<false>(address, Vec::from_bits(Vec::bits_add(bits, zero)));
    }
}

template <class M>
void read_write_loop(float* p, const MomentRange r, std::size_t n, std::size_t ahead) {
    constexpr std::size_t kUnit = 64;
    volatile std::uint32_t opaque = 0;
    const Bits zero = Vec::set_bits(opaque);
    std::size_t i = 0;
    for (; i + kUnit <= n; i += kUnit) {
        if (ahead != 0) {
            prefetch_run<sizeof(float), kUnit>(p, i + ahead);
            prefetch_run<M::kBytes, kUnit>(r.m, i + ahead);
            prefetch_run<M::kBytes, kUnit>(r.v, i + ahead);
        }
        touch<kUnit>(p + i, zero);
        touch<kUnit * M::kBytes / sizeof(float)>(r.m + i * M::kBytes, zero);
        touch<kUnit * M::kBytes / sizeof(float)>(r.v + i * M::kBytes, zero);
    }
    // The rest, byte by byte.
    for (std::size_t b = i * sizeof(float); b < n * sizeof(float); ++b) {
        reinterpret_cast<volatile char*>(p)[b] ^= static_cast<char>(opaque);
    }
    for (std::size_t b = i * M::kBytes; b < n * M::kBytes; ++b) {
        static_cast<volatile char*>(r.m)[b] ^= static_cast<char>(opaque);
        static_cast<volatile char*>(r.v)[b] ^= static_cast<char>(opaque);
    }
}

void read_write_range(float* p, const MomentRange& moments, std::size_t n, std::size_t ahead) {
    with_moments(moments.kind,
                 [&](auto kind) { read_write_loop<decltype(kind)>(p, moments, n, ahead); });
}
