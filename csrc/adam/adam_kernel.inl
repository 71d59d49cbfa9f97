// The one algorithm behind every instruction set.
//
// Included by adam_<isa>.cpp inside `namespace hytrain { namespace {`, after that file has
// defined `Vec`: a register of kLanes floats with correctly rounded add, sub, mul, fma, div and
// sqrt, and loads and stores of kLanes elements of each DType; and `Vec::Bits`, the same register
// as kLanes unsigned 32-bit integers, with the operations that roundings take. Since every
// operation is correctly rounded and the order below is fixed, all instruction sets agree bitwise.
// (The sign and payload of a NaN depend on the CPU.)

// For functions that must be inlined so that their registers stay registers. Not with sanitizers:
// compiling their checks in one body with everything inlined takes minutes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HYTRAIN_INLINE inline
#define HYTRAIN_INLINE_BODY
#else
#define HYTRAIN_INLINE [[gnu::always_inline]] inline
#define HYTRAIN_INLINE_BODY __attribute__((always_inline))
#endif

using Reg = Vec::Reg;
using Bits = Vec::Bits;
constexpr std::size_t kLanes = Vec::kLanes;

inline std::size_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4U : 2U; }

// An element type as a template argument, so that a runtime DType is dispatched once per range.
template <DType kType>
struct In {
    static constexpr std::size_t kBytes = kType == DType::kFloat32 ? 4 : 2;
    static inline Reg load(const void* data, std::size_t index) {
        const char* address = static_cast<const char*>(data) + index * kBytes;
        if constexpr (kType == DType::kFloat32) {
            return Vec::load_f32(address);
        } else if constexpr (kType == DType::kBFloat16) {
            return Vec::load_bf16(address);
        } else {
            return Vec::load_f16(address);
        }
    }
};

// Both halves of split weights, for kCount registers, as SplitWeights in hytrain/adam.h says.
constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kSplitHalf = 0x8000U;
template <std::size_t kCount>
HYTRAIN_INLINE void split_halves(const Reg* values, Bits* halves) {
    bool has_nan = false;  // almost never true: one check for two registers
    for (std::size_t j = 0; j < kCount; j += 2) {
        has_nan |= Vec::has_nan(values[j], values[j + 1 < kCount ? j + 1 : j]);
    }
    for (std::size_t j = 0; j < kCount; ++j) {
        halves[j] = Vec::bits_add(Vec::bits_of(values[j]), Vec::set_bits(kSplitHalf));
    }
    if (__builtin_expect(has_nan, 0)) {
        const Bits quiet = Vec::set_bits(0x7FC00000U + kSplitHalf);
        for (std::size_t j = 0; j < kCount; ++j) {
            const Bits nan = Vec::pick(Vec::set_bits(kSign), Vec::bits_of(values[j]), quiet);
            halves[j] = Vec::where_nan(values[j], nan, halves[j]);
        }
    }
}

struct NoOut {
    using Cached = NoOut;
    static constexpr std::size_t kBytes = 0;
    template <std::size_t kCount>
    static inline void store(void*, std::size_t, const Reg*) {}
};

template <DType kType, bool kStream>
struct Out {
    using Cached = Out<kType, false>;  // for the padded tail, which is on the stack
    static constexpr std::size_t kBytes = kType == DType::kFloat32 ? 4 : 2;
    // kCount registers, side by side.
    template <std::size_t kCount>
    static inline void store(void* data, std::size_t index, const Reg* values) {
        char* address = static_cast<char*>(data) + index * kBytes;
        if constexpr (kType == DType::kBFloat16) {
            Vec::template store_bf16<kStream, kCount>(address, values);
        } else if constexpr (kType == DType::kBFloat16Away) {
            Bits halves[kCount];
            Reg rounded[kCount];  // exact in bf16: the store rounds nothing
            split_halves<kCount>(values, halves);
            for (std::size_t j = 0; j < kCount; ++j) {
                rounded[j] = Vec::from_bits(Vec::bits_and(halves[j], Vec::set_bits(~0xFFFFU)));
            }
            Vec::template store_bf16<kStream, kCount>(address, rounded);
        } else {
            for (std::size_t j = 0; j < kCount; ++j) {
                store_one(address + j * kLanes * kBytes, values[j]);
            }
        }
    }

