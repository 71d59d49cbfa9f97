"""Two ranks measure together and learn of each other's failures."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_profiles as cases
from harness import RankPools
from launchers import SECONDS, launch
from support.configs import write_llama

from hytrain.formats.profile_file import ProfileFile, read_profile

pytestmark = pytest.mark.timeout(SECONDS + 100)


def test_two_ranks_have_one_profile(ranks: RankPools) -> None:
    texts = ranks(2).run(cases.profile_of_both)
    assert texts[0] == texts[1]
    profile = ProfileFile.model_validate_json(texts[0])
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


def test_a_rank_can_measure_alone(ranks: RankPools) -> None:
    assert ranks(2).run(cases.profile_alone) == [1, 0]


def test_a_failure_on_one_rank_is_told_on_all(ranks: RankPools) -> None:
    assert ranks(2).run(cases.fails_on_one, True) == [
        "ConfigError: rank 1: mend it",
        "ConfigError: mend it",
    ]
    assert ranks(2).run(cases.fails_on_one, False) == [
        "ProfileRunError: rank 1: KeyError: 'broken'",
        "KeyError: 'broken'",
    ]
    assert len(ranks(2).run(cases.profile_of_both)) == 2


def test_the_command_under_a_launcher_a_host(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    model = ["--model", str(write_llama(tmp_path)), "--seq-len", "16", "--dtype", "fp32"]
    command = ["--module", "hytrain", "profile", *model, "--out", str(out)]
    launch((1, 1), tmp_path, *command, "--micro-batches", "1,2", "--seconds", "1")
    profile = read_profile(out)
    # What the launchers take for two hosts is one machine.
    (host,) = profile.hosts
    assert len(host.ranks) == 2
    assert len(profile.collectives[0].hosts) == 2
    logs = [(tmp_path / f"host{number}.log").read_text() for number in range(2)]
    assert "tiny-llama: 4 layers" in logs[0]
    assert "layer, micro-batch of 2" in logs[0]
    assert "tiny-llama" not in logs[1].replace(str(tmp_path / "tiny-llama"), "")
