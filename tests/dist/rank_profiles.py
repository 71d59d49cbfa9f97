"""Cases of test_profile_ranks.py, run on every rank."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hytrain.errors import ConfigError, ProfileRunError
from hytrain.formats.profile_file import ProfileFile
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.run import profile_ranks

WIDTH = 16


def _build(num_layers: int | None, seq_len: int) -> Any:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers or 6)))
    return _Loss(model), lambda size: {"x": torch.ones(size, WIDTH)}


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().sum()


def _options() -> ProfileOptions:
    return ProfileOptions(
        micro_batches=(1, 2),
        seconds=1.0,
        rate_seconds=0.01,
        cpu_elements=1 << 14,
        copy_bytes=1 << 16,
        collective_bytes=(1 << 12, 1 << 14),
        # Told apart as if green contexts had divided the device.
        multiprocessors=100 * (dist.get_rank() + 1),
        settings=f"of rank {dist.get_rank()}",
    )


def _profile(build: Any) -> ProfileFile:
    ranks = Ranks()
    subject = MeasuredModel("linear", build, seq_len=1, dtype=torch.float32)
    return profile_ranks(subject, torch.device("cpu"), _options(), ranks=ranks)


def profile_of_both() -> str:
    return json.dumps(_profile(_build).model_dump(mode="json"))


def profile_alone() -> int:
    """One rank measures while the other does something else."""
    if dist.get_rank() == 1:
        return 0
    subject = MeasuredModel("linear", _build, seq_len=1, dtype=torch.float32)
    options = ProfileOptions(
        micro_batches=(1,),
        seconds=0.5,
        rate_seconds=0.01,
        cpu_elements=1 << 14,
        copy_bytes=1 << 16,
    )
    profile = profile_ranks(subject, torch.device("cpu"), options, ranks=Ranks(alone=True))
    assert profile.collectives == ()
    return len(profile.hosts[0].ranks)


def fails_on_one(mendable: bool) -> str:
    """The error that this rank gets, where the model of rank 1 fails."""

    def build(num_layers: int | None, seq_len: int) -> Any:
        if num_layers is not None and dist.get_rank() == 1:
            raise ConfigError("mend it") if mendable else KeyError("broken")
        return _build(num_layers, seq_len)

    try:
        _profile(build)
    except (ConfigError, ProfileRunError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing failed")
