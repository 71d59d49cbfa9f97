// How the moments are kept: fp32, bf16, or 8-bit codes; included by adam_kernel.inl.
//
// A kind is a type with
//   kBytes    bytes of one element
//   kUnit     elements that are loaded and stored together, a whole number of registers
//   stored    number of stored elements that hold the last `count` elements of a range
//   load      both moments of the unit at element i, as fp32
//   Store     the reverse: begin sees all of the unit's moments, then put stores one register of
//             each after the other and changes it to the value that a later load returns
// docs/internals.md ("Moments in fewer bytes") has the formulas and why they are these; all of it
// is exact arithmetic, or fp32 operations that every instruction set rounds alike.

// Elements that a loop handles between two prefetches of each array: one cache line of fp32.
constexpr std::size_t kStep = kLanes > 16 ? kLanes : 16;

// ---- fp32 -------------------------------------------------------------------------------------

struct Fp32Moments {
    static inline std::size_t stored(std::size_t count) { return count; }
    static constexpr std::size_t kBytes = 4;
    static constexpr std::size_t kUnit = kStep;
    static constexpr std::size_t kVectors = kUnit / kLanes;

    HYTRAIN_INLINE static void load(const MomentRange& r, std::size_t i, Reg* m, Reg* v) {
        for (std::size_t j = 0; j < kVectors; ++j) {
            m[j] = Vec::load_f32(r.m + (i + j * kLanes) * kBytes);
            v[j] = Vec::load_f32(r.v + (i + j * kLanes) * kBytes);
        }
    }
    static constexpr std::size_t kTogether = kVectors < 2 ? kVectors : 2;
    struct Store {
        inline void begin(const MomentRange&, std::size_t, const Reg*, const Reg*) {}
        template <std::size_t kByte, std::size_t kIndex>
        HYTRAIN_INLINE void put(const MomentRange& r, std::size_t i, Reg& m, Reg& v) {
            Vec::store_f32<false>(r.m + i * kBytes, m);
            Vec::store_f32<false>(r.v + i * kBytes, v);
        }
        inline void finish(const MomentRange&, std::size_t) {}
    };
};

// ---- random bits ------------------------------------------------------------------------------

// Chris Wellons's "lowbias32" (github.com/skeeto/hash-prospector, 2018).
constexpr std::uint32_t mix(std::uint32_t h) {
    h = (h ^ (h >> 16)) * 0x7FEB352DU;
    h = (h ^ (h >> 15)) * 0x846CA68BU;
    return h ^ (h >> 16);
}

// The factor of each element of a block: odd, so that multiplying loses no bit.
struct BlockFactors {
    std::uint32_t of[kMomentBlock];
    constexpr BlockFactors() : of() {
        for (std::uint32_t j = 0; j < kMomentBlock; ++j) {
            of[j] = mix(j + 1U) | 1U;
        }
    }
};
alignas(64) constexpr BlockFactors kFactors;

// 32 bits for each element. A block shares the mixed key and upper index, which costs no vector
// operation; the factors tell its elements apart.
HYTRAIN_INLINE Bits block_bits(const MomentRange& r, std::size_t i) {
    return Vec::set_bits(mix(((r.first_index + static_cast<std::uint32_t>(i)) >> 6) ^ r.key));
}
// Bits of one register's elements, from i on; i counts from a block's start.
HYTRAIN_INLINE Bits element_bits(Bits block, std::size_t i) {
    const void* factors = kFactors.of + i % kMomentBlock;
    const Bits h = Vec::bits_mul(block, Vec::bits_of(Vec::load_f32(factors)));
    return Vec::bits_xor(h, Vec::shift_right<16>(h));
}

// ---- bf16 -------------------------------------------------------------------------------------

struct Bf16Moments {
    static inline std::size_t stored(std::size_t count) { return count; }
    static constexpr std::size_t kBytes = 2;
    static constexpr std::size_t kUnit = kMomentBlock;
    static constexpr std::size_t kVectors = kUnit / kLanes;

    HYTRAIN_INLINE static void load(const MomentRange& r, std::size_t i, Reg* m, Reg* v) {
        for (std::size_t j = 0; j < kVectors; ++j) {
            m[j] = Vec::load_bf16(r.m + (i + j * kLanes) * kBytes);
            v[j] = Vec::load_bf16(r.v + (i + j * kLanes) * kBytes);
        }
    }
    static constexpr std::size_t kTogether = kVectors < 2 ? kVectors : 2;
    struct Store {
        Bits random;  // of the block
        Bits even;    // the rounded halves of the first of two registers

