"""Profiles of GPUs that were not measured, estimated from their data sheets.

For a first look at what a set of GPUs would do together. The tables have the values of NVIDIA's
data sheets: dense TFLOP/s, memory bandwidth, multiprocessors (memory: as the driver reports it).
The estimates are coarse, see the constants: a plan for training needs `hytrain profile`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from hytrain.errors import PlanError, did_you_mean
from hytrain.formats.dtypes import ITEMSIZE
from hytrain.formats.moment_kinds import MomentsName
from hytrain.formats.profile_file import (
    CopyRates,
    DeviceProfile,
    HostProfile,
    LayerSample,
    OutsideSample,
    ProfiledModel,
    ProfileFile,
    UpdateRate,
    device_label,
)

SETTINGS = "estimated from data sheets, not measured"

_WRITTEN = datetime(2026, 11, 21, tzinfo=timezone.utc)
_GIB = 1024**3
# Share of the sheet's TFLOP/s that a transformer layer's matrix products reach with enough tokens,
# and the number of tokens at once with which they reach half of that.
_EFFICIENCY = 0.55
_HALF_SPEED_TOKENS = 512
_LAUNCH_MS = 0.1
# Activations of a layer, bytes per token and hidden unit at 2 bytes each, without attention scores
# (Korthikanti et al. 2022, arXiv 2205.05198), for layers of 12 hidden^2 parameters.
_ACTIVATION_BYTES = 34
# Logits: 2 bytes, their fp32 copy, its gradient and softmax.
_LOGIT_BYTES = 14
# Share of the memory's bandwidth that Adam's kernels reach, and bytes they move per parameter.
_UPDATE_SHARE = 0.8
_UPDATE_BYTES = 30
_GPU_SPEED: dict[MomentsName, float] = {"fp32": 1.0, "bf16": 1.4, "8bit": 1.2}
_CPU_SPEED: dict[MomentsName, float] = {"fp32": 1.0, "bf16": 1.2, "8bit": 1.25}
"""Speed of updates over those with fp32 moments: one H200 and its host (experiments/moment_kinds).
Those of fewer bytes are limited by arithmetic."""
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CORE_RATE = 3.3e8
"""Parameters/s that a core updates, until the memory's bandwidth is used up."""


@dataclass(frozen=True, slots=True)
class DeviceSheet:
    """A GPU's data sheet.

    Attributes:
        name: as the driver reports it.
        gib: memory, as the driver reports it.
        half_tflops: bf16; the same as fp32 before Ampere, when tensor cores had fp16 but no bf16.
        single_tflops: fp32, without TF32.
        bandwidth: of its memory, GB/s.
        copy_rate: to and from the host, each way while both are in use, GB/s.
        link_rate: of a collective with other GPUs of its host over NVLink and its switches, GB/s:
            0.8 of the link's rate each way. 0: through the host.
    """

    name: str
    multiprocessors: int
    gib: float
    half_tflops: float
    single_tflops: float
    bandwidth: float
    copy_rate: float
    link_rate: float = 0.0


SHEETS: dict[str, DeviceSheet] = {
    "p40": DeviceSheet("Tesla P40", 30, 22.4, 11.8, 11.8, 346, 10),
    "p100": DeviceSheet("Tesla P100-PCIE-16GB", 56, 15.9, 9.3, 9.3, 732, 10),
    "v100": DeviceSheet("Tesla V100-PCIE-16GB", 80, 15.8, 14.0, 14.0, 900, 10),
    "v10032gb": DeviceSheet("Tesla V100-PCIE-32GB", 80, 31.7, 14.0, 14.0, 900, 10),
    "t4": DeviceSheet("Tesla T4", 40, 14.6, 8.1, 8.1, 320, 10),
    "rtx3090": DeviceSheet("NVIDIA GeForce RTX 3090", 82, 23.7, 71.0, 35.6, 936, 20),
    "a10": DeviceSheet("NVIDIA A10", 72, 22.1, 125.0, 31.2, 600, 20),
    "a10g": DeviceSheet("NVIDIA A10G", 80, 22.1, 70.0, 31.5, 600, 20),
    "a6000": DeviceSheet("NVIDIA RTX A6000", 84, 47.4, 154.8, 38.7, 768, 20),
    "a100": DeviceSheet("NVIDIA A100-SXM4-80GB", 108, 79.2, 312.0, 19.5, 2039, 20, 240),
    "a10040gb": DeviceSheet("NVIDIA A100-SXM4-40GB", 108, 39.4, 312.0, 19.5, 1555, 20, 240),
    "l4": DeviceSheet("NVIDIA L4", 58, 22.0, 121.0, 30.3, 300, 20),
    "l40s": DeviceSheet("NVIDIA L40S", 142, 44.4, 362.0, 91.6, 864, 20),
    "rtx4090": DeviceSheet("NVIDIA GeForce RTX 4090", 128, 23.6, 165.2, 82.6, 1008, 20),
    "h100": DeviceSheet("NVIDIA H100 80GB HBM3", 132, 79.2, 989.0, 66.9, 3350, 40, 360),
    "h100pcie": DeviceSheet("NVIDIA H100 PCIe", 114, 79.2, 756.0, 51.2, 2000, 40),
    "h100nvl": DeviceSheet("NVIDIA H100 NVL", 132, 93.0, 835.0, 60.0, 3938, 40),
    "h200": DeviceSheet("NVIDIA H200", 132, 139.8, 989.0, 66.9, 4800, 40, 360),
}

