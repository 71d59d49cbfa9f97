"""The published files of a case: args.json, hostfile, clusterfile.json and a folder of profiles.

CASE/args.json            num_layers, gbs, hidden_size, ..., profile_dir (relative to CASE)
CASE/hostfile             a line a node: IP slots=N
CASE/clusterfile.json     IP -> instance_type, inter_bandwidth, intra_bandwidth, memory (GB/s, GB)
PROFILES/DeviceType.{type}_tp{tp}_bs{samples}.json
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hytrain.errors import PlanError
from hytrain.formats.record import checked, parse_json, read_text
from hytrain.tools.hybrid.problem import (
    Constants,
    DeviceType,
    Node,
    Options,
    Problem,
    Samples,
)

_PROFILE = re.compile(r"DeviceType\.(?P<device>.+)_tp(?P<tp>\d+)_bs(?P<samples>\d+)\.json")
_HOST = re.compile(r"(?P<ip>\S+)\s+slots=(?P<slots>\d{1,6})")
_MB_PER_GB = 1024


class _Part(BaseModel):
    """The fields that are read from a JSON object, which may hold more."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class _Args(_Part):
    num_layers: PositiveInt
    gbs: PositiveInt
    hidden_size: PositiveInt
    sequence_length: PositiveInt
    vocab_size: PositiveInt
    max_profiled_tp_degree: PositiveInt
    max_profiled_batch_size: PositiveInt
    profile_dir: str = Field(min_length=1)
    min_group_scale_variance: PositiveFloat = 1.0
    mem_coef: PositiveFloat = 5.0
    constants_profile: str = "A100_tp1_bs16"
    """The profile that the constants are read from."""


class _ClusterNode(_Part):
    instance_type: str = Field(min_length=1)
    memory: PositiveFloat
    intra_bandwidth: PositiveFloat
    inter_bandwidth: PositiveFloat


class _Parameters(_Part):
    parameters_per_layer_bytes: list[NonNegativeFloat]


class _Model(_Part):
    num_layers: PositiveInt
    parameters: _Parameters


class _Time(_Part):
    forward_backward_time_ms: NonNegativeFloat
    optimizer_time_ms: NonNegativeFloat
    batch_generator_time_ms: NonNegativeFloat
    layer_compute_total_ms: list[NonNegativeFloat]


class _Memory(_Part):
    layer_memory_total_mb: list[NonNegativeFloat]


class _Profile(_Part):
    model: _Model
    execution_time: _Time
    execution_memory: _Memory


def _read(kind: Any, path: Path, what: str) -> Any:
    return checked(kind, parse_json(read_text(path, what), f"the {what} {path}"), str(path))


def read_case(case: Path, options: Options | None = None) -> Problem:
    """Reads the problem of a folder in the published formats.

    Raises:
        PlanError: a file or field is missing, unusable, or contradicts another; it is named.
    """
    args: _Args = _read(_Args, case / "args.json", "case")
    nodes, devices = read_cluster(case / "hostfile", case / "clusterfile.json")
    folder = case / args.profile_dir
    return Problem(
        nodes=nodes,
        devices=devices,
        samples=read_profiles(folder, [device.name for device in devices], args.num_layers),
        constants=_read_constants(folder, args.constants_profile, args.num_layers),
        gbs=args.gbs,
        hidden_size=args.hidden_size,
        sequence_length=args.sequence_length,
        vocab_size=args.vocab_size,
        max_tp=args.max_profiled_tp_degree,
        max_batch=args.max_profiled_batch_size,
        variance=args.min_group_scale_variance,
        mem_coef=args.mem_coef,
        options=options or Options(),
    )


