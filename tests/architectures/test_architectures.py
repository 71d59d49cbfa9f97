"""Some architectures of transformers train as with torch, in stages 2 and 3; all: test_all.py."""

from __future__ import annotations

import pytest
from harness import RankPools

# Heads whose output is a tied module's, layers that are used repeatedly, experts, parameters of
# modules around the stack, two stacks, convolutions with running means.
EVERY_RUN = (
    ("masked", "albert"), ("masked", "bert"), ("causal", "mixtral"), ("audio", "hubert"),
    ("seq2seq", "t5"), ("image", "resnet"),
)  # fmt: skip
EVERY_RUN_MIXTURES = (
    ("causal", "qwen3_moe", 3, "grouped_mm"), ("causal", "gpt_oss", 2, "eager"),
    ("seq2seq", "switch_transformers", 3, "eager"), ("causal", "mixtral", 3, "router_losses"),
)  # fmt: skip
MANNERS = ((2, "plain"), (3, "plain"), (3, "frozen"), (3, "recomputed"), (3, "short"))


def train(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    from rank_architectures import same_steps  # takes seconds, which collection need not

    why_not = ranks(2).run(same_steps, purpose, name, stage, manner, timeout=90)[0]
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
    train(ranks, purpose, name, stage, manner)


@pytest.mark.parametrize(("purpose", "name", "stage", "manner"), EVERY_RUN_MIXTURES)
def test_some_mixtures(ranks: RankPools, purpose: str, name: str, stage: int, manner: str) -> None:
    train(ranks, purpose, name, stage, manner)
