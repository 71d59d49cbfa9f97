"""A tiny model on two ranks makes the same steps as one process with the batches of both."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from support.engines import built, make_config
from support.short_memory import short_of_memory
from tiny_configs import NoTinyModelError, loss_of, make_batch, make_model
from torch import nn

STEPS = 3
MOST_DRAWS = 4
IDLE_EXPERTS = ("eager", "grouped_mm")
_CHANGES: dict[str, dict[str, Any]] = {
    **{way: {"experts_implementation": way} for way in IDLE_EXPERTS},
    "router_losses": {"output_router_logits": True, "router_aux_loss_coef": 1.0},
}
"""Changes of the model's configuration, by manner."""
# With an eps of the gradients' size, their roundings make no steps of their own.
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2}


def same_steps(purpose: str, name: str, stage: int, manner: str) -> str | None:
    """Trains a model in both ways, and compares master weights element by element.

    Args:
        purpose: see ``tiny_configs.TABLES``.
        name: the architecture's.
        stage: ZeRO's.
        manner: "plain"; "frozen": matrices are not trained; "recomputed": with checkpointing;
            "short": the first backward's gradients do not fit; "eager", "grouped_mm": ways in which
            transformers computes experts, with tokens that leave most of them idle;
            "router_losses": with the loss that keeps experts balanced.

    Returns:
        Why nothing was compared; None if it was.
    """

    def make() -> nn.Module:
        return _prepared(make_model(purpose, name, **_CHANGES.get(manner, {})), manner)

    try:
        model = make()
    except NoTinyModelError as error:
        return str(error)
    if manner == "router_losses" and not _has_router_loss(model, purpose):
        return "it has no such loss"
    rank, world = dist.get_rank(), dist.get_world_size()
    config = make_config(gpu_fraction=0.5, bf16=False, stage=stage)
    config["optimizer"]["params"].update(ADAM)
    short = short_of_memory() if manner == "short" else nullcontext()
    with short, built(model, config) as engine:
        for step in range(STEPS):
            engine.backward(_loss(engine, purpose, world * step + rank, manner))
            engine.step()
        state = engine.fp32_state_dict()
    if rank == 0:
        _compare(state, make, partial(_steps_of_torch, purpose=purpose, manner=manner))
    return None


def _prepared(model: nn.Module, manner: str) -> Any:
    if manner == "frozen":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter.dim() < 2)
        if not any(p.requires_grad for p in model.parameters()):
            raise NoTinyModelError("all of its parameters are matrices")
    if manner == "recomputed":
        try:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        except (ValueError, AttributeError) as error:
            raise NoTinyModelError(f"no checkpointing: {error}") from None
    return model


def _has_router_loss(model: Any, purpose: str) -> bool:
    return model(**make_batch(purpose, 0)).get("aux_loss") is not None


def _loss(model: Any, purpose: str, number: int, manner: str) -> torch.Tensor:
    # Dropout, random masks and noise of routers are the same in both trainings.
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
    return loss_of(model, make_batch(purpose, number, one_token=manner in IDLE_EXPERTS))


def _compare(
    state: dict[str, Any], make: Callable[[], Any], steps: Callable[..., dict[str, torch.Tensor]]
) -> None:
    before = {name: p.detach() for name, p in make().named_parameters()}
    expected = steps(make())
    if expected.keys() != state.keys():
        pytest.fail(f"not the same parameters: {sorted(expected.keys() ^ state.keys())}")
    assert any(not torch.equal(value, before[name]) for name, value in expected.items())
    # Some models are so steep that torch's own steps diverge if gradients are rounded differently.
    # A single draw of roundings may miss that: by chance it may leave them close to each other.
    differs = _largest_difference(expected, {name: state[name]["fp32"] for name in expected})
    apart = 0.0
    for draw in range(MOST_DRAWS):
        nearly = steps(make(), noise=1e-7, draw=draw)
        apart = max(apart, _largest_difference(expected, nearly))
        allowed = max(2e-5, 4 * apart)
        if differs <= allowed:
            break
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name]["fp32"],
            value,
            rtol=1e-4,
            atol=allowed,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def _has_idle_experts(trained: Mapping[str, nn.Parameter]) -> bool:
    """Whether an expert's weights have no gradient: as a tensor, or within a tensor of all."""
    where = re.compile(r"expert|(up|down)_embed")  # the latter: experts of one vector each
    gradients = {name: p.grad for name, p in trained.items() if where.search(name) or p.dim() == 3}
    assert gradients, "it has no experts"
    return any(
        grad is None
        or (not re.search(r"experts\.\w*\d", name) and not grad.reshape(len(grad), -1).any(1).all())
        for name, grad in gradients.items()
    )


def _largest_difference(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> float:
    return max(float((one[x] - other[x]).abs().max()) for x in one if one[x].numel())


def _steps_of_torch(
    model: nn.Module, *, purpose: str, manner: str, noise: float = 0.0, draw: int = 0
) -> dict[str, torch.Tensor]:
    world = dist.get_world_size()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **ADAM)
    drawn = torch.Generator().manual_seed(1 + draw)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(world):
            (_loss(model, purpose, world * step + part, manner) / world).backward()
        if manner in IDLE_EXPERTS:
            assert _has_idle_experts(trained), "all experts have got tokens"
        for p in trained.values():
            if p.grad is None:  # decay applies to all that is trained
                p.grad = torch.zeros_like(p)
            p.grad *= 1 + noise * torch.randn(p.shape, generator=drawn)
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in trained.items()}
