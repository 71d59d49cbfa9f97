"""plan.json: what was decided, for which ranks, model and batch, and what it is predicted to take.

    {"version": 1,
     "model": {name, num_layers, num_updates, parameters, frozen, dtype, seq_len, moments},
     "global_batch", "stage", "offload_param",
     "predicted": {"step_seconds", "unclipped_seconds", "clipped_seconds", "lower_bound", "gap"},
     "ranks": [{"host", "device", "multiprocessors", "memory_bytes", "batch_size",
                "microbatch_size", "activations", "shard_fraction", "gpu_layers", "step_seconds",
                "gpu_bytes", "host_bytes", "limit"}, ...]}

Ranks are in the job's order. A step takes ``unclipped_seconds`` or ``clipped_seconds``;
``step_seconds`` is their mean at the share of clipped steps that was planned for. ``lower_bound``
is for unclipped steps, and ``gap`` the share by which ``step_seconds`` exceeds it. Training
compares the file with the job (:func:`difference`) and refuses a plan for another one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from hytrain.formats.dtypes import Dtype
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.policies import LAYER_MAJOR, Activations
from hytrain.formats.record import Record, parse_record, read_text, write_record

VERSION = 1
# Two devices of one type differ by this share of memory at most (what drivers keep for themselves).
_MEMORY_TOLERANCE = 0.02
_GIB = 1024**3


class PlannedModel(Record):
    """The model that a plan is for.

    ``num_updates`` is the number of layers that training updates: ``num_layers``, one for the
    parameters before and one for those after them. Older files lack it: ``num_layers`` counts then.
    """

    name: str
    num_layers: int = Field(ge=1)
    num_updates: int | None = Field(default=None, ge=1)
    parameters: int = Field(ge=1)
    frozen: int = Field(default=0, ge=0)
    dtype: Dtype | None = None
    seq_len: int | None = Field(default=None, ge=1)
    moments: MomentsName = FP32


class Predicted(Record):
    """The step that a plan promises, in seconds, and how much longer than the best it may be."""

    step_seconds: float = Field(ge=0.0)
    unclipped_seconds: float = Field(ge=0.0)
    clipped_seconds: float = Field(ge=0.0)
    lower_bound: float = Field(ge=0.0)
    gap: float | None = Field(ge=0.0)

    def at(self, clipped_share: float) -> float:
        """Mean seconds of a step with this share of clipped steps."""
        longer = self.clipped_seconds - self.unclipped_seconds
        return self.unclipped_seconds + clipped_share * longer


class PlannedRank(Record):
    """One rank: what it is, what it does, what that is predicted to take.

    ``multiprocessors`` and ``memory_bytes`` tell the device apart from others of its name.
    """

    host: str
    device: str
    multiprocessors: int = Field(ge=0)
    memory_bytes: int = Field(ge=1)
    batch_size: int = Field(ge=0)
    microbatch_size: int = Field(ge=0)
    activations: Activations
    shard_fraction: float = Field(ge=0.0, le=1.0)
    gpu_layers: int = Field(ge=0)
    step_seconds: float = Field(ge=0.0)
    gpu_bytes: int = Field(ge=0)
    host_bytes: int = Field(ge=0)
    limit: str


class PlanFile(Record):
    """All of a plan.json, checked."""

    version: Literal[1]
    model: PlannedModel
    global_batch: int = Field(ge=1)
    stage: Literal[1, 2, 3]
    offload_param: Literal["cpu"] | None = None
    predicted: Predicted
    ranks: tuple[PlannedRank, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _sums(self) -> PlanFile:
        samples = sum(rank.batch_size for rank in self.ranks)
        if samples != self.global_batch:
            raise ValueError(f"the ranks' batch sizes sum to {samples}, not to {self.global_batch}")
        fractions = math.fsum(rank.shard_fraction for rank in self.ranks)
        if not math.isclose(fractions, 1.0, abs_tol=1e-6):
            raise ValueError(f"the ranks' shard fractions sum to {fractions}, not to 1")
        if self.offload_param is not None and self.stage != 3:
            raise ValueError(f"offload_param needs stage 3, but stage is {self.stage}")
        modes = {rank.activations in LAYER_MAJOR for rank in self.ranks}
        if self.stage == 3 and len(modes) > 1:
            raise ValueError(
                "in stage 3 all ranks use each layer together, but some go layer by layer (keep, "
                "offload) and others take one micro-batch after another (store, recompute)"
            )
        for number, rank in enumerate(self.ranks):
            if not (rank.microbatch_size <= rank.batch_size and rank.gpu_layers <= self.layers):
                raise ValueError(
                    f"rank {number}: micro-batches of {rank.microbatch_size} for "
                    f"{rank.batch_size} samples, {rank.gpu_layers} of {self.layers} layers"
                )
            if (rank.microbatch_size == 0) != (rank.batch_size == 0):
                raise ValueError(f"rank {number}: microbatch_size is 0 where batch_size is, only")
        return self

    @property
    def layers(self) -> int:
        """The number of layers that training updates; ``gpu_layers`` of them on the GPU."""
        return self.model.num_updates or self.model.num_layers


def write_plan(path: Path, plan: PlanFile) -> None:
    """Writes plan.json: all of it or nothing.

    Raises:
        PlanError: the file cannot be written.
    """
    write_record(path, plan, what="plan")


def read_plan(path: Path) -> PlanFile:
    """Reads plan.json.

    Raises:
        PlanError: no such file, no JSON, another version, or values that contradict each other.
    """
    return parse_plan(read_text(path, "plan"), path)


def parse_plan(text: str, path: Path) -> PlanFile:
    """Parses the text of a plan.json.

    Raises:
        PlanError: as for :func:`read_plan`.
    """
    return parse_record(PlanFile, VERSION, text, path, what="plan", remedy="make it anew")


# -- is it a plan for this job? ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActualRank:
    """A rank as training finds it.

    Attributes:
        memory_bytes: memory of the device, or the part of it that the process may use.
        multiprocessors: those that the process may use; 0 if unknown.
    """

    host: str
    device: str
    memory_bytes: int
    multiprocessors: int = 0


@dataclass(frozen=True, slots=True)
class Actual:
    """The job as training finds it.

    Attributes:
        ranks: in rank order.
        num_layers: transformer layers of the model.
        parameters: trained parameters of the model.
        global_batch: samples of a step.
        dtype: that of the training copy; None if unknown.
        offload_param: "cpu" if weights are kept in host memory.
        frozen: frozen parameters of the model.
        moments: how Adam's moments are kept.
    """

    ranks: Sequence[ActualRank]
    num_layers: int
    parameters: int
    global_batch: int
    stage: int
    dtype: str | None = None
    offload_param: str | None = None
    frozen: int = 0
    moments: str = FP32


_OFFLOAD = '"zero_optimization.offload_param"'


def difference(plan: PlanFile, actual: Actual) -> list[str]:
    """Says how the job differs from the one that was planned for; empty if it does not.

    Hosts are compared as groups of ranks: a name may change (a new allocation), but not which ranks
    share a host.
    """
    words: list[str] = []
    pairs = (
        ("layers", plan.model.num_layers, actual.num_layers),
        ("parameters", plan.model.parameters, actual.parameters),
        ("parameters that are not trained", plan.model.frozen, actual.frozen),
        ("samples in the global batch", plan.global_batch, actual.global_batch),
    )
    for what, planned, found in pairs:
        if planned != found:
            words.append(f"{what}: planned for {planned}, found {found}")
    if None not in (plan.model.dtype, actual.dtype) and plan.model.dtype != actual.dtype:
        words.append(f"dtype: planned for {plan.model.dtype}, found {actual.dtype}")
    if plan.model.moments != actual.moments:
        words.append(
            f'moments: planned for "{plan.model.moments}", found "hytrain.moments": '
            f'"{actual.moments}"'
        )
    if plan.stage != actual.stage:
        words.append(f"ZeRO stage: planned for {plan.stage}, found {actual.stage}")
    if plan.offload_param is not None and actual.offload_param is None:
        words.append(
            f"offload_param: planned for weights in host memory, found none there: set {_OFFLOAD}: "
            '{"device": "cpu"}'
        )
    elif plan.offload_param is None and actual.offload_param is not None:
        words.append(
            f"offload_param: planned for weights on the GPU, found {_OFFLOAD}: remove it, or plan "
            "with --offload-param cpu"
        )
    if len(plan.ranks) != len(actual.ranks):
        words.append(f"ranks: planned for {len(plan.ranks)}, found {len(actual.ranks)}")
        return words
    words += _rank_differences(plan.ranks, actual.ranks)
    if _same_devices(plan.ranks, actual.ranks):
        words.append("the devices are those of the plan in another order: order the hosts as there")
    return words


def _rank_differences(planned: Sequence[PlannedRank], found: Sequence[ActualRank]) -> list[str]:
    words: list[str] = []
    planned_groups = _groups([rank.host for rank in planned])
    found_groups = _groups([rank.host for rank in found])
    for number, (plan, actual) in enumerate(zip(planned, found, strict=True)):
        words += [f"rank {number}{text}" for text in _device_differences(plan, actual)]
        if planned_groups[number] != found_groups[number]:
            words.append(
                f"rank {number}: planned on {plan.host} with ranks {planned_groups[number]}, found "
                f"on {actual.host} with ranks {found_groups[number]}"
            )
    return words


def _device_differences(plan: PlannedRank, actual: ActualRank) -> list[str]:
    if plan.device != actual.device:
        return [f": planned for {plan.device}, found {actual.device}"]
    if actual.memory_bytes < plan.memory_bytes * (1.0 - _MEMORY_TOLERANCE):
        return [
            f" ({plan.device}): planned with {plan.memory_bytes / _GIB:.2f} GiB, found "
            f"{actual.memory_bytes / _GIB:.2f}"
        ]
    planned, found = plan.multiprocessors, actual.multiprocessors
    if planned and found and planned != found:
        return [f" ({plan.device}): planned with {planned} multiprocessors, found {found}"]
    return []


def _groups(hosts: Sequence[str]) -> list[list[int]]:
    """For each rank, all ranks of its host."""
    return [[other for other, name in enumerate(hosts) if name == host] for host in hosts]


def _same_devices(planned: Sequence[PlannedRank], found: Sequence[ActualRank]) -> bool:
    same = Counter(rank.device for rank in planned) == Counter(rank.device for rank in found)
    return same and any(p.device != f.device for p, f in zip(planned, found, strict=True))
