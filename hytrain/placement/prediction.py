"""How long a step will take for every number of GPU layers: a walk through the pipeline.

What is walked is the time from the begin of one backward pass to the begin of the next:

- GPU: backward of layers L-1..0, then ``tail``, then the updates of the first K layers (their
  kernels take all of the GPU, so they are simply serial), then forward of layers 0..L-1, each of
  which waits for its own weights, then ``between``.
- Worker: one thread. Among the jobs whose gradient is final it takes the lowest layer; where none
  is, it waits for the next gradient to become final. A job begins when the layer's first chunk is
  on the host and takes the largest of the kernel, the copy in and the copy out, which run side by
  side chunk by chunk. The weights are there when the last chunk has been copied back.
- The decision on clipping falls at the end of ``tail``, late by the part of ``tail`` that is the
  user's own code. In a clipped step, a layer whose job begins before it is only committed
  (``cpu_commit``) and is previewed by a second job (``cpu_preview``) after it; a layer whose job
  begins later is done in one (``cpu_update``). Both kinds then compete: lowest layer first.

One such walk *is* the steady state. Every layer's forward waits for that layer's weights, so when
a forward pass has ended, the worker has nothing left to do: nothing but the GPU's own position is
carried from one backward's begin to the next, and a step's length depends on nothing that
happened before. That is also why the steps of a run that clips now and then take, on average, the
mean of a clipped and an unclipped step.

A prediction is not monotone in the worker's times: a job that ends a little later may find another
gradient there, of a layer that forward needs earlier, or fall behind the decision and need no
second job. On transformers it is a matter of a second pass of one layer at most.

:func:`predict` walks all candidates at once; its slow twin is
``tests/unit/placement/prediction_twin.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hytrain.errors import PlacementError
from hytrain.placement.costs import StepCosts

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.intp]
_Bools = npt.NDArray[np.bool_]

HOST_BOUND_SHARE = 0.02
"""Compute that stands still for more than this share of the step makes the step host-bound."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The predicted steady state with the first ``gpu_layers`` layers updated on the GPU.

    Attributes:
        gpu_layers: number of GPU layers, K.
        step_seconds: the step.
        worker_seconds: of it, the CPU worker is busy.
        exposed_seconds: of it, compute stands still for weights.
        gpu_update_seconds: of it, the GPU updates its layers.
    """

    gpu_layers: int
    step_seconds: float
    worker_seconds: float
    exposed_seconds: float
    gpu_update_seconds: float

    @property
    def bound(self) -> Literal["host", "gpu"]:
        """What the step waits for: "host" where waits are more than 2 % of it."""
        return "host" if self.exposed_seconds > HOST_BOUND_SHARE * self.step_seconds else "gpu"


@dataclass(frozen=True, slots=True)
class Prediction:
    """All candidates, in the order in which they were asked for."""

    candidates: tuple[Candidate, ...]

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """The candidates' steps."""
        return tuple(candidate.step_seconds for candidate in self.candidates)


def predict(costs: StepCosts, *, gpu_layers: Sequence[int] | None = None) -> Prediction:
    """The predicted steady state for each candidate number of GPU layers.

    Args:
        costs: what each layer takes.
        gpu_layers: the candidates; None for 0..L.

    Raises:
        PlacementError: a candidate is not in 0..L.
    """
    num_layers = len(costs.layers)
    numbers = list(range(num_layers + 1)) if gpu_layers is None else list(gpu_layers)
    for number in numbers:
        _check_number(number, num_layers)
    candidates = np.array(numbers, dtype=np.intp)
    times = _Times.of(costs)
    gpu_update = times.gpu_updates[candidates]
    exposed = np.zeros(len(numbers))
    worker = np.zeros(len(numbers))
    for clipped, share in ((False, 1.0 - costs.clipped_share), (True, costs.clipped_share)):
        if share == 0.0:
            continue
        ready, busy = _walk_worker(times, candidates, clipped=clipped)
        exposed += share * _walk_forward(times, candidates, ready)
        worker += share * busy
    step = costs.compute_seconds + gpu_update + exposed
    columns = (step.tolist(), worker.tolist(), exposed.tolist(), gpu_update.tolist())
    rows = zip(numbers, *columns, strict=True)
    return Prediction(tuple(Candidate(*row) for row in rows))


def _check_number(gpu_layers: int, num_layers: int) -> None:
    if not 0 <= gpu_layers <= num_layers:
        raise PlacementError(f"{gpu_layers} GPU layers: must be in 0..{num_layers}")


