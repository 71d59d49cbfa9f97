"""Copies between a device and pinned host memory: their rates, and as a load beside updates."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence

import torch

from hytrain.formats.profile_file import CopyRates
from hytrain.tools.profiler.ranks import Ranks

_COPY_BYTES = 64 * 2**20
_COPIES = 8
"""Copies per measurement: so many that the time to launch and await them is negligible."""
_LOAD_BYTES = 32 * 2**20
_HASHED = bytes(1 << 16)
_TO_HOST, _FROM_HOST = 0, 1


_TURNS = 16
_TENTH = 10


@contextlib.contextmanager
def repeating(work: Callable[[], object]) -> Generator[None]:
    """While it lasts, another thread does the work repeatedly."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            work()

    worker = threading.Thread(target=go_on, daemon=True)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()


def measure_slowdown(launch: Callable[[], float], update: Callable[[], object]) -> float:
    """Ratio of the launch time beside updates to that alone, measured in turns; at least 1.

    The copies that go with updates count, too: on the host of an H100 launching took 1.1 to 1.2
    times as long beside updates alone, and 1.4 times with their copies.

    ``launch``: launches some passes and returns the seconds of one; ``update``: updates once, as in
    training.
    """
    update()  # touches pages, wakes threads
    ratios: list[float] = []
    for _ in range(_TURNS):  # in turns: hosts are faster or slower for seconds at a time
        alone = launch()
        with repeating(update):
            ratios.append(launch() / alone)
    return max(1.0, statistics.median(ratios))


def spread(turns: Sequence[float]) -> float:
    """How much longer slow turns took than fast ones, as a share of the fast ones' time.

    The slowest and the fastest tenth are left out: a stall is not a slow turn.
    """
    ascending = sorted(turns)
    left_out = len(ascending) // _TENTH
    return ascending[-1 - left_out] / ascending[left_out] - 1.0


class Copies:
    """Copies both ways, each on its own stream; for a CPU, copies within host memory."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.is_cuda = device.type == "cuda"
        host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self.is_cuda) for _ in "12"]
        there = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in "12"]
        self.ways = [(host[0], there[0]), (there[1], host[1])]  # (to, from)
        self._streams = [torch.cuda.Stream(device) for _ in self.ways] if self.is_cuda else []
        if self.is_cuda:
            torch.cuda.synchronize(device)  # zeros are written before other streams copy them

    def launch(self, times: int, ways: Sequence[int] = (_TO_HOST, _FROM_HOST)) -> None:
        """Copies ``times`` times, alternating the ways; on a GPU, returns before they are done."""
        for _ in range(times):
            for way in ways:
                target, source = self.ways[way]
                context = torch.cuda.stream(self._streams[way]) if self.is_cuda else None
                with context or contextlib.nullcontext():
                    target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Waits until all copies of a GPU are done."""
        for stream in self._streams:
            stream.synchronize()


def copy_rates(
    device: torch.device, ranks: Ranks, *, seconds: float = 0.3, num_bytes: int = _COPY_BYTES
) -> CopyRates:
    """Bytes per second each way alone and both at once, measured for ``seconds`` each."""
    copies = Copies(device, num_bytes)

    def rate(*ways: int) -> float:
        def run() -> float:
            begin = time.perf_counter()
            copies.launch(_COPIES, ways)
            copies.wait()
            return time.perf_counter() - begin

        return _COPIES * num_bytes / ranks.median_seconds(run, seconds)

    both = rate(_TO_HOST, _FROM_HOST)
    return CopyRates(
        to_host=rate(_TO_HOST), from_host=rate(_FROM_HOST), to_host_both=both, from_host_both=both
    )


class TrainingLoad:
    """The load beside the CPU's update in training: copies both ways, and a busy thread.

    A gradient arrives and new weights leave for every parameter of an update: as many bytes each
    way as the training copy has.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """``device``: a GPU; for a CPU one more thread copies within host memory. ``num_bytes``:
        bytes that :meth:`beside` moves each way.
        """
        size = min(num_bytes, _LOAD_BYTES)
        self._times = -(-num_bytes // size)
        self.copies = Copies(device, size)

    def launching(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, a thread stands in for the one that launches the GPU's kernels.

        It computes without the interpreter's lock and touches almost no memory.
        """
        return repeating(lambda: hashlib.sha256(_HASHED).digest())

    def beside(self, run: Callable[[], float]) -> float:
        """Calls ``run`` beside the copies of one update and returns its result."""
        if self.copies.is_cuda:
            self.copies.launch(self._times)
            result = run()
            self.copies.wait()
            return result
        copying = threading.Thread(target=self.copies.launch, args=(self._times,), daemon=True)
        copying.start()
        result = run()
        copying.join()
        return result
