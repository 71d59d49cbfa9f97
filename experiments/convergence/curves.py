"""A training's loss curve: read from train_lm's metrics, smoothed, and compared with another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from experiments.common.records import Json

WINDOW = 100
"""Steps of the moving average: it removes the noise of single batches, which trainings share."""
DIGITS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """What a training has reached so far."""

    losses: list[float] = dataclasses.field(default_factory=list)
    """The loss of each step's batch, before its update, in nats a token."""
    held_out: dict[str, float] = dataclasses.field(default_factory=dict)
    """Steps made (a string, as a key of JSON) -> the held-out loss after them."""
    k: float | None = None
    """Share of layers that the last step updated on the GPU; None without hytrain."""


def read_records(path: Path) -> list[Json]:
    """The records of train_lm's metrics.jsonl, without a last line that is still being written."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_curve(path: Path) -> Curve:
    """Reads a curve from train_lm's metrics.jsonl; empty if there is none yet."""
    losses: list[float] = []
    held_out: dict[str, float] = {}
    k = None
    for record in read_records(path):
        if "eval_loss" in record:
            held_out[str(record["step"])] = _number(record["eval_loss"])
        elif "loss" in record:
            losses.append(_number(record["loss"]))
            k = record.get("k")
    return Curve(losses=losses, held_out=held_out, k=k)


def _number(value: float | None) -> float:
    # A loss that is not finite is null in the file; a comparison must see it.
    return float("nan") if value is None else round(value, DIGITS)


def smoothed(losses: Sequence[float], window: int = WINDOW) -> npt.NDArray[np.float64]:
    """Moving average, shape [steps - window + 1]; element i is of steps i + 1 to i + window."""
    sums = np.cumsum(np.concatenate(([0.0], np.asarray(losses, dtype=np.float64))))
    return (sums[window:] - sums[:-window]) / window


def largest_difference(
    one: Sequence[float], other: Sequence[float], window: int = WINDOW
) -> tuple[float, float]:
    """(largest, mean) absolute difference of two smoothed curves, over the steps that both have.

    Raises:
        ValueError: one of them is shorter than the window.
    """
    steps = min(len(one), len(other))
    if steps < window:
        raise ValueError(f"{steps} steps are fewer than the {window} that are averaged")
    gap = np.abs(smoothed(one[:steps], window) - smoothed(other[:steps], window))
    return float(gap.max()), float(gap.mean())


def last_common_step(held_out: Sequence[Mapping[str, float]]) -> int | None:
    """The last step after which all were evaluated; None if there is none above 0."""
    steps = set.intersection(*({int(step) for step in one} for one in held_out))
    return max((step for step in steps if step), default=None)
