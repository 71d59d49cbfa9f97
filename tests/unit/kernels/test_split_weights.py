"""Split master weights: halves that are the fp32 value, and the same step as whole ones."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import INTERPRETED, ISAS, NEEDS_CUDA
from support.reference_adam import copy_away_from_zero

from hytrain import _C
from hytrain.errors import KernelArgumentError
from hytrain.kernels import cpu_adam, split_weights
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit, commit_split
from hytrain.kernels.device_adam import cuda_adam, device_adam
from hytrain.kernels.grouped_adam import GroupedAdam, Segment
from hytrain.kernels.moments import EightBit, Moment, Rounding, native_moments, zero_moment

KINDS = (torch.float32, torch.bfloat16, torch.uint8)
LENGTHS = (1, 15, 16, 17, 63, 64, 100, 16384 + 5, 3 * 16384 + 129)
ROUNDING = Rounding(3, 5)
SCALE = float(torch.tensor(0.37))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The training copy and the remainder."""
    copy = torch.empty(values.numel(), dtype=torch.bfloat16, device=values.device)
    remainder = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
    split_weights.split(values, copy, remainder)
    return copy, remainder


def weights_of(n: int) -> torch.Tensor:
    """Of all sizes, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(n)
    p = torch.randn(n, generator=generator) * torch.logspace(-40, 20, n)
    p[::7], p[3::7] = 0.0, -0.0
    return p


def gradient_of(n: int, step: int, dtype: torch.dtype) -> Gradient:
    generator = torch.Generator().manual_seed(1000 * n + step)
    hyper = AdamHyper(lr=1e-2, weight_decay=0.1, step=step, decoupled_decay=step % 2 == 0)
    return Gradient(torch.randn(n, generator=generator).to(dtype), SCALE, hyper)


def same(one: Moment, other: Moment) -> bool:
    pairs = zip(one, other, strict=True) if isinstance(one, EightBit) else [(one, other)]
    return all(torch.equal(a, b) for a, b in pairs)


def published(values: torch.Tensor) -> torch.Tensor:
    """The copy that a pass writes of whole master weights beside which others are split."""
    copy = torch.empty(values.numel(), dtype=torch.bfloat16)
    out = _C.Outgoing(copy.data_ptr(), _C.DType.bfloat16_away, values.numel() % 2 == 0)
    _C.publish(values.data_ptr(), values.numel(), out, 2)
    return copy


def check_halves(values: torch.Tensor) -> None:
    copy, remainder = halves(values)
    assert torch.equal(bits(published(values)), bits(copy))
    joined = split_weights.join(copy, remainder)
    is_nan = values.isnan()
    assert torch.equal(bits(joined)[~is_nan], bits(values)[~is_nan])
    assert torch.equal(joined.isnan(), is_nan)
    assert torch.equal(copy.isnan(), is_nan)
    assert torch.equal(bits(copy), bits(copy_away_from_zero(values)))


@pytest.mark.parametrize("isa", ISAS)
def test_halves_are_the_value(isa: str) -> None:
    cpu_adam.set_isa(isa)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    check_halves((upper[:, None] | lower).flatten().view(torch.float32))


@pytest.mark.parity_full
@pytest.mark.timeout(1800)
def test_halves_of_every_fp32_value() -> None:
    size = 2**24
    for begin in range(-(2**31), 2**31, size):
        check_halves(torch.arange(begin, begin + size, dtype=torch.int32).view(torch.float32))


def test_a_copy_without_a_remainder_is_its_value() -> None:
    copy = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    remainder = torch.full((copy.numel(),), split_weights.NO_REMAINDER, dtype=torch.int16)
    joined = split_weights.join(copy, remainder)
    is_nan = copy.isnan()
    assert torch.equal(bits(joined)[~is_nan], bits(copy.float())[~is_nan])
    assert bool(joined.isnan()[is_nan].all())


@pytest.mark.parametrize("isa", ISAS)
def test_a_zero_beside_any_remainder_stays_next_to_zero(isa: str) -> None:
    """Somebody may have written it who knows of no remainder."""
    cpu_adam.set_isa(isa)
    remainder = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    nothing = torch.zeros(2**16)
    still = Gradient(nothing, 1.0, AdamHyper(lr=0.0))
    for zero in (0.0, -0.0):
        copy = torch.full((2**16,), zero, dtype=torch.bfloat16)
        joined = split_weights.join(copy, remainder)
        assert float(joined.abs().max()) < 1e-40
        after, rest = copy.clone(), remainder.clone()
        commit_split(after, rest, nothing.clone(), nothing.clone(), still)
        assert torch.equal(bits(split_weights.join(after, rest)), bits(joined))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_stays_in_its_element(isa: str, kind: torch.dtype) -> None:
    """Looked for in two registers at a time: in each place of both. Rounded as a number, this one
    would become a zero."""
    cpu_adam.set_isa(isa)
    for place in range(32):
        p, n = weights_of(192), 192
        gradient = gradient_of(n, 1, torch.float32)
        bits(gradient.tensor)[64 + place] = 0x7FFFFFFF
        copy, remainder = halves(p)
        moments = [zero_moment(kind, n) for _ in range(4)]
        commit(p, moments[0], moments[1], gradient, rounding=ROUNDING)
        commit_split(copy, remainder, moments[2], moments[3], gradient, rounding=ROUNDING)
        joined, others = split_weights.join(copy, remainder), torch.arange(n) != 64 + place
        assert torch.equal(bits(joined)[others], bits(p)[others])
        assert joined.isnan().nonzero().flatten().tolist() == [64 + place]
        assert copy.isnan().nonzero().flatten().tolist() == [64 + place]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_a_step_is_that_of_whole_weights(isa: str, kind: torch.dtype) -> None:
    cpu_adam.set_isa(isa)
    for n in LENGTHS:
        p = weights_of(n)
        copy, remainder = halves(p)
        m, v, own_m, own_v = (zero_moment(kind, n) for _ in range(4))
        for step, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16), 1):
            gradient = gradient_of(n, step, dtype)
            commit(p, m, v, gradient, rounding=ROUNDING)
            commit_split(copy, remainder, own_m, own_v, gradient, rounding=ROUNDING, num_threads=2)
            expected_copy, expected = halves(p)
            assert torch.equal(bits(copy), bits(expected_copy)), n
            assert torch.equal(remainder, expected), n
            assert same(own_m, m), n
            assert same(own_v, v), n


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_copies_of_whole_weights_are_those_of_split_ones(isa: str, kind: torch.dtype) -> None:
    """By every pass, so that a layer that becomes a split one has its copy already."""
    cpu_adam.set_isa(isa)
    for n in LENGTHS:
        p, m, v = weights_of(n), zero_moment(kind, n), zero_moment(kind, n)
        moments = native_moments(m, v, ROUNDING)
        copies = [torch.empty(n, dtype=torch.bfloat16) for _ in range(3)]
        outs = [_C.Outgoing(x.data_ptr(), _C.DType.bfloat16_away, n % 2 == 0) for x in copies]
        one, two = (gradient_of(n, step, torch.bfloat16) for step in (1, 2))
        steps = [
            _C.GradientStep(g.tensor.data_ptr(), _C.DType.bfloat16, g.scale, g.hyper.native())
            for g in (one, two)
        ]
        _C.preview(p.data_ptr(), moments, n, steps[0], outs[0], 2)
        _C.commit_then_preview(p.data_ptr(), moments, n, *steps, outs[1], 2)
        assert torch.equal(bits(copies[0]), bits(halves(p)[0])), n
        _C.commit(p.data_ptr(), moments, n, steps[1], outs[2], 2)
        for copy in copies[1:]:
            assert torch.equal(bits(copy), bits(halves(p)[0])), n


def test_wrong_buffers_are_refused() -> None:
    copy, remainder = halves(torch.zeros(64))
    m, v = torch.zeros(64), torch.zeros(64)
    gradient = gradient_of(64, 1, torch.float32)
    with pytest.raises(KernelArgumentError, match=r"copy is torch\.float32"):
        commit_split(torch.zeros(64), remainder, m, v, gradient)
    with pytest.raises(KernelArgumentError, match=r"copy has 32 elements but remainder has 64"):
        commit_split(copy[:32], remainder, m, v, gradient)
    with pytest.raises(KernelArgumentError, match="remainder and copy overlap"):
        commit_split(copy, copy.view(torch.int16), m, v, gradient)


# ---- on the device ----


def _step_on(
    device: str, n: int, kind: torch.dtype, function: object, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy, remainder and moments after three steps, and those that they must be."""
    p = weights_of(n)
    copy, remainder = (x.to(device) for x in halves(p))
    m, v = zero_moment(kind, n), zero_moment(kind, n)
    own = [zero_moment(kind, n, device) for _ in range(2)]
    assert callable(function)
    for step in range(1, 4):
        gradient = gradient_of(n, step, dtype)
        skip = float(step == 2)
        outcome = torch.tensor([SCALE, skip], device=device)
        on_device = gradient.tensor.to(device)
        function(remainder, *own, on_device, copy, outcome, gradient.hyper, ROUNDING)
        if not skip:
            commit(p, m, v, gradient, rounding=ROUNDING)
    expected: list[torch.Tensor] = [*halves(p)]
    found = [copy.cpu(), remainder.cpu()]
    for mine, theirs in zip(own, (m, v), strict=True):
        found += [x.cpu() for x in mine] if isinstance(mine, EightBit) else [mine.cpu()]
        expected += [*theirs] if isinstance(theirs, EightBit) else [theirs]
    return found, expected


def _same_all(pair: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    for mine, theirs in zip(*pair, strict=True):
        assert torch.equal(bits(mine) if mine.dtype == torch.bfloat16 else mine,
                           bits(theirs) if theirs.dtype == torch.bfloat16 else theirs)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_device_adam_on_a_cpu(kind: torch.dtype) -> None:
    _same_all(_step_on("cpu", 1000, kind, device_adam, torch.bfloat16))


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("n", [1, 1000, 2048, 100003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gpu_is_bitwise_the_cpu_kernel(kind: torch.dtype, dtype: torch.dtype, n: int) -> None:
    _same_all(_step_on("cuda", n, kind, device_adam, dtype))


@INTERPRETED
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_kernel_in_the_interpreter(kind: torch.dtype) -> None:
    _same_all(_step_on("cpu", 300, kind, cuda_adam, torch.float32))


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]
)
def test_many_segments_in_one_launch(device: str) -> None:
    sizes = (64, 2048, 5000, 128)
    p = [weights_of(n) for n in sizes]
    parts = [tuple(x.to(device) for x in halves(each)) for each in p]
    moments = [[torch.zeros(n, device=device) for _ in range(2)] for n in sizes]
    twins = [[torch.zeros(n) for _ in range(2)] for n in sizes]
    gradients = [gradient_of(n, 2, torch.bfloat16) for n in sizes]
    segments = [
        Segment(remainder, *own, copy, number, 0, 0)
        for number, ((copy, remainder), own) in enumerate(zip(parts, moments, strict=True))
    ]
    grouped = GroupedAdam([segments], [torch.bfloat16] * len(sizes), 1, torch.device(device))
    # Kept until the launch has read them: the next tensor would take their memory.
    on_device = [gradient.tensor.to(device) for gradient in gradients]
    grouped.begin_step(on_device, [gradients[0].hyper])
    grouped.launch(0, torch.tensor([SCALE, 0.0], device=device))
    for each, (copy, remainder), own, twin, gradient in zip(
        p, parts, moments, twins, gradients, strict=True
    ):
        commit(each, *twin, gradient)
        _same_all(([copy.cpu(), remainder.cpu(), *(x.cpu() for x in own)], [*halves(each), *twin]))
