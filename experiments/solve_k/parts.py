"""What each part measures, one process an entry. Plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from experiments.common.records import Entry, Json

FRACTIONS = tuple(tenth / 10 for tenth in range(11))

FEW_CORES_FRACTIONS = (0.5, 0.7, 0.85, 1.0)

SPARE_CORES = 2
"""Beside the update's threads: one core launches, one runs the backward pass."""


OTHER_SYSTEMS = {
    "zero2_offload": "deepspeed_zero2_offload",
    "zero3_offload": "deepspeed_zero3_offload",
    "fsdp2": "fsdp2",
}
"""Label and module of the systems whose largest model is searched."""

OTHER_SIZES = {name: (24, 27, 30, 33, 36) for name in OTHER_SYSTEMS}
"""Blocks of the models that each is tried with, in this order, until one does not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line says about the entries."""

    clip: float
    caps: tuple[float, ...]
    few_threads: tuple[int, ...]
    layers: int | None
    checkpointing: str
    """on, off or auto; "part": as the part needs it."""
    section: Json
    """Further keys of hytrain's config section."""
    least_settling: int
    host_floor_gib: float
    sizes: Mapping[str, tuple[int, ...]] = dataclasses.field(
        default_factory=lambda: dict(OTHER_SIZES)
    )
    """As OTHER_SIZES."""
    other_threads: int = 15
    """Of the CPU updates of other systems."""


def _entry(
    settings: Settings, label: str, plan: str, *, offload: Json | None = None, **options: object
) -> Entry:
    section = settings.section
    if offload is not None:
        section = {**section, "offload": {**section.get("offload", {}), **offload}}
    common: Json = {
        "plan": plan,
        "gpu_fraction": "solve",
        "section": section,
        "layers": settings.layers,
        "checkpointing": "off",
        "settle": {"most": 60, "quiet": 10, "least": settings.least_settling},
        "host_floor_gib": settings.host_floor_gib,
    }
    common.update(options)
    if settings.checkpointing != "part":
        common["checkpointing"] = settings.checkpointing
    return Entry(label=label, system="hytrain", clip=settings.clip, options=common)


def _sweep(settings: Settings) -> list[Entry]:
    """The solved k, and every fixed one."""
    return [_entry(settings, "sweep", "sweep", fractions=list(FRACTIONS), offsets=[-1, 0, 1])]


def _caps(settings: Settings) -> list[Entry]:
    """Less and less GPU memory from the start, and less while it trains."""
    capped = [_entry(settings, f"cap {cap:g}", "capped", cap=cap) for cap in settings.caps]
    return [*capped, _entry(settings, "cap lowered", "lowered")]


def _follow(settings: Settings) -> list[Entry]:
    """The batch changes while it trains."""
    return [_entry(settings, "batch changed", "follow")]


def _few_cores(settings: Settings) -> list[Entry]:
    """A host with few cores."""
    return [
        _entry(
            settings,
            f"{count} threads",
            "sweep",
            offload={"cpu_threads": count},
            threads=[count],
            cores=count + SPARE_CORES,
            fractions=list(FEW_CORES_FRACTIONS),
            offsets=[-4, -2, 0, 2, 4],
        )
        for count in settings.few_threads
    ]


def _ten_b(settings: Settings) -> list[Entry]:
    """The published setting."""
    options: Json = {"checkpointing": "auto", "settle": {"most": 40, "quiet": 10, "least": 16}}
    return [_entry(settings, "ten_b", "big", **options)]


def _largest(settings: Settings) -> list[Entry]:
    """What neither side could hold."""
    options: Json = {
        "checkpointing": "on",
        "drop_gradients": True,
        "settle": {"most": 24, "quiet": 6, "least": 12},
        "timed": {"windows": 2, "steps": 4},
    }
    return [_entry(settings, "largest", "big", **options)]


def _others(settings: Settings) -> list[Entry]:
    """The largest model of other systems: growing ones, until one does not fit."""
    unknown = set(settings.sizes) - set(OTHER_SYSTEMS)
    if unknown:
        raise ValueError(f"--sizes names {sorted(unknown)}: choose of {', '.join(OTHER_SYSTEMS)}")
    entries = []
    for name, sizes in settings.sizes.items():
        for blocks in sizes:
            options: Json = {
                "plan": "other",
                "search": name,
                "layers": blocks,
                "checkpointing": "on",
                "threads": [settings.other_threads],
                "host_floor_gib": settings.host_floor_gib,
            }
            label, system = f"{name} {blocks}", OTHER_SYSTEMS[name]
            # Without a norm over all gradients on the host, in FSDP2's favour, as in offload_step.
            clip = None if name == "fsdp2" else settings.clip
            entries.append(Entry(label=label, system=system, clip=clip, options=options))
    return entries


PARTS = {
    "sweep": _sweep,
    "caps": _caps,
    "follow": _follow,
    "few_cores": _few_cores,
    "ten_b": _ten_b,
    "largest": _largest,
    "others": _others,
}

MODEL = {"ten_b": "llama-10b", "largest": "llama-15b", "others": "llama-7b"}
"""Of the parts that have one of their own; the others train llama-3b."""

EXPECTED_SECONDS = {
    **{"sweep": 200.0, "capped": 65.0, "lowered": 100.0, "follow": 100.0, "big": 240.0},
    "other": 130.0,
}
"""Of one measuring process on one H200, start and end included."""

FEW_CORES_SECONDS = 200.0


def expected_seconds(entry: Entry, model: str) -> float:
    """About how long the entry's process will run."""
    options = entry.options
    full = FEW_CORES_SECONDS if "cores" in options else EXPECTED_SECONDS[options["plan"]]
    return min(full, 60.0) if model in ("toy", "llama-100m") else full


def entries_of(part: str, settings: Settings) -> list[Entry]:
    """The part's entries in order."""
    if part not in PARTS:
        raise ValueError(f"--part {part!r} is unknown: choose one of {', '.join(PARTS)}")
    return PARTS[part](settings)
