"""A metrics file as one rank's decisions and the steps that were measured between them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from hytrain.errors import PlacementError
from hytrain.formats.record import checked, parse_json
from hytrain.placement.records import Decision

UNSTEADY_STEPS = 3
"""Steps after a change of k, and after the start, that measure the change instead of k."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step: its number, its wall seconds, its number of GPU layers."""

    step: int
    seconds: float
    gpu_layers: int
    is_steady: bool


@dataclass(frozen=True, slots=True)
class Median:
    """The median of ``num_steps`` steady steps; of 0 if a decision's own record has it."""

    seconds: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class History:
    """One rank's decisions, at least one, and the times of its steps, both in order.

    ``ranks`` are all with decisions in the file.
    """

    rank: int
    ranks: tuple[int, ...]
    decisions: tuple[Decision, ...]
    steps: tuple[MeasuredStep, ...]

    def measured_at(self, gpu_layers: int) -> Median | None:
        """The median of the steady steps with this number of GPU layers, whenever they ran."""
        return _median(
            [s.seconds for s in self.steps if s.is_steady and s.gpu_layers == gpu_layers]
        )

    def measured_after(self, index: int) -> Median | None:
        """The median of the steady steps from a decision to the next with another target."""
        decision = self.decisions[index]
        target = decision.gpu_layers_target
        later = (d.step for d in self.decisions[index + 1 :] if d.gpu_layers_target != target)
        end = next(later, math.inf)
        found = _median(
            [
                s.seconds
                for s in self.steps
                if s.is_steady and s.gpu_layers == target and decision.step < s.step <= end
            ]
        )
        if found is None and decision.measured_seconds is not None:
            return Median(decision.measured_seconds, 0)
        return found


def moves_layers(decision: Decision) -> bool:
    """Whether a decision changes the number of GPU layers."""
    return decision.gpu_layers_before != decision.gpu_layers_target


def _median(seconds: list[float]) -> Median | None:
    return Median(statistics.median(seconds), len(seconds)) if seconds else None


# -- reading -----------------------------------------------------------------------------------


def read_history(text: str, rank: int | None = None) -> History:
    """Reads a metrics file: JSON lines, of which decisions and step times are taken.

    A line that repeats a step (of a resumed run) replaces that step and all after it. The last line
    may be incomplete, if the job was killed.

    Args:
        text: the file's.
        rank: the rank whose decisions are read; None: the first rank that has some. Lines that name
            no rank are rank 0's.

    Raises:
        PlacementError: a line is not JSON, or there is no decision (of this rank).
    """
    records = _records(text)
    decisions: dict[int, list[Decision]] = {}
    for record in records:
        if "placement" in record:
            decision = _decision(record["placement"])
            mine = decisions.setdefault(record["rank"], [])
            while mine and mine[-1].step >= decision.step:
                mine.pop()
            mine.append(decision)
    steps = [record for record in records if _is_number(record.get("step_s"))]
    if not decisions:
        raise PlacementError(
            f"no placement decision in the file ({len(records)} lines, {len(steps)} of them "
            "steps): a run writes its first one before its first step; give the whole file of "
            '"hytrain.metrics", or a DeepSpeed configuration'
        )
    rank = min(decisions) if rank is None else rank
    if rank not in decisions:
        seen = ", ".join(str(r) for r in sorted(decisions))
        raise PlacementError(f"no decision of rank {rank} in the file: it has those of rank {seen}")
    own = [step for step in steps if step["rank"] == rank]
    # Steps of rank 0 tell the time for all, since ranks step together, but only rank 0's k.
    return History(
        rank=rank,
        ranks=tuple(sorted(decisions)),
        decisions=tuple(decisions[rank]),
        steps=_steps(own or steps, decisions[rank], has_own_k=bool(own)),
    )


def _records(text: str) -> list[dict[str, Any]]:
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    records: list[dict[str, Any]] = []
    for number, line in lines:
        try:
            record = parse_json(line, f"line {number}", PlacementError)
        except PlacementError as error:
            if number == lines[-1][0]:
                break
            raise PlacementError(
                f"{error}: a metrics file has one JSON object a line; "
                "delete the line if a killed job left half of it"
            ) from None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise PlacementError(
                f'line {number} is not an object with a whole number "step": give a metrics file '
                "or a DeepSpeed configuration"
            )
        if not isinstance(record.get("rank", 0), int):
            raise PlacementError(f'"rank" must be a whole number, got {record["rank"]!r}')
        records.append({"rank": 0, **record})
    return records


def _decision(record: Any) -> Decision:
    decision: Decision = checked(Decision, record, '"placement"', PlacementError)
    layers = decision.num_layers
    counts = {
        "layer_bytes": (len(decision.layer_bytes), (layers,)),
        "costs": (layers if decision.costs is None else len(decision.costs.layers), (layers,)),
        "corrections": (len(decision.corrections), (0, layers + 1)),
        "gpu_base_at": (len(decision.limits.gpu_base_at), (0, layers)),
    }
    wrong = [name for name, (found, right) in counts.items() if found not in right]
    numbers = (decision.gpu_layers_before, decision.gpu_layers_target)
    wrong += [] if all(0 <= number <= layers for number in numbers) else ["gpu_layers"]
    if wrong or layers < 1:
        raise PlacementError(
            f'"placement" of step {decision.step} is of {layers} layers, but '
            f"{', '.join(wrong) or 'it'} has other numbers"
        )
    return decision


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _steps(
    records: list[dict[str, Any]], decisions: list[Decision], *, has_own_k: bool
) -> tuple[MeasuredStep, ...]:
    kept: list[tuple[int, float, int]] = []
    num_layers = decisions[-1].num_layers
    for record in records:
        number = int(record["step"])
        while kept and kept[-1][0] >= number:
            kept.pop()
        share = record.get("k")
        if has_own_k and share is not None and _is_number(share):
            gpu_layers = round(share * num_layers)
        else:
            gpu_layers = _decided(decisions, number)
        kept.append((number, float(record["step_s"]), gpu_layers))
    steps: list[MeasuredStep] = []
    since, before = 0, None
    for number, seconds, gpu_layers in kept:
        if gpu_layers != before:
            since, before = number, gpu_layers
        steady = number >= since + UNSTEADY_STEPS
        steps.append(MeasuredStep(number, seconds, gpu_layers, steady))
    return tuple(steps)


def _decided(decisions: list[Decision], step: int) -> int:
    """The number of GPU layers in a step whose record does not give it."""
    earlier = [d for d in decisions if d.step < step]
    return earlier[-1].gpu_layers_target if earlier else decisions[0].gpu_layers_before
