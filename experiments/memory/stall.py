"""Steps with and without a save beside them, in turns, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.common.records import Json
from experiments.common.timing import Stepper
from experiments.common.worker import Recorder
from hytrain.checkpoint.snapshot import LayerSnapshot, StateSnapshot

_ALONE, _WARM = 12, 3
"""Steps without a save, before and after each save; how many of the first do not count."""
_FEWEST = 8
"""Least number of steps with a save beside them."""
_MOST_SECONDS = 30.0
"""Limit of the steps beside a save that does not end."""


def measure(stepper: Stepper, recorder: Recorder, folder: Path, saves: int) -> None:
    """Measures some saves, with steps alone between them."""
    before = _steps(stepper, lambda done: done == _ALONE)[_WARM:]
    for number in range(saves):
        # Under a tag of its own: removing what it would replace takes seconds.
        before, save = _one_save(stepper, recorder, folder, before, f"beside{number}")
        recorder.append("saves", save)
        recorder.reached(f"save {number}")
        if not save["ended"]:
            return


def _steps(stepper: Stepper, is_done: Callable[[int], bool]) -> list[float]:
    """Seconds of steps, from one return of ``step`` to the next."""
    times: list[float] = []
    last = time.perf_counter()
    while not is_done(len(times)):
        stepper.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


def _one_save(
    stepper: Stepper, recorder: Recorder, folder: Path, before: list[float], tag: str
) -> tuple[list[float], Json]:
    engine = stepper.system.engine
    with _Waits() as waits:
        begin = time.perf_counter()
        engine.save_checkpoint(str(folder), tag=tag)
        call = time.perf_counter() - begin
        saver = engine._saver
        limit = time.time() + min(_MOST_SECONDS, recorder.seconds_left() / 2)
        during = _steps(
            stepper,
            lambda done: (done >= _FEWEST and not saver.is_running) or time.time() > limit,
        )
        saved = time.perf_counter() - begin
        ended = not saver.is_running
    after: list[float] = []
    if ended:
        engine.wait_for_checkpoint()
        after = _steps(stepper, lambda done: done == _ALONE)[_WARM:]
    usual = statistics.median([*before, *after])
    copying = waits.copied_in(during)
    writing = during[len(copying) :]
    return after, {
        **{"step_ms": 1e3 * usual, "call_ms": 1e3 * call, "blocked_ms": 1e3 * waits.blocked},
        **{"copying_s": waits.copying, "saved_s": saved, "ended": ended},
        "slower_by_steps": (call + sum(copying)) / usual - len(copying),
        "step_while_writing_ms": 1e3 * statistics.median(writing) if writing else None,
    }


class _Waits:
    """Measures how long training waited for copies of layers, and how long all copies took."""

    def __enter__(self) -> _Waits:
        self.blocked = self.copying = 0.0
        self._methods = LayerSnapshot.wait, StateSnapshot.take
        LayerSnapshot.wait = self._timed(LayerSnapshot.wait, "blocked")
        StateSnapshot.take = self._timed(StateSnapshot.take, "copying")
        return self

    def _timed(self, method: Any, name: str) -> Any:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            found = method(*arguments)
            setattr(self, name, getattr(self, name) + time.perf_counter() - begin)
            return found

        return timed

    def copied_in(self, steps: list[float]) -> list[float]:
        """The steps beside which the copies were made."""
        spent, number = 0.0, 0
        while number < len(steps) and spent < self.copying:
            spent += steps[number]
            number += 1
        return steps[: number + 1]

    def __exit__(self, *_error: object) -> None:
        LayerSnapshot.wait, StateSnapshot.take = self._methods
