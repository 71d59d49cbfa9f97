"""What one rank measures before a plan is made: passes, memory, rates, collectives."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch

from experiments.offload_step.model import Batch
from experiments.offload_step.records import Json
from hytrain.parallel.collectives import ShardCollectives
from hytrain.profile.step_timer import Clock

COPY_BYTES = 256 * 2**20
REPEATS = 5


class Passes:
    """Forward and backward of the bare model on torch's current stream."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._clock = Clock(device)
        self._seen: Json = {}

    def once(self, batch: Batch, *, fresh: bool) -> tuple[float, float]:
        """Seconds of forward and of backward; waits for them.

        Args:
            batch: the micro-batch.
            fresh: gradients are written, as in a step's first micro-batch; else added.
        """
        if fresh:
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


def passes_of_size(passes: Passes, batch: Batch) -> Json:
    """A micro-batch's passes: gradients written, and added to.

    The first pass is for warming up.
    """
    passes.once(batch, fresh=True)
    first = passes.once(batch, fresh=True)
    further = passes.once(batch, fresh=False)
    again = passes.once(batch, fresh=True)
    return {
        "forward": statistics.median([first[0], further[0], again[0]]),
        "backward": min(first[1], again[1]),
        "accumulation": max(0.0, further[1] - min(first[1], again[1])),
    }


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def copy_rate(device: torch.device) -> float:
    """Bytes a second to the host; where there is no GPU, a number that limits nothing."""
    if device.type != "cuda":
        return 1e12
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    return COPY_BYTES / _median_seconds(lambda: here.copy_(there, non_blocking=True), device)


def collectives(
    shards: ShardCollectives, layer_elements: int, dtype: torch.dtype, device: torch.device
) -> Json:
    """Seconds of a layer's collectives against its bytes, and what unequal shards cost."""
    found: Json = {"all_gather": [], "reduce_scatter": [], "uneven_factor": 1.0}
    ranks = shards.world_size
    if ranks == 1:
        size = float(layer_elements * dtype.itemsize)
        return {**found, "all_gather": [(size, 0.0)], "reduce_scatter": [(size, 0.0)]}
    whole = layer_elements // (64 * ranks) * 64 * ranks
    for elements in (max(whole // 4 // ranks, 1) * ranks, whole):
        flat = torch.zeros(elements, dtype=dtype, device=device)
        even = [elements // ranks] * ranks
        size = float(elements * dtype.itemsize)
        gather = _median_seconds(lambda f=flat, e=even: shards.all_gather(f, e), device)
        scatter = _median_seconds(lambda f=flat, e=even: shards.reduce_scatter(f, e), device)
        found["all_gather"].append((size, gather))
        found["reduce_scatter"].append((size, scatter))
    # Half as much for the first rank as for the others.
    unit = whole // (2 * ranks - 1) // 64 * 64
    uneven = [unit, *[2 * unit] * (ranks - 1)]
    flat = torch.zeros(sum(uneven), dtype=dtype, device=device)
    seconds = _median_seconds(lambda: shards.all_gather(flat, uneven), device)
    seconds += _median_seconds(lambda: shards.reduce_scatter(flat, uneven), device)
    found["uneven_factor"] = max(1.0, seconds / (gather + scatter))
    return found
