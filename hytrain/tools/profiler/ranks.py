"""The ranks that measure together, or this process alone."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from hytrain.errors import ConfigError, HyTrainError, ProfileRunError

_T = TypeVar("_T")
_FEWEST_REPEATS = 3


class Ranks:
    """All ranks of the default process group.

    They exchange values over gloo, which does not use the GPUs.
    """

    def __init__(self, *, alone: bool = False) -> None:
        """A collective, unless ``alone``: this process only, even if a process group exists."""
        self._is_joined = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self._is_joined else 0
        self.world_size = dist.get_world_size() if self._is_joined else 1
        self.backend = dist.get_backend() if self._is_joined else ""
        self._control: dist.ProcessGroup | None = None
        if self._is_joined and self.backend != "gloo":
            made = dist.new_group(backend="gloo")
            assert isinstance(made, dist.ProcessGroup)  # all ranks are in it
            self._control = made

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, in rank order, on every rank; pickled."""
        if self.world_size == 1:
            return [value]
        values: list[_T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return [found for found in values if found is not None]

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            dist.barrier(group=self._control)

    def median_seconds(self, run: Callable[[], float], seconds: float) -> float:
        """The median of what ``run`` returns, over some seconds of repeats on all ranks at once.

        They share a host's memory and links: a measurement begins at a barrier and lasts a fixed
        time, not a number of repeats, so that no rank's last repeats run undisturbed.
        """
        run()  # touches pages, wakes threads
        self.barrier()
        end = time.perf_counter() + seconds
        values = [run()]
        while len(values) < _FEWEST_REPEATS or time.perf_counter() < end:
            values.append(run())
        return statistics.median(values)

    def together(self, work: Callable[[], _T]) -> _T:
        """Does work that may fail, and raises on every rank if it failed on any.

        The work itself must not wait for other ranks.

        Raises:
            Exception: this rank's own error.
            ConfigError: another rank's error, if the user can fix it.
            ProfileRunError: any other error of another rank.
        """
        result: list[_T] = []
        failure: Exception | None = None
        try:
            result.append(work())
        except Exception as error:
            # The other ranks must learn of it before it ends this one, whatever it is.
            failure = error
        told = (None, False) if failure is None else (_words(failure), _can_be_mended(failure))
        answers = self.gather(told)
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback refers to this frame: a cycle that would keep what has failed.
                failure = None
        for rank, (words, mendable) in enumerate(answers):
            if words is not None:
                kind = ConfigError if mendable else ProfileRunError
                raise kind(f"rank {rank}: {words}")
        return result[0]

    def close(self) -> None:
        """Destroys the gloo group, if one was made."""
        if self._control is not None:
            dist.destroy_process_group(self._control)
            self._control = None


def _words(error: Exception) -> str:
    return str(error) if _can_be_mended(error) else f"{type(error).__name__}: {error}"


def _can_be_mended(error: Exception) -> bool:
    return isinstance(error, HyTrainError) and isinstance(error, ValueError)


def local_device() -> torch.device:
    """This rank's GPU, or the CPU if there is none.

    Raises:
        ConfigError: the host has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local} of this host has no GPU of its own: {torch.cuda.device_count()} are "
            "visible; start fewer ranks a host"
        )
    return torch.device("cuda", local)


@contextlib.contextmanager
def joined(device: torch.device) -> Generator[None]:
    """Joins the process group of the launcher's ranks; none for one process or if one exists."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def limit_memory(device: torch.device, fractions: Sequence[float]) -> None:
    """Limits this process to a fraction of its GPU's memory: one for all ranks, or one per rank.

    Raises:
        ConfigError: a fraction is out of range, there are not as many as ranks, or no GPU.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if any(not 0.0 < fraction <= 1.0 for fraction in fractions):
        raise ConfigError(f"--device-memory-fraction {fractions}: must be in (0, 1]")
    if len(fractions) not in (1, world_size):
        raise ConfigError(
            f"--device-memory-fraction has {len(fractions)} values for {world_size} ranks: give "
            "one, or one a rank"
        )
    if device.type != "cuda":
        raise ConfigError("--device-memory-fraction is of a GPU, and there is none: leave it out")
    torch.cuda.set_per_process_memory_fraction(fractions[rank % len(fractions)], device)
