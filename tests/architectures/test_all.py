"""Every architecture of transformers trains as with torch (``make test-architectures``).

A file of its own: collecting the names alone takes seconds, and everyday runs leave it out.
"""

from __future__ import annotations

import pytest
from harness import RankPools
from test_architectures import EVERY_RUN_MIXTURES, MANNERS, train
from tiny_configs import architectures, mixtures

pytestmark = pytest.mark.architectures


def test_the_mixtures_of_every_run_are_some() -> None:
    assert {(purpose, name) for purpose, name, *_ in EVERY_RUN_MIXTURES} <= set(mixtures())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("manner", ["eager", "grouped_mm", "router_losses"])
@pytest.mark.parametrize(("purpose", "name"), list(mixtures()))
def test_mixtures(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    train(ranks, purpose, name, stage, manner)


@pytest.mark.parametrize(("stage", "manner"), MANNERS)
@pytest.mark.parametrize(("purpose", "name"), list(architectures()))
def test_all(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    train(ranks, purpose, name, stage, manner)
