"""Every architecture of transformers trains as with torch, in stages 2 and 3.

``make test-architectures``; some of them are in every run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rank_architectures as cases
from harness import RankPools
from tiny_configs import architectures, mixtures

# Heads whose output is a tied module's, layers that are used again and again, experts, parameters
# of modules around the stack, two stacks, convolutions with running means.
EVERY_RUN = (
    ("masked", "albert"), ("masked", "bert"), ("causal", "mixtral"), ("audio", "hubert"),
    ("seq2seq", "t5"), ("image", "resnet"),
)  # fmt: skip
EVERY_RUN_MIXTURES = (
    ("causal", "qwen3_moe", 3, "grouped_mm"), ("causal", "gpt_oss", 2, "eager"),
    ("seq2seq", "switch_transformers", 3, "eager"), ("causal", "mixtral", 3, "router_losses"),
)  # fmt: skip
MANNERS = ((2, "plain"), (3, "plain"), (3, "frozen"), (3, "recomputed"), (3, "short"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """They live as long as the file's tests."""
    pools = RankPools()
    yield pools
    pools.close()


def _train(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    why_not = ranks(2).run(cases.same_steps, purpose, name, stage, manner, timeout=90)[0]
    assert why_not is None or manner != "eager", why_not
    if why_not is not None:
        pytest.skip(f"plain torch does not train it so small: {why_not[:160]}")


@pytest.mark.parametrize(
    ("purpose", "name", "stage", "manner"),
    [
        (*model, *MANNERS[manner])
        for model, manner in zip(EVERY_RUN, (1, 2, 3, 4, 0, 1), strict=True)
    ],
)
def test_some(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    _train(ranks, purpose, name, stage, manner)


@pytest.mark.parametrize(("purpose", "name", "stage", "manner"), EVERY_RUN_MIXTURES)
def test_some_mixtures(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    assert (purpose, name) in list(mixtures())
    _train(ranks, purpose, name, stage, manner)


@pytest.mark.architectures
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("manner", ["eager", "grouped_mm", "router_losses"])
@pytest.mark.parametrize(("purpose", "name"), list(mixtures()))
def test_mixtures(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    _train(ranks, purpose, name, stage, manner)


@pytest.mark.architectures
@pytest.mark.parametrize(("stage", "manner"), MANNERS)
@pytest.mark.parametrize(("purpose", "name"), list(architectures()))
def test_all(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    _train(ranks, purpose, name, stage, manner)