        HYTRAIN_INLINE void begin(const MomentRange& r, std::size_t i, const Reg*, const Reg*) {
            random = block_bits(r, i);
        }
        // The lower random bits round m, the upper ones v.
        template <std::size_t kByte, std::size_t kIndex>
        HYTRAIN_INLINE void put(const MomentRange& r, std::size_t i, Reg& m, Reg& v) {
            const Bits halves =
                Vec::rounded_halves(Vec::bits_of(m), Vec::bits_of(v), element_bits(random, i));
            m = Vec::from_bits(Vec::shift_left<16>(halves));
            v = Vec::from_bits(Vec::bits_and(halves, Vec::set_bits(~0xFFFFU)));
            if constexpr (kIndex == 0) {
                even = halves;
            } else {
                const std::size_t at = (i - kLanes) * kBytes;
                Vec::store_halves(r.m + at, r.v + at, even, halves);
            }
        }
        inline void finish(const MomentRange&, std::size_t) {}
    };
};

// ---- 8-bit codes ------------------------------------------------------------------------------

// Code of a magnitude x: |m|, whose sign is kept beside it, or v. A block's elements share the
// factor 2^(exponent - 127), and y = x / factor + 2^(1 - 2^kExponents) lies between that offset and
// 2: the code is the upper part of y's bits, kExponents of the exponent and kMantissa of the
// mantissa. So codes are spaced like floating-point numbers where x is large and evenly below, and
// rounding on the bits of y is unbiased.
template <int kMantissa, int kExponents>
struct Code {
    static constexpr int kShift = 23 - kMantissa;
    static constexpr std::uint32_t kUnit = 1U << kShift;  // added to y's bits by one more code
    static constexpr std::uint32_t kCodes = (1U << (kMantissa + kExponents)) - 1U;
    static constexpr std::uint32_t kOffset = (128U - (1U << kExponents)) << 23;
    static_assert((kOffset >> kShift & kCodes) == 0, "the upper part must begin with code 0");

    // Exponent of a block: the least with which its largest magnitude, rounded up, has a code.
    static inline std::uint32_t exponent_of(std::uint32_t largest) {
        // Bits of mantissa of the largest x: y = 2 - 2^-kMantissa, less the offset.
        constexpr std::uint32_t kMost = (1U << 23) - kUnit - (1U << (24 - (1 << kExponents)));
        const std::uint32_t exponent = (largest + ((1U << 23) - 1U - kMost)) >> 23;
        return exponent >= 254U ? 255U : exponent;  // of 254 the reciprocal would be subnormal
    }
};

using MCode = Code<4, 3>;
using VCode = Code<4, 4>;

// One block's constants for one moment. The fused multiply-add gives NaN for every element with
// exponent 255 (the largest magnitude is not finite, or nearly 2^127), and zero with exponent 0 (it
// is below fp32's normal numbers).
template <class C>
struct BlockScale {
    Reg factor, minus_offset;

    explicit inline BlockScale(std::uint32_t exponent)
        : factor(Vec::from_bits(Vec::set_bits(exponent << 23))),
          minus_offset(Vec::mul(factor, Vec::from_bits(Vec::set_bits(C::kOffset | kSign)))) {}

    // Exact: y and the offset have few bits, and their difference fits fp32.
    inline Reg magnitude(Bits y) const { return Vec::fma(Vec::from_bits(y), factor, minus_offset); }
    // `code` has the code at bit kShift.
    inline Reg magnitude_of_code(Bits code) const {
        return magnitude(
            Vec::pick(Vec::set_bits(C::kCodes << C::kShift), code, Vec::set_bits(C::kOffset)));
    }
};

// One block's constants for storing. has_codes: false where the exponent alone gives the value of
// every element, see BlockScale. A negative x has a negative y.
template <class C>
struct BlockRounding {
    Reg factor, minus_offset, inverse;
    bool has_codes;

