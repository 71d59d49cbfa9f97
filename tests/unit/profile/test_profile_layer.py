"""A block's times are those of the clock, its memory that of counting by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from paced_model import PacedModel, paced_build, profile_layer
from torch import nn

from hytrain.errors import ConfigError
from hytrain.model.partition import align_up
from hytrain.tools.profiler import layer_bench, layer_profile
from hytrain.tools.profiler.block_hooks import BEGIN, END, LOSS
from hytrain.tools.profiler.layer_profile import (
    LayerProfile,
    LayerProfiling,
    widest_middle,
)
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch, has_events=False)


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_bench, "_MOST_PASSES", 6)
    # No gap is filled, but where a test is about that.
    monkeypatch.setattr(layer_profile, "_FILLED_UP_TO", 1)
    monkeypatch.setattr(layer_profile, "_WIDEST_GAP", float("inf"))


def subject_of(build: Callable[..., Any]) -> MeasuredModel:
    return MeasuredModel("paced", build, seq_len=4, dtype=torch.float32)


def profiled(build: Callable[..., Any], *sizes: int, seconds: float = 60.0) -> LayerProfile:
    options = ProfileOptions(micro_batches=sizes or None, seconds=seconds)
    return profile_layer(subject_of(build), CPU, options)


# ---- times ----


def test_times_are_those_of_the_clock(clock: FakeDevice) -> None:
    found = profiled(paced_build(clock, lambda n: 3.0 + n, lambda n: 5.0 * n), 1, 4)
    assert [row.samples for row in found.layer] == [1, 4]
    for row, around in zip(found.layer, found.outside, strict=True):
        forward, backward = 3.0 + row.samples, 5.0 * row.samples
        assert row.forward_ms == pytest.approx(1e3 * forward)
        assert row.backward_ms == pytest.approx(1e3 * backward)
        assert row.recompute_backward_ms == pytest.approx(1e3 * (forward + backward))
        assert around.forward_ms == pytest.approx(4e3)
        assert around.backward_ms == pytest.approx(6e3)


def test_blocks_of_two_kinds_are_averaged(clock: FakeDevice) -> None:
    ordinary = paced_build(clock, lambda n: 1.0, lambda n: 2.0)

    def build(num_layers: int | None, seq_len: int) -> Any:
        model, make_batch = ordinary(num_layers, seq_len)
        for block in model.blocks[::2]:
            block.arguments = (clock, lambda n: 3.0, lambda n: 6.0)
        return model, make_batch

    row = profiled(build, 1).layer[0]
    assert row.forward_ms == pytest.approx(2e3)
    assert row.backward_ms == pytest.approx(4e3)
    assert row.recompute_backward_ms == pytest.approx(6e3)


def test_the_first_pass_and_outliers_do_not_count(clock: FakeDevice) -> None:
    calls = 0

    def forward(n: int) -> float:
        nonlocal calls
        calls += 1
        # Five calls a pass: four passes before those that are timed, and the first of these.
        return 50.0 if calls <= 25 or calls == 40 else 1.0

    row = profiled(paced_build(clock, forward, lambda n: 1.0), 2).layer[0]
    assert row.forward_ms == pytest.approx(1e3)
    # The second visit has a first pass of its own, which does not count either.
    assert calls == 5 * (4 + 1 + 6) + 5 * (1 + 6)


@pytest.mark.parametrize(
    ("pace", "last"),
    [(lambda n: float(n), 8), (lambda n: float(max(n, 4)), 16), (lambda n: 1.0, 16)],
    ids=["no gain", "gain up to 4", "always gains: a CPU's limit"],
)
def test_sizes_end_where_nothing_is_gained(
    clock: FakeDevice, pace: Callable[[int], float], last: int
) -> None:
    found = profiled(paced_build(clock, pace, pace), seconds=120.0)
    assert found.layer[-1].samples == last


def test_gaps_between_doublings_are_filled_the_relatively_widest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_profile, "_FILLED_UP_TO", 16)
    monkeypatch.setattr(layer_profile, "_WIDEST_GAP", 1.5)
    sizes = [1, 2, 4, 8, 16, 32, 48]
    found: list[int] = []
    while (size := widest_middle(sizes)) is not None:
        found.append(size)
        sizes.append(size)
    assert found[:4] == [3, 6, 12, 24]
    assert sorted(sizes) == [*range(1, 17), 24, 32, 48]


def test_a_second_visit_counts_as_much_as_the_first(clock: FakeDevice) -> None:
    calls = 0

    def forward(n: int) -> float:
        nonlocal calls
        calls += 1
        return 2.0 if calls <= 5 * (4 + 1 + 6) else 1.0

    row = profiled(paced_build(clock, forward, lambda n: 1.0), 2).layer[0]
    assert row.forward_ms == pytest.approx(1.5e3)


@pytest.mark.parametrize(("seconds", "turns"), [(60.0, 40), (1e-9, 1)])
def test_launches_that_may_be_waited_for_are_timed_in_many_turns(
    clock: FakeDevice, monkeypatch: pytest.MonkeyPatch, seconds: float, turns: int
) -> None:
    """In half of them launching takes twice as long; all count but the slowest tenth."""
    seen: list[int] = []

    def launches(_bench: object, batch: Any, taken: float = 0.0) -> list[Any]:
        size = len(batch["x"])
        if taken != layer_bench._SLICE_SECONDS:  # a visit's
            return [(turn, _evenly(1e4 / size)) for turn in (1, 2)]
        seen.append(size)
        return [(turn, _evenly(2e4 if seen.count(size) % 2 else 1e4)) for turn in (1, 2)]

    monkeypatch.setattr(layer_bench.LayerBench, "_launches", launches)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _cycles: None)
    found = profiled(paced_build(clock, lambda _: 2.0, lambda _: 3.0), 1, 2, 40, seconds=seconds)
    rows = found.layer
    assert seen == [1, 2] * turns
    visits = 2 if turns > 1 else 1
    every = sorted(visits * [1e4] + [2e4, 1e4] * (turns // 2) + [2e4] * (turns % 2))
    usual = every[: len(every) - len(every) // 10]
    assert rows[0].launch_ms == pytest.approx(2 * sum(usual) / len(usual))
    assert found.outside[0].launch_ms == pytest.approx(2 * rows[0].launch_ms)
    assert rows[2].launch_ms == pytest.approx(2 * 1e4 / 40)
    assert found.launch_spread == pytest.approx(1.0 if turns > 1 else 0.0)


def test_turns_are_shared_among_pauses(clock: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as any other launches; a size without room is left out from then on."""
    seen: list[int] = []

    def launches(_bench: object, batch: Any, taken: float = 0.0) -> list[Any]:
        size = len(batch["x"])
        if taken == layer_bench._SLICE_SECONDS:
            seen.append(size)
            if size == 2 and seen.count(2) == 3:
                raise torch.cuda.OutOfMemoryError("full")
        return [(turn, _evenly(1e4 if len(seen) < 9 else 3e4)) for turn in (1, 2)]

    monkeypatch.setattr(layer_bench.LayerBench, "_launches", launches)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _cycles: None)
    subject = subject_of(paced_build(clock, lambda _: 2.0, lambda _: 3.0))
    with LayerProfiling(subject, CPU, ProfileOptions(micro_batches=(1, 2))) as layers:
        layers.measure()
        assert seen == []
        before = layers.result().layer[0].launch_ms
        assert layers.result().launch_spread is None
        layers.launch_again(pauses=20)
        assert layers.result().launch_spread == 0.0
        assert seen == [1, 2] * 2
        layers.launch_again(pauses=13)
        assert seen == [1, 2] * 3 + [1] * 3
        after = layers.result().layer[0].launch_ms
        assert layers.result().launch_spread == pytest.approx(2.0)
    assert before == pytest.approx(2e4)
    # Two visits and six turns, the last of which takes three times as long.
    assert after == pytest.approx(2e4 * (7 + 3) / 8)


