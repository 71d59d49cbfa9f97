// Where a pass has master weights from and where it leaves them; included by adam_kernel.inl.
//
// A kind is a type with
//   kHasWeights    whether there are any; without, commit moves the moments alone
//   load           the weights of one register at element i
//   store          kCount registers of new weights, side by side, and their outgoing copy
//   prefetch_unit  asks for what a unit's loads will need
//   Padding        the same for the last elements of a range, on the stack

// fp32, with an outgoing copy W.
template <class W>
struct WholeWeights {
    static constexpr bool kHasWeights = true;
    float* p;
    void* w;

    HYTRAIN_INLINE Reg load(std::size_t i) const { return Vec::load_f32(p + i); }
    template <std::size_t kCount>
    HYTRAIN_INLINE void store(std::size_t i, const Reg* values) const {
        for (std::size_t j = 0; j < kCount; ++j) {
            Vec::template store_f32<false>(p + i + j * kLanes, values[j]);
        }
        W::template store<kCount>(w, i, values);
    }
    template <std::size_t kUnit>
    inline void prefetch_unit(std::size_t i) const {
        prefetch_run<sizeof(float), kUnit>(p, i);
    }

    template <std::size_t kUnit>
    struct Padding {
        Padded<kUnit> p, w;
        Padding(const WholeWeights& of, std::size_t i, std::size_t count)
            : p(of.p, i, count, sizeof(float)) {}
        WholeWeights<typename W::Cached> weights() { return {p.data, w.data}; }
        void write(const WholeWeights& of, std::size_t i, std::size_t count) const {
            p.write(of.p, i, count, sizeof(float));
            w.write(of.w, i, count, W::kBytes);
        }
    };
};

// The same for a preview, which writes the copy alone.
template <class W>
struct PreviewedWeights {
    const float* p;
    void* w;

    HYTRAIN_INLINE Reg load(std::size_t i) const { return Vec::load_f32(p + i); }
    template <std::size_t kCount>
    HYTRAIN_INLINE void store(std::size_t i, const Reg* values) const {
        W::template store<kCount>(w, i, values);
    }
    template <std::size_t kUnit>
    inline void prefetch_unit(std::size_t i) const {
        prefetch_run<sizeof(float), kUnit>(p, i);
    }

    template <std::size_t kUnit>
    struct Padding {
        Padded<kUnit> p, w;
        Padding(const PreviewedWeights& of, std::size_t i, std::size_t count)
            : p(of.p, i, count, sizeof(float)) {}
        PreviewedWeights<typename W::Cached> weights() { return {p.data, w.data}; }
        void write(const PreviewedWeights& of, std::size_t i, std::size_t count) const {
            w.write(of.w, i, count, W::kBytes);
        }
    };
};

// None: a preview has written them already.
struct NoWeights {
    static constexpr bool kHasWeights = false;
    HYTRAIN_INLINE Reg load(std::size_t) const { return Vec::set(0.0F); }
    template <std::size_t kUnit>
    inline void prefetch_unit(std::size_t) const {}
    template <std::size_t kUnit>
    struct Padding {
        Padding(const NoWeights&, std::size_t, std::size_t) {}
        NoWeights weights() { return {}; }
        void write(const NoWeights&, std::size_t, std::size_t) const {}
    };
};

// Two halves of 16 bits (SplitWeights in hytrain/adam.h). What only the copy's owner may write may
// have been written by somebody else, who knows of no remainder: a zero stays within half a
// spacing of zero then, and does not become a NaN.
struct HalvedWeights {
    static constexpr bool kHasWeights = true;
    SplitRange r;

    HYTRAIN_INLINE Reg load(std::size_t i) const {
        const Bits copy = Vec::bits_of(Vec::load_bf16(r.copy + 2 * i));
        const Bits low = Vec::bits_of(Vec::load_bf16(r.remainder + 2 * i));
        const Bits both = Vec::bits_add(copy, Vec::template shift_right<16>(low));
        const Bits magnitude = Vec::bits_and(both, Vec::set_bits(~kSign));
        const Bits least = Vec::bits_max(magnitude, Vec::set_bits(kSplitHalf));
        const Bits bits = Vec::bits_add(least, Vec::set_bits(0U - kSplitHalf));
        return Vec::from_bits(Vec::pick(Vec::set_bits(kSign), copy, bits));
    }
    template <std::size_t kCount>
    HYTRAIN_INLINE void store(std::size_t i, const Reg* values) const {
        if constexpr (kCount == 1) {
            Vec::store_halves(r.remainder + 2 * i, r.new_copy + 2 * i, split_halves(values[0]));
        } else {
            static_assert(kCount % 2 == 0, "registers are stored alone or in pairs");
            for (std::size_t j = 0; j < kCount; j += 2) {
                const std::size_t at = 2 * (i + j * kLanes);
                Vec::store_halves(r.remainder + at, r.new_copy + at, split_halves(values[j]),
                                  split_halves(values[j + 1]));
            }
        }
    }
    template <std::size_t kUnit>
    inline void prefetch_unit(std::size_t i) const {
        prefetch_run<2, kUnit>(r.copy, i);
        prefetch_run<2, kUnit>(r.remainder, i);
    }

    template <std::size_t kUnit>
    struct Padding {
        Padded<kUnit> copy, remainder;
        Padding(const HalvedWeights& of, std::size_t i, std::size_t count)
            : copy(of.r.copy, i, count, 2), remainder(of.r.remainder, i, count, 2) {}
        HalvedWeights weights() {
            char* const c = reinterpret_cast<char*>(copy.data);
            return {{c, c, reinterpret_cast<char*>(remainder.data)}};
        }
        void write(const HalvedWeights& of, std::size_t i, std::size_t count) const {
            copy.write(of.r.new_copy, i, count, 2);
            remainder.write(of.r.remainder, i, count, 2);
        }
    };
};
