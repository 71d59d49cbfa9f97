"""The file of "hytrain.metrics": a line of JSON for each step and each decision about k."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hytrain.errors import ConfigError
from hytrain.optimizer.statistics import StepStatistics
from hytrain.placement.records import Decision

Record = dict[str, Any]

logger = logging.getLogger(__name__)

_BEGIN = b'{"rank": '
"""How each line begins."""
_LONGEST_LINE = 2**24
"""In bytes; a decision takes some hundred for each layer."""


class DecisionLog:
    """An engine's decisions about k: each when it is made, and again when its step is measured."""

    def __init__(self, decisions_since: Callable[[int], Sequence[Decision]]) -> None:
        """``decisions_since(n)``: all decisions but the first n, oldest first."""
        self._since = decisions_since
        self._num_taken = 0
        self._is_measured = False  # the last one taken

    def skip_history(self) -> None:
        """Skips decisions of a loaded checkpoint, put before this run's: only the last is new."""
        self._num_taken = max(0, len(self._since(0)) - 1)
        self._is_measured = True

    def take(self) -> list[Record]:
        """Returns the records that are new since the last call."""
        first = max(0, self._num_taken - 1)
        records: list[Record] = []
        for number, decision in enumerate(self._since(first), start=first + 1):
            # Only the newest can still be measured.
            is_measured = decision.measured_seconds is not None
            if number > self._num_taken or (is_measured and not self._is_measured):
                records.append(decision.metrics_record())
            self._num_taken = max(self._num_taken, number)
            self._is_measured = is_measured
        return records


def step_record(statistics: StepStatistics) -> Record:
    """Returns what a metrics file has of a step; keys of seconds end in ``_s``."""
    return {
        "grad_norm": statistics.grad_norm,
        "k": statistics.gpu_fraction,
        "update_s": statistics.update_seconds,
        "exposed_s": statistics.exposed_seconds,
        "hidden_share": statistics.hidden_share,
        "clip_coefficient": statistics.clip_coefficient,
        "skipped": statistics.skipped,
    }


def memory_record(device: torch.device) -> Record:
    """Returns this process's peak memory so far, in GiB: of the GPU (or None) and of the host."""
    is_gpu = device.type == "cuda"
    return {
        "gpu_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if is_gpu else None,
        "host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def json_line(record: Record) -> str:
    """Returns a line of a metrics file: None is left out, numbers that are not finite are null."""
    kept = {key: _finite(value) for key, value in record.items() if value is not None}
    return json.dumps(kept, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """One rank's file, to which lines are appended.

    A resumed run goes on in the same file; if it repeats steps, its lines count, not the earlier
    ones (as `hytrain explain` reads them).
    """

    def __init__(self, name: str, rank: int, decisions: DecisionLog, device: torch.device) -> None:
        """
        ``name``: the file of rank 0; rank 2 writes "metrics.rank2.jsonl" for "metrics.jsonl".

        Raises:
            ConfigError: it cannot be opened, or is no metrics file.
        """
        path = Path(name)
        if rank:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self._rank, self.decisions, self._device = rank, decisions, device
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_half_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f'"hytrain.metrics" is "{name}", but {path} cannot be written: {error.strerror}; '
                "give a file in a folder that can be written to"
            ) from error

    def add_step(self, step: int, statistics: StepStatistics) -> None:
        """Writes a step, which may have been skipped; ``step``: how many have been made."""
        record = {"kind": "step", "step": step, "step_s": statistics.step_seconds}
        record |= step_record(statistics)
        self._write([*self.decisions.take(), record | memory_record(self._device)])

    def close(self) -> None:
        """Writes the last decisions."""
        self._write(self.decisions.take())
        self._file.close()

    def _write(self, records: Iterable[Record]) -> None:
        if self._file.closed:
            return
        try:
            self._file.writelines(json_line({"rank": self._rank, **each}) for each in records)
            self._file.flush()  # a killed job loses none
        except OSError as error:  # a full disk must not end training
            logger.warning("no more metrics are written to %s: %s", self._file.name, error)
            with contextlib.suppress(OSError):  # what it still holds
                self._file.close()


def _cut_half_line(path: Path) -> None:
    """Removes half a line that a killed job has left; leaves other files as they are.

    Raises:
        ConfigError: the file ends in half a line that is not of a metrics file.
    """
    if not path.is_file():
        return
    with path.open("rb+") as file:
        start = max(0, path.stat().st_size - _LONGEST_LINE)
        file.seek(start)
        whole, newline, half = file.read().rpartition(b"\n")
        if not half:
            return
        if not half.startswith(_BEGIN[: len(half)]):
            raise ConfigError(
                f'"hytrain.metrics" is "{path}", which exists and is no metrics file: lines would '
                "be appended to it; give another file"
            )
        file.truncate(start + len(whole) + len(newline))
