// How the moments are kept: fp32, bf16, or 8-bit codes; included by adam_kernel.inl.
//
// A kind is a type with
//   kBytes    of one element
//   kUnit     elements that are loaded and stored together, a whole number of registers
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
    static constexpr std::size_t kBytes = 4;
    static constexpr std::size_t kUnit = kStep;
    static constexpr std::size_t kVectors = kUnit / kLanes;

    [[gnu::always_inline]] static inline void load(const MomentRange& r, std::size_t i, Reg* m, Reg* v) {
        for (std::size_t j = 0; j < kVectors; ++j) {
            m[j] = Vec::load_f32(r.m + (i + j * kLanes) * kBytes);
            v[j] = Vec::load_f32(r.v + (i + j * kLanes) * kBytes);
        }
    }
    [[gnu::always_inline]] static inline void store(const MomentRange& r, std::size_t i, Reg* m, Reg* v, const Reg*) {
        for (std::size_t j = 0; j < kVectors; ++j) {
            Vec::store_f32<false>(r.m + (i + j * kLanes) * kBytes, m[j]);
            Vec::store_f32<false>(r.v + (i + j * kLanes) * kBytes, v[j]);
        }
    }
};

// ---- random bits ------------------------------------------------------------------------------

// 32 bits for each element from i on: Chris Wellons's "lowbias32"
// (github.com/skeeto/hash-prospector, 2018) of the element's index and the key of the step.
[[gnu::always_inline]] inline Bits random_bits(const MomentRange& r, std::size_t i) {
    const auto first = r.first_index + static_cast<std::uint32_t>(i);
    Bits h = Vec::bits_xor(Vec::bits_add(Vec::lanes(), Vec::set_bits(first)), Vec::set_bits(r.key));
    h = Vec::bits_xor(h, Vec::shift_right<16>(h));
    h = Vec::bits_mul(h, Vec::set_bits(0x7FEB352DU));
    h = Vec::bits_xor(h, Vec::shift_right<15>(h));
    h = Vec::bits_mul(h, Vec::set_bits(0x846CA68BU));
    return Vec::bits_xor(h, Vec::shift_right<16>(h));
}

constexpr std::uint32_t kSign = 0x80000000U;

// ---- bf16 -------------------------------------------------------------------------------------

struct Bf16Moments {
    static constexpr std::size_t kBytes = 2;
    static constexpr std::size_t kUnit = kStep;
    static constexpr std::size_t kVectors = kUnit / kLanes;

    [[gnu::always_inline]] static inline void load(const MomentRange& r, std::size_t i, Reg* m, Reg* v) {
        for (std::size_t j = 0; j < kVectors; ++j) {
            m[j] = Vec::load_bf16(r.m + (i + j * kLanes) * kBytes);
            v[j] = Vec::load_bf16(r.v + (i + j * kLanes) * kBytes);
        }
    }
    [[gnu::always_inline]] static inline void store(const MomentRange& r, std::size_t i, Reg* m, Reg* v, const Reg*) {
        const Bits low = Vec::set_bits(0xFFFFU);
        for (std::size_t j = 0; j < kVectors; ++j) {
            const std::size_t at = i + j * kLanes;
            const Bits random = random_bits(r, at);
            m[j] = put(r.m + at * kBytes, m[j], Vec::bits_and(random, low));
            v[j] = put(r.v + at * kBytes, v[j], Vec::shift_right<16>(random));
        }
    }

