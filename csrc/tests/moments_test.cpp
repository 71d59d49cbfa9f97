// The passes on moments in bf16 and in 8-bit codes, over every instruction set, length,
// misalignment and split, for the sanitizers to watch. What the numbers must be, the Python tests
// say.
#include <cmath>
#include <cstring>

#include "hytrain/adam.h"
#include "hytrain/dispatch.h"
#include "kernel_buffers.h"

namespace {

using hytrain::AdamHyper;
using hytrain::DType;
using hytrain::GradientStep;
using hytrain::kMomentBlock;
using hytrain::MomentKind;
using hytrain::Moments;
using hytrain::Outgoing;
using namespace kernel_buffers;

constexpr MomentKind kKinds[] = {MomentKind::kBFloat16, MomentKind::kEightBit};

std::size_t blocks_of(std::size_t n) { return (n + kMomentBlock - 1) / kMomentBlock; }

// A short last block of codes has the memory of a whole one.
std::size_t stored(std::size_t n, MomentKind kind) {
    return kind == MomentKind::kEightBit ? blocks_of(n) * kMomentBlock : n;
}

struct Case {
    Case(std::size_t n, MomentKind kind_, std::size_t offset)
        : kind(kind_),
          p(n, DType::kFloat32, offset),
          m(stored(n, kind), hytrain::moment_bytes(kind), offset),
          v(stored(n, kind), hytrain::moment_bytes(kind), offset),
          m_exponents(blocks_of(n), std::size_t{1}, offset),
          v_exponents(blocks_of(n), std::size_t{1}, offset),
          previous(n, DType::kFloat32, offset),
          current(n, DType::kFloat32, offset),
          out(n, DType::kBFloat16, offset) {
        std::uint32_t seed = 17;
        for (std::size_t i = 0; i < n; ++i) {
            p.floats()[i] = next_value(seed);
            previous.floats()[i] = next_value(seed);
            current.floats()[i] = next_value(seed);
        }
    }
    Moments moments(std::size_t begin) {
        Moments result;
        result.kind = kind;
        result.m = m.data() + begin * hytrain::moment_bytes(kind);
        result.v = v.data() + begin * hytrain::moment_bytes(kind);
        result.m_exponents =
            reinterpret_cast<std::uint8_t*>(m_exponents.data()) + begin / kMomentBlock;
        result.v_exponents =
            reinterpret_cast<std::uint8_t*>(v_exponents.data()) + begin / kMomentBlock;
        result.seed = 5;
        // The upper half of the index changes within the longer ranges, and so does the parameter.
        const std::uint64_t first = (std::uint64_t{1} << 32) - 3 * kMomentBlock;
        const std::size_t second = 40 * kMomentBlock;
        if (begin < second) {
            result.runs = {{0, 9, first + begin}, {second - begin, 10, 2 * kMomentBlock}};
        } else {
            result.runs = {{0, 10, begin - second + 2 * kMomentBlock}};
        }
        return result;
    }
    std::vector<std::vector<char>> bytes() const {
        return {p.bytes(),           m.bytes(),           v.bytes(),
                m_exponents.bytes(), v_exponents.bytes(), out.bytes()};
    }

