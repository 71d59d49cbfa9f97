"""What launching takes of the host: at which points it is read, and beside updates on the CPU."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fake_device import FakeDevice
from paced_model import paced_build

from hytrain.tools.profiler import copies, layer_bench
from hytrain.tools.profiler.block_hooks import BEGIN, END, LOSS, Point
from hytrain.tools.profiler.layer_bench import LayerBench
from hytrain.tools.profiler.layer_samples import DEPTH, Allocated, Pass, SizeMeasurements
from hytrain.tools.profiler.measured_model import MeasuredModel

CPU = torch.device("cpu")


def _points(forward: float, backward: float, outside: float) -> Pass[float]:
    """Of a pass through three blocks; what is outside of them takes ``outside`` four times."""
    now = outside
    points: dict[Point, float] = {BEGIN: 0.0}
    for block in range(3):
        points["enter", block] = now
        now += forward
        points["leave", block] = now
    now += outside
    points[LOSS] = now
    now += outside
    for block in range(2, -1, -1):
        points["gradient", block] = now
        now += backward
    points["gradient", -1] = now
    points[END] = now + outside
    return points


MEMORY: dict[int, Pass[Allocated]] = {
    turn: {p: Allocated(0, 0) for p in _points(1.0, 1.0, 1.0)} for turn in (1, 2)
}


def test_a_row_has_the_hosts_time_beside_the_devices() -> None:
    times = [(turn, _points(3.0, 5.0, 1.0)) for turn in (1, 2)]
    launches = [(turn, _points(2.0, 4.0, 0.5)) for turn in (1, 2)]
    layer, outside = SizeMeasurements(times, MEMORY, launches).row(4)
    assert (layer.forward_ms, layer.backward_ms, layer.launch_ms) == (3.0, 5.0, 6.0)
    assert outside.launch_ms == pytest.approx(2.0)
    assert not layer.is_launch_bound
    assert layer.model_copy(update={"launch_ms": 7.5}).is_launch_bound
    assert layer.device_ms is None is outside.device_ms
    layer, outside = SizeMeasurements(times, MEMORY).row(4)
    assert layer.launch_ms is None is outside.launch_ms
    assert not layer.is_launch_bound


def test_a_row_has_what_the_device_needs_by_itself() -> None:
    times = [(turn, _points(3.0, 5.0, 1.0)) for turn in (1, 2)]
    queued = [(turn, _points(forward, 1.5, 0.25)) for forward in (0.5, 1.0, 9.0) for turn in (1, 2)]
    layer, outside = SizeMeasurements(times, MEMORY, times, queued).row(4)
    assert layer.device_ms == pytest.approx(1.0 + 1.5)
    assert outside.device_ms == pytest.approx(4 * 0.25)
    assert layer.forward_ms == 3.0


@pytest.mark.parametrize(("share", "is_bound"), [(0.6, False), (0.8, True)])
def test_a_size_is_launch_bound_before_its_passes_take_longer(share: float, is_bound: bool) -> None:
    times = [(turn, _points(3.0, 5.0, 1.0)) for turn in (1, 2)]
    launches = [(turn, _points(3.0 * share, 5.0 * share, share)) for turn in (1, 2)]
    assert SizeMeasurements(times, {}, launches).may_be_launch_bound == is_bound
    assert not SizeMeasurements(times, {}).may_be_launch_bound  # without a GPU


@pytest.mark.parametrize(("seconds", "passes"), [(0.0, 6), (100.0, 12), (1e6, 40)])
def test_passes_are_launched_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch, seconds: float, passes: int
) -> None:
    clock = FakeDevice(monkeypatch, has_events=False)
    monkeypatch.setattr(layer_bench, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(layer_bench, "_SLICE_SECONDS", seconds)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    # A pass takes 10 s outside of its blocks, which take no time.
    build = paced_build(clock, lambda size: 0.0, lambda size: 0.0)
    subject = MeasuredModel("paced", build, seq_len=4, dtype=torch.float32)
    bench = LayerBench(subject, subject.copy(DEPTH, CPU), CPU)
    with bench.recomputing():
        found = bench.measure(1, 60.0)
        assert found.launches == []  # a host that computes launches nothing
        bench.launch_again(1, found)
        assert found.launches == found.turns == []
        bench._is_cuda = True
        before = clock.now
        assert bench.launch_seconds(1) == pytest.approx(10.0)
    bench.close()
    assert clock.now - before == pytest.approx(10.0 * passes)


def test_what_a_pass_takes_counts_slow_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside updates a third of the launches may be slow: in a median they would not be seen."""
    build = paced_build(FakeDevice(monkeypatch, has_events=False), lambda _: 0.0, lambda _: 0.0)
    subject = MeasuredModel("paced", build, seq_len=4, dtype=torch.float32)
    bench = LayerBench(subject, subject.copy(DEPTH, CPU), CPU)
    each = [1e3] * 14 + [4e3] * 7  # milliseconds
    passes = [(1, {BEGIN: 0.0, END: taken}) for taken in each]
    monkeypatch.setattr(bench, "_launches", lambda _batch, _seconds: passes)
    assert bench.launch_seconds(1) == pytest.approx((14 * 1.0 + 5 * 4.0) / 19)
    bench.close()


