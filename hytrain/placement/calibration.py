"""Measures the GPU's update once at the start, before any layer is updated there."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import cache

import torch

from hytrain.formats.moment_kinds import FP32, MasterName, MomentsName
from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.kernels.device_adam import device_adam
from hytrain.kernels.moments import Rounding
from hytrain.model.state_format import StateFormat
from hytrain.placement.step_timer import Clock

_ELEMENTS = 1 << 24
"""256 MiB of state, gradient and weights on a GPU, for some milliseconds: beyond its caches."""
_ELEMENTS_ON_CPU = 1 << 20
_REPEATS = 5


def accumulation_seconds_per_parameter(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds per parameter that adding a gradient to earlier ones takes longer than copying it.

    Measured on the current stream, as in backward.
    """
    n = _ELEMENTS if device.type == "cuda" else _ELEMENTS_ON_CPU
    gradient, held = (torch.zeros(n, dtype=dtype, device=device) for _ in range(2))
    adding = _median_seconds(device, lambda: held.add_(gradient))
    copying = _median_seconds(device, lambda: held.copy_(gradient))
    return max(0.0, adding - copying) / n


def _median_seconds(device: torch.device, run: Callable[[], object]) -> float:
    clock = Clock(device)
    run()
    marks = [clock.mark()]
    for _ in range(_REPEATS):
        run()
        marks.append(clock.mark())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median(clock.seconds(*pair) for pair in itertools.pairwise(marks))


@cache
def gpu_seconds_per_parameter(
    device: torch.device,
    dtype: torch.dtype,
    moments: MomentsName = FP32,
    master: MasterName = FP32,
) -> float:
    """Seconds per parameter of the Adam update on the device, with the device to itself.

    A process measures it once per device: on a CPU that stands in for one, buffers of this size
    come from the heap and leave holes there, megabytes with each engine that is built.

    ``dtype``: that of gradients and training copy.
    """
    n = _ELEMENTS if device.type == "cuda" else _ELEMENTS_ON_CPU
    how = StateFormat(moments, master=master)
    memory = torch.zeros(how.state_bytes(n), dtype=torch.uint8, device=device)
    p, m, v = how.split(memory, n)
    gradient = torch.zeros(n, dtype=dtype, device=device)
    # Gradients may be of another dtype than the copy that is half of the master weights.
    copy_dtype = torch.bfloat16 if how.is_split else dtype
    weights = torch.zeros(n, dtype=copy_dtype, device=device)
    outcome = torch.tensor([1.0, 0.0], device=device)
    hyper = AdamHyper(lr=1e-3)
    # The first run, which does not count, compiles the kernel.
    return (
        _median_seconds(
            device,
            lambda: device_adam(p, m, v, gradient, weights, outcome, hyper, Rounding(0, 0)),
        )
        / n
    )
