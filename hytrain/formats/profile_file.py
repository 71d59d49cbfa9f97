"""profile.json: what `hytrain profile` measured, of which devices and hosts, with which model.

    {"version": 1, "model": {...}, "devices": [{...}], "hosts": [{...}], "collectives": [{...}]}

A device is known by its host and its label; a label is a name with what makes the device differ
from others of that name (see :func:`device_label`). A file may hold any number of hosts: files of
several hosts, or of several days, merge (:func:`merge_profiles`), the newest measurement wins.

Times are milliseconds of one micro-batch, sizes bytes, rates a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AwareDatetime, Field, model_validator

from hytrain.errors import PlanError
from hytrain.formats.dtypes import Dtype
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.record import Record, parse_record, read_text, write_record

VERSION = 1

_GIB = 1024**3
MOST_SAMPLES = 2**16
"""Of a batch that is planned: tables have a value for each number of samples below.

65,536 of a model of 7 B took less than 10 s on 8 ranks, in stage 3, too (one core), and 42 and 90 s
on 4 ranks whose host had hardly enough memory. More were not tried."""
MOST_LAYERS = 10_000
LAUNCH_BOUND_SHARE = 0.9
"""Share of the device's time from which on it counts as waiting for launches."""


def _check_ascending(what: str, column: str, values: Sequence[int]) -> None:
    if list(values) != sorted(set(values)):
        raise ValueError(f"{what} must have ascending {column}, not {values}")


class ProfiledModel(Record):
    """The model that was measured, as equal layers and what is outside of them."""

    name: str
    num_layers: int = Field(ge=1, le=MOST_LAYERS)
    """Transformer blocks."""

    layer_parameters: int = Field(ge=1)
    """Trained parameters of one block."""

    outside_parameters: tuple[int, int]
    """Trained parameters before the first block (embeddings), and after the last one (head)."""

    frozen_layer_parameters: int = Field(default=0, ge=0)
    """Parameters of one block that are not trained."""

    frozen_outside_parameters: tuple[int, int] = (0, 0)
    """Those that are not trained before the first trained block, and after the last one."""

    frozen_block_parameters: int = Field(default=0, ge=0)
    """Those of all blocks in which nothing is trained, which are not among ``num_layers``."""

    seq_len: int = Field(ge=1)
    """Tokens of a sample."""

    dtype: Dtype
    """Of the training copy."""

    boundary_bytes: int = Field(ge=0)
    """Activations between two blocks, a sample."""

    moments: MomentsName = FP32
    """How updates kept Adam's moments ("hytrain.moments"); their rates are of that kind."""

    @property
    def parameters(self) -> int:
        """All that is trained."""
        return self.num_layers * self.layer_parameters + sum(self.outside_parameters)

    @property
    def frozen(self) -> int:
        """All that is not."""
        blocks = self.num_layers * self.frozen_layer_parameters + self.frozen_block_parameters
        return blocks + sum(self.frozen_outside_parameters)


class LayerSample(Record):
    """One block with a micro-batch of so many samples."""

    samples: int = Field(ge=1, le=MOST_SAMPLES)
    forward_ms: float = Field(gt=0.0)
    backward_ms: float = Field(gt=0.0)
    """From stored activations, without recomputation."""

    recompute_backward_ms: float = Field(gt=0.0)
    """From the block's input alone: recomputation and backward."""

    kept_bytes: int = Field(ge=0)
    """What one block's forward leaves on the GPU until its backward, without recomputation; its
    output, the next block's input, included."""

    peak_bytes: int = Field(ge=0)
    """Most that was allocated in forward and backward above what was there before (weights, the
    block's input): activations, temporaries, the gradients of its weights."""

    recompute_peak_bytes: int = Field(ge=0)
    """The same with recomputation."""

    launch_ms: float | None = Field(ge=0.0, default=None)
    """Of the host, to launch forward and backward, without recomputation, while nothing is queued
    and nothing updates beside it; None where it was not measured. Where it is as long as both
    passes, the device waits for the host: a launch-bound size."""

    device_ms: float | None = Field(ge=0.0, default=None)
    """What the device needs for both passes, without recomputation, where all of them is launched
    before; measured of sizes for which it waits for the host, or nearly. What is left of both
    passes is room for updates. None where it was not measured."""

    @property
    def is_launch_bound(self) -> bool:
        """Whether the device waits for the host; so far as that was measured."""
        passes = self.forward_ms + self.backward_ms
        return self.launch_ms is not None and self.launch_ms > LAUNCH_BOUND_SHARE * passes