def test_what_the_device_needs_is_measured_while_it_has_all_of_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sleeps in the first block, for twice as long as launching takes; blocks 1 and 2 count."""
    clock = FakeDevice(monkeypatch, has_events=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    slept: list[tuple[int, float]] = []

    def sleep(cycles: int) -> None:
        slept.append((cycles, clock.now))
        clock.now += 100.0

    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    subject = MeasuredModel("paced", paced_build(clock, lambda _: 2.0, lambda _: 3.0), seq_len=4)
    bench = LayerBench(subject, subject.copy(DEPTH, CPU), CPU)
    launches = [(turn, {BEGIN: 0.0, END: 7.0}) for turn in (1, 2)]
    with bench.recomputing():
        monkeypatch.setattr(bench, "_launches", lambda _batch: launches)
        found = bench.measure(1, 0.0)
        assert not slept
        assert not found.queued  # launching takes next to nothing of the pass
        launches = [(turn, {BEGIN: 0.0, END: 1e5}) for turn in (1, 2)]  # milliseconds
        found = bench.measure(1, 0.0)
        assert [cycles for cycles, _ in slept] == [int(2 * 100.0 * 3e9)] * 6
        assert sorted(turn for turn, _ in found.queued) == [1] * 3 + [2] * 3
        for turn, points in found.queued:
            between = points["leave", turn] - points["enter", turn]
            between += points["gradient", turn - 1] - points["gradient", turn]
            assert between == pytest.approx(5e3)
            assert points["leave", 0] - points["enter", 0] == pytest.approx(102e3)
            assert points["enter", 0] - points[BEGIN] == pytest.approx(1e3)
        bench.measure_again(1, found)
        assert len(slept) == len(found.queued) == 12
    bench.close()


class _Updates:
    """Counts them."""

    def __init__(self) -> None:
        self.number = 0
        self.is_updating = threading.Event()

    def __call__(self) -> None:
        self.number += 1
        self.is_updating.set()
        time.sleep(1e-4)


def test_the_slowdown_is_of_launching_beside_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    update, calls = _Updates(), 0

    def launch() -> float:
        nonlocal calls
        calls += 1
        if calls % 2:
            return 2.0
        update.is_updating.clear()
        assert update.is_updating.wait(60.0)  # they go on all the time
        return 3.0

    assert copies.measure_slowdown(launch, update) == 1.5
    number = update.number
    time.sleep(0.01)
    assert update.number == number
    # A host that was faster beside updates than alone is one that drifts.
    monkeypatch.setattr(copies, "_TURNS", 1)
    assert copies.measure_slowdown(iter([2.0, 1.0]).__next__, update) == 1.0


def test_the_slowdown_of_a_host_that_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_TURNS", 3)
    times = iter([2.0, 2.4, 3.0, 3.9, 2.5, 3.5])  # alone, beside updates
    assert copies.measure_slowdown(times.__next__, _Updates()) == pytest.approx(1.3)


def test_a_stall_is_no_slow_turn() -> None:
    assert copies.spread([2.0, 3.0, 2.5]) == pytest.approx(0.5)
    assert copies.spread([2.0, 1.0, *[2.5] * 6, 3.0, 9.0]) == pytest.approx(0.5)
    assert copies.spread([2.0]) == 0.0
