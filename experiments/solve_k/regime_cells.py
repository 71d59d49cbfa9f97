"""The cells of regimes.py's grid, and what a cell's process trains: hytrain's engine and its rival.

The rival has a copy of the model and everything on the GPU: fp32 master weights and torch's fused
AdamW. It stays beside the engine if the device's memory holds both, so that they can be measured in
turns: steps of one host differ by 10 to 30 % within a minute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiments.common.records import Json
from experiments.common.sizes import MODELS

COMPILE_MODES = {"compiled": "default", "graphs": "reduce-overhead"}
"""A cell's word -> the mode of torch.compile; "graphs" are CUDA graphs."""
FORM = "MODEL/BATCHxTOKENS/CORES[/noclip][/compiled|/graphs[/whole]]"
_BATCHES = {
    "0.1B": ("4x512", "16x1024"),
    "0.37B": ("4x512", "16x1024"),
    "0.95B": ("2x512", "8x1024"),
    "2.7B": ("2x512", "8x1024"),
    "9.8B": ("2x512", "8x1024"),
}
_CORES = (16, 8, 4, 2)
_BYTES_OF_BOTH = 44
"""Most bytes a parameter: the rival has 20 (weight, gradient, master, moments, fp32 gradient), the
engine 18 with all its state on the GPU, and activations some."""


@dataclass(frozen=True)
class Cell:
    """What a process trains.

    Attributes:
        compile: the mode of torch.compile; None: not compiled.
        whole: whether the whole model is compiled; else each block is.
    """

    model: str
    batch: int
    tokens: int
    cores: int
    clips: bool
    compile: str | None = None
    whole: bool = False

    @staticmethod
    def of(text: str) -> Cell:
        """Parses a text of :data:`FORM`.

        Raises:
            SystemExit: the text has another form, or the model is unknown.
        """
        try:
            model, shape, cores, *words = text.split("/")
            batch, tokens = shape.split("x")
            modes = [COMPILE_MODES[word] for word in words if word in COMPILE_MODES]
            known = {"noclip", *COMPILE_MODES} | ({"whole"} if modes else set())
            if model not in MODELS or len(modes) > 1 or not set(words) <= known:
                raise ValueError
            clips, whole = "noclip" not in words, "whole" in words
            mode = modes[0] if modes else None
            return Cell(model, int(batch), int(tokens), int(cores), clips, mode, whole)
        except ValueError:
            raise SystemExit(
                f"--cells: {text!r} is not {FORM} with a model of {', '.join(MODELS)}"
            ) from None

    def job(self, device: str) -> Json:
        """The job that the cell's engine is built from.

        Every step is clipped, which costs the worker most, or none is. The gradient norm of a model
        that learns its batch by heart falls below 1e-3 within some fifty steps; gradients clipped
        to a norm of 1e-6 lie below Adam's epsilon, and the model does not learn.
        """
        return {
            **{"system": "hytrain", "gpu_fraction": "solve", "device": device},
            **{"model": self.model, "batch": self.batch, "seq": self.tokens},
            "clip": 1e-6 if self.clips else None,
        }


def grid() -> list[str]:
    """Every model with each batch and number of cores, half of them clipped: every pair of values
    of model, batch, cores and clipping occurs."""
    return [
        f"{model}/{batch}/{cores}" + ("/noclip" if (m + b + c) % 2 else "")
        for c, cores in enumerate(_CORES)
        for m, (model, batches) in enumerate(_BATCHES.items())
        for b, batch in enumerate(batches)
    ]


class Contest:
    """An engine and its rival, and seconds of their steps."""

    def __init__(self, cell: Cell, device: str) -> None:
        from experiments.common.model import build_batches

        self._cell = cell
        self._job = cell.job(device)
        self._model = self._make_model()
        self._batch = build_batches(self._job)[0]
        self.system: Any = None
        self._rival: Any = None
        self._waits = True

    def _make_model(self) -> Any:
        import torch

        from experiments.common.model import build_model

        model = build_model(self._job, torch.bfloat16)
        if self._cell.compile is not None:
            for module in [model] if self._cell.whole else model.model.layers:
                module.compile(mode=self._cell.compile)
        return model

    @property
    def engine(self) -> Any:
        """hytrain's engine, once it is started."""
        return self.system.engine

    @property
    def rival_fits(self) -> bool:
        """Whether the device holds the rival beside the engine with all its state there."""
        import torch

        if self._job["device"] != "cuda":
            return True
        needed = _BYTES_OF_BOTH * sum(p.numel() for p in self._model.parameters())
        return needed < torch.cuda.mem_get_info()[1]

    def start_rival(self) -> None:
        """Builds the rival; comes before the engine, which is told of the memory that is left."""
        from experiments.common.systems import AllGpu

        self._rival = AllGpu(self._make_model(), self._job["clip"])

    def start_engine(self) -> None:
        """Wraps the model in the engine."""
        from experiments.common.systems import HyTrain

        self.system = HyTrain(self._model, self._job)

    def compute(self, steps: int) -> list[float]:
        """Seconds of forward and backward alone; without a rival, only before the engine starts."""
        from experiments.common.systems import System

        bare = System(self._model if self._rival is None else self._rival.model)
        return self._timed(steps, lambda: bare.step([self._batch]))

    def all_gpu(self, steps: int) -> list[float]:
        """Seconds of whole steps of the rival."""
        return self._timed(steps, lambda: self._rival.step([self._batch]))

    def train(self, steps: int, seconds: float = math.inf) -> list[float]:
        """Seconds of whole steps of the engine; no step begins after `seconds` in all."""
        return self._timed(steps, lambda: self.system.step([self._batch]), seconds)

    def queued(self, run: Callable[[], object]) -> float:
        """Seconds of a run of steps of which only the last is waited for, as in training."""
        self._wait()
        self._waits = False
        try:
            begin = time.perf_counter()
            run()
            self._wait()
            return time.perf_counter() - begin
        finally:
            self._waits = True

    def queued_steps(self, steps: int) -> float:
        """Mean seconds of some steps of the engine, from decision to decision.

        One more step goes before: it waits for what is done between steps after a pause.
        """
        times: list[float] = []
        self._waits = False
        try:
            for _ in range(steps + 1):
                self.train(1)
                times.append(time.perf_counter())
        finally:
            self._waits = True
        self._wait()
        return (times[-1] - times[0]) / steps

    def close(self) -> None:
        """Closes the engine, and frees it, the model and the rival."""
        self.system.close()
        self.system = self._model = self._rival = None

    def _timed(
        self, steps: int, step: Callable[[], object], seconds: float = math.inf
    ) -> list[float]:
        times: list[float] = []
        while len(times) < steps and sum(times) < seconds:
            begin = time.perf_counter()
            step()
            if self._waits:
                self._wait()
            times.append(time.perf_counter() - begin)
        return times

    def _wait(self) -> None:
        from experiments.common.timing import synchronize

        synchronize(self._job["device"])