    inline void set(std::uint32_t exponent) {
        has_codes = exponent != 0U && exponent != 255U;
        const BlockScale<C> scale(exponent);
        factor = scale.factor;
        minus_offset = scale.minus_offset;
        inverse = Vec::from_bits(Vec::set_bits(has_codes ? (254U - exponent) << 23 : 0U));
    }
    // y of x, with random bits below those of its code added; `offset` has x's sign.
    inline Bits raised(Reg x, Bits offset, Bits random) const {
        return Vec::bits_add(Vec::bits_of(Vec::fma(x, inverse, Vec::from_bits(offset))), random);
    }
    // The value that a load will give for y's code; exact, as in BlockScale. rounded_magnitude is
    // for y without a sign and uses the load's own formula: with exponent 255 it gives NaN, too.
    inline Reg rounded(Bits y, Bits offset) const {
        return Vec::mul(Vec::sub(cut(y), Vec::from_bits(offset)), factor);
    }
    inline Reg rounded_magnitude(Bits y) const { return Vec::fma(cut(y), factor, minus_offset); }

   private:
    static inline Reg cut(Bits y) {
        return Vec::from_bits(Vec::bits_and(y, Vec::set_bits(~(C::kUnit - 1U))));
    }
};

// Shifts left by kCount, or right if it is negative.
template <int kCount>
inline Bits shift(Bits a) {
    if constexpr (kCount > 0) {
        return Vec::shift_left<kCount>(a);
    } else if constexpr (kCount < 0) {
        return Vec::shift_right<-kCount>(a);
    } else {
        return a;
    }
}

// A block's codes are 16 words: byte b of word w is the code of element 16 b + w, so that a
// register of words holds registers of codes, a shift away.
struct EightBitMoments {
    static inline std::size_t stored(std::size_t) { return kUnit; }  // a block, also if short
    static constexpr std::size_t kBytes = 1;
    static constexpr std::size_t kUnit = kMomentBlock;
    static constexpr std::size_t kVectors = kUnit / kLanes;
    static constexpr std::size_t kWords = kVectors / 4;  // registers of words

    HYTRAIN_INLINE static void load(const MomentRange& r, std::size_t i, Reg* m, Reg* v) {
        const BlockScale<MCode> m_scale(r.m_exponents[i / kMomentBlock]);
        const BlockScale<VCode> v_scale(r.v_exponents[i / kMomentBlock]);
        for (std::size_t w = 0; w < kWords; ++w) {
            const Bits m_word = load_word(r.m + i, w);
            const Bits v_word = load_word(r.v + i, w);
            load_byte<0>(m_word, v_word, m_scale, v_scale, m + w, v + w);
            load_byte<1>(m_word, v_word, m_scale, v_scale, m + w, v + w);
            load_byte<2>(m_word, v_word, m_scale, v_scale, m + w, v + w);
            load_byte<3>(m_word, v_word, m_scale, v_scale, m + w, v + w);
        }
    }

    static constexpr std::size_t kTogether = kVectors < 2 ? kVectors : 2;
    struct Store {
        Bits random;  // of the block
        BlockRounding<MCode> m_rounding;
        BlockRounding<VCode> v_rounding;
        Bits m_words[kWords], v_words[kWords];

        HYTRAIN_INLINE void begin(const MomentRange& r, std::size_t i, const Reg* m, const Reg* v) {
            const std::uint32_t m_exponent = MCode::exponent_of(largest(m));
            const std::uint32_t v_exponent = VCode::exponent_of(largest_of_positive(v));
            r.m_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(m_exponent);
            r.v_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(v_exponent);
            m_rounding.set(m_exponent);
            v_rounding.set(v_exponent);
            random = block_bits(r, i);
        }

