"""What users do between steps without the engine's calls: a rank's part, and the reference's."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fuzz import precision
from fuzz.cases import Case, Event
from fuzz.models import FuzzModel, batch_of

if TYPE_CHECKING:
    from fuzz.judge import Judge
    from fuzz.player import Player

Forward = Callable[..., torch.Tensor]
Scale = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies a loss by its scale."""


# -- gradients of inputs ---------------------------------------------------------------------------


def _with_input(
    model: FuzzModel, forward: Forward, batch: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a loss and its input; for tokens, which have no gradient, what is made of them."""
    if not model.spec.takes_tokens:
        inputs = batch["inputs"].requires_grad_()
        return forward(**batch), inputs
    model.keeps_hidden = True
    loss = forward(**batch)
    hidden, model.keeps_hidden, model.hidden = model.hidden, False, None
    assert hidden is not None
    return loss, hidden


def penalized(
    model: FuzzModel, forward: Forward, batch: dict[str, Any], scale: Scale, value: float
) -> torch.Tensor:
    """Returns a loss with a penalty on its input's gradient; ``value``: of the scale."""
    loss, inputs = _with_input(model, forward, batch)
    (gradient,) = torch.autograd.grad(scale(loss), inputs, create_graph=True)
    return loss + 0.1 * (gradient.float() / value).pow(2).sum()


def _input_gradients(
    case: Case, event: Event, rank: int, model: FuzzModel, forward: Forward, scale: Scale
) -> list[torch.Tensor]:
    """Returns losses and the gradients of their inputs, of one forward or of the sum of two."""
    was_trained = [p.requires_grad for p in model.parameters()]
    if event.kind == "frozen_backward":
        model.requires_grad_(False)
    losses: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for number in range(2 if event.number % 5 < 2 else 1):
        torch.manual_seed(event.number)
        batch = batch_of(case, 950 + number, rank, 0, None)
        loss, own = _with_input(model, forward, batch)
        losses.append(loss)
        inputs.append(own)
    total = scale(sum(losses[1:], losses[0]))
    if event.kind == "frozen_backward":
        total.backward()
        gradients = [own.grad for own in inputs]
        for parameter, trained in zip(model.parameters(), was_trained, strict=True):
            parameter.requires_grad_(trained)
    else:
        gradients = list(torch.autograd.grad(total, inputs))
    return [each.detach().cpu() for each in (*losses, *gradients) if each is not None]


def _shared(scale: Scale, share: int, loss: torch.Tensor) -> torch.Tensor:
    return scale(loss) / share


def _play_input_gradients(player: Player, event: Event) -> None:
    engine = player.engine
    engine.train(event.number % 2 == 0)
    forward = engine.module if event.number % 3 == 0 else engine
    found = _input_gradients(
        player.case, event, player.rank, player.model, forward, player.scale_loss
    )
    # As in DeepSpeed: a gradient that comes through the engine's output is a micro-batch's share.
    share = engine.gradient_accumulation_steps() if forward is engine else 1
    player.note("input_gradients", (share, found))
    engine.train()


def _judge_input_gradients(judge: Judge, event: Event) -> None:
    reference = judge.reference
    reference.take_weights()
    model = reference.model.train(event.number % 2 == 0)

    def forward(**batch: Any) -> torch.Tensor:
        if event.number % 3 == 0:
            return model(**batch)
        with precision.autocasting(judge.case):
            return model(**batch)

    for rank, (share, found) in enumerate(judge.next_seen("input_gradients")):
        expected = _input_gradients(
            judge.case, event, rank, model, forward, partial(_shared, reference.scale_loss, share)
        )
        for number, (actual, right) in enumerate(zip(found, expected, strict=True)):
            judge.same_values(f"tensor {number} of input gradients of rank {rank}", actual, right)
    model.train()


# -- weights that are frozen and thawed ------------------------------------------------------------


def toggle(model: FuzzModel, event: Event) -> None:
    """Freezes some weights, or thaws all, sometimes also those that were frozen at the build."""
    rng = random.Random(event.number)
    share = rng.choice((0.2, 0.5, 1.0))
    thaws_all = rng.random() < 0.3
    prefix = rng.choice(["", "", *(name for name, _ in model.named_children())])
    anchor = model.anchor()
    for name, parameter in model.named_parameters():
        if parameter is anchor:
            continue
        if event.value < 0.5:
            if name.startswith(prefix) and rng.random() < share:
                parameter.requires_grad_(False)
        elif thaws_all or name not in model.frozen_at_build:
            parameter.requires_grad_(True)


# -- hooks -----------------------------------------------------------------------------------------


def _kept(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient masked to its last row; masking it twice gives the same."""
    if gradient.dim() == 0:
        return gradient * 0.0
    if gradient.is_sparse:  # as for the dense gradient: part of a sum may come sparse
        return _kept(gradient.to_dense()).to_sparse(1)
    mask = torch.zeros_like(gradient)
    mask[-1:] = 1.0
    return gradient * mask


def _mask(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "a hook without a gradient"
    parameter.grad.copy_(_kept(parameter.grad))


def _replace(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "a hook without a gradient"
    parameter.grad = _kept(parameter.grad)


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "a hook without a gradient"
    parameter.grad.mul_(0.5)


AFTER = {"mask": _mask, "replace": _replace, "halve": _halve}
"""Hooks after accumulation; "halve" only for gradients that come once per backward."""
ON_TENSOR = {"tensor halve": lambda gradient: gradient * 0.5, "tensor mask": _kept}


class Hooks:
    """A user's hooks on gradients of parameters; the same on every model of a case."""

    def __init__(self, model: FuzzModel | None = None) -> None:
        self.live: list[Event] = []
        self._handles: dict[Event, Any] = {}
        self._model = model

    def move_to(self, model: FuzzModel) -> None:
        """Moves the hooks to the model of another engine, before its build."""
        self._model, self._handles = model, {}
        live, self.live = self.live, []
        for event in live:
            self.put_on(event)

    def put_on(self, event: Event) -> None:
        """Puts a hook on its parameter, if that has gradients now."""
        model = self._model
        assert model is not None
        parameter = self._parameter(model, event.number)
        if parameter is None or event in self._handles or not parameter.requires_grad:
            return
        kind = (*AFTER, *ON_TENSOR)[int(event.value * 100) % 5]
        if kind == "halve" and "reentrant" in (model.spec.recompute, model.spec.tiled):
            kind = "tensor halve"
        if kind in AFTER:
            handle = parameter.register_post_accumulate_grad_hook(AFTER[kind])
        else:
            handle = parameter.register_hook(ON_TENSOR[kind])
        self._handles[event] = handle
        self.live.append(event)

    def take_off(self, event: Event) -> None:
        """Removes one of the hooks, if there is one."""
        if self.live:
            self._handles.pop(self.live.pop(event.number % len(self.live))).remove()

    def _parameter(self, model: FuzzModel, number: int) -> nn.Parameter | None:
        anchor = model.anchor()  # its own hook poisons gradients
        found = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter is not anchor and name not in model.frozen_at_build
        ]
        return found[number % len(found)] if found else None


PLAYED: dict[str, Callable[[Player, Event], None]] = {
    "input_gradient": _play_input_gradients,
    "frozen_backward": _play_input_gradients,
    "hook": lambda player, event: player.hooks.put_on(event),
    "unhook": lambda player, event: player.hooks.take_off(event),
}
JUDGED: dict[str, Callable[[Judge, Event], None]] = {
    "input_gradient": _judge_input_gradients,
    "frozen_backward": _judge_input_gradients,
    "toggle": lambda judge, event: toggle(judge.reference.model, event),
    "hook": lambda judge, event: judge.hooks.put_on(event),
    "unhook": lambda judge, event: judge.hooks.take_off(event),
}