# -- all candidates at once --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Times:
    """A step's costs as columns over the layers; the clock starts when backward begins."""

    forward: _Floats
    ready: _Floats  # the gradient is final
    arrival: _Floats  # its first chunk is on the host
    update: _Floats
    commit: _Floats
    preview: _Floats
    last_copy: _Floats  # of the last chunk, back to the GPU
    gpu_updates: _Floats  # of the first 0..L layers together
    decision: float

    @staticmethod
    def of(costs: StepCosts) -> _Times:
        def column(name: str) -> _Floats:
            return np.array([getattr(layer, name) for layer in costs.layers], dtype=np.float64)

        to_host, to_device = column("to_host"), column("to_device")
        chunk = _chunk_shares(costs)
        # cumsum adds one by one, from the last layer down, as the slow twin does: equal to the last
        # bit, so that both break a tie of two times in the same way.
        ready = np.cumsum(column("backward")[::-1])[::-1].copy()
        return _Times(
            forward=column("forward"),
            ready=ready,
            arrival=ready + to_host * chunk,
            update=np.maximum(np.maximum(column("cpu_update"), to_host), to_device),
            commit=np.maximum(column("cpu_commit"), to_host),
            preview=np.maximum(column("cpu_preview"), to_device),
            last_copy=to_device * chunk,
            gpu_updates=np.concatenate([np.zeros(1), np.cumsum(column("gpu_update"))]),
            decision=float(ready[0]) + costs.tail,
        )


def _chunk_shares(costs: StepCosts) -> _Floats:
    """A chunk's share of each layer: what cannot be hidden behind the layer's own kernel."""
    sizes = np.array([layer.parameters for layer in costs.layers], dtype=np.float64)
    return np.minimum(1.0, costs.chunk_elements / np.maximum(sizes, 1.0))


def _walk_worker(times: _Times, candidates: _Ints, *, clipped: bool) -> tuple[_Floats, _Floats]:
    """When each layer's weights are on the GPU, and the worker's busy seconds.

    Rows are candidates, columns layers; each turn of the loop is one job of every candidate that
    has one left. A layer that has no job left is ready at infinity.
    """
    num_layers = len(times.forward)
    rows = np.arange(len(candidates))
    on_cpu = np.arange(num_layers) >= candidates[:, None]
    ready = np.where(on_cpu, times.ready, np.inf)
    weights = np.full(ready.shape, -np.inf)
    committed: _Bools = np.zeros(ready.shape, dtype=np.bool_)
    free = np.zeros(len(candidates))
    busy = np.zeros(len(candidates))
    while True:
        layer = _lowest_ready(ready, free)
        has_job = np.isfinite(ready[rows, layer])
        if not has_job.any():
            return weights, busy
        if clipped:
            second = committed[rows, layer]
            begin = np.maximum(free, np.where(second, times.decision, times.arrival[layer]))
            commits = ~second & (begin < times.decision)
            duration = np.where(
                second,
                times.preview[layer],
                np.where(commits, times.commit[layer], times.update[layer]),
            )
            committed[rows, layer] |= commits
            next_ready: Any = np.where(commits, times.decision, np.inf)
        else:
            begin = np.maximum(free, times.arrival[layer])
            duration = times.update[layer]
            next_ready = np.inf
        end = begin + duration
        # A committed layer gets a time here that its preview replaces. Candidates without a job
        # point at a layer whose time must stay.
        done = end + times.last_copy[layer]
        weights[rows, layer] = np.where(has_job, done, weights[rows, layer])
        free = np.where(has_job, end, free)
        busy += np.where(has_job, duration, 0.0)
        ready[rows, layer] = np.where(has_job, next_ready, np.inf)


def _lowest_ready(ready: _Floats, free: _Floats) -> _Ints:
    """For each row the lowest layer that is ready at ``free``, else the next to become ready."""
    is_ready = ready <= free[:, None]
    return np.where(is_ready.any(axis=1), is_ready.argmax(axis=1), ready.argmin(axis=1))


def _walk_forward(times: _Times, candidates: _Ints, weights: _Floats) -> _Floats:
    """Seconds for which the forward pass stands still, for every candidate."""
    now = times.decision + times.gpu_updates[candidates]
    exposed = np.zeros(len(candidates))
    for index, seconds in enumerate(times.forward.tolist()):
        wait = np.maximum(0.0, weights[:, index] - now)
        exposed += wait
        now = now + wait + seconds
    return exposed