def read_cluster(
    hostfile: Path, clusterfile: Path
) -> tuple[tuple[Node, ...], tuple[DeviceType, ...]]:
    """Reads the nodes in the hostfile's order, and the types of their GPUs by name.

    Raises:
        PlanError: a line or field that cannot be used, or two nodes of a type that differ.
    """
    entries: dict[str, _ClusterNode] = _read(dict[str, _ClusterNode], clusterfile, "clusterfile")
    nodes: list[Node] = []
    devices: dict[str, DeviceType] = {}
    for number, line in enumerate(read_text(hostfile, "hostfile").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _HOST.fullmatch(line.strip())
        if match is None or int(match["slots"]) < 1:
            raise PlanError(f"{hostfile}, line {number}: must be 'IP slots=N', not {line!r}")
        if match["ip"] not in entries:
            raise PlanError(f"{clusterfile} has no entry for {match['ip']}, a node of {hostfile}")
        entry = entries[match["ip"]]
        device = DeviceType(
            name=entry.instance_type,
            memory_mb=entry.memory * _MB_PER_GB,
            intra_bandwidth=entry.intra_bandwidth,
            inter_bandwidth=entry.inter_bandwidth,
        )
        if devices.setdefault(device.name, device) != device:
            raise PlanError(
                f"{clusterfile}, {match['ip']}.instance_type: another node of type {device.name} "
                "has other memory or bandwidths: give one of them a type (and profiles) of its own"
            )
        nodes.append(Node(match["ip"], device.name, int(match["slots"])))
    if not nodes:
        raise PlanError(f"{hostfile} names no node: write a line 'IP slots=N' for each")
    return tuple(nodes), tuple(devices[name] for name in sorted(devices))


def read_profiles(
    folder: Path, devices: list[str], num_layers: int
) -> dict[tuple[str, int, int], Samples]:
    """Reads every profile of these types, by (type, tp, samples), whatever the folder's order.

    Raises:
        PlanError: no folder, a type without profile, or a file or field that cannot be used.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise PlanError(f"cannot read the profiles of {folder} ({error.strerror})") from None
    found: dict[tuple[str, int, int], Samples] = {}
    for name in names:
        match = _PROFILE.fullmatch(name)
        if match is None or match["device"] not in devices:
            continue
        key = (match["device"], int(match["tp"]), int(match["samples"]))
        if key in found:
            raise PlanError(f"{folder / name}: another file has tp {key[1]}, bs {key[2]} as well")
        found[key] = _read_samples(folder / name, num_layers)
    missing = [device for device in devices if device not in {key[0] for key in found}]
    if missing:
        raise PlanError(f"{folder}: no profile DeviceType.{missing[0]}_tp*_bs*.json of these nodes")
    return found


def _read_samples(path: Path, num_layers: int) -> Samples:
    profile: _Profile = _read(_Profile, path, "profile")
    times = profile.execution_time.layer_compute_total_ms
    memory = profile.execution_memory.layer_memory_total_mb
    _check_length(path, "execution_time.layer_compute_total_ms", times, num_layers)
    _check_length(path, "execution_memory.layer_memory_total_mb", memory, num_layers)
    sync = profile.execution_time.forward_backward_time_ms - sum(times)
    if sync < -1e-6 * sum(times):
        raise PlanError(
            f"{path}, execution_time.forward_backward_time_ms: must be at least the sum of "
            "layer_compute_total_ms"
        )
    return Samples(tuple(times), tuple(memory), sync)


def _read_constants(folder: Path, name: str, num_layers: int) -> Constants:
    path = folder / f"DeviceType.{name}.json"
    profile: _Profile = _read(_Profile, path, "profile of the constants")
    model, time = profile.model, profile.execution_time
    if model.num_layers != num_layers:
        raise PlanError(
            f"{path}, model.num_layers: must be {num_layers}, as in args.json, not "
            f"{model.num_layers}"
        )
    sizes = model.parameters.parameters_per_layer_bytes
    _check_length(path, "model.parameters.parameters_per_layer_bytes", sizes, num_layers)
    return Constants(2 * time.optimizer_time_ms, time.batch_generator_time_ms, tuple(sizes))


def _check_length(path: Path, name: str, values: Sequence[float], num_layers: int) -> None:
    if len(values) != num_layers:
        raise PlanError(
            f"{path}, {name}: must have {num_layers} numbers, one for each layer, not {len(values)}"
        )
