"""Forward and backward of a bare model, timed one by one, and where backward runs."""

from __future__ import annotations

import contextlib
import gc
import statistics
import threading
import time
from collections.abc import Generator

import torch

from experiments.common.model import Batch
from experiments.common.records import Json
from hytrain.placement.step_timer import Clock

REPEATS = 2


class Passes:
    """Forward and backward of the bare model on torch's current stream."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._clock = Clock(device)
        self._seen: Json = {}

    def once(self, batch: Batch) -> tuple[float, float]:
        """Seconds of forward and of backward of a micro-batch; waits for them."""
        self.drop_gradients()
        marks = [self._clock.mark()]
        loss = self._model(**batch).loss
        loss.register_hook(self._note_backward)
        marks.append(self._clock.mark())
        loss.backward()
        marks.append(self._clock.mark())
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        forward, backward = (
            self._clock.seconds(marks[0], marks[1]),
            self._clock.seconds(marks[1], marks[2]),
        )
        return forward, backward

    def drop_gradients(self) -> None:
        """As before a step."""
        for parameter in self._model.parameters():
            parameter.grad = None

    def _note_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._seen["thread"] = threading.get_ident()
        if self._device.type == "cuda":
            self._seen["stream"] = torch.cuda.current_stream(self._device).cuda_stream
        return gradient

    def where_backward_ran(self) -> Json:
        """Whether it was another thread than this one, and on which stream (None on a CPU)."""
        return {
            "other_thread": self._seen.get("thread") != threading.get_ident(),
            "stream": self._seen.get("stream"),
        }


@contextlib.contextmanager
def collector_pauses() -> Generator[list[float]]:
    """Seconds of each pass of Python's garbage collector in the block: all ranks wait for one.

    A full one takes some tenths of a second in a process that has imported all that these have.
    """
    pauses: list[float] = []
    begin = time.perf_counter()

    def note(phase: str, _info: object) -> None:
        nonlocal begin
        if phase == "start":
            begin = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - begin)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def passes_of_size(passes: Passes, batch: Batch) -> Json:
    """Medians of a micro-batch's passes, after one for warming up."""
    passes.once(batch)
    timed = [passes.once(batch) for _ in range(REPEATS)]
    return {
        "forward": statistics.median(forward for forward, _ in timed),
        "backward": statistics.median(backward for _, backward in timed),
    }