def _evenly(each: float) -> dict[Any, float]:
    """A pass whose points follow on each other after as many milliseconds each."""
    order: list[Any] = [BEGIN]
    order += [(kind, block) for block in range(3) for kind in ("enter", "leave")]
    order += [LOSS, *(("gradient", block) for block in (2, 1, 0, -1)), END]
    return {point: number * each for number, point in enumerate(order)}


# ---- memory ----


@pytest.mark.parametrize("size", [1, 6], ids=["weights dominate", "activations dominate"])
def test_a_linear_blocks_memory_is_counted_exactly(clock: FakeDevice, size: int) -> None:
    width = 8
    found = profiled(paced_build(clock, lambda n: 1.0, lambda n: 1.0), size)
    activation, weights = 4 * size * width, 4 * (width * width + width)
    flat = 4 * (align_up(width * width) + align_up(width))
    assert found.boundary_bytes == 4 * width
    row = found.layer[0]
    assert row.kept_bytes == 2 * activation  # the linear's output, and its copy
    # First the output's gradient (the copy is gone), the input's (so is the linear's output) and
    # the weights'; then the input's in the input's place, the weights' and their flat copy.
    assert row.peak_bytes == max(2 * activation + weights, weights + flat)
    # Recomputation makes the linear's output anew, and drops the copy at once.
    assert row.peak_bytes <= row.recompute_peak_bytes <= row.peak_bytes + activation


