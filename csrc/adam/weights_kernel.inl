// How commit reads and writes master weights; included by adam_kernel.inl.
//
// A kind is a type with
//   Unit           the weights of a unit, by register
//   store          writes kCount adjacent registers of new weights, and their outgoing copy
//   prefetch_unit  prefetches the lines that a unit's loads need
//   Padding        a copy of the last elements of a range, on the stack

// fp32, with an outgoing copy W.
template <class W>
struct WholeWeights {
    float* p;
    void* w;

    // Loaded from the cache at each use, which keeps registers free.
    template <std::size_t>
    struct Unit {
        const float* p;
        HYTRAIN_INLINE Unit(const WholeWeights& of, std::size_t i) : p(of.p + i) {}
        HYTRAIN_INLINE Reg operator[](std::size_t j) const { return Vec::load_f32(p + j * kLanes); }
    };
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

// Two halves of 16 bits (SplitWeights in hytrain/adam.h). Somebody who knows of no remainder may
// have written the copy: a zero written so stays within half a spacing of zero, and does not become
// a NaN.
struct HalvedWeights {
    SplitRange r;

    // Joined once and kept in registers.
    template <std::size_t kCount>
    struct Unit {
        Reg p[kCount];
        HYTRAIN_INLINE Unit(const HalvedWeights& of, std::size_t i) {
            for (std::size_t j = 0; j < kCount; ++j) {
                p[j] = of.load(i + j * kLanes);
            }
        }
        HYTRAIN_INLINE Reg operator[](std::size_t j) const { return p[j]; }
    };
    template <std::size_t kCount>
    HYTRAIN_INLINE void store(std::size_t i, const Reg* values) const {
        Bits halves[kCount];
        split_halves<kCount>(values, halves);
        if constexpr (kCount == 1) {
            Vec::store_halves(r.remainder + 2 * i, r.copy + 2 * i, halves[0]);
        } else {
            static_assert(kCount == 2, "registers are stored alone or in pairs");
            Vec::store_halves(r.remainder + 2 * i, r.copy + 2 * i, halves[0], halves[1]);
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
            return {{reinterpret_cast<char*>(copy.data), reinterpret_cast<char*>(remainder.data)}};
        }
        void write(const HalvedWeights& of, std::size_t i, std::size_t count) const {
            copy.write(of.r.copy, i, count, 2);
            remainder.write(of.r.remainder, i, count, 2);
        }
    };

   private:
    HYTRAIN_INLINE Reg load(std::size_t i) const {
        const Bits both = Vec::load_halves(r.remainder + 2 * i, r.copy + 2 * i);
        const Bits magnitude = Vec::bits_and(both, Vec::set_bits(~kSign));
        const Bits least = Vec::bits_max(magnitude, Vec::set_bits(kSplitHalf));
        const Bits bits = Vec::bits_add(least, Vec::set_bits(0U - kSplitHalf));
        return Vec::from_bits(Vec::pick(Vec::set_bits(kSign), both, bits));
    }
};
