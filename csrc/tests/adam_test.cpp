// The passes over every instruction set, length and misalignment, for the sanitizers to watch.
// Buffers are exact heap allocations, so one element too far is a report. Numbers are checked
// against a float64 step here too, but the bounds of the Python tests are the tight ones.
#include "hytrain/adam.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "hytrain/dispatch.h"
#include "kernel_buffers.h"

namespace {

using hytrain::AdamHyper;
using hytrain::DType;
using hytrain::GradientStep;
using hytrain::Outgoing;
using namespace kernel_buffers;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

struct Case {
    Case(std::size_t n, DType dtype, DType out_dtype, std::size_t offset)
        : p(n, DType::kFloat32, offset),
          m(n, DType::kFloat32, offset),
          v(n, DType::kFloat32, offset),
          previous(n, dtype, offset),
          current(n, dtype, offset),
          out(n, out_dtype, offset) {
        std::uint32_t seed = 17;
        for (std::size_t i = 0; i < n; ++i) {
            p.floats()[i] = next_value(seed);
            m.floats()[i] = next_value(seed) * 0.1F;
            v.floats()[i] = std::fabs(next_value(seed)) * 0.01F;
            store(previous.data(), dtype, i, next_value(seed));
            store(current.data(), dtype, i, next_value(seed));
        }
    }

    // Half-precision gradients are written as bits whose value is some small number.
    static void store(char* data, DType dtype, std::size_t i, float value) {
        if (dtype == DType::kFloat32) {
            std::memcpy(data + 4 * i, &value, 4);
            return;
        }
        const auto bits = static_cast<std::uint16_t>(value < 0 ? 0xB000U + i % 512 : 0x3000U);
        std::memcpy(data + 2 * i, &bits, 2);
    }