_ALIASES = {
    "3090": "rtx3090", "4090": "rtx4090", "rtxa6000": "a6000", "v100pcie16gb": "v100",
    "v10016gb": "v100", "v100pcie32gb": "v10032gb", "a10080gb": "a100", "a100sxm480gb": "a100",
    "a100sxm440gb": "a10040gb", "h10080gb": "h100", "h10080gbhbm3": "h100", "h100sxm": "h100",
}  # fmt: skip
"""Other names of the sheets."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an estimate needs to know of a model beyond what a profile says of it."""

    model: ProfiledModel
    hidden: int
    vocabulary: int


def sheet_of(name: str) -> DeviceSheet | None:
    """Returns the sheet that a user's name means, in any spelling; None if there is none."""
    word = re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())
    return SHEETS.get(_ALIASES.get(word, word))


def estimated_interconnect(profile: ProfileFile) -> float:
    """Returns the bytes/s of a collective between all ranks of an estimated profile.

    It uses NVLink if all are GPUs of one host that have it, else the slowest one's way to its host.
    """
    there = {device.device for device in profile.devices}
    linked = min(sheet.link_rate for sheet in SHEETS.values() if sheet.name in there)
    if len(profile.hosts) == 1 and linked:
        return linked * 1e9
    return min(device.copies.to_host_both for device in profile.devices)


def estimated_device(sheet: DeviceSheet, shape: ModelShape, host: str) -> DeviceProfile:
    """Returns a profile of the device with a model, from its data sheet."""
    model = shape.model
    itemsize = ITEMSIZE[model.dtype]
    tflops = sheet.single_tflops if model.dtype == "fp32" else sheet.half_tflops
    limit = int(sheet.gib * _GIB)
    swept = _UPDATE_SHARE * sheet.bandwidth * 1e9
    return DeviceProfile(
        host=host,
        label=device_label(sheet.name, sheet.multiprocessors, limit),
        device=sheet.name,
        multiprocessors=sheet.multiprocessors,
        limit_bytes=limit,
        memory_bytes=limit,
        layer=tuple(_layer(shape, size, tflops * 1e9, itemsize) for size in _SIZES),
        outside=tuple(_outside(shape, size, tflops * 1e9, itemsize) for size in _SIZES),
        update_rate=_GPU_SPEED[model.moments] * swept / _UPDATE_BYTES,
        copies=CopyRates(
            to_host=sheet.copy_rate * 1e9,
            from_host=sheet.copy_rate * 1e9,
            to_host_both=sheet.copy_rate * 1e9,
            from_host_both=sheet.copy_rate * 1e9,
        ),
        measured=_WRITTEN,
        settings=SETTINGS,
    )


def _milliseconds(operations: float, tokens: int, per_ms: float) -> float:
    reached = _EFFICIENCY * per_ms * tokens / (tokens + _HALF_SPEED_TOKENS)
    return _LAUNCH_MS + operations / reached


def _layer(shape: ModelShape, samples: int, per_ms: float, itemsize: int) -> LayerSample:
    model = shape.model
    tokens = samples * model.seq_len
    # Two operations per parameter and token, and attention's two products, half of them masked.
    operations = 2.0 * tokens * (model.layer_parameters + model.seq_len * shape.hidden)
    forward = _milliseconds(operations, tokens, per_ms)
    backward = _milliseconds(2.0 * operations, tokens, per_ms)
    wide = model.layer_parameters / (12.0 * shape.hidden**2)
    kept = int(_ACTIVATION_BYTES * itemsize / 2 * tokens * shape.hidden * max(1.0, wide))
    peak = int(1.3 * kept) + itemsize * model.layer_parameters
    return LayerSample(
        samples=samples,
        forward_ms=forward,
        backward_ms=backward,
        recompute_backward_ms=forward + backward,
        kept_bytes=kept,
        peak_bytes=peak,
        recompute_peak_bytes=peak,
    )


