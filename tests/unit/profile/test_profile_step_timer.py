"""Marks become samples: what is counted to which layer, and which steps give no sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice

from hytrain.placement.step_timer import StepSample, StepTimer

FORWARD = (1.0, 2.0, 4.0)
BACKWARD = (8.0, 16.0, 32.0)
L = len(FORWARD)


class Life:
    """Steps of a model of three layers on a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.timer = StepTimer(L, device.device)

    def forward(
        self,
        forward: Sequence[float] = FORWARD,
        cpu_waits: Mapping[int, float] | None = None,
        gpu_waits: Mapping[int, float] | None = None,
        before_layers: float = 0.0,
        repeats: int = 1,
    ) -> None:
        timer, device = self.timer, self.device
        timer.begin_forward()
        timer.begin_forward()  # by the engine and by the model's hook
        device.passes(before_layers)
        for index, seconds in enumerate(forward):
            for waits, on_cpu in ((cpu_waits, True), (gpu_waits, False)):
                if waits and index in waits:
                    timer.wait_begins(index, on_cpu=on_cpu)
                    device.passes(waits[index])
                    timer.wait_ends(index)
            for _ in range(repeats):
                timer.enter(index)
                device.passes(seconds / repeats)
        timer.end_forward()

    def backward(self, backward: Sequence[float] = BACKWARD) -> None:
        self.timer.begin_backward()
        for index in reversed(range(L)):
            self.device.passes(backward[index])
            self.timer.gradient(index)

    def step(
        self,
        updates: Mapping[int, float] | None = None,
        tail: float = 0.0,
        *,
        measure_next: bool = True,
    ) -> None:
        self.timer.end_backward()
        self.timer.updates_begin()
        for index, seconds in (updates or {}).items():
            self.device.passes(seconds)
            self.timer.layers_updated({index: 1})
        self.device.passes(tail)
        self.timer.end_step(measure_next=measure_next)

    def whole(self, *, measure_next: bool = True, **forward: Any) -> None:
        self.forward(**forward)
        self.device.passes(0.25)
        self.backward()
        self.step(tail=0.5, measure_next=measure_next)

    def evaluation(self, seconds: float = 1000.0) -> None:
        with torch.no_grad():
            self.forward([seconds / L] * L)

    def samples(self) -> list[StepSample]:
        """All, closed by the begin of a forward."""
        self.timer.begin_forward()
        return self.take()

    def take(self) -> list[StepSample]:
        """All; whether the host was behind is for a test of its own."""
        return [replace(sample, launch_bound=False) for sample in self.timer.take()]


ORDINARY = StepSample(
    forward=list(FORWARD),
    cpu_wait=0.0,
    gpu_wait=0.0,
    between=0.25,
    backward=list(BACKWARD),
    tail=0.5,
    gpu_update={},
    seconds=sum(FORWARD) + 0.25 + sum(BACKWARD) + 0.5,
)


@pytest.fixture(params=["cpu", "events"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch, has_events=request.param == "events")


@pytest.fixture
def life(device: FakeDevice) -> Life:
    return Life(device)


def test_every_second_belongs_to_somebody(life: Life) -> None:
    life.forward(cpu_waits={1: 64.0, 2: 128.0}, gpu_waits={0: 256.0}, before_layers=0.125)
    life.device.passes(0.25)
    life.backward()
    life.step(tail=0.5)
    (sample,) = life.samples()
    assert sample.forward == [1.125, 2.0, 4.0]  # what comes before any layer is the first's
    assert sample.cpu_wait == 192.0
    assert sample.gpu_wait == 256.0
    assert sample.backward == list(BACKWARD)
    parts = [*sample.forward, sample.cpu_wait, sample.gpu_wait, sample.between, *sample.backward]
    assert sample.seconds == sum(parts) + sample.tail
    assert sample.between == 0.25
    assert sample.tail == 0.5


def test_a_layer_is_entered_once_whatever_its_modules_say(life: Life) -> None:
    life.whole(repeats=4)
    assert life.samples() == [ORDINARY]


def test_updates_on_the_device(life: Life) -> None:
    life.forward()
    life.device.passes(0.25)
    life.backward()
    life.step(updates={0: 64.0, 1: 128.0}, tail=0.5)
    (sample,) = life.samples()
    assert sample.gpu_update == {0: 64.0, 1: 128.0}
    # A CPU makes them in between; a GPU beside, here in a time that the compute stream waited.
    assert sample.tail == (192.5 if life.device.device.type == "cuda" else 0.5)


def test_steps_follow_one_another(life: Life) -> None:
    for _ in range(3):
        life.whole()
        assert len(life.samples()) == 1
        life.timer.invalidate()  # that was a forward of one mark
        life.timer.end_step()
    life.whole()
    life.whole()
    assert life.take() == [ORDINARY]  # the second one has not ended
    assert life.samples() == [ORDINARY]


def test_only_the_first_forward_and_the_last_backward_of_an_accumulated_step(life: Life) -> None:
    life.forward()
    life.device.passes(1000.0)  # the first micro-batch's backward is not announced
    life.forward([100.0] * L)
    life.device.passes(0.25)
    life.backward()
    life.step(tail=0.5)
    (sample,) = life.samples()
    assert sample.forward == list(FORWARD)
    assert sample.backward == list(BACKWARD)
    assert sample.between == 1300.25
    assert sample.seconds == ORDINARY.seconds + 1300.0


@pytest.mark.parametrize("times", [1, 3])
def test_an_evaluation_between_steps(life: Life, times: int) -> None:
    life.whole()
    for _ in range(times):
        life.evaluation()
    life.whole()
    life.whole()
    # The step before ends where the evaluation begins; the one after found all weights there.
    assert life.samples() == [ORDINARY, ORDINARY]
    assert life.timer.take() == []


def test_an_evaluation_before_an_unmeasured_step(life: Life) -> None:
    life.whole(measure_next=False)
    life.evaluation()
    life.whole(measure_next=True)
    life.whole()
    assert life.samples() == [ORDINARY, ORDINARY]


def test_an_evaluation_between_backward_and_step(life: Life) -> None:
    life.whole()
    life.forward()
    life.backward()
    life.evaluation()
    life.step()
    life.whole()
    assert life.samples() == [ORDINARY, ORDINARY]


def test_a_repeated_backward_gives_no_sample(life: Life) -> None:
    life.forward()
    life.backward()
    life.backward()
    life.step()
    life.whole()
    assert life.samples() == [ORDINARY]


def test_an_aborted_forward_gives_no_sample(life: Life) -> None:
    life.whole()
    life.timer.begin_forward()
    life.timer.enter(0)
    life.device.passes(1000.0)  # and an exception
    life.whole()
    life.whole()
    assert life.samples() == [ORDINARY, ORDINARY]


def test_an_invalidated_step_gives_no_sample(life: Life) -> None:
    life.forward()
    life.timer.invalidate()
    life.backward()
    life.step()
    life.whole()
    assert life.samples() == [ORDINARY]


@pytest.mark.parametrize("indices", [[2, 1], [2, 1, 1], [2, 1, 0, 0], []])
def test_a_step_without_every_gradient_gives_no_sample(life: Life, indices: list[int]) -> None:
    life.forward()
    life.timer.begin_backward()
    for index in indices:
        life.timer.gradient(index)
    life.step()
    life.whole()
    assert life.samples() == [ORDINARY]


def test_steps_that_are_left_out(life: Life) -> None:
    life.whole(measure_next=False)
    for _ in range(3):
        life.whole(measure_next=False)
    life.whole(measure_next=True)
    life.whole(measure_next=False)
    life.whole(measure_next=True)
    assert life.samples() == [ORDINARY, ORDINARY]


@pytest.mark.parametrize("measured", [True, False])
def test_the_step_before_one_without_a_forward_has_no_end(life: Life, measured: bool) -> None:
    life.whole(measure_next=measured)
    life.device.passes(1000.0)
    life.step()  # this rank had no batch
    life.whole()
    assert life.samples() == [ORDINARY]


def test_nothing_is_read_before_the_device_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, has_events=True)
    life = Life(device)
    life.forward()
    life.device.passes(0.25)
    life.backward()
    device.has_come_to = device.now - 1.0
    life.step(tail=0.5)
    assert life.samples() == []
    device.has_come_to = device.now
    assert life.take() == [ORDINARY]


