"""Steps with and without a save beside them, in turns, in one process."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

from experiments.common.records import Json
from experiments.memory.case import Case
from hytrain.checkpoint import contents
from hytrain.checkpoint.async_save import AsyncSaver
from hytrain.checkpoint.copy_memory import CopyMemory
from hytrain.checkpoint.snapshot import LayerSnapshot, StateSnapshot
from hytrain.engine.checkpoints import EngineCheckpoints
from hytrain.optimizer.kept_state import KeptState

_ALONE = 12
"""Steps without a save, before and after each."""
_WARM = 3
_FEWEST = 8
"""Steps with a save beside them."""


def measure(case: Case, engine: Any) -> None:
    """Part "stall": some saves, with steps alone between them."""
    case.result["async"] = {
        "layers": engine.optimizer.placement.decisions[0].num_layers,
        "gpu_layers": engine.optimizer.placement.controller.num_gpu_layers,
        "saves": [],
    }
    alone = case.steps(engine, lambda done: done == _ALONE)[_WARM:]
    saves: list[Json] = case.result["async"]["saves"]
    for _ in range(case.job["saves"]):
        # What it took the last time, it takes again.
        if saves and case.left < 1.3 * saves[-1]["saved_seconds"] + 3.0:
            break
        # Under a tag of its own: removing what it would replace takes seconds.
        saves.append(_one_save(case, engine, alone, f"beside{len(saves)}"))
        alone = saves[-1].pop("after")
        case.say(_line(saves[-1]))
        case.keep()
        if not saves[-1]["ended_in_time"]:
            return  # the other parts wait for it


def _line(save: Json) -> str:
    state = "" if save["ended_in_time"] else ", its end was not waited for"
    return (
        f"a save beside training: step {1e3 * save['step_seconds']:.1f} ms, call "
        f"{1e3 * save['call_seconds']:.2f} ms ({_parts(save)}), "
        f"blocked {1e3 * save['blocked_seconds']:.2f} ms, "
        f"{save['saved_seconds']:.1f} s{state}"
    )


def _parts(save: Json) -> str:
    found = {"CPU time": save["call_cpu_seconds"], **save["call_parts"]}
    return ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in found.items())


def _one_save(case: Case, engine: Any, before: list[float], tag: str) -> Json:
    waits = _Waits()
    with _CallParts() as parts:
        begin, used = time.perf_counter(), time.thread_time()
        engine.save_checkpoint(str(case.folder), tag=tag)
        call, used = time.perf_counter() - begin, time.thread_time() - used
    saver = engine._saver
    limit = time.time() + min(case.job["async_seconds"], case.left / 2)
    during = case.steps(
        engine, lambda done: (done >= _FEWEST and not saver.is_running) or time.time() > limit
    )
    saved = time.perf_counter() - begin
    ended = not saver.is_running
    waits.undo()
    copying = during[: waits.copied_in(during)]
    writing = during[len(copying) :]
    after: list[float] = []
    if ended:
        engine.wait_for_checkpoint()
        after = case.steps(engine, lambda done: done == _ALONE)[_WARM:]
    usual = statistics.median([*before, *after])
    return {
        "step_seconds": usual,
        "before": statistics.median(before),
        "after": after,
        "call_seconds": call,
        "call_cpu_seconds": used,
        "call_parts": parts.seconds,
        "copy_seconds": waits.copy_seconds,
        "without_room_bytes": waits.without,
        "blocked_seconds": waits.blocked,
        "stall_of_a_step": (call + waits.blocked) / usual,
        "copying_steps": len(copying),
        "extra_while_copying": call + sum(copying) - usual * len(copying),
        "writing_steps": len(writing),
        "step_while_writing": statistics.median(writing) if writing else None,
        "saved_seconds": saved,
        "ended_in_time": ended,
        "first_steps": [round(seconds, 4) for seconds in during[:12]],
    }


_PARTS: dict[str, tuple[Any, str]] = {
    "earlier save": (AsyncSaver, "wait"),
    "steps that are not final": (KeptState, "begin_reading"),
    "generators": (contents, "random_state"),
    "module and client": (EngineCheckpoints, "_model_states"),
    "memory for copies": (CopyMemory, "fit"),
    "layers held": (LayerSnapshot, "__init__"),
    "copies begun": (LayerSnapshot, "begin"),
    "thread woken": (AsyncSaver, "_begin"),
}


class _CallParts:
    """What a save's call takes its time for, in the thread that calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> _CallParts:
        caller = threading.get_ident()
        for part, (owner, name) in _PARTS.items():
            self._before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(part, getattr(owner, name), caller))
        return self

    def _timed(self, part: str, real: Any, caller: int) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return real(*arguments, **named)
            finally:
                if threading.get_ident() == caller:
                    spent = time.perf_counter() - begin
                    self.seconds[part] = self.seconds.get(part, 0.0) + spent

        return timed

    def __exit__(self, *_error: object) -> None:
        for owner, name, real in self._before:
            setattr(owner, name, real)


class _Waits:
    """How long training waited for the copy of a layer, and how long copies took."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self.copy_seconds = 0.0
        self.without = 0
        self._wait, self._take = LayerSnapshot.wait, StateSnapshot.take
        LayerSnapshot.wait = self._timed_wait()
        StateSnapshot.take = self._timed_take()

    def _timed_wait(self) -> Any:
        wait = self._wait

        def timed(snapshot: LayerSnapshot) -> None:
            begin = time.perf_counter()
            wait(snapshot)
            self.blocked += time.perf_counter() - begin

        return timed

    def _timed_take(self) -> Any:
        take = self._take

        def timed(snapshot: StateSnapshot, *arguments: Any) -> int:
            begin = time.perf_counter()
            self.without = take(snapshot, *arguments)
            self.copy_seconds = time.perf_counter() - begin
            return self.without

        return timed

    def copied_in(self, steps: list[float]) -> int:
        """In how many of the steps the copies were made."""
        spent, number = 0.0, 0
        while number < len(steps) and spent < self.copy_seconds:
            spent += steps[number]
            number += 1
        return min(number + 1, len(steps))

    def undo(self) -> None:
        """The methods are as they were."""
        LayerSnapshot.wait, StateSnapshot.take = self._wait, self._take
