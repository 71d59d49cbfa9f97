"""Profiles and peaks of memory that were recorded on H200s (recorded_runs.json says where)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from experiments.common.records import read_json
from hytrain.formats.profile_file import ProfileFile

_DATA = read_json(Path(__file__).with_suffix(".json"))


class Trained(NamedTuple):
    """What a rank of a run was given, and what it had allocated at most."""

    rank: int
    samples: int
    micro_batch: int
    shard_fraction: float
    activations: Any
    gpu_fraction: float
    peak_bytes: int


class Case(NamedTuple):
    """A profile, a global batch, and the ranks that were trained with them."""

    name: str
    profile: ProfileFile
    batch: int
    ranks: list[Trained]


def profile(name: str) -> ProfileFile:
    """A recorded profile."""
    return ProfileFile.model_validate(_DATA["profiles"][name])


def cases() -> list[Case]:
    """All cases in which something was trained."""
    return [
        Case(
            each["id"],
            profile(each["profile"]),
            each["batch"],
            [Trained(*r) for r in each["ranks"]],
        )
        for each in _DATA["cases"]
    ]
