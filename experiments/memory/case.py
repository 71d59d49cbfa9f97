"""A model, its engine and its steps, with a deadline and a result that is kept as it grows."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

import hytrain
from experiments.common.model import build_batches, build_model
from experiments.common.records import Json, Workload, write_json
from experiments.common.systems.base import OPTIMIZER


class Case:
    """What the parts of a process share: its job, its result, engines and steps."""

    def __init__(self, job: Json, path: Path, progress: TextIO) -> None:
        """
        Args:
            job: see ``run.py``.
            path: of the result, rewritten with every figure.
            progress: a line for whatever begins or ends.
        """
        self.job = job
        self.is_cuda = job["device"] == "cuda"
        self.folder = Path(job["folder"])
        self.result: Json = {"status": "begun", "left_out": []}
        self._path, self._progress = path, progress
        self._batches: list[dict[str, torch.Tensor]] = []
        self._done = 0

    # -- time and result ---------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """Seconds until the process is ended."""
        return self.job["deadline"] - time.time()

    def say(self, text: str) -> None:
        """A line of progress, with the seconds since the command began."""
        seconds = time.time() - self.job["begun"]
        self._progress.write(f"[{seconds:6.1f} s] {self.job['name']}: {text}\n")
        self._progress.flush()

    def keep(self) -> None:
        """Writes the result as it is."""
        write_json(self._path, self.result)

    def part(self, name: str, run: Callable[[], None], least: float = 5.0) -> None:
        """Runs a part, unless there are fewer seconds left than it needs."""
        if self.left < least:
            line = f"{name}: {self.left:.0f} s left, {least:.0f} needed"
            self.result["left_out"].append(line)
            self.say(f"left out: {line}")
        else:
            self.say(f"{name} begins")
            begin = time.monotonic()
            run()
            self.say(f"{name} ended after {time.monotonic() - begin:.1f} s")
        self.keep()

    # -- engines and steps -------------------------------------------------------------------------

    def model(self, name: str) -> torch.nn.Module:
        """A model with random weights; steps are on its batches from now on."""
        workload = Workload(
            model=name,
            batch=self.job["batch"],
            seq=self.job["seq"],
            device=self.job["device"],
        )
        self._batches = build_batches(workload)
        return build_model(workload, torch.bfloat16)

    def build(self, model: torch.nn.Module) -> Any:
        """Its engine. Saves are asynchronous; see :meth:`save_now`."""
        config: Json = {
            "train_micro_batch_size_per_gpu": self.job["batch"],
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": self.job["stage"],
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
            "optimizer": copy.deepcopy(OPTIMIZER),
            "steps_per_print": 10**9,
            "hytrain": {
                "gpu_fraction": self.job["gpu_fraction"],
                "checkpoint": {"async": True},
            },
        }
        engine, *_ = hytrain.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        return engine

    def batch(self) -> dict[str, torch.Tensor]:
        """The next one."""
        self._done += 1
        return self._batches[self._done % len(self._batches)]

    def step(self, engine: Any) -> None:
        """Forward, backward and step; nothing is waited for."""
        engine.backward(engine(**self.batch(), use_cache=False).loss)
        engine.step()

    def steps(self, engine: Any, is_done: Callable[[int], bool]) -> list[float]:
        """Seconds of steps, from one return of ``step`` to the next."""
        times: list[float] = []
        last = time.perf_counter()
        while not is_done(len(times)):
            self.step(engine)
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return times

    def save_now(self, engine: Any) -> None:
        """A synchronous save, by an engine that saves beside training elsewhere."""
        saver, engine._saver = engine._saver, None
        try:
            engine.save_checkpoint(str(self.folder), tag="now")
        finally:
            engine._saver = saver

    def synchronize(self) -> None:
        """Waits for the GPU, where there is one."""
        if self.is_cuda:
            torch.cuda.synchronize()


def said(engine: Any) -> Json:
    """What the engine says of each phase's memory."""
    return {name: asdict(peak) for name, peak in engine.memory_peaks().items()}
