"""profile.json: what `hytrain profile` measured, of which devices and hosts, with which model.

    {"version": 1, "model": {...}, "devices": [{...}], "hosts": [{...}], "collectives": [{...}]}

A device is identified by its host and its label: its name with what distinguishes it from others of
that name (see :func:`device_label`). A file may hold any number of hosts. Files of several hosts or
days can be merged (:func:`merge_profiles`); the newest measurement wins.

Times are in milliseconds, for one micro-batch; sizes in bytes; rates per second.
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
"""Most samples of a batch that is planned: tables have a value for each number of samples up to it.

To plan 65,536 samples of a 7 B model took less than 10 s for 8 ranks, in stage 3, too (one core),
and 42 and 90 s for 4 ranks whose host had hardly enough memory. More were not tried."""
MOST_LAYERS = 10_000
LAUNCH_BOUND_SHARE = 0.9
"""A device waits for launches if they take more than this share of its passes."""


def _check_ascending(what: str, column: str, values: Sequence[int]) -> None:
    if list(values) != sorted(set(values)):
        raise ValueError(f"{what} must have ascending {column}, not {values}")


class ProfiledModel(Record):
    """The model that was measured, as equal blocks and what is outside of them."""

    name: str
    num_layers: int = Field(ge=1, le=MOST_LAYERS)
    """Transformer blocks."""

    layer_parameters: int = Field(ge=1)
    """Trained parameters of one block."""

    outside_parameters: tuple[int, int]
    """Trained parameters before the first block (embeddings), and after the last one (head)."""

    frozen_layer_parameters: int = Field(default=0, ge=0)
    """Frozen parameters of one block."""

    frozen_outside_parameters: tuple[int, int] = (0, 0)
    """Frozen parameters before the first trained block, and after the last one."""

    frozen_block_parameters: int = Field(default=0, ge=0)
    """Parameters of all wholly frozen blocks, which are not among ``num_layers``."""

    seq_len: int = Field(ge=1)
    """Tokens per sample."""

    dtype: Dtype
    """Dtype of the training copy."""

    boundary_bytes: int = Field(ge=0)
    """Size of the activations between two blocks, per sample."""

    moments: MomentsName = FP32
    """How Adam's moments were kept ("hytrain.moments") when rates of updates were measured."""

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return self.num_layers * self.layer_parameters + sum(self.outside_parameters)

    @property
    def frozen(self) -> int:
        """The number of frozen parameters."""
        blocks = self.num_layers * self.frozen_layer_parameters + self.frozen_block_parameters
        return blocks + sum(self.frozen_outside_parameters)


class LayerSample(Record):
    """One block with a micro-batch of ``samples`` samples."""

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
    """Most that was allocated in forward and backward beyond what was there before (weights, the
    block's input): activations, temporaries, the gradients of its weights."""

    recompute_peak_bytes: int = Field(ge=0)
    """The same with recomputation."""

    launch_ms: float | None = Field(ge=0.0, default=None)
    """Host time to launch forward and backward without recomputation, with nothing queued and no
    updates beside it; None if not measured. If it is as long as both passes, the device waits for
    the host: a launch-bound size."""

    device_ms: float | None = Field(ge=0.0, default=None)
    """Device time of both passes without recomputation if all of it is launched before; measured
    for sizes at which the device waits for the host, or nearly. The rest of both passes is room for
    updates. None if not measured."""

    @property
    def is_launch_bound(self) -> bool:
        """Whether the device waits for the host; False if not measured."""
        passes = self.forward_ms + self.backward_ms
        return self.launch_ms is not None and self.launch_ms > LAUNCH_BOUND_SHARE * passes


class OutsideSample(Record):
    """All that is outside of the blocks (embedding, head, loss) with one micro-batch."""

    samples: int = Field(ge=1, le=MOST_SAMPLES)
    forward_ms: float = Field(ge=0.0)
    backward_ms: float = Field(ge=0.0)
    peak_bytes: int = Field(ge=0)
    """Most that was allocated beyond what was there before, gradients of weights included."""

    launch_ms: float | None = Field(ge=0.0, default=None)
    """Host time to launch both passes; see :class:`LayerSample`."""

    device_ms: float | None = Field(ge=0.0, default=None)
    """Device time of both passes; see :class:`LayerSample`."""


class CopyRates(Record):
    """Bytes per second between a GPU and pinned host memory: each way alone, then both at once."""

    to_host: float = Field(gt=0.0)
    from_host: float = Field(gt=0.0)
    to_host_both: float = Field(gt=0.0)
    from_host_both: float = Field(gt=0.0)


class UpdateLaunches(Record):
    """Host time that training adds to the model's own launches, in ms, on one rank with nothing
    beside it.

    If the device has more to do than the host, it is hidden; in a launch-bound step it adds up.
    """

    gpu_step_ms: float = Field(ge=0.0)
    """Once per step in which any layer is updated on the GPU."""

    launch_ms: float = Field(ge=0.0)
    """Per launch of updates on the GPU; small neighbouring layers share one."""

    gpu_layer_ms: float = Field(ge=0.0)
    """Per layer that is updated on the GPU, to launch its update."""

    cpu_layer_ms: float = Field(ge=0.0)
    """Per layer that is updated on the CPU: its hooks, the hand-over of its gradient, the next
    forward's wait for its weights if they are there already."""

    passes_ms: float = Field(ge=0.0)
    """Per step, in its passes, wherever layers are updated."""

    gpu_layer_passes_ms: float = Field(ge=0.0)
    """Per layer that is updated on the GPU, in the passes: its hooks, the hand-over of its
    gradient."""


class DeviceProfile(Record):
    """Measurements of one kind of GPU of a host, shared by its ranks of equal label."""

    host: str
    label: str
    """See :func:`device_label`; the ranks of :class:`HostProfile` refer to it."""

    device: str
    """Its name, as the driver gives it."""

    multiprocessors: int = Field(ge=1)
    """Multiprocessors that the process may use."""

    limit_bytes: int = Field(ge=1)
    """Memory of the device, or the part of it that the process was allowed (its fraction)."""

    memory_bytes: int = Field(ge=1)
    """What training can use of it: not what other processes and the driver's context hold."""

    idle_bytes: int = Field(ge=0, default=0)
    """What the allocator holds before there is a model (workspaces)."""

    layer: tuple[LayerSample, ...] = Field(min_length=1)
    """By ascending samples."""

    outside: tuple[OutsideSample, ...] = ()
    """By ascending samples; empty if the model has nothing outside."""

    update_rate: float = Field(gt=0.0)
    """Parameters per second that the GPU updates."""

    copies: CopyRates
    accumulation_ms: float | None = Field(ge=0.0, default=None)
    """Extra time to add a layer's gradient to that of earlier micro-batches instead of copying it,
    which the measured backward includes; None if not measured."""

    launch_slowdown: float | None = Field(ge=1.0, default=None)
    """Ratio of the time to launch beside updates on the CPU, with all but one of the rank's cores,
    to that of launching alone; None if not measured."""

    launch_spread: float | None = Field(ge=0.0, default=None)
    """Share by which launching took longer in some seconds of the profile than in others, with
    nothing beside it; launch-bound steps may, too. None if no size waits for launches."""

    update_launches: UpdateLaunches | None = None
    """Host time to launch a step's updates; None if not measured (no GPU, data sheets): plans then
    count no launches."""

    measured: AwareDatetime
    settings: str = ""
    """What made the device differ from others of its kind, in words; may be empty."""

    @model_validator(mode="after")
    def _ascending(self) -> DeviceProfile:
        for name, rows in (("layer", self.layer), ("outside", self.outside)):
            _check_ascending(f"{self.label}: {name}", "samples", [row.samples for row in rows])
        if self.memory_bytes > self.limit_bytes:
            raise ValueError(f"{self.label}: memory_bytes is more than limit_bytes")
        return self


class UpdateRate(Record):
    """Parameters per second of one rank's CPU update while all ranks of the host update."""

    threads: int = Field(ge=1)
    """Threads of each rank."""

    rate: float = Field(gt=0.0)
    """The rate with nothing beside it."""

    in_training: float | None = Field(gt=0.0, default=None)
    """The rate with a training's copies and launching thread beside it; None if not measured (data
    sheets)."""


class HostProfile(Record):
    """Measurements of one machine."""

    host: str
    ranks: tuple[str, ...] = Field(min_length=1)
    """Labels of its devices, in the order of its ranks."""

    cores: int = Field(ge=1)
    """Cores that all its ranks may use together."""

    memory_bytes: int = Field(ge=1)
    """Memory that all its ranks may use together, without what is in use already."""

    bandwidth: float = Field(gt=0.0)
    """Bytes per second that its memory reads and writes, for all ranks together."""

    updates: tuple[UpdateRate, ...] = Field(min_length=1)
    """By ascending threads."""

    cpu: str = ""
    measured: AwareDatetime

    @model_validator(mode="after")
    def _ascending(self) -> HostProfile:
        _check_ascending(f"{self.host}: updates", "threads", [row.threads for row in self.updates])
        return self


class CollectiveSample(Record):
    """Times of collectives over a layer of ``num_bytes`` (all shards together), in milliseconds."""

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
    """Versions of hytrain, torch, deepspeed, CUDA and driver where the newest part was measured."""

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
    """The label that identifies a device: its name, its multiprocessors and its memory.

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
    """Merges profiles into one of all hosts; of repeated measurements the newest is kept.

    Hosts come in the order in which they first appear, which is that of the ranks.

    Raises:
        PlanError: there is no profile, or they are of different models, sequence lengths, dtypes or
            kinds of moments.
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
    """The newest part of each key, of equally old ones the last; in the order of the keys."""
    newest: dict[object, _Measured] = {}
    for key, part in zip(keys, parts, strict=True):
        if key not in newest or part.measured >= newest[key].measured:
            newest[key] = part
    return tuple(newest.values())


def _model_differences(one: ProfiledModel, other: ProfiledModel) -> list[str]:
    pairs = zip(one.model_dump().items(), other.model_dump().values(), strict=True)
    return [f"{name} is {here} and {there}" for (name, here), there in pairs if here != there]