class OutsideSample(Record):
    """All that is outside of the blocks (embedding, head, loss) with one micro-batch."""

    samples: int = Field(ge=1, le=MOST_SAMPLES)
    forward_ms: float = Field(ge=0.0)
    backward_ms: float = Field(ge=0.0)
    peak_bytes: int = Field(ge=0)
    """Most that was allocated above what was there before, gradients of weights included."""

    launch_ms: float | None = Field(ge=0.0, default=None)
    """Of the host, to launch both passes; see :class:`LayerSample`."""

    device_ms: float | None = Field(ge=0.0, default=None)
    """Of the device, likewise."""


class CopyRates(Record):
    """Bytes a second between a GPU and pinned host memory; one way alone, then each of both."""

    to_host: float = Field(gt=0.0)
    from_host: float = Field(gt=0.0)
    to_host_both: float = Field(gt=0.0)
    from_host_both: float = Field(gt=0.0)


class UpdateLaunches(Record):
    """Of the host, in milliseconds: what training adds to the model's own launches, on one rank,
    nothing beside it.

    Where the device has more to do than the host these hide; in a launch-bound step they add up.
    """

    gpu_step_ms: float = Field(ge=0.0)
    """Once, in a step in which any layer is updated on the GPU."""

    launch_ms: float = Field(ge=0.0)
    """Each launch there; small neighbours share one."""

    gpu_layer_ms: float = Field(ge=0.0)
    """Each layer that is updated there, to launch that."""

    cpu_layer_ms: float = Field(ge=0.0)
    """Each layer that is updated on the CPU: its hooks, the hand-over of its gradient, the next
    forward's wait for its weights so far as they are there."""

    passes_ms: float = Field(ge=0.0)
    """Each step, in its passes, whatever is updated where."""

    gpu_layer_passes_ms: float = Field(ge=0.0)
    """Each layer that is updated on the GPU, in the passes: its hooks, the hand-over of its
    gradient."""


class DeviceProfile(Record):
    """A distinct GPU of a host. Ranks of equal label share one."""

    host: str
    label: str
    """See :func:`device_label`; a rank's is compared with it before a plan is trained by."""

    device: str
    """Its name, as the driver gives it."""

    multiprocessors: int = Field(ge=1)
    """That the process may use."""

    limit_bytes: int = Field(ge=1)
    """Memory of the device, or the part of it that the process was allowed (its fraction)."""

    memory_bytes: int = Field(ge=1)
    """Of it, what training can use: not what other processes and the driver's context hold."""

    idle_bytes: int = Field(ge=0, default=0)
    """What the allocator holds before there is a model (workspaces)."""

    layer: tuple[LayerSample, ...] = Field(min_length=1)
    """By ascending samples."""

    outside: tuple[OutsideSample, ...] = ()
    """By ascending samples; empty where the model has nothing outside."""

    update_rate: float = Field(gt=0.0)
    """Parameters a second that the GPU updates."""

    copies: CopyRates
    accumulation_ms: float | None = Field(ge=0.0, default=None)
    """By how much longer adding a layer's gradient to that of earlier micro-batches takes than
    copying it, which its measured backward has; None where it was not measured."""

    launch_slowdown: float | None = Field(ge=1.0, default=None)
    """Ratio of launching beside updates on the CPU, with all but one of the rank's cores, to
    launching alone; None where it was not measured."""

    launch_spread: float | None = Field(ge=0.0, default=None)
    """By which launching took longer in some seconds of the profile than in others, nothing beside
    it, as a share; launch-bound steps may do so, too. None where no size waits for launches."""

    update_launches: UpdateLaunches | None = None
    """Of the host, to launch a step's updates; None where it was not measured (no GPU, data
    sheets): plans then count no launches."""

    measured: AwareDatetime
    settings: str = ""
    """What made the device differ from its kind, in words; empty for nothing."""

    @model_validator(mode="after")
    def _ascending(self) -> DeviceProfile:
        for name, rows in (("layer", self.layer), ("outside", self.outside)):
            _check_ascending(f"{self.label}: {name}", "samples", [row.samples for row in rows])
        if self.memory_bytes > self.limit_bytes:
            raise ValueError(f"{self.label}: memory_bytes is more than limit_bytes")
        return self


