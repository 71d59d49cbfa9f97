// Sweeps that are no optimizer's pass; included by adam_kernel.inl, on the same terms.

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

inline void touch_vector(float* array, std::size_t i, Reg one) {
    // Times one, which the compiler does not know: a plain load and store would be dropped.
    Vec::template store_f32<false>(array + i, Vec::mul(Vec::load_f32(array + i), one));
}

void read_write_range(float* p, float* m, float* v, std::size_t n, std::size_t ahead) {
    volatile float opaque = 1.0F;
    const Reg one = Vec::set(opaque);
    std::size_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        if (ahead != 0) {
            prefetch_state(p, m, v, i + ahead);
        }
        for (std::size_t j = 0; j < kStep; j += kLanes) {
            touch_vector(p, i + j, one);
            touch_vector(m, i + j, one);
            touch_vector(v, i + j, one);
        }
    }
    for (; i < n; ++i) {
        p[i] *= opaque;
        m[i] *= opaque;
        v[i] *= opaque;
    }
}