        // The upper random bits round m, the lower ones v; six bits are common to both.
        template <std::size_t kFirstByte, std::size_t kIndex>
        HYTRAIN_INLINE void put(const MomentRange&, std::size_t i, Reg& m, Reg& v) {
            constexpr int kByte = static_cast<int>(kFirstByte + (kWords == 1 ? kIndex : 0));
            const std::size_t word = i / kLanes % kWords;
            const Bits bits = element_bits(random, i);

            const Bits offset =
                Vec::pick(Vec::set_bits(kSign), Vec::bits_of(m), Vec::set_bits(MCode::kOffset));
            const Bits m_y =
                m_rounding.raised(m, offset, Vec::shift_right<32 - MCode::kShift>(bits));
            m = m_rounding.rounded(m_y, offset);
            // Below the sign, in the uppermost byte.
            const Bits m_top = Vec::pick(Vec::set_bits(0x7F000000U),
                                         Vec::shift_left<24 - MCode::kShift>(m_y), m_y);
            put_byte<kByte>(m_words[word], shift<8 * kByte - 24>(m_top));

            const Bits v_offset = Vec::set_bits(VCode::kOffset);
            const Bits raised = v_rounding.raised(
                v, v_offset, Vec::bits_and(bits, Vec::set_bits(VCode::kUnit - 1U)));
            // A nonzero v has at least code 1: the update m / (sqrt(v) + eps) of an element that is
            // small in its block must not lose its denominator.
            const Bits one = Vec::set_bits(VCode::kOffset + VCode::kUnit);
            const Bits v_y = Vec::max_where_not_zero(v, raised, one);
            v = v_rounding.rounded_magnitude(v_y);
            put_byte<kByte>(v_words[word], shift<8 * kByte - VCode::kShift>(v_y));
        }

        HYTRAIN_INLINE void finish(const MomentRange& r, std::size_t i) {
            if (!m_rounding.has_codes) {
                clear(m_words);
            }
            if (!v_rounding.has_codes) {
                clear(v_words);
            }
            for (std::size_t w = 0; w < kWords; ++w) {
                store_word(r.m + i, w, m_words[w]);
                store_word(r.v + i, w, v_words[w]);
            }
        }

       private:
        static inline void clear(Bits* words) {
            for (std::size_t w = 0; w < kWords; ++w) {
                words[w] = Vec::set_bits(0U);
            }
        }
        // Bytes come lowest first: the bits above a byte are overwritten by those that follow.
        template <int kByte>
        static inline void put_byte(Bits& word, Bits byte) {
            if constexpr (kByte == 0) {
                word = byte;
            } else {
                word = Vec::pick(Vec::set_bits(~0U << (8 * kByte)), byte, word);
            }
        }
    };

   private:
    static inline Bits load_word(const char* block, std::size_t w) {
        return Vec::bits_of(Vec::load_f32(block + w * kLanes * sizeof(float)));
    }
    static inline void store_word(char* block, std::size_t w, Bits word) {
        Vec::store_f32<false>(block + w * kLanes * sizeof(float), Vec::from_bits(word));
    }
    static inline Bits magnitude_bits(Reg x) {
        return Vec::bits_and(Vec::bits_of(x), Vec::set_bits(~kSign));
    }
    static inline Reg with_sign(Reg magnitude, Bits sign) {
        return Vec::from_bits(Vec::put(Vec::set_bits(kSign), sign, Vec::bits_of(magnitude)));
    }
    // Bits of the largest magnitude; those of infinity and of a NaN are above all others.
    static inline std::uint32_t largest(const Reg* x) {
        Bits most = magnitude_bits(x[0]);
        for (std::size_t j = 1; j < kVectors; ++j) {
            most = Vec::bits_max(most, magnitude_bits(x[j]));
        }
        return Vec::largest_lane(most);
    }

    // The same for non-negative numbers; a NaN, of either sign, is above all others.
    static inline std::uint32_t largest_of_positive(const Reg* x) {
        Bits most = Vec::bits_of(x[0]);
        for (std::size_t j = 1; j < kVectors; ++j) {
            most = Vec::bits_max(most, Vec::bits_of(x[j]));
        }
        return Vec::largest_lane(most) & ~kSign;
    }

    template <int kByte>
    static inline void load_byte(Bits m_word, Bits v_word, const BlockScale<MCode>& m_scale,
                                 const BlockScale<VCode>& v_scale, Reg* m, Reg* v) {
        const Reg magnitude = m_scale.magnitude_of_code(shift<MCode::kShift - 8 * kByte>(m_word));
        m[kByte * kWords] = with_sign(magnitude, shift<24 - 8 * kByte>(m_word));
        v[kByte * kWords] = v_scale.magnitude_of_code(shift<VCode::kShift - 8 * kByte>(v_word));
    }
};

// Calls body(kind) for a runtime kind.
template <class Body>
inline void with_moments(MomentKind kind, Body body) {
    switch (kind) {
        case MomentKind::kFloat32:
            return body(Fp32Moments());
        case MomentKind::kBFloat16:
            return body(Bf16Moments());
        case MomentKind::kEightBit:
            return body(EightBitMoments());
    }
}