class UpdateRate(Record):
    """Parameters a second of one rank's CPU update, all ranks of the host updating at once."""

    threads: int = Field(ge=1)
    """Of each rank."""

    rate: float = Field(gt=0.0)
    """With nothing beside it."""

    in_training: float | None = Field(gt=0.0, default=None)
    """With a training's copies and launching thread beside it; None where it was not measured (data
    sheets)."""


class HostProfile(Record):
    """A machine."""

    host: str
    ranks: tuple[str, ...] = Field(min_length=1)
    """Labels of its devices, in the order of its ranks."""

    cores: int = Field(ge=1)
    """That all its ranks may use together."""

    memory_bytes: int = Field(ge=1)
    """That all its ranks may use together, what is in use already taken off."""

    bandwidth: float = Field(gt=0.0)
    """Bytes a second of its memory, read and written, all ranks together."""

    updates: tuple[UpdateRate, ...] = Field(min_length=1)
    """By ascending threads."""

    cpu: str = ""
    measured: AwareDatetime

    @model_validator(mode="after")
    def _ascending(self) -> HostProfile:
        _check_ascending(f"{self.host}: updates", "threads", [row.threads for row in self.updates])
        return self


class CollectiveSample(Record):
    """Collectives over a layer of so many bytes, all shards together, in milliseconds."""

    num_bytes: int = Field(ge=1)
    all_gather_ms: float = Field(ge=0.0)
    reduce_scatter_ms: float = Field(ge=0.0)
    uneven_all_gather_ms: float = Field(ge=0.0)
    """With unequal shards."""

    uneven_reduce_scatter_ms: float = Field(ge=0.0)


class CollectiveProfile(Record):
    """Collectives of one set of ranks."""

    hosts: tuple[str, ...] = Field(min_length=2)
    """Each rank's host, in rank order."""

    backend: str
    samples: tuple[CollectiveSample, ...] = Field(min_length=1)
    """By ascending bytes."""

    measured: AwareDatetime

    @model_validator(mode="after")
    def _ascending(self) -> CollectiveProfile:
        _check_ascending("collectives", "num_bytes", [row.num_bytes for row in self.samples])
        return self


class ProfileFile(Record):
    """All of a profile.json, checked."""

    version: Literal[1] = VERSION
    model: ProfiledModel
    devices: tuple[DeviceProfile, ...] = Field(min_length=1)
    hosts: tuple[HostProfile, ...] = Field(min_length=1)
    """In rank order."""

    collectives: tuple[CollectiveProfile, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict[str, str])
    """Of hytrain, torch, deepspeed, CUDA and the driver, where the newest part was measured."""

    @model_validator(mode="after")
    def _complete(self) -> ProfileFile:
        keys = [(device.host, device.label) for device in self.devices]
        _refuse_twice("device", [f"{label} of {host}" for host, label in keys])
        _refuse_twice("host", [host.host for host in self.hosts])
        for host in self.hosts:
            missing = sorted({label for label in host.ranks if (host.host, label) not in keys})
            if missing:
                raise ValueError(f"{host.host} has ranks on {missing}, which were not measured")
        return self

    def device(self, host: str, label: str) -> DeviceProfile:
        """The profile of a device.

        Raises:
            PlanError: there is none.
        """
        for device in self.devices:
            if (device.host, device.label) == (host, label):
                return device
        raise PlanError(f"there is no profile of {label} of {host}")