# ---- limits ----


def _out_of_memory_above(most: int, clock: FakeDevice) -> Callable[..., Any]:
    def forward(size: int) -> float:
        if size > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nand more")
        return 1.0

    return paced_build(clock, forward, lambda n: 1.0)


def test_a_size_that_does_not_fit_is_the_end(clock: FakeDevice) -> None:
    found = profiled(_out_of_memory_above(4, clock), 1, 2, 4, 8, 16)
    assert [row.samples for row in found.layer] == [1, 2, 4]
    assert found.boundary_bytes == 4 * 8


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 11])
def test_what_fits_is_found_where_twice_does_not(
    clock: FakeDevice, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(layer_profile, "_FILLED_UP_TO", 16)
    found = profiled(_out_of_memory_above(most, clock), seconds=600.0)
    sizes = list(range(1, most + 1))
    assert [row.samples for row in found.layer] == [row.samples for row in found.outside] == sizes


def test_not_even_one_sample_fits(clock: FakeDevice) -> None:
    with pytest.raises(ConfigError, match=r"not even the smallest micro-batch fits.*--seq-len"):
        profiled(_out_of_memory_above(0, clock))


def test_three_layers_do_not_fit() -> None:
    def build(num_layers: int | None, seq_len: int) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(ConfigError, match=r"3 of its layers .* do not fit on cpu"):
        profiled(build, 1)


def test_the_time_is_up_after_two_sizes(clock: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_profile.time, "monotonic", iter(range(0, 10**6, 100)).__next__)
    found = profiled(paced_build(clock, lambda n: 1.0, lambda n: 1.0), seconds=9.0)
    assert [row.samples for row in found.layer] == [1, 2]


@pytest.mark.parametrize("sizes", [(), (2, 1), (1, 1), (0, 1)])
def test_sizes_must_ascend(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="--micro-batches"):
        ProfileOptions(micro_batches=sizes)


# ---- models that cannot be followed ----


def build_of(kind: type[PacedModel], clock: FakeDevice) -> Callable[..., Any]:
    def build(num_layers: int | None, seq_len: int) -> Any:
        model = kind(clock, num_layers or 5, (lambda n: 1.0, lambda n: 2.0))
        return model, lambda size: {"x": torch.ones(size, 8)}

    return build


class _Twice(PacedModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](super().forward(x) * x)).sum()


class _Skips(PacedModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](self.before(x))).sum()


class _Detached(PacedModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).detach()
        return self.head(x).sum()


class _NoLoss(PacedModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (_Twice, "block 0 is called more than once"),
        (_Skips, r"blocks \[1, 2\] were not called"),
        (_Detached, r"blocks \[0, 1, 2\] were not called, or no gradient came back"),
        (_NoLoss, "returns a Tensor without a loss"),
    ],
)
def test_a_model_that_cannot_be_followed_is_refused(
    clock: FakeDevice, kind: type[PacedModel], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        profiled(build_of(kind, clock), 2)


class _NoEmbedding(PacedModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def test_a_first_block_whose_input_needs_no_gradient(clock: FakeDevice) -> None:
    found = profiled(build_of(_NoEmbedding, clock), 1)
    assert found.layer[0].backward_ms == pytest.approx(2e3)
    assert found.outside[0].forward_ms == pytest.approx(3e3)
    assert found.outside[0].backward_ms == pytest.approx(4e3)
    flat = 4 * (align_up(8 * 8) + align_up(8))
    # Head: output, sum, their gradients; the linear's flat gradient. No block's backward is in it.
    assert found.outside[0].peak_bytes <= 4 * (8 * 8 + 8) + flat + 4 * 4 * 8


def test_blocks_are_as_they_were(clock: FakeDevice) -> None:
    seen: list[nn.Module] = []
    ordinary = paced_build(clock, lambda n: 1.0, lambda n: 1.0)

    def build(num_layers: int | None, seq_len: int) -> Any:
        model, make_batch = ordinary(num_layers, seq_len)
        seen.append(model)
        return model, make_batch

    profiled(build, 1)
    for module in seen[0].modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in seen[0].parameters():
        assert parameter.grad is None
        assert not parameter._post_accumulate_grad_hooks
