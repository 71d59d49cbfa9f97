"""Two ranks measure together and learn of each other's failures."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from support.configs import write_llama
from support.engines import from_all_ranks
from support.ports import free_port
from torch import nn

from hytrain.errors import ConfigError, ProfileRunError
from hytrain.formats.profile_file import ProfileFile, read_profile
from hytrain.tools import cli
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.run import profile_ranks

pytestmark = pytest.mark.timeout(240)

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


@on_ranks(2)
def test_two_ranks_have_one_profile() -> None:
    profile = _profile(_build)
    text = profile.model_dump_json()
    assert from_all_ranks(text) == [text, text]
    (host,) = profile.hosts
    assert len(host.ranks) == 2
    assert [device.multiprocessors for device in profile.devices] == [100, 200]
    assert [device.settings for device in profile.devices] == ["of rank 0", "of rank 1"]
    assert host.ranks == tuple(device.label for device in profile.devices)
    (collectives,) = profile.collectives
    assert collectives.backend == "gloo"
    assert collectives.hosts == (host.host, host.host)
    assert collectives.samples[0].num_bytes == 1 << 12
    for row in collectives.samples:
        assert min(row.model_dump().values()) > 0.0


@on_ranks(2)
def test_a_rank_can_measure_alone() -> None:
    """While the other does something else."""
    if dist.get_rank() == 1:
        return
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
    assert len(profile.hosts[0].ranks) == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("mend it"), "ConfigError: rank 1: mend it"),
        (KeyError("broken"), "ProfileRunError: rank 1: KeyError: 'broken'"),
    ],
    ids=["mendable", "broken"],
)
@on_ranks(2)
def test_reports_a_failure_of_one_rank_on_all(error: Exception, told: str) -> None:
    """The model of rank 1 fails; they measure again afterwards."""

    def build(num_layers: int | None, seq_len: int) -> Any:
        if num_layers is not None and dist.get_rank() == 1:
            raise error
        return _build(num_layers, seq_len)

    with pytest.raises((ConfigError, ProfileRunError, KeyError)) as raised:
        _profile(build)
    expected = f"{type(error).__name__}: {error}" if dist.get_rank() == 1 else told
    assert f"{type(raised.value).__name__}: {raised.value}" == expected
    _profile(_build)


@on_ranks(2, alone=True)
def test_the_command_under_a_launcher(tmp_path: Path) -> None:
    """It joins the launcher's ranks, measures with them, and rank 0 tells of it."""
    port = from_all_ranks(free_port())[0]  # at which rank 0 holds a store of its own
    dist.destroy_process_group()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    out, rank = tmp_path / "profile.json", int(os.environ["RANK"])
    folder = write_llama(tmp_path / f"rank{rank}")
    model = ["--model", str(folder), "--seq-len", "16", "--dtype", "fp32", "--out", str(out)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert cli.main(["profile", *model, "--micro-batches", "1,2", "--seconds", "1"]) == 0
    assert not dist.is_initialized()
    if rank:
        assert "tiny-llama" not in said.getvalue()
        return
    profile = read_profile(out)
    (host,) = profile.hosts
    assert len(host.ranks) == 2
    assert len(profile.collectives[0].hosts) == 2
    assert "tiny-llama: 4 layers" in said.getvalue()
    assert "layer, micro-batch of 2" in said.getvalue()
