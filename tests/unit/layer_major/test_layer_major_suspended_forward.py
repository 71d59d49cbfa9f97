"""Forwards that stand still at blocks: hand-overs, a thread's settings, ends that come early."""

from __future__ import annotations

import contextvars
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hytrain.layer_major.block_calls import BlockCalls
from hytrain.layer_major.suspended_forward import BlockCall, Finished, SuspendedForward
from hytrain.optimizer.randomness import MicroBatchRandomness

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")


class Adding(nn.Module):
    def forward(self, x: Any, by: int = 1) -> Any:
        return x + by


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(3))
        self.other = Adding()

    def forward(self, x: int) -> int:
        for block in self.blocks:
            x = block(self.other(x), by=10)
        return x


def calls_of(model: Model) -> BlockCalls:
    return BlockCalls(list(model.blocks), ["0", "1", "2"])


def test_several_forwards_take_turns() -> None:
    model = Model()
    running: list[int] = []

    def watch(_module: object, _args: object) -> None:
        running.append(1)
        time.sleep(0.002)
        assert sum(running) == 1, "two threads at once"
        running.pop()

    model.other.register_forward_pre_hook(watch)
    forwards = [SuspendedForward(lambda n=n: model(n), CPU, f"{n}") for n in (0, 100)]
    with calls_of(model).stopping() as blocks:
        events = [forward.advance() for forward in forwards]
        for index in range(3):
            for number, forward in enumerate(forwards):
                call = events[number]
                assert isinstance(call, BlockCall)
                assert call.index == index
                events[number] = forward.advance(blocks[index](*call.args, **call.kwargs))
    assert [e.output for e in events if isinstance(e, Finished)] == [33, 133]
    assert "__call__" not in vars(Adding)
    assert model(0) == 33


def test_calls_from_elsewhere_are_what_they_were() -> None:
    model = Model()
    with calls_of(model).stopping() as blocks:
        assert model(0) == 33, "not in a suspended forward"
        assert blocks[0](1) == 2
        assert Adding()(1) == 2


def test_a_class_with_a_call_of_its_own_gets_it_back() -> None:
    class Doubling(Adding):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().__call__(*args, **kwargs)

    own = vars(Doubling)["__call__"]
    block = Doubling()
    with BlockCalls([block], ["a"]).stopping() as blocks:
        assert blocks[0](1) == 4
    assert vars(Doubling)["__call__"] is own


def test_a_threads_settings_are_taken_along() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    found: dict[str, Any] = {}

    def forward() -> None:
        found["grad"] = torch.is_grad_enabled()
        found["autocast"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        found["device"] = torch.get_default_device()
        found["variable"] = variable.get()

    variable.set(7)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
        SuspendedForward(forward, CPU, "a").advance()
    assert found == {
        "grad": False,
        "autocast": (True, torch.float16),
        "device": torch.device("meta"),
        "variable": 7,
    }


def test_an_error_of_the_forward_is_raised_at_the_hand_over() -> None:
    def fail() -> None:
        raise KeyError("mine")

    forward = SuspendedForward(fail, CPU, "a")
    with pytest.raises(KeyError, match="mine"):
        forward.advance()
    forward.cancel()


def test_an_error_that_nobody_keeps_is_freed_with_all_frames_at_once() -> None:
    """A cycle would keep the frames' tensors until the collector runs."""

    class Mine(Exception): ...

    def fail() -> None:
        raise Mine

    gc.disable()
    try:
        try:
            SuspendedForward(fail, CPU, "a").advance()
        except Mine as error:
            gone = weakref.ref(error)
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_leaves_no_hooks_of_checkpoints_to_other_threads() -> None:
    """Torch before 2.13 takes them back when the exception is freed, in whichever thread."""

    def fail(x: torch.Tensor) -> None:
        raise KeyError(float(x))

    def forward() -> None:
        try:
            checkpoint(fail, torch.ones(1), use_reentrant=False)
        except KeyError as error:
            kept.append(error)
            raise

    def top() -> object:
        return torch._C._autograd._top_saved_tensors_default_hooks(True)

    kept: list[KeyError] = []
    seen: list[str] = []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda x: x):
        mine = top()
        with pytest.raises(KeyError):
            SuspendedForward(forward, CPU, "a").advance()
        kept.clear()
        gc.collect()
        assert top() == mine
    assert top() is None


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_cancelled_forward_leaves_its_contexts_and_ends(stubborn: bool) -> None:
    model = Model()
    left: list[str] = []

    def run() -> None:
        try:
            model.blocks[0](1)
        finally:
            left.append("first")
            if stubborn:
                model.blocks[1](1)

    before = threading.active_count()
    with calls_of(model).stopping():
        forward = SuspendedForward(run, CPU, "a")
        assert isinstance(forward.advance(), BlockCall)
        forward.cancel()
        forward.cancel()
    assert left == ["first"]
    assert threading.active_count() == before


def test_streams_of_random_numbers_do_not_depend_on_the_order() -> None:
    def draw(order: list[int]) -> tuple[dict[int, list[float]], float]:
        torch.manual_seed(3)
        found: dict[int, list[float]] = {0: [], 1: []}
        with MicroBatchRandomness(2, CPU) as randomness:
            for number in order:
                randomness.choose(number)
                found[number].append(float(torch.rand(())))
        return found, float(torch.rand(()))

    first = draw([0, 0, 0, 1, 1, 1])
    assert first == draw([0, 1, 0, 1, 1, 0])
    assert len({*first[0][0], *first[0][1], first[1]}) == 7


def test_a_stream_can_be_gone_back_to_and_begun_anew() -> None:
    with MicroBatchRandomness(2, CPU) as randomness:
        randomness.choose(0)
        first = float(torch.rand(()))
        state = randomness.state()
        second = float(torch.rand(()))
        randomness.choose(1)
        torch.rand(5)
        randomness.replay(state)
        assert float(torch.rand(())) == second
        randomness.restart()
        randomness.choose(0)
        assert float(torch.rand(())) == first