@pytest.mark.parametrize("behind", [True, False])
def test_a_device_that_has_caught_up_waited_for_the_host(
    monkeypatch: pytest.MonkeyPatch, *, behind: bool
) -> None:
    device = FakeDevice(monkeypatch, has_events=True)
    life = Life(device)
    life.forward()
    life.timer.begin_backward()
    for index in reversed(range(L)):
        # Launching takes the host no time; the device is still at the layer before the last, or
        # it has nothing left to do each time that the host comes with more.
        device.has_come_to = device.now - 1.0 if behind else device.now
        device.passes(BACKWARD[index])
        life.timer.gradient(index)
    device.has_come_to = device.now
    life.step(tail=0.5)
    device.has_come_to = device.now
    life.timer.begin_forward()
    (sample,) = life.timer.take()
    assert sample.launch_bound is not behind


def test_a_device_that_has_caught_up_while_the_host_waited_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait is of the step in which it was, and of no other."""
    device = FakeDevice(monkeypatch, has_events=True)
    life = Life(device)
    for waits in (True, False):
        life.forward()
        life.timer.begin_backward()
        for index in reversed(range(L)):
            device.has_come_to = device.now
            device.passes(BACKWARD[index])
            if waits and index == 0:
                with life.timer.host_waits():
                    device.passes(7.0)
            life.timer.gradient(index)
        device.has_come_to = device.now
        life.step(tail=0.5)
    device.has_come_to = device.now
    life.timer.begin_forward()
    samples = life.timer.take()
    assert [sample.launch_bound for sample in samples] == [False, True]
    # A wait for the worker is no part of a layer's backward.
    assert samples[0].backward == samples[1].backward
    assert samples[0].seconds == pytest.approx(samples[1].seconds + 7.0)


def test_updates_in_one_launch_share_their_time_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, has_events=True)
    life = Life(device)
    life.forward()
    life.backward()
    life.timer.end_backward()
    life.timer.updates_begin()
    for sizes, seconds in (({0: 300, 1: 100}, 8.0), ({2: 50}, 1.0)):
        device.passes(seconds)
        life.timer.layers_updated(sizes)
    life.timer.end_step()
    (sample,) = life.samples()
    assert sample.gpu_update == {0: 6.0, 1: 2.0, 2: 1.0}


def test_an_update_that_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, has_events=True)
    life = Life(device)
    life.forward()
    life.backward()
    life.timer.end_backward()
    life.timer.updates_begin()
    after = device.now
    device.now = after + 100.0  # on the update stream, beside the next forward
    life.timer.layers_updated({0: 1})
    device.now = after + 0.5
    life.timer.end_step()
    device.has_come_to = after + 50.0
    assert life.samples() == []
    device.has_come_to = after + 100.0
    (sample,) = life.timer.take()
    assert sample.gpu_update == {0: 100.0}
    assert sample.tail == 0.5


def test_a_device_that_never_comes_costs_a_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, has_events=True)
    life = Life(device)
    device.has_come_to = -1.0
    for _ in range(100):
        life.whole()
        assert life.timer.take() == []
    assert len(life.timer._done) == StepTimer.MAX_OPEN