   private:
    static inline void store_one(char* address, Reg value) {
        if constexpr (kType == DType::kFloat32) {
            Vec::template store_f32<kStream>(address, value);
        } else {
            Vec::template store_f16<kStream>(address, value);
        }
    }
};

// Calls body(In<dtype>) for a runtime dtype.
template <class Body>
inline void with_in(DType dtype, Body body) {
    switch (dtype) {
        case DType::kFloat32:
            return body(In<DType::kFloat32>());
        case DType::kBFloat16:
        case DType::kBFloat16Away:  // never an incoming one's
            return body(In<DType::kBFloat16>());
        case DType::kFloat16:
            return body(In<DType::kFloat16>());
    }
}

// A streaming store needs an address aligned to what is stored, up to a cache line; the elements
// before it would need a path of their own, so a misaligned copy simply goes through the cache.
inline bool can_stream(const OutRange& out) {
    return Vec::kCanStream && out.non_temporal &&
           reinterpret_cast<std::uintptr_t>(out.data) % 64 == 0;
}

template <bool kStream, class Body>
inline void with_out_type(DType dtype, Body body) {
    switch (dtype) {
        case DType::kFloat32:
            return body(Out<DType::kFloat32, kStream>());
        case DType::kBFloat16:
            return body(Out<DType::kBFloat16, kStream>());
        case DType::kBFloat16Away:
            return body(Out<DType::kBFloat16Away, kStream>());
        case DType::kFloat16:
            return body(Out<DType::kFloat16, kStream>());
    }
}

// Calls body(Out<...>) for a runtime dtype, with streaming stores if asked for and possible.
template <class Body>
inline void with_out(const OutRange& out, Body body) {
    if constexpr (Vec::kCanStream) {
        if (can_stream(out)) {
            with_out_type<true>(out.dtype, body);
            Vec::fence();  // streamed lines must be visible before the caller signals "written"
            return;
        }
    }
    with_out_type<false>(out.dtype, body);
}

struct Constants {
    Reg scale, l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps,
        neg_step_size;

    explicit inline Constants(const AdamConstants& c)
        : scale(Vec::set(c.scale)),
          l2(Vec::set(c.l2)),
          decay(Vec::set(c.decay)),
          one_minus_beta1(Vec::set(c.one_minus_beta1)),
          beta2(Vec::set(c.beta2)),
          one_minus_beta2(Vec::set(c.one_minus_beta2)),
          inv_sqrt_correction2(Vec::set(c.inv_sqrt_correction2)),
          eps(Vec::set(c.eps)),
          neg_step_size(Vec::set(c.neg_step_size)) {}
};

struct State {
    Reg p, m, v;
};

struct NewMoments {
    Reg m, v;
};

// One step of Adam (Kingma and Ba 2015, algorithm 1), with the decoupled decay of AdamW
// (Loshchilov and Hutter 2019, algorithm 2) or L2 decay; the one that is not asked for has
// decay = 1 or l2 = 0, both exact. First the moments, then with them the weights.
template <bool kL2 = true>
inline NewMoments step_moments(State s, Reg gradient, const Constants& c) {
    Reg g = Vec::mul(gradient, c.scale);
    if constexpr (kL2) {
        g = Vec::fma(c.l2, s.p, g);
    }
    const Reg m = Vec::fma(c.one_minus_beta1, Vec::sub(g, s.m), s.m);
    const Reg v = Vec::fma(Vec::mul(c.one_minus_beta2, g), g, Vec::mul(c.beta2, s.v));
    return {m, v};
}

inline Reg denominator(Reg root, const Constants& c) {
    return Vec::fma(root, c.inv_sqrt_correction2, c.eps);
}
inline Reg moved_by(Reg p, Reg quotient, const Constants& c) {
    return Vec::fma(c.neg_step_size, quotient, Vec::mul(p, c.decay));
}
inline Reg step_weights(Reg p, Reg m, Reg root, const Constants& c) {
    return moved_by(p, Vec::div(m, denominator(root, c)), c);
}