    Buffer p, m, v, previous, current, out;
};

AdamHyper hyper_of(std::int64_t step, bool decoupled) {
    AdamHyper hyper;
    hyper.weight_decay = 0.1;
    hyper.step = step;
    hyper.decoupled_decay = decoupled;
    return hyper;
}

std::vector<std::vector<char>> run_all(std::size_t n, DType dtype, DType out_dtype,
                                       std::size_t offset, int num_threads) {
    Case c(n, dtype, out_dtype, offset);
    const GradientStep previous{c.previous.data(), dtype, 0.5F, hyper_of(3, true)};
    const GradientStep current{c.current.data(), dtype, 1.0F, hyper_of(4, false)};
    const Outgoing out{c.out.data(), out_dtype, offset % 2 == 0};
    float* p = c.p.floats();
    float* m = c.m.floats();
    float* v = c.v.floats();
    std::vector<std::vector<char>> results;
    hytrain::adam_commit_then_preview(p, m, v, n, previous, current, out, num_threads);
    results.push_back(c.out.bytes());
    hytrain::adam_preview(p, m, v, n, current, out, num_threads);
    check(results.back() == c.out.bytes(), "commit_then_preview differs from preview");
    hytrain::adam_commit(p, m, v, n, current, Outgoing{}, num_threads);
    hytrain::adam_publish(p, n, out, num_threads);
    check(results.back() == c.out.bytes(), "publish after commit differs from preview");
    hytrain::adam_commit(p, m, v, n, current, out, num_threads);
    results.insert(results.end(), {c.p.bytes(), c.m.bytes(), c.v.bytes(), c.out.bytes()});
    const double sum = hytrain::sum_of_squares(c.current.data(), dtype, n, num_threads);
    std::vector<char> sum_bytes(sizeof(sum));
    std::memcpy(sum_bytes.data(), &sum, sizeof(sum));
    results.push_back(sum_bytes);
    hytrain::read_write(p, m, v, n, num_threads);
    check(results[1] == c.p.bytes(), "read_write changed a value");
    return results;
}

// Every upper half of a float with each sort of lower half, at every place in a register and beside
// numbers or NaNs, rounded to bf16 as the portable kernel does.
void test_every_bf16() {
    const std::uint32_t lower[] = {0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    std::vector<float> p;
    for (const std::uint32_t half : lower) {
        for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
            // Neighbours far apart, so that a NaN is among numbers.
            const std::uint32_t bits = (upper * 40503U % 0x10000U) << 16 | half;
            float value;
            std::memcpy(&value, &bits, sizeof(value));
            p.push_back(value);
        }
    }
    std::vector<std::uint16_t> expected(p.size());
    std::vector<std::uint16_t> got(p.size());
    hytrain::set_isa("scalar");
    hytrain::adam_publish(p.data(), p.size(), {expected.data(), DType::kBFloat16, false}, 1);
    // Without a gradient and decay a preview's weights are what it is given.
    const std::vector<float> zero(p.size(), 0.0F);
    AdamHyper hyper;
    const GradientStep none{zero.data(), DType::kFloat32, 1.0F, hyper};
    for (const std::string& isa : hytrain::available_isas()) {
        hytrain::set_isa(isa);
        hytrain::adam_publish(p.data(), p.size(), {got.data(), DType::kBFloat16, false}, 2);
        check(got == expected, isa + " publishes another bf16");
        const hytrain::Moments moments = hytrain::fp32_moments(zero.data(), zero.data());
        hytrain::adam_preview(p.data(), moments, p.size(), none,
                              {got.data(), DType::kBFloat16, false}, 2);
        std::size_t others = 0;
        for (std::size_t i = 0; i < p.size(); ++i) {
            // What is not finite is times an L2 decay of 0, which makes it a NaN.
            const bool same =
                std::isfinite(p[i]) ? got[i] == expected[i] : (got[i] & 0x7FFFU) > 0x7F80U;
            others += same ? 0U : 1U;
        }
        check(others == 0, isa + " previews another bf16");
    }
}

void test_all_agree() {
    const std::size_t lengths[] = {0, 1, 15, 16, 17, 31, 33, 1000, 16384 + 3, 3 * 16384 + 130};
    const std::vector<std::string> isas = hytrain::available_isas();
    for (const std::size_t n : lengths) {
        for (const DType dtype : kDTypes) {
            for (const DType out_dtype : kDTypes) {
                for (const std::size_t offset : {0U, 1U, 3U}) {
                    hytrain::set_isa("scalar");
                    const auto expected = run_all(n, dtype, out_dtype, offset, 1);
                    for (const std::string& isa : isas) {
                        hytrain::set_isa(isa);
                        const auto got = run_all(n, dtype, out_dtype, offset, 3);
                        check(got == expected, isa + " differs from scalar");
                    }
                }
            }
        }
    }
}

void test_against_float64() {
    constexpr std::size_t kN = 1000;
    Case c(kN, DType::kFloat32, DType::kFloat32, 0);
    Case before(kN, DType::kFloat32, DType::kFloat32, 0);
    const AdamHyper h = hyper_of(3, true);
    const GradientStep step{c.current.data(), DType::kFloat32, 0.5F, h};
    hytrain::adam_commit(c.p.floats(), c.m.floats(), c.v.floats(), kN, step, Outgoing{}, 1);
    for (std::size_t i = 0; i < kN; ++i) {
        const double g = 0.5 * static_cast<double>(before.current.floats()[i]);
        const double m = h.beta1 * static_cast<double>(before.m.floats()[i]) + (1 - h.beta1) * g;
        const double v =
            h.beta2 * static_cast<double>(before.v.floats()[i]) + (1 - h.beta2) * g * g;
        const double p = static_cast<double>(before.p.floats()[i]) * (1 - h.lr * h.weight_decay) -
                         h.lr * (m / (1 - std::pow(h.beta1, 3))) /
                             (std::sqrt(v / (1 - std::pow(h.beta2, 3))) + h.eps);
        check(std::fabs(static_cast<double>(c.p.floats()[i]) - p) < 4e-7, "p is far from float64");
    }
}

void test_mixed_gradient_types() {
    constexpr std::size_t kN = 2500;
    Case a(kN, DType::kBFloat16, DType::kBFloat16, 1);
    Case b(kN, DType::kFloat32, DType::kBFloat16, 1);
    const GradientStep previous{a.previous.data(), DType::kBFloat16, 0.5F, hyper_of(3, true)};
    const GradientStep current{b.current.data(), DType::kFloat32, 0.5F, hyper_of(4, true)};
    const Outgoing out{a.out.data(), DType::kBFloat16, true};
    hytrain::adam_commit_then_preview(a.p.floats(), a.m.floats(), a.v.floats(), kN, previous,
                                      current, out, 2);
    const std::vector<char> seen = a.out.bytes();
    hytrain::adam_commit(a.p.floats(), a.m.floats(), a.v.floats(), kN, current, out, 1);
    check(seen == a.out.bytes(), "mixed gradients: preview differs from commit");
}

// Split weights over every length and misalignment: both halves, and what they are halves of.
void test_split_weights() {
    for (const std::size_t n : {1U, 15U, 17U, 33U, 1000U, 16384U + 3U}) {
        for (const std::size_t offset : {0U, 1U, 3U}) {
            Case whole(n, DType::kBFloat16, DType::kBFloat16, offset);
            Buffer copy(n, 2, offset), remainder(n, 2, offset);
            auto* const upper = reinterpret_cast<std::uint16_t*>(copy.data());
            auto* const lower = reinterpret_cast<std::uint16_t*>(remainder.data());
            const auto halves = [&](std::size_t i) {
                std::uint32_t bits;
                std::memcpy(&bits, whole.p.data() + 4 * i, sizeof(bits));
                return bits + 0x8000U;
            };
            for (std::size_t i = 0; i < n; ++i) {
                upper[i] = static_cast<std::uint16_t>(halves(i) >> 16);
                lower[i] = static_cast<std::uint16_t>(halves(i));
            }
            const GradientStep step{whole.current.data(), DType::kBFloat16, 0.5F,
                                    hyper_of(3, true)};
            hytrain::set_isa("scalar");
            hytrain::adam_commit(whole.p.floats(), whole.m.floats(), whole.v.floats(), n, step,
                                 Outgoing{}, 1);
            const std::vector<char> old_copy = copy.bytes(), old_remainder = remainder.bytes();
            for (const std::string& isa : hytrain::available_isas()) {
                hytrain::set_isa(isa);
                Case again(n, DType::kBFloat16, DType::kBFloat16, offset);
                std::memcpy(copy.data() - 2 * offset, old_copy.data(), old_copy.size());
                std::memcpy(remainder.data() - 2 * offset, old_remainder.data(),
                            old_remainder.size());
                hytrain::adam_commit(hytrain::SplitWeights{upper, lower},
                                     hytrain::fp32_moments(again.m.floats(), again.v.floats()), n,
                                     step, 2);
                std::size_t others = 0;
                for (std::size_t i = 0; i < n; ++i) {
                    const std::uint32_t found =
                        static_cast<std::uint32_t>(upper[i]) << 16 | lower[i];
                    others += found == halves(i) ? 0U : 1U;
                }
                check(others == 0, isa + ": split weights make another step");
                check(again.m.bytes() == whole.m.bytes(), isa + ": their moments differ");
            }
        }
    }
}

void test_wrong_names() {
    bool thrown = false;
    try {
        hytrain::set_isa("sse9");
    } catch (const std::invalid_argument& error) {
        thrown = std::string(error.what()).find("scalar") != std::string::npos;
    }
    check(thrown, "a wrong instruction set must be refused, with the choices");
}

}  // namespace

int main() {
    test_every_bf16();
    test_all_agree();
    test_against_float64();
    test_mixed_gradient_types();
    test_split_weights();
    test_wrong_names();
    std::printf("adam_test: passed on");
    for (const std::string& isa : hytrain::available_isas()) {
        std::printf(" %s", isa.c_str());
    }
    std::printf("\n");
    return 0;
}
