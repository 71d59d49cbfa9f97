"""Two ranks measure together and learn of each other's failures."""

from __future__ import annotations

import rank_profiles as cases
from harness import RankPools

from hytrain.planner.profile_file import ProfileFile


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