// Calls body(index) for each index below kCount, which is a constant in each call.
template <class Body, std::size_t... kIndices>
HYTRAIN_INLINE void unrolled(Body body, std::index_sequence<kIndices...>) {
    (body(std::integral_constant<std::size_t, kIndices>()), ...);
}
template <std::size_t kCount, class Body>
HYTRAIN_INLINE void for_each_index(Body body) {
    unrolled(body, std::make_index_sequence<kCount>());
}

#include "moments_kernel.inl"

inline void prefetch(const void* data, std::size_t index, std::size_t bytes) {
    __builtin_prefetch(static_cast<const char*>(data) + index * bytes, 0, 3);
}

// The lines of `elements` elements from `index` on.
template <std::size_t kBytes, std::size_t kElements>
inline void prefetch_run(const void* data, std::size_t index) {
    for (std::size_t offset = 0; offset < kElements;
         offset += kStep > 64 / kBytes ? kStep : 64 / kBytes) {
        prefetch(data, index + offset, kBytes);
    }
}

template <class M>
inline void prefetch_moments(const MomentRange& r, std::size_t index) {
    prefetch_run<M::kBytes, M::kUnit>(r.m, index);
    prefetch_run<M::kBytes, M::kUnit>(r.v, index);
}

// One unit on the stack for the rest at the end of a range: the same vector code runs on it, with
// zeros past the range's end, and nothing beyond n is touched.
template <std::size_t kElements>
struct alignas(64) Padded {
    float data[kElements];
    Padded() { std::memset(data, 0, sizeof(data)); }
    // Large enough for the widest element type; the first count * bytes are filled.
    Padded(const void* from, std::size_t first, std::size_t count, std::size_t bytes) : Padded() {
        std::memcpy(data, static_cast<const char*>(from) + first * bytes, count * bytes);
    }
    void write(void* to, std::size_t first, std::size_t count, std::size_t bytes) const {
        if (bytes != 0) {
            std::memcpy(static_cast<char*>(to) + first * bytes, data, count * bytes);
        }
    }
};

// A padded copy of the last elements' moments.
template <class M>
struct PaddedMoments {
    Padded<M::kUnit> m, v;
    std::uint8_t m_exponent = 0, v_exponent = 0;
    MomentRange range;

    PaddedMoments(const MomentRange& r, std::size_t i, std::size_t count)
        : m(r.m, i, M::stored(count), M::kBytes), v(r.v, i, M::stored(count), M::kBytes), range(r) {
        range.m = reinterpret_cast<char*>(m.data);
        range.v = reinterpret_cast<char*>(v.data);
        range.first_index += static_cast<std::uint32_t>(i);
        if (r.kind == MomentKind::kEightBit) {
            m_exponent = r.m_exponents[i / kMomentBlock];
            v_exponent = r.v_exponents[i / kMomentBlock];
        }
        range.m_exponents = &m_exponent;
        range.v_exponents = &v_exponent;
    }
    void write(const MomentRange& r, std::size_t i, std::size_t count) const {
        m.write(r.m, i, M::stored(count), M::kBytes);
        v.write(r.v, i, M::stored(count), M::kBytes);
        if (r.kind == MomentKind::kEightBit) {
            r.m_exponents[i / kMomentBlock] = m_exponent;
            r.v_exponents[i / kMomentBlock] = v_exponent;
        }
    }
};

#include "weights_kernel.inl"

// ---- commit -----------------------------------------------------------------------------------

// Calls body(first register, byte) for each M::kTogether registers of a unit. `byte` is a constant:
// the quarter of the unit that they are of, or where that is one register, the first's index.
template <class M, class Body>
HYTRAIN_INLINE void for_each_group(Body body) {
    constexpr std::size_t kGroups = M::kVectors / M::kTogether;
    constexpr std::size_t kQuarter = M::kVectors < 4 ? 1 : M::kVectors / 4;
    if constexpr (kGroups <= 4) {
        for_each_index<kGroups>([&](auto group) HYTRAIN_INLINE_BODY {
            constexpr std::size_t kFirst = group * M::kTogether;
            body(kFirst, std::integral_constant<std::size_t, kFirst / kQuarter>());
        });
    } else {
        for_each_index<4>([&](auto byte) HYTRAIN_INLINE_BODY {
            for (std::size_t k = 0; k < kQuarter; k += M::kTogether) {
                body(byte * kQuarter + k, byte);
            }
        });
    }
}