    MomentKind kind;
    Buffer p, m, v, m_exponents, v_exponents, previous, current, out;
};

GradientStep step_of(const float* gradient, std::int64_t number) {
    AdamHyper hyper;
    hyper.weight_decay = 0.1;
    hyper.step = number;
    return {gradient, DType::kFloat32, 0.5F, hyper};
}

// Three steps, the last one previewed and committed; in two calls where `cut` lies within.
std::vector<std::vector<char>> run(std::size_t n, MomentKind kind, std::size_t offset,
                                   std::size_t cut, int num_threads) {
    Case c(n, kind, offset);
    const std::size_t middle = cut < n ? cut : n;
    const std::size_t ends[] = {middle, n};
    std::size_t begin = 0;
    for (const std::size_t end : ends) {
        const std::size_t count = end - begin;
        float* p = c.p.floats() + begin;
        const Moments moments = c.moments(begin);
        const GradientStep first = step_of(c.previous.floats() + begin, 1);
        const GradientStep second = step_of(c.current.floats() + begin, 2);
        const GradientStep third = step_of(c.previous.floats() + begin, 3);
        const Outgoing out{c.out.data() + 2 * begin, DType::kBFloat16, offset % 2 == 0};
        hytrain::adam_commit(p, moments, count, first, Outgoing{}, num_threads);
        hytrain::adam_commit_then_preview(p, moments, count, second, third, out, num_threads);
        const auto seen = c.bytes();
        hytrain::adam_preview(p, moments, count, third, out, num_threads);
        check(seen == c.bytes(), "preview differs after a commit in the same sweep, or stores");
        hytrain::adam_commit(p, moments, count, third, Outgoing{}, num_threads);
        hytrain::adam_publish(p, count, out, num_threads);
        check(seen.back() == c.out.bytes(), "publish after commit differs from preview");
        const auto written = c.bytes();
        hytrain::read_write(p, moments, count, num_threads);
        check(written == c.bytes(), "read_write changed a value");
        begin = end;
    }
    return c.bytes();
}

void test_all_agree() {
    const std::size_t lengths[] = {
        0, 1, 15, 63, 64, 65, 127, 193, 1000, 16384 + 3, 2 * 16384 + 130};
    for (const MomentKind kind : kKinds) {
        for (const std::size_t n : lengths) {
            hytrain::set_isa("scalar");
            const auto expected = run(n, kind, 0, n, 1);
            for (const std::string& isa : hytrain::available_isas()) {
                hytrain::set_isa(isa);
                check(run(n, kind, 0, n, 3) == expected, isa + " differs from scalar");
                check(run(n, kind, 0, 5 * kMomentBlock, 2) == expected, isa + ": a cut shows");
                const auto shifted = run(n, kind, 3, n, 1);
                for (std::size_t k = 0; k < shifted.size(); ++k) {
                    const std::size_t shift = shifted[k].size() - expected[k].size();
                    check(std::equal(expected[k].begin(), expected[k].end(),
                                     shifted[k].begin() + static_cast<std::ptrdiff_t>(shift)),
                          isa + ": alignment shows");
                }
            }
        }
    }
}

// Steps of a constant gradient: the first moment tends to it, also in few bits.
void test_moments_are_near() {
    constexpr std::size_t kN = 1000;
    for (const MomentKind kind : kKinds) {
        Case c(kN, kind, 0);
        std::vector<float> g(kN, 0.25F);
        for (std::int64_t number = 1; number <= 200; ++number) {
            hytrain::adam_commit(c.p.floats(), c.moments(0), kN, step_of(g.data(), number),
                                 Outgoing{}, 1);
        }
        // With the moments at their limits a step moves p by lr.
        const std::vector<float> before(c.p.floats(), c.p.floats() + kN);
        hytrain::adam_commit(c.p.floats(), c.moments(0), kN, step_of(g.data(), 201), Outgoing{}, 1);
        double sum = 0.0;
        for (std::size_t i = 0; i < kN; ++i) {
            sum += static_cast<double>(before[i] * (1.0F - 1e-4F) - c.p.floats()[i]);
        }
        check(std::fabs(sum / kN / 1e-3 - 1.0) < 0.02, "a step of a constant gradient is not lr");
    }
}

// A gradient whose square is infinite makes its block of v NaN, in 8-bit codes and not in others:
// the preview in the same sweep sees what one that reads the block later sees.
void test_infinite_square() {
    constexpr std::size_t kN = 3 * kMomentBlock;
    for (const std::string& isa : hytrain::available_isas()) {
        hytrain::set_isa(isa);
        for (const MomentKind kind : kKinds) {
            Case c(kN, kind, 0);
            c.previous.floats()[70] = 1e22F;
            const GradientStep first = step_of(c.previous.floats(), 1);
            const GradientStep second = step_of(c.current.floats(), 2);
            const Outgoing out{c.out.data(), DType::kBFloat16, false};
            hytrain::adam_commit_then_preview(c.p.floats(), c.moments(0), kN, first, second, out,
                                              1);
            const auto seen = c.out.bytes();
            hytrain::adam_preview(c.p.floats(), c.moments(0), kN, second, out, 1);
            check(seen == c.out.bytes(), isa + ": preview differs where a square is infinite");
        }
    }
}

}  // namespace

int main() {
    test_all_agree();
    test_infinite_square();
    test_moments_are_near();
    std::printf("moments_test: passed\n");
    return 0;
}
