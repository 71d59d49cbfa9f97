"""Trains the same model layer by layer and one micro-batch after another, and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.engines import built, device, make_config
from support.models import HIDDEN
from torch import nn

MICRO_BATCHES = 3
STEPS = 3

MakeModel = Callable[[], nn.Module]
MakeBatch = Callable[[int], dict[str, Any]]


def mlp_batch(number: int) -> dict[str, torch.Tensor]:
    """For models that take ``inputs``; micro-batches differ in size."""
    generator = torch.Generator().manual_seed(100 + number)
    return {"inputs": torch.randn(1 + number % 3, HIDDEN, generator=generator)}


def rows(batch: dict[str, Any]) -> int:
    """Terms of the mean loss of a batch without labels."""
    return len(next(iter(batch.values())))


@dataclass(slots=True)
class Outcome:
    """What a run has computed."""

    losses: list[float]
    gradients: list[dict[int, torch.Tensor]]
    state: dict[str, dict[str, torch.Tensor]]
    refusal: str | None
    random: torch.Tensor


def train(
    make_model: MakeModel,
    make_batch: MakeBatch = mlp_batch,
    *,
    accumulation: str = "layer_major",
    activations: str = "keep",
    gpu_fraction: Any = 0.5,
    steps: int = STEPS,
    micro_batches: int = MICRO_BATCHES,
    bf16: bool = False,
    master: str = "fp32",
    overflow_check: bool = True,
    clipping: float = 0.5,
    trained: Callable[[nn.Module], Sequence[nn.Parameter]] | None = None,
    watch: Callable[[Any], None] | None = None,
    **config: Any,
) -> Outcome:
    """Trains with ``engine.train_batch``; ``watch`` is called with the engine before the steps."""
    section = {"accumulation": accumulation, "activations": activations, "master": master}
    torch.manual_seed(11)
    model = make_model()
    keywords = {} if trained is None else {"model_parameters": trained(model)}
    made = make_config(
        gpu_fraction=gpu_fraction,
        clipping=clipping,
        bf16=bf16,
        accumulation=micro_batches,
        hytrain=section,
        **config,
    )
    if not overflow_check:
        made["bf16"] = {"enabled": True, "check_grad_overflow": False}
    torch.manual_seed(23)
    gradients: list[dict[int, torch.Tensor]] = []
    losses: list[float] = []
    with built(model, made, **keywords) as engine:
        engine.optimizer.passes.reducer.on_reduced_gradient = lambda state, shard: gradients[
            -1
        ].__setitem__(state.index, shard.detach().clone())
        if watch is not None:
            watch(engine)
        for step in range(steps):
            gradients.append({})
            numbers = range(step * micro_batches, (step + 1) * micro_batches)
            batches = iter([_on_device(make_batch(number)) for number in numbers])
            labelled = "labels" in make_batch(0) and make_batch(0)["labels"].dim() > 1
            losses.append(float(engine.train_batch(batches, None if labelled else rows)))
        refusal = vars(engine.batch_training.accumulation).get("refusal")
        state = engine.fp32_state_dict()
    return Outcome(losses, gradients, state, refusal, torch.get_rng_state())


def assert_same(one: Outcome, other: Outcome) -> None:
    """Bit by bit."""
    assert one.losses == other.losses
    for step, (ours, theirs) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        assert ours.keys() == theirs.keys()
        for index, gradient in ours.items():
            assert torch.equal(gradient, theirs[index]), f"step {step}, layer {index}"
    for name, tensors in one.state.items():
        for key, value in tensors.items():
            assert torch.equal(value, other.state[name][key]), f"{key} of {name}"
    assert torch.equal(one.random, other.random), "the random numbers go on elsewhere"


def assert_close(one: Outcome, other: Outcome) -> None:
    """The first step's gradients are sums of the same terms, in another order."""
    for index, gradient in one.gradients[0].items():
        expected = other.gradients[0][index]
        size = float(expected.abs().max())
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=2e-6 * size)
    for mine, theirs in zip(one.losses, other.losses, strict=True):
        assert abs(mine - theirs) < 1e-3 * abs(theirs)


def _on_device(batch: dict[str, Any]) -> dict[str, Any]:
    place = device()
    return {k: v.to(place) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def train_both(
    make_model: MakeModel, make_batch: MakeBatch = mlp_batch, *, bits: bool = True, **options: Any
) -> None:
    """Both ways, with nothing refused: they agree bit by bit, or closely."""
    by_layer = train(make_model, make_batch, **options)
    assert by_layer.refusal is None
    options.pop("watch", None)
    options.pop("activations", None)
    one_by_one = train(make_model, make_batch, accumulation="micro_batch_major", **options)
    (assert_same if bits else assert_close)(by_layer, one_by_one)
