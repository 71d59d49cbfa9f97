"""The published files of a case: args.json, hostfile, clusterfile.json and a folder of profiles.

CASE/args.json            num_layers, gbs, hidden_size, ..., profile_dir (relative to CASE)
CASE/hostfile             a line a node: IP slots=N
CASE/clusterfile.json     IP -> instance_type, inter_bandwidth, intra_bandwidth, memory (GB/s, GB)
PROFILES/DeviceType.{type}_tp{tp}_bs{samples}.json
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hytrain.errors import PlanError
from hytrain.formats.record import parse_json, read_text
from hytrain.tools.hybrid.problem import (
    Constants,
    DeviceType,
    Node,
    Options,
    Problem,
    Samples,
)

CONSTANTS = "A100_tp1_bs16"
"""The profile that the constants are read from, unless args.json says ``constants_profile``."""

_PROFILE = re.compile(r"DeviceType\.(?P<device>.+)_tp(?P<tp>\d+)_bs(?P<samples>\d+)\.json")
_HOST = re.compile(r"(?P<ip>\S+)\s+slots=(?P<slots>\d+)")
_MB_PER_GB = 1024
_ARGS = {
    "num_layers": (int, None),
    "gbs": (int, None),
    "hidden_size": (int, None),
    "sequence_length": (int, None),
    "vocab_size": (int, None),
    "max_profiled_tp_degree": (int, None),
    "max_profiled_batch_size": (int, None),
    "min_group_scale_variance": (float, 1.0),
    "max_permute_len": (int, 2**31),
    "mem_coef": (float, 5.0),
}


class Fields:
    """A JSON object whose errors name the file and the field."""

    def __init__(self, path: Path, values: Any, where: str = "") -> None:
        self.path, self.where = path, where
        if not isinstance(values, Mapping):
            raise PlanError(f"{path}{self._at()}: must be a JSON object")
        self.values: Mapping[str, Any] = values

    def _at(self, name: str = "") -> str:
        parts = [part for part in (self.where, name) if part]
        return f", {'.'.join(parts)}" if parts else ""

    def refuse(self, name: str, words: str) -> PlanError:
        return PlanError(f"{self.path}{self._at(name)}: {words}")

    def _value(self, name: str) -> Any:
        if name not in self.values:
            raise self.refuse(name, "is missing")
        return self.values[name]

    def part(self, name: str) -> Fields:
        where = f"{self.where}.{name}" if self.where else name
        return Fields(self.path, self._value(name), where)

    def parts(self, name: str) -> list[Fields]:
        """A list of objects, one or more."""
        values = self._list(name)
        where = f"{self.where}.{name}" if self.where else name
        return [Fields(self.path, one, f"{where}[{i}]") for i, one in enumerate(values)]

    def length(self, name: str) -> int:
        """Of a list, 1 or more."""
        return len(self._list(name))

    def _list(self, name: str) -> list[Any]:
        values = self._value(name)
        if not isinstance(values, list) or not values:
            raise self.refuse(name, f"must be a list of one or more, not {values!r}")
        return values

    def number(self, name: str, *, least: float = 0.0, above: bool = False) -> float:
        """A finite number of at least ``least``, or above it."""
        return self._number(name, self._value(name), least, above)

    def _number(self, name: str, value: Any, least: float, above: bool) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < least or (above and value == least):
            raise self.refuse(
                name,
                f"must be a number {'above' if above else 'of at least'} {least:g}, not {value!r}",
            )
        return float(value)

    def whole(self, name: str) -> int:
        """A whole number of at least 1."""
        value = self.number(name, least=1)
        if value != int(value):
            raise self.refuse(name, f"must be a whole number, not {value!r}")
        return int(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """So many numbers, none negative."""
        values = self._value(name)
        if not isinstance(values, list) or len(values) != count:
            seen = f"{len(values)}" if isinstance(values, list) else repr(values)
            raise self.refuse(name, f"must have {count} numbers, one a layer, not {seen}")
        return tuple(self._number(f"{name}[{i}]", v, 0.0, False) for i, v in enumerate(values))

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str) or not value:
            raise self.refuse(name, f"must be a text, not {value!r}")
        return value


def read_json(path: Path, what: str) -> Fields:
    """A file's object.

    Raises:
        PlanError: it cannot be read, or is not one JSON object.
    """
    text = read_text(path, what)
    return Fields(path, parse_json(text, f"the {what} {path}"))


def read_case(case: Path, options: Options | None = None) -> Problem:
    """The problem of a folder in the published formats.

    Raises:
        PlanError: a file or field is missing, unusable, or contradicts another; it is named.
    """
    fields = read_json(case / "args.json", "case")
    args = {name: _argument(fields, name) for name in _ARGS}
    nodes, devices = read_cluster(case / "hostfile", case / "clusterfile.json")
    folder = case / fields.text("profile_dir")
    num_layers = int(args["num_layers"])
    names = [device.name for device in devices]
    samples = read_profiles(folder, names, num_layers)
    named = fields.text("constants_profile") if "constants_profile" in fields.values else CONSTANTS
    return Problem(
        nodes=nodes,
        devices=devices,
        samples=samples,
        constants=_read_constants(folder, named, num_layers),
        gbs=int(args["gbs"]),
        hidden_size=int(args["hidden_size"]),
        sequence_length=int(args["sequence_length"]),
        vocab_size=int(args["vocab_size"]),
        max_tp=int(args["max_profiled_tp_degree"]),
        max_batch=int(args["max_profiled_batch_size"]),
        variance=args["min_group_scale_variance"],
        max_permute_len=int(args["max_permute_len"]),
        mem_coef=args["mem_coef"],
        options=options or Options(),
    )


def _argument(fields: Fields, name: str) -> float:
    kind, default = _ARGS[name]
    if name not in fields.values and default is not None:
        return default
    return fields.whole(name) if kind is int else fields.number(name, above=True)


def read_cluster(
    hostfile: Path, clusterfile: Path
) -> tuple[tuple[Node, ...], tuple[DeviceType, ...]]:
    """Nodes in the hostfile's order, and the types of their GPUs by name.

    Raises:
        PlanError: a line or field that cannot be used, or two nodes of a type that differ.
    """
    entries = read_json(clusterfile, "clusterfile")
    nodes: list[Node] = []
    devices: dict[str, DeviceType] = {}
    for number, line in enumerate(read_text(hostfile, "hostfile").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _HOST.fullmatch(line.strip())
        if match is None or int(match["slots"]) < 1:
            raise PlanError(f"{hostfile}, line {number}: must be 'IP slots=N', not {line!r}")
        entry = entries.part(match["ip"])
        device = DeviceType(
            name=entry.text("instance_type"),
            memory_mb=entry.number("memory", above=True) * _MB_PER_GB,
            intra_bandwidth=entry.number("intra_bandwidth", above=True),
            inter_bandwidth=entry.number("inter_bandwidth", above=True),
        )
        known = devices.setdefault(device.name, device)
        if known != device:
            raise entry.refuse(
                "instance_type",
                f"another node of type {device.name} has other memory or bandwidths: give one of "
                "them a type (and profiles) of its own",
            )
        nodes.append(Node(match["ip"], device.name, int(match["slots"])))
    if not nodes:
        raise PlanError(f"{hostfile}: has no node")
    return tuple(nodes), tuple(devices[name] for name in sorted(devices))


def read_profiles(
    folder: Path, devices: list[str], num_layers: int
) -> dict[tuple[str, int, int], Samples]:
    """Every profile of these types, by (type, tp, samples), whatever order the folder lists.

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
            raise PlanError(f"{folder / name}: tp {key[1]}, bs {key[2]} is given twice")
        found[key] = _read_samples(read_json(folder / name, "profile"), num_layers)
    missing = [device for device in devices if device not in {key[0] for key in found}]
    if missing:
        raise PlanError(f"{folder}: no DeviceType.{missing[0]}_tp*_bs*.json, which hostfile needs")
    return found


def _read_samples(fields: Fields, num_layers: int) -> Samples:
    time = fields.part("execution_time")
    times = time.numbers("layer_compute_total_ms", num_layers)
    sync = time.number("forward_backward_time_ms") - sum(times)
    if sync < -1e-6 * sum(times):
        raise time.refuse(
            "forward_backward_time_ms", "is less than the sum of layer_compute_total_ms"
        )
    memory = fields.part("execution_memory").numbers("layer_memory_total_mb", num_layers)
    return Samples(times, memory, sync)


def _read_constants(folder: Path, name: str, num_layers: int) -> Constants:
    fields = read_json(folder / f"DeviceType.{name}.json", "profile of the constants")
    model, time = fields.part("model"), fields.part("execution_time")
    if model.whole("num_layers") != num_layers:
        raise model.refuse("num_layers", f"args.json has {num_layers}")
    return Constants(
        optimizer_ms=2 * time.number("optimizer_time_ms"),
        batch_generator_ms=time.number("batch_generator_time_ms"),
        parameter_bytes=model.part("parameters").numbers("parameters_per_layer_bytes", num_layers),
    )
