// How the moments are kept: fp32, bf16, or 8-bit codes; included by adam_kernel.inl.
//
// A kind is a type with
//   kBytes    of one element
//   kUnit     elements that are loaded and stored together, a whole number of registers
//   stored    elements whose memory belongs to the last `count` elements of a range
//   load      both moments of the unit at element i, as fp32
//   store     the reverse; m and v become what a later load will give; `root` is v's square root,
//             which the step has computed
// docs/internals.md ("Moments in fewer bytes") has the formulas and why they are these; all of it
// is exact arithmetic, or fp32 operations that every instruction set rounds alike.

using Bits = Vec::Bits;

// Elements that a loop handles between two prefetches of each array: one cache line of fp32.
constexpr std::size_t kStep = kLanes > 16 ? kLanes : 16;

// ---- fp32 -------------------------------------------------------------------------------------

struct Fp32Moments {
    static inline std::size_t stored(std::size_t count) { return count; }
    static constexpr std::size_t kBytes = 4;
    static constexpr std::size_t kUnit = kStep;
    static constexpr std::size_t kVectors = kUnit / kLanes;

    [[gnu::always_inline]] static inline void load(const MomentRange& r, std::size_t i, Reg* m,
                                                   Reg* v) {
        for (std::size_t j = 0; j < kVectors; ++j) {
            m[j] = Vec::load_f32(r.m + (i + j * kLanes) * kBytes);
            v[j] = Vec::load_f32(r.v + (i + j * kLanes) * kBytes);
        }
    }
    [[gnu::always_inline]] static inline void store(const MomentRange& r, std::size_t i, Reg* m,
                                                    Reg* v, const Reg*) {
        for (std::size_t j = 0; j < kVectors; ++j) {
            Vec::store_f32<false>(r.m + (i + j * kLanes) * kBytes, m[j]);
            Vec::store_f32<false>(r.v + (i + j * kLanes) * kBytes, v[j]);
        }
    }
};

// ---- random bits ------------------------------------------------------------------------------

// Chris Wellons's "lowbias32" (github.com/skeeto/hash-prospector, 2018).
inline std::uint32_t mix(std::uint32_t h) {
    h = (h ^ (h >> 16)) * 0x7FEB352DU;
    h = (h ^ (h >> 15)) * 0x846CA68BU;
    return h ^ (h >> 16);
}

// 32 bits for each element from i on. Sixteen neighbours share the mixed key and upper index, which
// costs no vector operation; golden-ratio steps and one more round tell them apart.
[[gnu::always_inline]] inline Bits random_bits(const MomentRange& r, std::size_t i) {
    constexpr std::uint32_t kGolden = 0x9E3779B9U;
    const std::uint32_t index = r.first_index + static_cast<std::uint32_t>(i);
    const std::uint32_t start = mix((index >> 4) ^ r.key) + (index & 15U) * kGolden;
    const Bits steps = Vec::bits_mul(Vec::lanes(), Vec::set_bits(kGolden));
    Bits h = Vec::bits_add(steps, Vec::set_bits(start));
    h = Vec::bits_xor(h, Vec::shift_right<16>(h));
    h = Vec::bits_mul(h, Vec::set_bits(0x846CA68BU));
    return Vec::bits_xor(h, Vec::shift_right<16>(h));
}

constexpr std::uint32_t kSign = 0x80000000U;

// ---- bf16 -------------------------------------------------------------------------------------

struct Bf16Moments {
    static inline std::size_t stored(std::size_t count) { return count; }
    static constexpr std::size_t kBytes = 2;
    // Long enough that the roundings of some registers fill the divisions' and roots' time of
    // others.
    static constexpr std::size_t kUnit = 4 * kStep;
    static constexpr std::size_t kVectors = kUnit / kLanes;

    [[gnu::always_inline]] static inline void load(const MomentRange& r, std::size_t i, Reg* m,
                                                   Reg* v) {
        for (std::size_t j = 0; j < kVectors; ++j) {
            m[j] = Vec::load_bf16(r.m + (i + j * kLanes) * kBytes);
            v[j] = Vec::load_bf16(r.v + (i + j * kLanes) * kBytes);
        }
    }
    [[gnu::always_inline]] static inline void store(const MomentRange& r, std::size_t i, Reg* m,
                                                    Reg* v, const Reg*) {
        const Bits low = Vec::set_bits(0xFFFFU);
        for (std::size_t j = 0; j < kVectors; ++j) {
            const std::size_t at = i + j * kLanes;
            const Bits random = random_bits(r, at);
            const Bits magnitude = Vec::bits_and(Vec::bits_of(m[j]), Vec::set_bits(~kSign));
            const Bits m_bits = Vec::pick(Vec::set_bits(kSign), Vec::bits_of(m[j]),
                                          rounded(magnitude, Vec::bits_and(random, low)));
            const Bits v_bits = rounded(Vec::bits_of(v[j]), Vec::shift_right<16>(random));
            Vec::store_upper_halves(r.m + at * kBytes, m_bits, r.v + at * kBytes, v_bits);
            m[j] = Vec::from_bits(Vec::bits_and(m_bits, Vec::set_bits(~0xFFFFU)));
            v[j] = Vec::from_bits(Vec::bits_and(v_bits, Vec::set_bits(~0xFFFFU)));
        }
    }