// A unit's moments after a step. All of them are computed before any is stored, since the moments
// of a block are rounded by the largest of them; no square root or division is on this path.
template <class G, class M>
struct Moved {
    Reg m[M::kVectors], v[M::kVectors];
    typename M::Store store;

    template <class P>
    HYTRAIN_INLINE Moved(const P& p, const MomentRange& r, const void* g, std::size_t i,
                         const Constants& c) {
        M::load(r, i, m, v);
        for (std::size_t j = 0; j < M::kVectors; ++j) {
            const std::size_t at = i + j * kLanes;
            const NewMoments moved = step_moments({p[j], m[j], v[j]}, G::load(g, at), c);
            m[j] = moved.m;
            v[j] = moved.v;
        }
    }
    HYTRAIN_INLINE void begin(const MomentRange& r, std::size_t i) { store.begin(r, i, m, v); }
    // Stores a group's registers, which become what a later load will give.
    template <std::size_t kByte>
    HYTRAIN_INLINE void put(const MomentRange& r, std::size_t i, std::size_t first) {
        for_each_index<M::kTogether>([&](auto j) HYTRAIN_INLINE_BODY {
            store.template put<kByte, j>(r, i + (first + j) * kLanes, m[first + j], v[first + j]);
        });
    }
};

template <class G, class P, class M>
HYTRAIN_INLINE void commit_unit(const P& p, const MomentRange& r, const void* g, std::size_t i,
                                const Constants& c) {
    const typename P::template Unit<M::kVectors> old_p(p, i);
    Moved<G, M> u(old_p, r, g, i, c);
    u.begin(r, i);
    for_each_group<M>([&](std::size_t first, auto byte) HYTRAIN_INLINE_BODY {
        Reg new_p[M::kTogether];
        for (std::size_t j = 0; j < M::kTogether; ++j) {
            const Reg root = Vec::sqrt(u.v[first + j]);
            new_p[j] = step_weights(old_p[first + j], u.m[first + j], root, c);
        }
        p.template store<M::kTogether>(i + first * kLanes, new_p);
        u.template put<byte>(r, i, first);
    });
    u.store.finish(r, i);
}

template <class G, class P, class M>
void commit_loop(const P p, const MomentRange r, std::size_t n, const GradientRange& gradient,
                 std::size_t ahead) {
    constexpr std::size_t kUnit = M::kUnit;
    const Constants c(gradient.constants);
    const void* g = gradient.data;
    std::size_t i = 0;
    for (; i + kUnit <= n; i += kUnit) {
        if (ahead != 0) {
            p.template prefetch_unit<kUnit>(i + ahead);
            prefetch_moments<M>(r, i + ahead);
            prefetch_run<G::kBytes, kUnit>(g, i + ahead);
        }
        commit_unit<G, P, M>(p, r, g, i, c);
    }
    if (i < n) {
        const std::size_t count = n - i;
        typename P::template Padding<kUnit> tail_p(p, i, count);
        PaddedMoments<M> tail(r, i, count);
        const Padded<kUnit> tail_g(g, i, count, G::kBytes);
        commit_loop<G, decltype(tail_p.weights()), M>(
            tail_p.weights(), tail.range, kUnit, {tail_g.data, gradient.dtype, gradient.constants},
            0);
        tail_p.write(p, i, count);
        tail.write(r, i, count);
    }
}

void commit(float* p, const MomentRange& moments, std::size_t n, const GradientRange& gradient,
            const OutRange& out, std::size_t ahead) {
    with_moments(moments.kind, [&](auto kind) {
        with_in(gradient.dtype, [&](auto in) {
            using G = decltype(in);
            using M = decltype(kind);
            const auto run = [&](auto to) {
                using P = WholeWeights<decltype(to)>;
                commit_loop<G, P, M>(P{p, out.data}, moments, n, gradient, ahead);
            };
            if (out.data == nullptr) {
                return run(NoOut());
            }
            with_out(out, run);
        });
    });
}

