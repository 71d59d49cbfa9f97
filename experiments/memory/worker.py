"""One case: memory said and measured, phases, saves beside training.

    python -m experiments.memory.worker JOB.json RESULT.json

RESULT.json is rewritten after every part, so that what was measured outlives the time limit.
"""

from __future__ import annotations

import copy
import gc
import logging
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import hytrain
from experiments.common.memory import host_memory
from experiments.common.model import build_batches, build_model
from experiments.common.processes import end
from experiments.common.records import Json, Workload, read_json, write_json
from experiments.common.systems.base import OPTIMIZER
from experiments.memory.meters import PhaseMeter, PinnedBytes, disk_rates, forget_cached
from hytrain.checkpoint.snapshot import LayerSnapshot, StateSnapshot

_SMALL = "llama-100m"


class Case:
    """A process's work; each part may be left out where its time is up."""

    def __init__(self, job: Json, path: Path) -> None:
        self._job, self._path = job, path
        self._end = time.monotonic() + job["seconds"]
        self._cuda = job["device"] == "cuda"
        self._pinned = PinnedBytes()
        self._folder = Path(job["folder"])
        self.result: Json = {"status": "begun", "left_out": []}
        self._batches: list[dict[str, torch.Tensor]] = []
        self._done = 0

    def run(self) -> None:
        """All parts that the job names."""
        parts: dict[str, Callable[[], None]] = {
            "cycles": self._cycles,
            "contract": self._contract,
            "async": self._async,
        }
        self._warm_up()
        for name in self._job["parts"]:
            self._note(name, parts[name], 8.0)
        self.result["status"] = "ok"
        self._write()

    def _note(self, name: str, part: Callable[[], None], least: float) -> None:
        left = self._end - time.monotonic()
        if left < least:
            self.result["left_out"].append(f"{name}: {left:.0f} s left, {least:.0f} needed")
        else:
            part()
            print(f"{name} done, {self._end - time.monotonic():.0f} s left", flush=True)
        self._write()

    def _write(self) -> None:
        write_json(self._path, self.result)

    # -- engines and steps -------------------------------------------------------------------------

    def _config(self, **section: Any) -> Json:
        config: Json = {
            "train_micro_batch_size_per_gpu": self._job["batch"],
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": self._job["stage"],
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
            "optimizer": copy.deepcopy(OPTIMIZER),
            "steps_per_print": 10**9,
            "hytrain": {"gpu_fraction": self._job["gpu_fraction"], **section},
        }
        return config

    def _model(self, name: str) -> torch.nn.Module:
        workload = Workload(
            model=name,
            batch=self._job["batch"],
            seq=self._job["seq"],
            device=self._job["device"],
        )
        self._batches = build_batches(workload)
        return build_model(workload, torch.bfloat16)

    def _build(self, model: torch.nn.Module, **section: Any) -> Any:
        engine, *_ = hytrain.initialize(
            model=model, model_parameters=list(model.parameters()), config=self._config(**section)
        )
        return engine

    def _step(self, engine: Any) -> None:
        batch = self._batches[self._done % len(self._batches)]
        self._done += 1
        engine.backward(engine(**batch, use_cache=False).loss)
        engine.step()

    def _evaluate(self, engine: Any) -> None:
        engine.eval()
        with torch.no_grad():
            engine(**self._batches[0], use_cache=False)
        engine.train()

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _warm_up(self) -> None:
        """Libraries, allocators and threads get what they take once from a small engine."""
        engine = self._build(self._model(self._job["small"]))
        for _ in range(3):
            self._step(engine)
        engine.save_checkpoint(str(self._folder), tag="small")
        engine.load_checkpoint(str(self._folder), tag="small")
        engine.destroy()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- states that leave and come back -----------------------------------------------------------

    def _cycles(self) -> None:
        """200 cycles of a small model; then times at this size beside one copy's."""
        engine = self._build(self._model(self._job["small"]))
        for _ in range(3):
            self._step(engine)
        seen: list[tuple[int, int]] = []
        for number in range(self._job["cycles"]):
            engine.offload_states(include=[None, ["optim_states"], ["lp_params"]][number % 3])
            engine.reload_states()
            if number in (19, self._job["cycles"] - 1):
                gc.collect()
                gpu = torch.cuda.memory_allocated() if self._cuda else 0
                seen.append((host_memory().rss_bytes, gpu))
        self._step(engine)
        engine.destroy()
        del engine
        found: Json = {
            "cycles": self._job["cycles"],
            "rss_growth_bytes": seen[-1][0] - seen[0][0],
            "gpu_growth_bytes": seen[-1][1] - seen[0][1],
        }
        self.result["cycles"] = found
        if self._cuda:
            engine = self._build(self._model(self._job["model"]), gpu_fraction=0.5)
            for _ in range(2):
                self._step(engine)
            found.update(self._timed_cycles(engine))
            engine.destroy()

    def _timed_cycles(self, engine: Any) -> Json:
        engine.synchronize()
        gc.collect()
        # They are no part of the engine.
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
        torch.cuda.empty_cache()
        full = torch.cuda.memory_allocated()
        seconds: dict[str, list[float]] = {"offload": [], "reload": []}
        left = full
        freeing: list[float] = []
        free = torch.cuda.empty_cache

        def timed_free() -> None:
            begin = time.perf_counter()
            free()
            freeing.append(time.perf_counter() - begin)

        torch.cuda.empty_cache = timed_free
        for _ in range(9):
            for name, call in (
                ("offload", engine.offload_states),
                ("reload", engine.reload_states),
            ):
                self._synchronize()
                begin = time.perf_counter()
                call()
                self._synchronize()
                seconds[name].append(time.perf_counter() - begin)
                left = torch.cuda.memory_allocated() if name == "offload" else left
        torch.cuda.empty_cache = free
        moved = full - left
        copies = _copy_rates(moved)
        found: Json = {"full_bytes": full, "left_bytes": left}
        found["freeing_seconds"] = statistics.median(freeing[1:])
        found["seconds"] = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        for name, times in seconds.items():
            # The first pins memory.
            rate = moved / statistics.median(times[1:])
            found[name] = {"rate": rate, "copy_rate": copies[name], "share": rate / copies[name]}
        return found

    # -- the contract ------------------------------------------------------------------------------

    def _contract(self) -> None:
        model = self._model(self._job["model"])
        self._synchronize()
        gc.collect()
        meter = PhaseMeter(self._job["device"], self._pinned)
        held: list[Any] = []
        meter.measure("build", lambda: held.append(self._build(model)))
        engine = held[0]
        parameters = sum(
            slot.numel for layer in engine.optimizer.weights.layers for slot in layer.slots
        )
        found: Json = {"parameters": parameters, "measured": meter.peaks}
        self.result["contract"] = found
        found["said_at_build"] = _peaks(engine)

        def steps() -> None:
            for _ in range(6):
                self._step(engine)
            engine.synchronize()

        meter.measure("step", steps)
        meter.measure("evaluation", lambda: self._evaluate(engine))
        found["said"] = _peaks(engine)
        self._write()
        seconds = float(self._job["least_seconds"]["save"])
        self._note("save and load", lambda: self._save_and_load(engine, meter), seconds)
        engine.destroy()

    def _save_and_load(self, engine: Any, meter: PhaseMeter) -> None:
        seconds = meter.measure(
            "save", lambda: engine.save_checkpoint(str(self._folder), tag="one")
        )
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        sizes = [path.stat().st_size for path in files]
        rates: Json = {"files": len(files), "bytes": sum(sizes), "save": sum(sizes) / seconds}
        self.result["rates"] = rates
        self._write()
        forget_cached(files)
        rates["load"] = sum(sizes) / meter.measure(
            "load", lambda: engine.load_checkpoint(str(self._folder), tag="one")
        )
        shutil.rmtree(self._folder)
        rates["disk"] = disk_rates(self._folder.with_name("disk"), sizes, self._job["probe_bytes"])

    # -- saves beside training ---------------------------------------------------------------------

    def _async(self) -> None:
        engine = self._build(
            self._model(self._job["model"]), gpu_fraction="solve", checkpoint={"async": True}
        )
        self.result["async"] = {}
        try:
            for _ in range(self._job["solve_steps"]):
                self._step(engine)
            for name in self._job["async_fractions"]:

                def part(name: str = name) -> None:
                    if name != "solve":
                        engine.set_gpu_fraction(float(name))
                    self.result["async"][name] = self._one_async_save(engine)

                self._note(f"async {name}", part, float(self._job["least_seconds"]["save"]))
        finally:
            engine.destroy()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _one_async_save(self, engine: Any) -> Json:
        waits = _Waits()
        before = self._timed_steps(engine, lambda done: done == 16)[4:]
        usual = statistics.median(before)
        begin = time.perf_counter()
        engine.save_checkpoint(str(self._folder), tag="beside")
        call = time.perf_counter() - begin
        saver = engine._saver
        # Until it is written, at least eight steps, at most a given time.
        limit = time.monotonic() + self._job["async_seconds"]
        during = self._timed_steps(
            engine,
            lambda done: (done >= 8 and not saver.is_running) or time.monotonic() > limit,
        )
        saved = time.perf_counter() - begin
        ended = not saver.is_running
        engine.wait_for_checkpoint()
        waits.undo()
        after = self._timed_steps(engine, lambda done: done == 12)[2:]
        copying = during[: waits.copied_in(during)]
        writing = during[len(copying) :]
        usual = statistics.median([*before, *after])
        found: Json = {
            "layers": engine.optimizer.placement.decisions[0].num_layers,
            "gpu_layers": engine.optimizer.placement.controller.num_gpu_layers,
            "step_seconds": usual,
            "before": statistics.median(before),
            "after": statistics.median(after),
            "call_seconds": call,
            "copy_seconds": waits.copy_seconds,
            "without_room_bytes": waits.without,
            "blocked_seconds": waits.blocked,
            "copying_steps": len(copying),
            "extra_while_copying": sum(copying) - usual * len(copying),
            "writing_steps": len(writing),
            "step_while_writing": statistics.median(writing) if writing else None,
            "extra_while_writing": sum(writing) - usual * len(writing),
            "saved_seconds": saved,
            "ended_in_time": ended,
            "first_steps": [round(t, 4) for t in during[:12]],
        }
        found["stall_of_a_step"] = (call + found["extra_while_copying"]) / usual
        shutil.rmtree(self._folder, ignore_errors=True)
        return found

    def _timed_steps(self, engine: Any, is_done: Callable[[int], bool]) -> list[float]:
        """Seconds of steps, from one return of ``step`` to the next: nothing is waited for."""
        times: list[float] = []
        last = time.perf_counter()
        while not is_done(len(times)):
            self._step(engine)
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return times


class _Waits:
    """How long training waited for the copy of a layer, and how long copies took."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self.copy_seconds = 0.0
        self.without = 0
        self._begin = time.perf_counter()
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


def _peaks(engine: Any) -> Json:
    return {name: asdict(peak) for name, peak in engine.memory_peaks().items()}


def _copy_rates(num_bytes: int) -> Json:
    """Bytes a second of one pinned copy each way, the median of five."""
    here = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    rates: Json = {}
    for name, (to, source) in {"offload": (host, here), "reload": (here, host)}.items():
        times: list[float] = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        rates[name] = num_bytes / statistics.median(times)
    return rates


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    logging.basicConfig(level=logging.INFO)
    job, path = read_json(Path(arguments[0])), Path(arguments[1])
    case = Case(job, path)
    try:
        case.run()
    except Exception as error:
        # The process boundary: the table says what went wrong, beside what was measured before.
        traceback.print_exc()
        case.result["status"] = f"{type(error).__name__}: {error}"[:500]
        write_json(path, case.result)
        return 1
    return 0


if __name__ == "__main__":
    end(main(sys.argv[1:]))