   private:
    // A magnitude goes up to the next bf16 as often as its lower half says. What is finite stays
    // below infinity, and what is not is left as it is: a NaN that an operation made is quiet, so
    // its upper half is a NaN too.
    static inline Bits rounded(Bits magnitude, Bits random) {
        const Bits up = Vec::bits_add(magnitude, random);
        return Vec::bits_max(Vec::bits_min(up, Vec::set_bits(0x7F7FFFFFU)), magnitude);
    }
};

// ---- 8-bit codes ------------------------------------------------------------------------------

// Code of a magnitude x: that of m, beside a sign, or the root of v. A block's elements share the
// factor 2^(exponent - 127), and y = x / factor + 2^(1 - 2^kExponents) lies between that offset and
// 2: the code is the upper part of y's bits, kExponents of the exponent and kMantissa of the
// mantissa. So codes are spaced like floating-point numbers where x is large and evenly below, and
// rounding on the bits of y is unbiased.
template <int kMantissa, int kExponents>
struct Code {
    static constexpr int kShift = 23 - kMantissa;
    static constexpr std::uint32_t kUnit = 1U << kShift;  // what one code more adds to y's bits
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
using RootCode = Code<5, 3>;

// One block's constants for one moment. With exponent 255 (the largest magnitude is not finite, or
// nearly 2^127) every element reads as NaN, with exponent 0 (it is below fp32's normal numbers) as
// zero: that is what the fused multiply-add gives.
template <class C>
struct BlockScale {
    Reg factor, minus_offset;

    explicit inline BlockScale(std::uint32_t exponent)
        : factor(Vec::from_bits(Vec::set_bits(exponent << 23))),
          minus_offset(Vec::mul(factor, Vec::from_bits(Vec::set_bits(C::kOffset | kSign)))) {}

    // Exact: the bits of y and of the offset are few, and what they differ by fits fp32.
    inline Reg magnitude(Bits y) const { return Vec::fma(Vec::from_bits(y), factor, minus_offset); }
    // `code` has the code at bit kShift.
    inline Reg magnitude_of_code(Bits code) const {
        return magnitude(
            Vec::pick(Vec::set_bits(C::kCodes << C::kShift), code, Vec::set_bits(C::kOffset)));
    }
};

// The same for storing; `codes` has the bits that a code may have, none where the exponent says
// all.
template <class C>
struct BlockRounding : BlockScale<C> {
    Reg inverse;
    Bits codes;

    explicit inline BlockRounding(std::uint32_t exponent) : BlockScale<C>(exponent) {
        const bool has_codes = exponent != 0U && exponent != 255U;
        inverse = Vec::from_bits(Vec::set_bits(has_codes ? (254U - exponent) << 23 : 0U));
        codes = Vec::set_bits(has_codes ? ~0U : 0U);
    }
    // y of the magnitude, with random bits below those of its code added.
    inline Bits raised(Reg magnitude, Bits random) const {
        const Reg offset = Vec::from_bits(Vec::set_bits(C::kOffset));
        return Vec::bits_add(Vec::bits_of(Vec::fma(magnitude, inverse, offset)), random);
    }
    inline Reg rounded(Bits y) const {
        return this->magnitude(Vec::bits_and(y, Vec::set_bits(~(C::kUnit - 1U))));
    }
};

// Shifts left by kCount, or right where that is negative.
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

    [[gnu::always_inline]] static inline void load(const MomentRange& r, std::size_t i, Reg* m,
                                                   Reg* v) {
        const BlockScale<MCode> m_scale(r.m_exponents[i / kMomentBlock]);
        const BlockScale<RootCode> v_scale(r.v_exponents[i / kMomentBlock]);
        for (std::size_t w = 0; w < kWords; ++w) {
            const Bits m_word = load_word(r.m + i, w);
            const Bits v_word = load_word(r.v + i, w);
            load_byte<0>(m_word, v_word, m_scale, v_scale, m + w, v + w);
            load_byte<1>(m_word, v_word, m_scale, v_scale, m + w, v + w);
            load_byte<2>(m_word, v_word, m_scale, v_scale, m + w, v + w);
            load_byte<3>(m_word, v_word, m_scale, v_scale, m + w, v + w);
        }
    }