void commit_split(const SplitRange& weights, const MomentRange& moments, std::size_t n,
                  const GradientRange& gradient, std::size_t ahead) {
    with_moments(moments.kind, [&](auto kind) {
        with_in(gradient.dtype, [&](auto in) {
            commit_loop<decltype(in), HalvedWeights, decltype(kind)>(HalvedWeights{weights},
                                                                     moments, n, gradient, ahead);
        });
    });
}

// ---- preview ----------------------------------------------------------------------------------

template <class G, class W, class M>
HYTRAIN_INLINE void preview_unit(const float* p, const MomentRange& r, const void* g, void* w,
                                 std::size_t i, const Constants& c) {
    Reg m[M::kVectors], v[M::kVectors], new_p[M::kVectors];
    M::load(r, i, m, v);
    for (std::size_t j = 0; j < M::kVectors; ++j) {
        const std::size_t at = i + j * kLanes;
        const Reg old_p = Vec::load_f32(p + at);
        const NewMoments moved = step_moments({old_p, m[j], v[j]}, G::load(g, at), c);
        new_p[j] = step_weights(old_p, moved.m, Vec::sqrt(moved.v), c);
    }
    W::template store<M::kVectors>(w, i, new_p);
}

template <class G, class W, class M>
void preview_loop(const float* p, const MomentRange r, std::size_t n, const GradientRange& gradient,
                  void* w, std::size_t ahead) {
    constexpr std::size_t kUnit = M::kUnit;
    const Constants c(gradient.constants);
    const void* g = gradient.data;
    std::size_t i = 0;
    for (; i + kUnit <= n; i += kUnit) {
        if (ahead != 0) {
            prefetch_run<sizeof(float), kUnit>(p, i + ahead);
            prefetch_moments<M>(r, i + ahead);
            prefetch_run<G::kBytes, kUnit>(g, i + ahead);
        }
        preview_unit<G, W, M>(p, r, g, w, i, c);
    }
    if (i < n) {
        const std::size_t count = n - i;
        const Padded<kUnit> tail_p(p, i, count, sizeof(float));
        const PaddedMoments<M> tail(r, i, count);
        const Padded<kUnit> tail_g(g, i, count, G::kBytes);
        Padded<kUnit> tail_w;
        preview_loop<G, typename W::Cached, M>(tail_p.data, tail.range, kUnit,
                                               {tail_g.data, gradient.dtype, gradient.constants},
                                               tail_w.data, 0);
        tail_w.write(w, i, count, W::kBytes);
    }
}

void preview(const float* p, const MomentRange& moments, std::size_t n,
             const GradientRange& gradient, const OutRange& out, std::size_t ahead) {
    with_moments(moments.kind, [&](auto kind) {
        with_in(gradient.dtype, [&](auto in) {
            with_out(out, [&](auto to) {
                preview_loop<decltype(in), decltype(to), decltype(kind)>(p, moments, n, gradient,
                                                                         out.data, ahead);
            });
        });
    });
}

#include "both_kernel.inl"

// ---- publish ----------------------------------------------------------------------------------

template <class W>
void publish_loop(const float* p, std::size_t n, void* w, std::size_t ahead) {
    std::size_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        if (ahead != 0) {
            prefetch(p, i + ahead, sizeof(float));
        }
        for (std::size_t j = 0; j < kStep; j += kLanes) {
            const Reg values = Vec::load_f32(p + i + j);
            W::template store<1>(w, i + j, &values);
        }
    }
    for (; i < n; i += kLanes) {
        const std::size_t count = n - i < kLanes ? n - i : kLanes;
        const Padded<kLanes> tail_p(p, i, count, sizeof(float));
        Padded<kLanes> tail_w;
        const Reg values = Vec::load_f32(tail_p.data);
        W::Cached::template store<1>(tail_w.data, 0, &values);
        tail_w.write(w, i, count, W::kBytes);
    }
}

void publish(const float* p, std::size_t n, const OutRange& out, std::size_t ahead) {
    with_out(out, [&](auto to) { publish_loop<decltype(to)>(p, n, out.data, ahead); });
}

#include "sweep_kernel.inl"

constexpr KernelTable kTable{Vec::kName,          commit,  commit_split,         preview,
                             commit_then_preview, publish, sum_of_squares_range, read_write_range};
