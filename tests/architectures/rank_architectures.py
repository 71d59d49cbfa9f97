"""On two ranks a tiny model of an architecture makes the steps of one process with both batches."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from support.engines import built, make_config
from tiny_configs import NoTinyModelError, loss_of, make_batch, make_model
from torch import nn

STEPS = 3
# With an eps like the gradients, roundings of them make no steps of their own.
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2}


def same_steps(purpose: str, name: str, stage: int, manner: str) -> str | None:
    """Trains it in both ways, and compares master weights element by element.

    Args:
        purpose: see ``tiny_configs.TABLES``.
        name: the architecture's.
        stage: ZeRO's.
        manner: "plain"; "frozen": matrices are not trained; "recomputed": with checkpointing.

    Returns:
        Why nothing was compared; None where it was.
    """
    try:
        model = _prepared(make_model(purpose, name), manner)
    except NoTinyModelError as error:
        return str(error)
    rank, world = dist.get_rank(), dist.get_world_size()
    config = make_config(gpu_fraction=0.5, bf16=False, stage=stage)
    config["optimizer"]["params"].update(ADAM)
    with built(model, config) as engine:
        for step in range(STEPS):
            engine.backward(_loss(engine, purpose, world * step + rank))
            engine.step()
        state = engine.fp32_state_dict()
    if rank == 0:
        _compare(state, _prepared(make_model(purpose, name), manner), purpose, world)
    return None


def _prepared(model: nn.Module, manner: str) -> Any:
    if manner == "frozen":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter.dim() < 2)
    if manner == "recomputed":
        try:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        except (ValueError, AttributeError) as error:
            raise NoTinyModelError(f"no checkpointing: {error}") from None
    return model


def _loss(model: Any, purpose: str, number: int) -> torch.Tensor:
    # Dropout, masks that are drawn and noise of routers are the same in both trainings.
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
    return loss_of(model, make_batch(purpose, number))


def _compare(state: dict[str, Any], model: nn.Module, purpose: str, world: int) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **ADAM)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(world):
            (_loss(model, purpose, world * step + part) / world).backward()
        for parameter in trained.values():
            if parameter.grad is None:  # decay is for all that is trained
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    if trained.keys() != state.keys():
        pytest.fail(f"not the same parameters: {sorted(trained.keys() ^ state.keys())}")
    assert any(not torch.equal(p, before[name]) for name, p in trained.items())
    for name, parameter in trained.items():
        torch.testing.assert_close(
            state[name]["fp32"],
            parameter.detach(),
            rtol=1e-4,
            atol=2e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )
