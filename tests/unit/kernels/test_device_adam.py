"""The update of GPU-placed layers: against its slow twin, and on a GPU against the CPU kernel."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import INTERPRETED, NEEDS_CUDA
from moment_cases import KINDS, RoundedCase, make_rounded, same_moment
from support.reference_adam import stored_moments

from hytrain.kernels.clipping import ClipSettings, GradientNorm
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit
from hytrain.kernels.device_adam import adam_constants, cuda_adam, device_adam
from hytrain.kernels.moment_codes import part_of
from hytrain.kernels.moments import EightBit, Moment, Rounding
from hytrain.kernels.rounded_runs import RoundedRuns, Run

HYPERS = [
    AdamHyper(lr=1e-3, weight_decay=0.1, step=7),
    AdamHyper(lr=1e-2, weight_decay=0.1, step=1, decoupled_decay=False, bias_correction=False),
]
SCALE = 0.37


def make(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """p, m, v and a gradient."""
    generator = torch.Generator().manual_seed(n)
    p, m, g = (torch.randn(n, generator=generator) for _ in range(3))
    v = torch.rand(n, generator=generator) * 0.01
    return [p, m * 0.1, v, g.to(dtype)]


def reference_device_adam(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    outcome: torch.Tensor,
    hyper: AdamHyper,
) -> None:
    """The slow twin of device_adam, in plain torch operations on any device."""
    if float(outcome[1]) != 0.0:
        return
    c = adam_constants(hyper)
    g = gradient.float() * outcome[0] + c["l2"] * p
    m.lerp_(g, c["one_minus_beta1"])
    v.mul_(c["beta2"]).addcmul_(g, g, value=c["one_minus_beta2"])
    denominator = v.sqrt().mul_(c["inv_sqrt_correction2"]).add_(c["eps"])
    p.mul_(c["decay"]).addcdiv_(m, denominator, value=c["neg_step_size"])
    weights.copy_(p)


def step(
    function: object, tensors: list[torch.Tensor], hyper: AdamHyper, *, skip: float = 0.0
) -> list[torch.Tensor]:
    """p, m, v and the training copy after one step of ``function``."""
    p, m, v, g = (t.clone() for t in tensors)
    weights = torch.full_like(p, 7.0, dtype=torch.bfloat16)
    outcome = torch.tensor([SCALE, skip], device=p.device)
    assert callable(function)
    function(p, m, v, g, weights, outcome, hyper)
    return [p, m, v, weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hyper", HYPERS, ids=["adamw", "l2"])
def test_agrees_with_the_slow_twin(hyper: AdamHyper, dtype: torch.dtype) -> None:
    tensors = make(5003, dtype)
    ours = step(device_adam, tensors, hyper)
    theirs = step(reference_device_adam, tensors, hyper)
    for actual, expected, size in zip(ours[:3], theirs[:3], (1.0, 1.0, 0.01), strict=True):
        torch.testing.assert_close(actual, expected, rtol=4e-7, atol=4e-7 * size)
    assert torch.equal(ours[3], ours[0].to(torch.bfloat16))
    assert not torch.equal(ours[0], tensors[0])


@pytest.mark.parametrize("function", [device_adam, reference_device_adam])
def test_a_skipped_step_writes_nothing(function: object) -> None:
    tensors = make(100, torch.float32)
    p, m, v, weights = step(function, tensors, HYPERS[0], skip=1.0)
    for actual, expected in zip((p, m, v), tensors[:3], strict=True):
        assert torch.equal(actual, expected)
    assert bool((weights == 7.0).all())


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("n", [1, 1000, 2048, 100003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hyper", HYPERS, ids=["adamw", "l2"])
def test_gpu_is_bitwise_the_cpu_kernel(hyper: AdamHyper, dtype: torch.dtype, n: int) -> None:
    tensors = make(n, dtype)
    ours = step(device_adam, [t.cuda() for t in tensors], hyper)
    p, m, v, g = tensors
    weights = torch.empty(n, dtype=torch.bfloat16)
    scale = float(torch.tensor(SCALE))
    commit(p, m, v, Gradient(g, scale, hyper), out=weights)
    for actual, expected in zip(ours, (p, m, v, weights), strict=True):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("n", [1, 10, 5_000_003])
def test_gpu_norm(n: int) -> None:
    norm = GradientNorm(1, torch.device("cuda"), ClipSettings(1.0, True), lambda _tensor: None)
    gradient = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    norm.measure([0], [gradient])
    expected = float(gradient.double().square().sum())
    assert float(norm.sums[0]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.gpu
@NEEDS_CUDA
def test_gpu_norm_of_a_layer_does_not_depend_on_the_others() -> None:
    """A layer's sum is taken alone where it is updated on the CPU, with others on the GPU."""
    sizes = [1, 7, 65536, 65537, 5_000_003, 64, 12_845_056, *([1000] * 150)]
    norm = GradientNorm(
        len(sizes), torch.device("cuda"), ClipSettings(1.0, True), lambda _tensor: None
    )
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    gradients = [
        torch.randn(n, device="cuda").to(dtypes[i % 3 if i < 7 else 0]) for i, n in enumerate(sizes)
    ]
    gradients[1][3] = math.inf
    gradients[2][5] = math.nan
    norm.measure(range(len(sizes)), gradients)
    together = norm.sums.clone()
    norm.sums.zero_()
    for number, gradient in enumerate(gradients):
        norm.measure([number], [gradient])
    is_finite = torch.isfinite(together)
    assert is_finite.tolist() == [number not in (1, 2) for number in range(len(sizes))]
    assert torch.equal(together[is_finite], norm.sums[is_finite])
    assert torch.equal(is_finite, torch.isfinite(norm.sums))
    expected = gradients[6].double().square().sum()
    assert float(together[6]) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("check_overflow", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-30, 0.25, 3e5, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("unscale", [1.0, 1.0 / 3.0])
def test_the_decision(max_norm: float, check_overflow: bool, value: float, unscale: float) -> None:
    settings = ClipSettings(max_norm, check_overflow)
    norm = GradientNorm(2, torch.device("cpu"), settings, lambda _tensor: None)
    norm.measure([0, 1], [torch.tensor([value, 0.5]), torch.tensor([2.0])])
    norm.launch_decision(unscale)
    outcome = norm.read_decision()
    total = math.sqrt(value * value + 4.25) * unscale
    if math.isfinite(total):
        limited = min(1.0, max_norm / (total + 1e-6)) if max_norm else 1.0
        assert outcome.norm == pytest.approx(total, rel=1e-15)
        assert outcome.coefficient == pytest.approx(limited, rel=1e-14)
        assert outcome.scale == float(torch.tensor(outcome.coefficient * unscale).float())
        assert not outcome.skip
    else:
        assert outcome.skip == check_overflow
        assert outcome.coefficient == (0.0 if max_norm else 1.0)
    skipped = norm.outcome[1].item()
    assert skipped == float(outcome.skip)
    assert norm.outcome[0].item() == outcome.scale


def on_device(moment: Moment, device: str) -> Moment:
    if isinstance(moment, EightBit):
        return EightBit(*(tensor.to(device) for tensor in moment))
    return moment.to(device)


# The last one is cut within the run, where the upper half of the index changes.
FIRSTS = (0, 128, 2**32 - 192)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rounded_moments_on_a_cpu_are_the_cpu_kernel(kind: torch.dtype) -> None:
    case, twin = (make_rounded(1000, kind, torch.bfloat16) for _ in range(2))
    weights = torch.full_like(case.p, 7.0, dtype=torch.bfloat16)
    rounding = Rounding(1, 2, 64)
    scale = float(torch.tensor(SCALE))
    for skip in (1.0, 0.0):
        outcome = torch.tensor([SCALE, skip])
        device_adam(*case.state, case.current, weights, outcome, HYPERS[0], rounding)
        if skip:
            assert same_moment(case.m, twin.m)
            assert bool((weights == 7.0).all())
    commit(*twin.state, Gradient(twin.current, scale, HYPERS[0]), rounding=rounding)
    assert torch.equal(case.p, twin.p)
    assert same_moment(case.m, twin.m)
    assert same_moment(case.v, twin.v)


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("n", [1, 1000, 2048, 100003])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("hyper", HYPERS, ids=["adamw", "l2"])
def test_rounded_moments_on_a_gpu_are_bitwise_the_cpu_kernel(
    hyper: AdamHyper, first: int, kind: torch.dtype, n: int
) -> None:
    case = make_rounded(n, kind, torch.bfloat16)
    rounding = Rounding(1, 2, first)
    p, g = case.p.cuda(), case.current.cuda()
    m, v = (on_device(moment, "cuda") for moment in (case.m, case.v))
    weights = torch.empty(n, dtype=torch.bfloat16, device="cuda")
    device_adam(p, m, v, g, weights, torch.tensor([SCALE, 0.0]).cuda(), hyper, rounding)
    expected = torch.empty(n, dtype=torch.bfloat16)
    gradient = Gradient(case.current, float(torch.tensor(SCALE)), hyper)
    commit(*case.state, gradient, rounding=rounding, out=expected)
    assert torch.equal(p.cpu(), case.p)
    assert torch.equal(weights.cpu(), expected)
    assert same_moment(on_device(m, "cpu"), case.m)
    assert same_moment(on_device(v, "cpu"), case.v)


# Short and long runs, one that is cut where the upper half of its index changes, and a gap.
RUNS = RoundedRuns(
    [
        Run(0, 63, Rounding(1, 2, 0)),
        Run(64, 4200, Rounding(1, 3, 2**32 - 192)),
        Run(4224, 4225, Rounding(1, 4, 0)),
        Run(4288, 7000, Rounding(1, 2**64 - 1, 5 * 2**32 + 128)),
        Run(7040, 7100, Rounding(1, 6, 64)),
    ]
)


def _one_by_one(case: RoundedCase, weights: torch.Tensor, outcome: torch.Tensor) -> None:
    """What an update of all runs at once has to give."""
    for begin, end, rounding in RUNS.runs:
        part = case.part(begin, end)
        device_adam(*part.state, part.current, weights[begin:end], outcome, HYPERS[0], rounding)


def _same_runs(actual: RoundedCase, expected: RoundedCase) -> None:
    assert torch.equal(actual.p, expected.p)
    for begin, end, _ in RUNS.runs:
        for name in ("m", "v"):
            moments = (part_of(getattr(case, name), begin, end) for case in (actual, expected))
            assert same_moment(*moments)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("interpreter", marks=INTERPRETED),
        pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]),
    ],
)
def test_runs_of_several_parameters_are_updated_at_once(device: str, kind: torch.dtype) -> None:
    """Bitwise as one by one, by one launch on a GPU."""
    n, home = 7104, "cuda" if device == "cuda" else "cpu"
    actual, expected = (make_rounded(n, kind, torch.bfloat16) for _ in range(2))
    for case in (actual, expected):
        case.p, case.current = case.p.to(home), case.current.to(home)
        case.m, case.v = (on_device(moment, home) for moment in (case.m, case.v))
    weights, others = (torch.full((n,), 7.0, dtype=torch.bfloat16, device=home) for _ in range(2))
    update = cuda_adam if device == "interpreter" else device_adam
    for skip in (1.0, 0.0):
        outcome = torch.tensor([SCALE, skip], device=home)
        update(*actual.state, actual.current, weights, outcome, HYPERS[0], RUNS)
        if device == "interpreter":
            for begin, end, rounding in RUNS.runs:
                part = expected.part(begin, end)
                own = RoundedRuns([Run(0, end - begin, rounding)])
                update(*part.state, part.current, others[begin:end], outcome, HYPERS[0], own)
        else:
            _one_by_one(expected, others, outcome)
        assert torch.equal(weights, others)
        _same_runs(actual, expected)
    assert bool((weights[:63] != 7.0).any())
    assert bool((weights[7000:7040] == 7.0).all())


