"""Loss scaling: fp16 gradients kept in range (Micikevicius et al. 2018, section 3.2).

A loss is multiplied by the scale before backward, and the update divides by it again, in fp32.
The rule by which the scale moves is the scaler's, DeepSpeed's own or torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from hytrain.errors import LossGraphError, LossScaleError

_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "clean_steps")
"""The attributes of a scaler that change."""


def check_graph(loss: object, rank: int) -> None:
    """Refuses a loss without a graph, of which DeepSpeed would say that it is not a scalar.

    Raises:
        LossGraphError: it has no graph.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.grad_fn is None:
        raise LossGraphError(
            f"rank {rank}: the loss has no graph (loss.grad_fn is None), so no backward can run: "
            "it was computed without a trained parameter, from detached tensors or in "
            "torch.no_grad(). Where this rank has nothing to learn from its batch, let it learn "
            "nothing from an output of the model: loss + 0.0 * output.sum(); or give it no samples "
            "in engine.train_batch"
        )


class LossScaler(Protocol):
    """The rule by which a scale moves; :mod:`deepspeed.runtime.fp16.loss_scaler` has two."""

    cur_scale: float
    dynamic: bool

    def update_scale(self, overflow: bool) -> None:
        """Moves the scale: a step was made, or skipped because a gradient had an inf or NaN."""
        ...


class GradScalerRule:
    """The rule of torch.amp.GradScaler with its defaults, DeepSpeed's under fp16 autocast."""

    dynamic = True
    min_scale = 2.0**-24
    """torch's scale goes down to zero, and then skips every step."""
    _GROWTH_INTERVAL = 2000

    def __init__(self) -> None:
        self.cur_scale = 65536.0
        self.clean_steps = 0
        """Steps without overflow since the scale last moved."""

    def update_scale(self, overflow: bool) -> None:
        """Halves the scale after an overflow; doubles it after 2000 steps without any."""
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.cur_scale *= 0.5
        elif self.clean_steps == self._GROWTH_INTERVAL:
            self.cur_scale *= 2.0
            self.clean_steps = 0


class LossScaling:
    """The scale of losses; the same on all ranks, because they skip the same steps."""

    def __init__(self, scaler: LossScaler | None) -> None:
        """``scaler`` says how the scale moves; None: there is no scale."""
        self.scaler = scaler
        self.external: float | None = None
        """A scale that the user sets and moves; it replaces the scaler's."""
        self._is_applied = False

    @property
    def scale(self) -> float:
        """The factor of the next loss; 1.0 without scaling."""
        if self.external is not None:
            return self.external
        return 1.0 if self.scaler is None else float(self.scaler.cur_scale)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the scale."""
        self._is_applied = True
        return loss * self.scale if self.is_used else loss

    @property
    def is_used(self) -> bool:
        """Whether losses must be scaled before backward."""
        return self.external is not None or self.scaler is not None

    def check_applied(self) -> None:
        """Checks a backward that the engine has not begun.

        Raises:
            LossScaleError: its loss was not scaled, although the update divides by the scale.
        """
        if self.is_used and not self._is_applied:
            raise LossScaleError(
                f"a loss runs back without its scale ({self.scale:g}), by which the update "
                "divides: call engine.backward(loss), or engine.scale(loss).backward()"
            )

    def end_backward(self) -> None:
        """Notes that the next loss must be scaled anew."""
        self._is_applied = False

    def end_step(self, *, overflow: bool) -> None:
        """Moves the scale.

        Raises:
            LossScaleError: it is as small as allowed, and a gradient has overflowed again.
        """
        scaler = self.scaler
        if scaler is None:
            return
        smallest = getattr(scaler, "min_scale", None)
        # DeepSpeed's scaler raises a bare Exception then.
        is_due = getattr(scaler, "delayed_shift", 1) == 1 or vars(scaler).get("cur_hysteresis") == 1
        if overflow and scaler.dynamic and is_due and scaler.cur_scale == smallest:
            raise LossScaleError(
                f"the loss scale is {scaler.cur_scale:g}, the smallest that "
                f'is allowed ("fp16.min_loss_scale"), and gradients are not finite: the step was '
                "skipped, weights and state are those of the step before. Most often the model "
                "itself has an inf or NaN (look at the loss, lower the learning rate, set "
                '"gradient_clipping"); or train in bf16'
            )
        scaler.update_scale(overflow)

    def state(self) -> dict[str, float]:
        """What a resumed run needs; empty without a scaler."""
        return {} if self.scaler is None else _moving(self.scaler)

    def deepspeed_state(self) -> dict[str, Any]:
        """The state as DeepSpeed's optimizers save it; no scaler unless it is DeepSpeed's."""
        scaler = self.scaler
        own = {"dynamic_loss_scale": scaler is not None and scaler.dynamic}
        if scaler is None or isinstance(scaler, GradScalerRule):
            return own
        return {**own, "loss_scaler": scaler}

    def load(self, stored: object) -> None:
        """Restores a checkpoint's state: what :meth:`state` gave, or a scaler of DeepSpeed's."""
        if self.scaler is None or stored is None:
            return
        values = stored if isinstance(stored, Mapping) else _moving(stored)
        for name in vars(self.scaler).keys() & _STATE & values.keys():
            # A static scale comes from the configuration.
            if self.scaler.dynamic:
                setattr(self.scaler, name, values[name])


def _moving(scaler: Any) -> dict[str, float]:
    return {name: vars(scaler)[name] for name in _STATE if name in vars(scaler)}