def _refuse_twice(what: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} given twice: {', '.join(twice)}")


def device_label(name: str, multiprocessors: int, limit_bytes: int) -> str:
    """What a device is told apart by: its name, its multiprocessors and its memory.

    >>> device_label("NVIDIA L4", 58, 23 * 2**30)
    'NVIDIA L4, 58 SMs, 23.0 GiB'
    >>> device_label("CPU AMD EPYC", 2, 23 * 2**30)
    'CPU AMD EPYC, 2 cores, 23.0 GiB'
    """
    units = "cores" if name.startswith("CPU ") else "SMs"
    return f"{name}, {multiprocessors} {units}, {limit_bytes / _GIB:.1f} GiB"


# -- files -------------------------------------------------------------------------------------


def write_profile(path: Path, profile: ProfileFile) -> None:
    """Writes profile.json: all of it or nothing.

    Raises:
        PlanError: the file cannot be written.
    """
    write_record(path, profile, what="profile")


def read_profile(path: Path) -> ProfileFile:
    """Reads profile.json.

    Raises:
        PlanError: no such file, no JSON, another version, or values that make no profile.
    """
    text, remedy = read_text(path, "profile"), "measure again with `hytrain profile`"
    return parse_record(ProfileFile, VERSION, text, path, what="profile", remedy=remedy)


# -- merging -----------------------------------------------------------------------------------

_Measured = TypeVar("_Measured", DeviceProfile, HostProfile, CollectiveProfile)


def merge_profiles(profiles: Sequence[ProfileFile]) -> ProfileFile:
    """One profile of all hosts: of what was measured twice, the newest.

    Hosts come in the order in which they first appear, which is that of the ranks.

    Raises:
        PlanError: the profiles are of different models, sequence lengths or dtypes.
    """
    if not profiles:
        raise PlanError("no profile was given")
    first = profiles[0].model
    for profile in profiles[1:]:
        words = _model_differences(first, profile.model)
        if words:
            raise PlanError(
                f"profiles of different models cannot be merged: {'; '.join(words)}; measure them "
                "with one model, sequence length, dtype and kind of moments"
            )
    by_age = sorted(
        profiles,
        key=lambda one: max(part.measured for part in (*one.devices, *one.hosts, *one.collectives)),
    )
    versions = {key: value for profile in by_age for key, value in profile.versions.items()}
    devices = [device for profile in profiles for device in profile.devices]
    hosts = [host for profile in profiles for host in profile.hosts]
    collectives = [one for profile in profiles for one in profile.collectives]
    return ProfileFile(
        model=first,
        devices=_latest(devices, [(device.host, device.label) for device in devices]),
        hosts=_latest(hosts, [host.host for host in hosts]),
        collectives=_latest(collectives, [one.hosts for one in collectives]),
        versions=versions,
    )


def _latest(parts: Sequence[_Measured], keys: Sequence[object]) -> tuple[_Measured, ...]:
    """Of parts with one key the newest, of equally old ones the last; in the order of the keys."""
    newest: dict[object, _Measured] = {}
    for key, part in zip(keys, parts, strict=True):
        if key not in newest or part.measured >= newest[key].measured:
            newest[key] = part
    return tuple(newest.values())


def _model_differences(one: ProfiledModel, other: ProfiledModel) -> list[str]:
    pairs = zip(one.model_dump().items(), other.model_dump().values(), strict=True)
    return [f"{name} is {here} and {there}" for (name, here), there in pairs if here != there]
