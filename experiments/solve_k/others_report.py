"""The largest models of other systems, for the report. Plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from experiments.common import records
from experiments.common.records import GIB, Json
from experiments.solve_k.recorder import HOST_MEMORY_LOW

HEADER = ("run", "system", "blocks", "parameters", "ended", "step s", "TFLOP/s", "peak GPU GiB",
          "host GiB", "free before, GiB", "left at least, GiB")  # fmt: skip

DID_NOT_FIT = (HOST_MEMORY_LOW, records.OUT_OF_MEMORY)


def is_search(part: Json) -> bool:
    """Whether the part has growing models of other systems."""
    return part["part"] == "others"


@dataclasses.dataclass(frozen=True)
class Largest:
    """What a search found, in parameters; 0 and None where nothing trained, nothing failed."""

    trained: int
    failed: int | None


def largest(parts: Iterable[Json]) -> dict[str, Largest]:
    """For each system, the largest model that trained and the smallest that did not fit."""
    trained: dict[str, int] = {}
    failed: dict[str, int] = {}
    for part in parts:
        for record in part["records"] if is_search(part) else ():
            name = record["entry"]["options"]["search"]
            count: int | None = (record["result"] or {}).get("num_parameters")
            if count is None:
                continue
            if record["status"] == records.OK:
                trained[name] = max(trained.get(name, 0), count)
            elif record["status"] in DID_NOT_FIT:
                failed[name] = min(failed.get(name, count), count)
    names = sorted({*trained, *failed})
    return {name: Largest(trained.get(name, 0), failed.get(name)) for name in names}


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.1f}"


def row_of(part: Json, record: Json) -> list[str]:
    """One model of one system."""
    options, result = record["entry"]["options"], record["result"] or {}
    count, trained = result.get("num_parameters"), result.get("trained")
    moments = result.get("host", {}).values()
    peaks = [moment["rss_peak_bytes"] for moment in moments]
    before = result.get("host", {}).get("before building", {}).get("available_bytes")
    return [
        part.get("run") or "-",
        options["search"],
        str(options["layers"]),
        "-" if count is None else f"{count / 1e9:.2f} B",
        "trained" if trained else record["status"],
        f"{trained['step_seconds']:.2f}" if trained else "-",
        f"{trained['tflops']:.0f}" if trained else "-",
        _gib(trained["gpu"].get("peak_allocated_bytes")) if trained else "-",
        _gib(max(peaks)) if trained and peaks else "-",
        _gib(before),
        _gib(result.get("host_available_least_bytes")),
    ]


def rows(parts: Sequence[Json]) -> list[list[str]]:
    """All models that were tried."""
    return [row_of(part, r) for part in parts if is_search(part) for r in part["records"]]