   private:
    // The magnitude goes up to the next bf16 as often as its lower half says. What is finite stays
    // below infinity, and what is not is left as it is: a NaN that an operation made is quiet, so
    // its upper half is a NaN too.
    [[gnu::always_inline]] static inline Reg put(void* address, Reg value, Bits random) {
        const Bits bits = Vec::bits_of(value);
        const Bits magnitude = Vec::bits_and(bits, Vec::set_bits(~kSign));
        const Bits up = Vec::bits_min(Vec::bits_add(magnitude, random), Vec::set_bits(0x7F7FFFFFU));
        const Bits rounded = Vec::pick(Vec::set_bits(kSign), bits, Vec::bits_max(up, magnitude));
        Vec::store_upper_half(address, rounded);
        return Vec::from_bits(Vec::bits_and(rounded, Vec::set_bits(0xFFFF0000U)));
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
    inline Reg magnitude_of_code(Bits code) const {
        return magnitude(Vec::pick(Vec::set_bits(C::kCodes << C::kShift),
                                   Vec::shift_left<C::kShift>(code), Vec::set_bits(C::kOffset)));
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
        codes = Vec::set_bits(has_codes ? 0xFFU : 0U);
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

struct EightBitMoments {
    static constexpr std::size_t kBytes = 1;
    static constexpr std::size_t kUnit = kMomentBlock;
    static constexpr std::size_t kVectors = kUnit / kLanes;

    [[gnu::always_inline]] static inline void load(const MomentRange& r, std::size_t i, Reg* m, Reg* v) {
        const BlockScale<MCode> m_scale(r.m_exponents[i / kMomentBlock]);
        const BlockScale<RootCode> v_scale(r.v_exponents[i / kMomentBlock]);
        for (std::size_t j = 0; j < kVectors; ++j) {
            const Bits m_code = Vec::load_i8(r.m + i + j * kLanes);
            m[j] = with_sign(m_scale.magnitude_of_code(m_code), m_code);
            const Reg root = v_scale.magnitude_of_code(Vec::load_i8(r.v + i + j * kLanes));
            v[j] = Vec::mul(root, root);
        }
    }

    [[gnu::always_inline]] static inline void store(const MomentRange& r, std::size_t i, Reg* m, Reg* v, const Reg* root) {
        const std::uint32_t m_exponent = MCode::exponent_of(largest(m));
        const std::uint32_t v_exponent = RootCode::exponent_of(largest(root));
        r.m_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(m_exponent);
        r.v_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(v_exponent);
        const BlockRounding<MCode> m_rounding(m_exponent);
        const BlockRounding<RootCode> v_rounding(v_exponent);
        for (std::size_t j = 0; j < kVectors; ++j) {
            const std::size_t at = i + j * kLanes;
            const Bits random = random_bits(r, at);
            m[j] = put_m(r.m + at, m[j], random, m_rounding);
            v[j] = put_v(r.v + at, root[j], random, v_rounding);
        }
    }

   private:
    [[gnu::always_inline]] static inline Bits magnitude_bits(Reg x) {
        return Vec::bits_and(Vec::bits_of(x), Vec::set_bits(~kSign));
    }
    [[gnu::always_inline]] static inline Reg with_sign(Reg magnitude, Bits sign) {
        return Vec::from_bits(Vec::pick(Vec::set_bits(kSign), sign, Vec::bits_of(magnitude)));
    }
    // Bits of the largest magnitude; those of infinity and of a NaN are above all others.
    [[gnu::always_inline]] static inline std::uint32_t largest(const Reg* x) {
        Bits most = magnitude_bits(x[0]);
        for (std::size_t j = 1; j < kVectors; ++j) {
            most = Vec::bits_max(most, magnitude_bits(x[j]));
        }
        return Vec::largest_lane(most);
    }
    // The upper random bits round m, the lower ones v; five bits are common to both.
    [[gnu::always_inline]] static inline Reg put_m(void* address, Reg value, Bits random,
                            const BlockRounding<MCode>& rounding) {
        const Bits bits = Vec::bits_of(value);
        const Bits y = rounding.raised(Vec::from_bits(magnitude_bits(value)),
                                       Vec::shift_right<32 - MCode::kShift>(random));
        const Bits code = Vec::pick(Vec::set_bits(0x80U), Vec::shift_right<24>(bits),
                                    Vec::shift_right<MCode::kShift>(y));
        Vec::store_low_byte(address, Vec::bits_and(code, rounding.codes));
        return with_sign(rounding.rounded(y), bits);
    }
    // A root that is not zero has at least code 1: the update m / (sqrt(v) + eps) of an element
    // that is small in its block must not lose its denominator.
    [[gnu::always_inline]] static inline Reg put_v(void* address, Reg root, Bits random,
                            const BlockRounding<RootCode>& rounding) {
        const Bits one = Vec::bits_min(Vec::bits_of(root), Vec::set_bits(RootCode::kUnit));
        const Bits least = Vec::bits_or(one, Vec::set_bits(RootCode::kOffset));
        const Bits raised =
            rounding.raised(root, Vec::bits_and(random, Vec::set_bits(RootCode::kUnit - 1U)));
        const Bits y = Vec::bits_max(raised, least);
        const Bits code = Vec::shift_right<RootCode::kShift>(y);
        Vec::store_low_byte(address, Vec::bits_and(code, rounding.codes));
        const Reg rounded = rounding.rounded(y);
        return Vec::mul(rounded, rounded);
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
