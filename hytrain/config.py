"""The ``"hytrain"`` section of the DeepSpeed JSON: typed, checked, unknown keys refused.

DeepSpeed keeps an unknown top-level section without looking at it, so this module is the only
check that the section gets. Every error is a :class:`~hytrain.errors.ConfigError` that names the
key, what was seen, the limit and what to change.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from hytrain.errors import ConfigError, did_you_mean, unquoted

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Default of "hytrain.offload.chunk_elements"; profiles and plans assume that runs have it."""
SECTION = "hytrain"


# JSON has types: neither true nor "4" is a number here.
Number = Annotated[float, Strict()]
Count = Annotated[int, Strict()]
Samples = Annotated[int, Strict(), Field(lt=2**31)]
Flag = Annotated[bool, Strict()]


def _named_folder(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise ValueError("must name a folder, got an empty name")
    return value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class LayersConfig(_Section):
    """How the model is cut into layers."""

    block_class: str | None = Field(default=None, alias="class")
    """Class name of the transformer block, in place of detection."""


class OffloadConfig(_Section):
    """How the CPU update runs."""

    cpu_threads: Count | None = Field(default=None, ge=1, le=1024)
    """Threads of the CPU kernel; null: a short calibration at start chooses."""

    numa: Literal["auto", "off"] = "auto"
    """On a host with several NUMA nodes "auto" keeps the update threads, and the memory that they
    use, on the node of the rank's GPU, unless using all cores is measured to be faster."""

    chunk_elements: Count = Field(default=CHUNK_ELEMENTS, ge=1024, le=2**30)
    """Parameters per chunk, the unit of copies and of the CPU update (a multiple of 64)."""

    overlap_forward: Flag = True
    """False: step() waits until every layer is updated, instead of each layer's next forward."""

    @field_validator("chunk_elements")
    @classmethod
    def _aligned(cls, value: int) -> int:
        if value % 64:
            raise ValueError(f"must be a multiple of 64, for example {value // 64 * 64 + 64}")
        return value


class CheckpointConfig(_Section):
    """How checkpoints are saved."""

    is_async: Flag = Field(default=False, alias="async")
    """``save_checkpoint`` returns at once; the checkpoint is written during the next steps."""

    sigterm_dir: str | None = None
    """Folder for a checkpoint when SIGTERM asks the job to end; null: none is saved."""

    run_pickled_code: Flag = False
    """``load_checkpoint`` makes objects of all classes that a checkpoint names, which may run any
    code. False: only tensors, containers, numbers and text; other objects are refused."""

    @field_validator("sigterm_dir")
    @classmethod
    def _is_named(cls, value: str | None) -> str | None:
        return _named_folder(value)


@dataclass(frozen=True, slots=True)
class BatchShares:
    """The global batch, divided into one piece per rank, and each piece into micro-batches.

    Attributes:
        sizes: samples of the global batch that each rank computes; 0 for one that only holds state.
        micro_sizes: most samples that each rank computes at once.
    """

    sizes: tuple[int, ...]
    micro_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.micro_sizes):
            raise ConfigError(
                f'"hytrain.batch_sizes" has {len(self.sizes)} numbers and '
                f'"hytrain.micro_batch_sizes" {len(self.micro_sizes)}: give one a rank in both'
            )
        if not self.sizes or min(self.sizes) < 0 or sum(self.sizes) == 0:
            raise ConfigError(
                f'"hytrain.batch_sizes" is {list(self.sizes)}: give one number a rank, none below '
                "0, not all 0"
            )
        if min(self.micro_sizes) < 1:
            raise ConfigError(
                f'"hytrain.micro_batch_sizes" is {list(self.micro_sizes)}: all must be above 0'
            )

    def check_ranks(self, ranks: int) -> None:
        """Refuses pieces for another number of ranks.

        Raises:
            ConfigError: there are more or fewer ranks.
        """
        if len(self.sizes) != ranks:
            raise ConfigError(
                f'"hytrain.batch_sizes" has {len(self.sizes)} numbers but the job has {ranks} '
                "ranks: give one number a rank"
            )

    @property
    def global_batch(self) -> int:
        """Samples of a step, all ranks together."""
        return sum(self.sizes)

    def micro_batches(self, rank: int) -> list[int]:
        """Samples of each micro-batch of a rank; only the last may be smaller than the others."""
        size, most = self.sizes[rank], self.micro_sizes[rank]
        return [min(most, size - at) for at in range(0, size, most)]

    def first_sample(self, rank: int) -> int:
        """Where a rank's piece begins in the global batch."""
        return sum(self.sizes[:rank])


