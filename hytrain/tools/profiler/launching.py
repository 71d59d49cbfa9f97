"""What launching takes of the host: of passes beside updates on the CPU, of updates on the GPU."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Generator

import torch

from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.kernels.clipping import ClipSettings, GradientNorm
from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.kernels.device_adam import device_adam
from hytrain.kernels.moments import Rounding
from hytrain.model.moment_format import MomentFormat
from hytrain.tools.profiler.rates import UpdateArrays

_TURNS = 3
_SMALL = 1 << 12
_LAUNCHES = 40


@contextlib.contextmanager
def updating(arrays: UpdateArrays, threads: int) -> Generator[None]:
    """While it lasts, so many threads update on the CPU, one pass after another."""
    is_over = threading.Event()

    def update() -> None:
        while not is_over.is_set():
            arrays.update(threads)

    worker = threading.Thread(target=update, daemon=True)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()


def launch_slowdown(launch: Callable[[], float], arrays: UpdateArrays, threads: int) -> float:
    """Ratio of what launching takes beside updates to what it takes alone; at least 1.

    Args:
        launch: launches some passes and returns the seconds of one.
        arrays: that are updated.
        threads: that update.
    """
    arrays.update(threads)  # touches pages, wakes threads
    ratios: list[float] = []
    for _ in range(_TURNS):  # in turns: hosts are faster and slower for seconds on end
        alone = launch()
        with updating(arrays, threads):
            ratios.append(launch() / alone)
    return max(1.0, statistics.median(ratios))


def update_launch_ms(
    device: torch.device, dtype: torch.dtype, moments: MomentsName = FP32
) -> float | None:
    """Of the host, to launch a layer's norm and its update on the GPU; None without one."""
    if device.type != "cuda":
        return None
    how = MomentFormat(moments)
    state = torch.zeros(how.state_bytes(_SMALL), dtype=torch.uint8, device=device)
    arrays = how.split(state, _SMALL)
    gradient, weights = (torch.zeros(_SMALL, dtype=dtype, device=device) for _ in range(2))
    norm = GradientNorm(1, device, ClipSettings(1.0, True), lambda _tensor: None)
    outcome = torch.tensor([1.0, 0.0], device=device)
    updated, hyper = torch.cuda.Event(), AdamHyper(lr=1e-3)
    seconds: list[float] = []
    for _ in range(_LAUNCHES):
        begin = time.perf_counter()
        norm.measure([0], [gradient])
        device_adam(*arrays, gradient, weights, outcome, hyper, Rounding(0, 0))
        gradient.record_stream(torch.cuda.current_stream(device))
        updated.record()
        seconds.append(time.perf_counter() - begin)
        torch.cuda.synchronize(device)
    return 1e3 * statistics.median(seconds)
