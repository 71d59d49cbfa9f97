"""Compares what a plan predicted with what its steps take, on all ranks.

Each rank follows its own steps. Ranks meet for a report only after fixed numbers of steps, or when
all of them ask for one: a collective never depends on what one rank alone has seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.errors import HyTrainError
from hytrain.formats.plan_file import PlanFile
from hytrain.formats.text_table import align

_GIB = 1024**3
_WARM_UP = 3
_STEPS = 10
# Automatic reports: after steps 13, 23, ..., until layers no longer move.
_MOST_REPORTS = 4


@dataclass(frozen=True, slots=True)
class RankMeasured:
    """What was measured in a rank's last steps, or in one of them.

    Attributes:
        step_seconds: the median time from the end of the step before to the step's own end.
        clipped_share: share of these steps that follow a clipped one: their forward waited for
            second passes. Of a single step: whether it was clipped itself (0 or 1).
        gpu_bytes: the allocator's peak since the process began, or since the user reset it; None
            without a GPU.
        host_bytes: state, weights, activations and staging on the host.
        gpu_layers: layers of ``num_layers`` whose state is on the GPU.
        is_settled: whether no layer moved in these steps.
    """

    step_seconds: float
    clipped_share: float
    gpu_bytes: int | None
    host_bytes: int
    gpu_layers: int
    num_layers: int
    is_settled: bool


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a plan predicted, and what was measured.

    Attributes:
        first_step: the first measured step, counted from the engine's first.
        last_step: the last measured step.
        plan: what was predicted.
        ranks: what was measured, in rank order.
    """

    first_step: int
    last_step: int
    plan: PlanFile
    ranks: tuple[RankMeasured, ...]

    @property
    def measured_seconds(self) -> float:
        """The step's time: the longest median, since ranks wait for each other."""
        return max(rank.step_seconds for rank in self.ranks)

    @property
    def clipped_share(self) -> float:
        """The ranks' common ``clipped_share``: they all clip the same steps."""
        return self.ranks[0].clipped_share

    @property
    def predicted_seconds(self) -> float:
        """The step's time that the plan predicts for the measured share of clipped steps.

        Plans that do not distinguish clipped steps have one prediction.
        """
        return self.plan.predicted.at(self.clipped_share)

    @property
    def error(self) -> float:
        """By what share the step is longer than predicted; negative if it is shorter."""
        return self.measured_seconds / self.predicted_seconds - 1.0

    @property
    def is_settled(self) -> bool:
        """Whether no layer moved on any rank."""
        return all(rank.is_settled for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "predicted_seconds": self.predicted_seconds,
            "clipped_share": self.clipped_share,
            "measured_seconds": self.measured_seconds,
            "error": self.error,
            "is_settled": self.is_settled,
            "ranks": [
                {
                    **asdict(measured),
                    "device": planned.device,
                    "batch_size": planned.batch_size,
                    "predicted_gpu_bytes": planned.gpu_bytes,
                    "predicted_host_bytes": planned.host_bytes,
                    "planned_gpu_layers": planned.gpu_layers,
                }
                for planned, measured in zip(self.plan.ranks, self.ranks, strict=True)
            ],
        }

    def table(self) -> str:
        """Returns text for users: the step, and each rank's memory and GPU layers."""
        rows = [("rank", "device", "samples", "k planned", "k", "GPU GiB", "host GiB")]
        for number, (planned, found) in enumerate(zip(self.plan.ranks, self.ranks, strict=True)):
            gpu = "-" if found.gpu_bytes is None else f"{found.gpu_bytes / _GIB:.2f}"
            rows.append(
                (
                    *(str(number), planned.device, str(planned.batch_size)),
                    f"{planned.gpu_layers / self.plan.layers:.2f}",
                    f"{found.gpu_layers / found.num_layers:.2f}",
                    f"{planned.gpu_bytes / _GIB:.2f} -> {gpu}",
                    f"{planned.host_bytes / _GIB:.2f} -> {found.host_bytes / _GIB:.2f}",
                )
            )
        words = (
            f"plan, predicted -> measured, median of steps {self.first_step} to {self.last_step}: "
            f"step {1e3 * self.predicted_seconds:.1f} -> "
            f"{1e3 * self.measured_seconds:.1f} ms ({self.error:+.1%}), "
            f"{self.clipped_share:.0%} of the steps clipped"
        )
        if not self.is_settled:
            words += "; layers still move"
        return "\n".join([words, *align(rows)])


class PlanWatch:
    """Follows the steps of one engine."""

    def __init__(self, plan: PlanFile, collectives: ShardCollectives, device: torch.device) -> None:
        self._plan = plan
        self._collectives = collectives
        self._device = device
        self._steps = 0
        # The steps that a report is about, and the one before them.
        self._recent: list[RankMeasured] = []
        self._reports = 0
        self._is_printed = False

    def after_step(self, state: RankMeasured) -> None:
        """Adds a step that was made; a collective after some steps."""
        self._steps += 1
        if self._steps < _WARM_UP:
            return
        self._recent = [*self._recent, state][-_STEPS - 1 :]
        is_due = (self._steps - _WARM_UP) % _STEPS == 0 and self._steps > _WARM_UP
        # The same on all ranks: it follows from the step count and from the reports before.
        if self._is_printed or not is_due:
            return
        self._reports += 1
        report = self.report()
        self._is_printed = report.is_settled or self._reports == _MOST_REPORTS
        if self._is_printed and self._collectives.rank == 0:
            # A user who trains by a plan wants to see it, whether logging is set up or not.
            print(report.table(), flush=True)

    def report(self) -> PlanReport:
        """See :meth:`HyTrainEngine.plan_report`."""
        if len(self._recent) < 2:
            raise HyTrainError(
                f"a plan is compared with steps after the first {_WARM_UP}: make some more"
            )
        own = self._measured(self._recent)
        ranks: list[RankMeasured] = self._collectives.gather_objects(own, "the ranks' times")
        first = self._steps - len(self._recent) + 2
        return PlanReport(first, self._steps, self._plan, tuple(ranks))

    def _measured(self, recent: Sequence[RankMeasured]) -> RankMeasured:
        states, before = recent[1:], recent[:-1]
        last = states[-1]
        is_cuda = self._device.type == "cuda"
        return replace(
            last,
            step_seconds=statistics.median(state.step_seconds for state in states),
            clipped_share=sum(state.clipped_share for state in before) / len(before),
            gpu_bytes=torch.cuda.max_memory_allocated(self._device) if is_cuda else None,
            is_settled=all(
                state.is_settled and state.gpu_layers == last.gpu_layers for state in states
            ),
        )