@INTERPRETED
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("first", FIRSTS)
def test_rounding_in_triton_is_the_reference(first: int, kind: torch.dtype) -> None:
    """The interpreter does not fuse, so its own fp32 step is what is rounded."""
    n = 5000
    hyper, rounding = HYPERS[0], Rounding(1, 2, first)
    case = make_rounded(n, kind, torch.bfloat16)
    case.current[70] = float("nan")
    p, (m, v), g = case.p.clone(), case.read(), case.current
    weights, expected = (torch.zeros(n, dtype=torch.bfloat16) for _ in range(2))
    outcome = torch.tensor([SCALE, 0.0])
    cuda_adam(*case.state, g, weights, outcome, hyper, rounding)
    cuda_adam(p, m.clone(), v.clone(), g, expected, outcome, hyper, None)
    m32, v32 = m.clone(), v.clone()
    cuda_adam(case.p.new_zeros(n), m32, v32, g, expected.clone(), outcome, hyper, None)
    stored = stored_moments(m32, v32, kind, rounding, hyper.step)
    assert torch.equal(case.p.nan_to_num(), p.nan_to_num())
    assert torch.equal(weights.nan_to_num(), expected.nan_to_num())
    assert same_moment(case.m, stored[0])
    assert same_moment(case.v, stored[1])