class SolverConfig(_Section):
    """How k is solved at run time, if ``gpu_fraction`` is "solve"."""

    method: Literal["pipeline", "closed_form"] = "pipeline"
    """"pipeline" predicts the step for every number of GPU layers; "closed_form" is the published
    balance of backward and CPU update."""

    alpha: Number | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """A layer's update time on the GPU over that on the CPU; null: measured."""

    interval: Count = Field(default=1, ge=1)
    """Steps between two solves."""

    gpu_memory_reserve_bytes: Count | None = Field(default=None, ge=0)
    """GPU memory that the placement leaves free; null: 4 % of it, at least 1 GiB."""

    host_memory_reserve_bytes: Count | None = Field(default=None, ge=0)
    """Host memory that the placement leaves free; null: 3 % of it, at least 1 GiB."""

    host_activation_bytes: Count = Field(default=0, ge=0)
    """Host memory that offloaded activations of a rank will take (torch's ``save_on_cpu``,
    DeepSpeed's ``checkpoint_in_cpu``), beside the reserve."""

    start: tuple[Count, ...] | None = None
    """Layers on the GPU in the first steps, before anything is measured, one number a rank; null:
    the fewest that fit."""

    @field_validator("start")
    @classmethod
    def _numbers(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and min(value, default=0) < 0:
            raise ValueError(f"every number of layers must be 0 or more, got {list(value)}")
        return value


DEFAULT_TRACED_STEPS = (10, 14)


class TraceConfig(_Section):
    """Which steps are recorded, and where to."""

    dir: str | None = None
    """Folder of the traces, ``trace_rank<N>.json``; null: none is written."""

    steps: tuple[Count, Count] | None = None
    """The first recorded step, counted from 1, and the first step after the recording; null: 10 and
    14, or all steps under VizTracer."""

    kernels: Flag = True
    """Records the GPU's kernels too, with torch.profiler; false: one span per layer and pass."""

    threads: Flag = False
    """One lane per thread of the CPU update, instead of one for all."""

    @field_validator("dir")
    @classmethod
    def _is_named(cls, value: str | None) -> str | None:
        return _named_folder(value)

    @field_validator("steps")
    @classmethod
    def _in_order(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 1 <= value[0] < value[1]:
            raise ValueError(
                f"must be two step numbers, the first at least 1 and the second above it (that "
                f"step is not recorded any more), got {list(value)}: [10, 14] records 10 to 13"
            )
        return value


class HyTrainConfig(_Section):
    """The whole section. docs/configuration.md explains every key."""

    gpu_fraction: Number | Literal["solve"] = "solve"
    """k: share of the layers, counted from the first, whose state is on the GPU."""

    solver: SolverConfig = SolverConfig()

    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How Adam's two moments are kept: 4 + 4 bytes a parameter, 2 + 2, or 1 + 1."""

    master: Literal["fp32", "split"] = "fp32"
    """How master weights are kept: in 4 bytes a parameter, or in 2 beside their bf16 training copy,
    which together are the fp32 value, bit for bit. With clipping, "split" leaves layers on the CPU
    their 4 bytes if memory allows: split ones wait for the step's clip coefficient."""

    moments_seed: Count = Field(default=0, ge=0, lt=2**63)
    """Seed of the random bits that round moments; all seeds are equally good."""

    shard_fractions: tuple[Number, ...] | None = None
    """Share of every layer's state that each rank owns, one number a rank; null: equal."""

    batch_sizes: tuple[Samples, ...] | None = None
    """Samples of the global batch that each rank computes in ``engine.train_batch``, one number a
    rank, 0 for a rank that only holds state; null: as DeepSpeed's keys say."""

    micro_batch_sizes: tuple[Samples, ...] | None = None
    """Most samples that each rank computes at once, one number a rank; needs ``batch_sizes``."""

    accumulation: Literal["micro_batch_major", "layer_major"] = "micro_batch_major"
    """How ``engine.train_batch`` computes a step's micro-batches: one after another, or all of them
    layer by layer, with the inside of the layers recomputed in backward."""

    activations: Literal["keep", "offload"] = "keep"
    """Where the activations between the layers wait for backward with "layer_major": on the device,
    or in pinned host memory."""

    plan: str | None = None
    """A file of ``hytrain plan``, relative to the configuration's folder or the current one. It
    decides batches, shards, activations and the k to start with, and must be for this job."""

    metrics: str | None = None
    """A file to which every step and every decision about k is appended, a line of JSON each, for
    ``hytrain explain`` and other tools; rank r > 0 writes one beside it, with ".rank<r>"
    before the ending. Relative to the current folder."""

    wait_in_stream: Flag = True
    """Ranks of a host wait for each other before NCCL's kernels, not inside them."""

    layers: LayersConfig = LayersConfig()
    offload: OffloadConfig = OffloadConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trace: TraceConfig = TraceConfig()

    @field_validator("gpu_fraction", mode="before")
    @classmethod
    def _in_range(cls, value: Any) -> Any:
        # Before the type's own check, which has a line for each member of the union.
        if value == "solve":
            return value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0.0 <= value <= 1.0:  # also for NaN
            raise ValueError('must be a number in [0, 1], or "solve", which decides at run time')
        return value

    @field_validator("shard_fractions")
    @classmethod
    def _sums_to_one(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is None:
            return value
        if any(not math.isfinite(f) or f <= 0.0 for f in value):
            raise ValueError(f"every fraction must be above 0, got {list(value)}")
        if abs(sum(value) - 1.0) > 1e-3:
            raise ValueError(
                f"the fractions must sum to 1, got {sum(value):.6g} from {list(value)}"
            )
        return value

    @model_validator(mode="after")
    def _offloads_by_layer(self) -> HyTrainConfig:
        if self.activations == "offload" and self.accumulation != "layer_major":
            raise ValueError(
                f'"{SECTION}.activations" is "offload", which needs "{SECTION}.accumulation": '
                '"layer_major". Elsewhere activation checkpointing within `with '
                "torch.autograd.graph.save_on_cpu(pin_memory=True):` around the forward does it, "
                f'and "{SECTION}.solver.host_activation_bytes" leaves room for them'
            )
        return self

    def batch_shares(self) -> BatchShares | None:
        """Who computes how much of the global batch; None where DeepSpeed's keys say it.

        Raises:
            ConfigError: the sizes are not possible.
        """
        if self.batch_sizes is None:
            if self.micro_batch_sizes is not None:
                raise ConfigError(
                    f'"{SECTION}.micro_batch_sizes" needs "{SECTION}.batch_sizes": give both, one '
                    "number a rank"
                )
            return None
        micro = self.micro_batch_sizes or tuple(max(1, size) for size in self.batch_sizes)
        return BatchShares(self.batch_sizes, micro)

    def micro_batches(self, rank: int, *, stage: int, accumulation: int) -> int:
        """Micro-batches of a step for a rank: ``accumulation``, or by ``batch_sizes``.

        ZeRO-3 gathers for all ranks: there it is the most that any rank computes.
        """
        shares = self.batch_shares()
        if shares is None:
            return accumulation
        ranks = range(len(shares.sizes)) if stage == 3 else (rank,)
        return max(len(shares.micro_batches(one)) for one in ranks)

    @staticmethod
    def from_deepspeed(config: Mapping[str, Any]) -> HyTrainConfig | None:
        """The section of a DeepSpeed configuration; None if it has none (plain DeepSpeed).

        Raises:
            ConfigError: the section is malformed, or a top-level key looks like its misspelt name
                or is one of its keys.
        """
        _refuse_outside(config)
        if SECTION not in config:
            lowered = {str(key).lower(): key for key in config}
            near = difflib.get_close_matches(SECTION, list(lowered), n=1, cutoff=0.8)
            if near:
                seen = lowered[near[0]]
                raise ConfigError(
                    f'the configuration has a section "{seen}" but none called "{SECTION}": '
                    f'rename "{seen}" to "{SECTION}" (DeepSpeed would ignore it silently)'
                )
            return None
        section = config[SECTION]
        if not isinstance(section, Mapping):
            raise ConfigError(
                f'"{SECTION}" must be a JSON object, got {type(section).__name__}: '
                f'write "{SECTION}": {{}}'
            )
        try:
            return HyTrainConfig.model_validate(dict(section))
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None


_OF_JSON = {
    "tuple_type": "must be a JSON list, as in [1, 2]",
    "model_type": "must be a JSON object, {...}",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "string_type": "must be a string",
}
"""Replaces pydantic's messages, which use Python's terms."""


def _refuse_outside(config: Mapping[str, Any]) -> None:
    """Refuses keys of the section outside of it, which DeepSpeed would ignore silently."""
    for key in map(str, config):
        # A key of one word, such as "plan", may be the user's own.
        if "_" in key and key in HyTrainConfig.model_fields:
            raise ConfigError(
                f'"{key}" is a key of the section "{SECTION}", and of no use at the top level of '
                f'the configuration: write "{SECTION}": {{"{key}": ...}}'
            )
        if key != SECTION and key.lower() == SECTION and SECTION in config:
            raise ConfigError(f'the configuration has sections "{SECTION}" and "{key}": merge them')


def _explain(error: ValidationError) -> str:
    lines = [f'the "{SECTION}" section of the configuration cannot be used:']
    for item in error.errors():
        # pydantic appends the union member it tried; the user only wrote the key.
        names = [
            str(part) for part in item["loc"] if "literal" not in str(part) and part != "float"
        ]
        key = ".".join([SECTION, *names])
        if item["type"] == "extra_forbidden":
            lines.append(f"  {key}: unknown key; {_suggest(item['loc'])}")
        else:
            message = _OF_JSON.get(item["type"], item["msg"].removeprefix("Value error, "))
            if item["type"] == "literal_error":
                message = "must be " + str(item.get("ctx", {}).get("expected")).replace("'", '"')
            else:
                message += unquoted(item["input"])
            lines.append(f"  {key} = {item['input']!r}: {message}")
    return f"{lines[0]}\n" + ";\n".join(lines[1:])


def _suggest(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = HyTrainConfig
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        model = annotation
    known = [field.alias or name for name, field in model.model_fields.items()]
    return did_you_mean(location[-1], known).rstrip() or f"known keys: {', '.join(known)}"