def _outside(shape: ModelShape, samples: int, per_ms: float, itemsize: int) -> OutsideSample:
    model = shape.model
    tokens = samples * model.seq_len
    operations = 2.0 * tokens * shape.vocabulary * shape.hidden
    return OutsideSample(
        samples=samples,
        forward_ms=_milliseconds(operations, tokens, per_ms),
        backward_ms=_milliseconds(2.0 * operations, tokens, per_ms),
        peak_bytes=_LOGIT_BYTES * tokens * shape.vocabulary
        + itemsize * sum(model.outside_parameters),
    )


def estimated_host(
    name: str,
    ranks: tuple[str, ...],
    *,
    cores: int,
    memory_bytes: int,
    bandwidth: float,
    moments: MomentsName,
) -> HostProfile:
    """Returns an estimated profile of a host; ``bandwidth``: bytes/s of its memory."""
    speed = _CPU_SPEED[moments]
    together = speed * _UPDATE_SHARE * bandwidth / _UPDATE_BYTES / len(ranks)
    threads = sorted({1, max(1, cores // 2), cores})
    return HostProfile(
        host=name,
        ranks=ranks,
        cores=cores,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        updates=tuple(
            UpdateRate(threads=count, rate=min(speed * _CORE_RATE * count, together))
            for count in threads
        ),
        cpu=SETTINGS,
        measured=_WRITTEN,
    )


_MOST_OF_A_KIND = 4096
_COUNTED = re.compile(r"(\d+)x(?=.*[A-Za-z])(.+)")


def expand(names: Sequence[str]) -> list[str]:
    """Returns names with counts, "2xl4" or "2x l4", as one name per device."""
    found: list[str] = []
    for name in names:
        counted = _COUNTED.fullmatch(name.strip())
        count = int(counted[1][:20]) if counted else 1
        if not 1 <= count <= _MOST_OF_A_KIND:
            raise PlanError(f"{name}: give 1 to {_MOST_OF_A_KIND} devices of a kind")
        found += [counted[2].strip() if counted else name.strip()] * count
    return found


def _meant(name: str) -> str:
    """Returns an unknown name with a suggestion of what was meant."""
    if name.isdigit():
        return f"{name} (write {name}xNAME, as {name}xh100)"
    counted = re.fullmatch(r"(.+?)[x*:](\d+)", name)
    if counted and sheet_of(counted[1]):
        return f"{name} (write {counted[2]}x{counted[1]})"
    meant = did_you_mean(name.lower(), SHEETS).strip()
    return f"{name} ({meant})" if meant else name


def hosts_of(names: Sequence[str], per_host: Sequence[int] | None) -> list[list[str]]:
    """Returns the devices of each host; all on one host if ``per_host`` is None.

    Raises:
        PlanError: the hosts do not have exactly these devices.
    """
    counts = [len(names)] if per_host is None else list(per_host)
    if sum(counts) != len(names):
        raise PlanError(
            f"--hosts {' '.join(map(str, counts))} are {sum(counts)} GPUs together, but --gpus "
            f"names {len(names)}: give numbers that sum to it"
        )
    groups: list[list[str]] = []
    for count in counts:
        begin = sum(len(group) for group in groups)
        groups.append(list(names[begin : begin + count]))
    return groups


def estimated_cluster(
    groups: Sequence[Sequence[str]],
    shape: ModelShape,
    *,
    cores: int = 16,
    memory_bytes: int = 64 * 1024**3,
    bandwidth: float = 1e11,
) -> ProfileFile:
    """Returns the profile of a model on hosts with devices of the shipped data sheets.

    Raises:
        PlanError: there is no data sheet for a name.
    """
    unknown = {name: None for names in groups for name in names if sheet_of(name) is None}
    if unknown:
        raise PlanError(
            f"no data sheet of a GPU called {', '.join(map(_meant, unknown))}: there are "
            f"{', '.join(SHEETS)}; several of a kind: 4xh100"
        )
    hosts: list[HostProfile] = []
    devices: dict[tuple[str, str], DeviceProfile] = {}
    for number, names in enumerate(groups):
        host = f"host{number}"
        labels: list[str] = []
        for name in names:
            sheet = sheet_of(name)
            assert sheet is not None
            device = estimated_device(sheet, shape, host)
            devices[host, device.label] = device
            labels.append(device.label)
        hosts.append(
            estimated_host(
                host,
                tuple(labels),
                cores=cores,
                memory_bytes=memory_bytes,
                bandwidth=bandwidth,
                moments=shape.model.moments,
            )
        )
    return ProfileFile(model=shape.model, devices=tuple(devices.values()), hosts=tuple(hosts))
