"""Generation between steps of ZeRO-3 on a GPU, as TRL's online trainers do it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.engines import built, device, make_config
from support.sharded import VOCABULARY, deterministic, llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]
PROMPT = [[5, 6, 7, 8], [9, 10, 11, 12]]
NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    with deterministic():
        yield


def _small() -> torch.nn.Module:
    return llama(hidden=512, layers=4)


@contextlib.contextmanager
def _unwrapped(engine: Any) -> Iterator[None]:
    """All weights there and no hooks, as TRL's ``unwrap_model_for_generation`` has it."""
    import deepspeed

    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        yield
        offload._register_deepspeed_module(offload.module)


def _generate(model: Any) -> list[list[int]]:
    prompt = torch.tensor(PROMPT, device=device())
    with torch.no_grad():
        found = model.generate(
            prompt, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True, pad_token_id=0
        )
    return found.tolist()


def _expected(engine: Any) -> list[list[int]]:
    """By a plain model with the engine's weights."""
    plain = _small()
    with engine.gathered_parameters(), torch.no_grad():
        weights = dict(engine.module.named_parameters())
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    plain.eval()
    return _generate(plain)


def _train(way: str, *, streamed: bool, gpu_fraction: float) -> tuple[list[float], list[Any]]:
    """Six steps; every second one is followed by a generation. Losses, and what was generated."""
    config = make_config(
        stage=3, gpu_fraction=gpu_fraction,
        optimizer={"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.0}},
    )  # fmt: skip
    if streamed:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    generator = torch.Generator().manual_seed(2)
    batches = torch.randint(VOCABULARY, (6, 2, 64), generator=generator).to(device())
    losses: list[float] = []
    found: list[Any] = []
    with built(_small(), config) as engine:
        for number, tokens in enumerate(batches):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            if way == "none" or number % 2 == 0:
                continue
            engine.eval()
            with _unwrapped(engine) if way == "unwrapped" else contextlib.nullcontext():
                generated = _generate(engine.module)
            assert generated == _expected(engine), f"after step {number}"
            engine.train()
            found.append(generated)
    return losses, found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_generation_between_steps(gpu_fraction: float, streamed: bool) -> None:
    """Its tokens are a plain model's, and training goes on as if there had been none."""
    losses, _ = _train("none", streamed=streamed, gpu_fraction=gpu_fraction)
    for way in ("unwrapped", "hooked"):
        again, found = _train(way, streamed=streamed, gpu_fraction=gpu_fraction)
        assert again == losses, way
        assert len(found) == 3
        assert all(len(row) == len(PROMPT[0]) + NEW_TOKENS for rows in found for row in rows)