    [[gnu::always_inline]] static inline void store(const MomentRange& r, std::size_t i, Reg* m,
                                                    Reg* v, const Reg* root) {
        const std::uint32_t m_exponent = MCode::exponent_of(largest(m));
        const std::uint32_t v_exponent = RootCode::exponent_of(largest(root));
        r.m_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(m_exponent);
        r.v_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(v_exponent);
        const BlockRounding<MCode> m_rounding(m_exponent);
        const BlockRounding<RootCode> v_rounding(v_exponent);
        for (std::size_t w = 0; w < kWords; ++w) {
            const std::size_t at = i + w * kLanes;
            Words words{Vec::set_bits(0), Vec::set_bits(0)};
            put_byte<0>(words, random_bits(r, at), m_rounding, v_rounding, m + w, v + w, root + w);
            put_byte<1>(words, random_bits(r, at + 16), m_rounding, v_rounding, m + w, v + w,
                        root + w);
            put_byte<2>(words, random_bits(r, at + 32), m_rounding, v_rounding, m + w, v + w,
                        root + w);
            put_byte<3>(words, random_bits(r, at + 48), m_rounding, v_rounding, m + w, v + w,
                        root + w);
            store_word(r.m + i, w, Vec::bits_and(words.m, m_rounding.codes));
            store_word(r.v + i, w, Vec::bits_and(words.v, v_rounding.codes));
        }
    }

   private:
    struct Words {
        Bits m, v;
    };
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
        return Vec::from_bits(Vec::pick(Vec::set_bits(kSign), sign, Vec::bits_of(magnitude)));
    }
    // Bits of the largest magnitude; those of infinity and of a NaN are above all others.
    static inline std::uint32_t largest(const Reg* x) {
        Bits most = magnitude_bits(x[0]);
        for (std::size_t j = 1; j < kVectors; ++j) {
            most = Vec::bits_max(most, magnitude_bits(x[j]));
        }
        return Vec::largest_lane(most);
    }

    template <int kByte>
    static inline void load_byte(Bits m_word, Bits v_word, const BlockScale<MCode>& m_scale,
                                 const BlockScale<RootCode>& v_scale, Reg* m, Reg* v) {
        const Reg magnitude = m_scale.magnitude_of_code(shift<MCode::kShift - 8 * kByte>(m_word));
        m[kByte * kWords] = with_sign(magnitude, shift<24 - 8 * kByte>(m_word));
        const Reg root = v_scale.magnitude_of_code(shift<RootCode::kShift - 8 * kByte>(v_word));
        v[kByte * kWords] = Vec::mul(root, root);
    }

    // The upper random bits round m, the lower ones v; five bits are common to both.
    template <int kByte>
    static inline void put_byte(Words& words, Bits random, const BlockRounding<MCode>& m_rounding,
                                const BlockRounding<RootCode>& v_rounding, Reg* m, Reg* v,
                                const Reg* root) {
        const Bits byte = Vec::set_bits(0xFFU << (8 * kByte));
        const Bits m_bits = Vec::bits_of(m[kByte * kWords]);
        const Bits m_y = m_rounding.raised(Vec::from_bits(magnitude_bits(m[kByte * kWords])),
                                           Vec::shift_right<32 - MCode::kShift>(random));
        const Bits m_top =
            Vec::pick(Vec::set_bits(0x7F000000U), Vec::shift_left<24 - MCode::kShift>(m_y), m_bits);
        words.m = Vec::pick(byte, shift<8 * kByte - 24>(m_top), words.m);
        m[kByte * kWords] = with_sign(m_rounding.rounded(m_y), m_bits);

        const Bits v_y = at_least_one(
            v_rounding.raised(root[kByte * kWords],
                              Vec::bits_and(random, Vec::set_bits(RootCode::kUnit - 1U))),
            root[kByte * kWords]);
        words.v = Vec::pick(byte, shift<8 * kByte - RootCode::kShift>(v_y), words.v);
        const Reg rounded = v_rounding.rounded(v_y);
        v[kByte * kWords] = Vec::mul(rounded, rounded);
    }

    // A root that is not zero has at least code 1: the update m / (sqrt(v) + eps) of an element
    // that is small in its block must not lose its denominator.
    static inline Bits at_least_one(Bits y, Reg root) {
        const Bits one = Vec::bits_min(Vec::bits_of(root), Vec::set_bits(RootCode::kUnit));
        return Vec::bits_max(y, Vec::bits_or(one, Vec::set_bits(RootCode::kOffset)));
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
