"""What each part measures, in which order, and how long that should take. Plain data.

Host bandwidth differs between machines of one class and drifts on one machine, so two systems are
compared only within a part. Every part begins with the reference, forward and backward only, and
ends with it where time is left.
"""

from __future__ import annotations

import dataclasses

from experiments.common.checks import REFERENCE
from experiments.common.records import Entry

CLIP_NEVER = 1e9
"""No gradient norm reaches this, so clipping is on and never triggers."""

CLIP_ALWAYS = 1e-3
"""Every gradient norm of an untrained model exceeds this, so clipping triggers at every step."""

EXPECTED_SECONDS = {
    "forward_backward": 35.0,
    "all_gpu": 40.0,
    "hytrain": 65.0,
    "deepspeed_zero2_offload": 150.0,
    "deepspeed_twin_flow": 150.0,
    "deepspeed_zero3_offload": 150.0,
    "fsdp2": 110.0,
}
"""Of one measuring process with the 3 B model, start and end included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line says about the entries."""

    gpu_fractions: tuple[float, ...]
    clip: float
    threads: tuple[int, ...]
    section: dict[str, object]
    """Further keys of hytrain's config section."""


def _reference(*, optional: bool = False) -> Entry:
    return Entry(label=REFERENCE, system=REFERENCE, optional=optional)


def _hytrain(
    settings: Settings, fraction: float, variant: str = "clip", *, optional: bool = False
) -> Entry:
    """hytrain at a fraction; `variant` is clip (the command's norm), never, always or direct."""
    clips = {"clip": settings.clip, "never": CLIP_NEVER, "always": CLIP_ALWAYS, "direct": None}
    options = {
        "gpu_fraction": fraction,
        "direct": variant == "direct",
        "variant": variant,
        "section": settings.section,
    }
    suffix = "" if variant == "clip" else f" {variant}"
    return Entry(
        label=f"hytrain {fraction:g}{suffix}",
        system="hytrain",
        clip=clips[variant],
        options=options,
        optional=optional,
    )


def _deepspeed(settings: Settings, name: str) -> Entry:
    return Entry(
        label=name,
        system=f"deepspeed_{name}",
        clip=settings.clip,
        options={"threads": list(settings.threads)},
    )


def _fsdp2(settings: Settings, *, reshard: bool = True) -> Entry:
    label = "fsdp2" if reshard else "fsdp2 keeping weights"
    options = {"threads": list(settings.threads), "reshard_after_forward": reshard}
    return Entry(label=label, system="fsdp2", options=options)


def _part_a(settings: Settings) -> list[Entry]:
    """hytrain beside the two strongest systems with everything on the host."""
    return [
        _hytrain(settings, 0.0),
        _deepspeed(settings, "zero2_offload"),
        _hytrain(settings, 0.7),
        _fsdp2(settings),
    ]


def _part_b(settings: Settings) -> list[Entry]:
    """hytrain over gpu_fraction, between the limit and everything on the GPU."""
    all_gpu = Entry(label="all_gpu", system="all_gpu", clip=settings.clip)
    return [all_gpu, *(_hytrain(settings, f) for f in settings.gpu_fractions)]


def _part_c(settings: Settings) -> list[Entry]:
    """What clipping costs: never triggering against none at all, twice, and always triggering."""
    first = [
        _hytrain(settings, fraction, variant)
        for fraction in (0.7, 0.0)
        for variant in ("direct", "never", "always")
    ]
    again = [
        _hytrain(settings, fraction, variant, optional=True)
        for fraction in (0.7, 0.0)
        for variant in ("never", "direct")
    ]
    return first + again


def _part_d(settings: Settings) -> list[Entry]:
    """The other systems."""
    return [
        _deepspeed(settings, "twin_flow"),
        _deepspeed(settings, "zero3_offload"),
        _fsdp2(settings, reshard=False),
        dataclasses.replace(_hytrain(settings, 0.0), optional=True),
    ]


PARTS = {"A": _part_a, "B": _part_b, "C": _part_c, "D": _part_d}


def entries_of(part: str, settings: Settings) -> list[Entry]:
    """The part's entries in order, the reference at both ends."""
    if part not in PARTS:
        raise ValueError(f"--part {part!r} is unknown: choose one of {', '.join(PARTS)}")
    return [_reference(), *PARTS[part](settings), _reference(optional=True)]


def expected_seconds(entry: Entry, model: str) -> float:
    """About how long the entry's process will run; small models take seconds to start and no
    more, but they are also run on machines without a GPU."""
    full = EXPECTED_SECONDS[entry.system]
    return full if model == "llama-3b" else min(full, 30.0)
