"""A serial optimizer that follows an engine step by step, and a plain model for gradients.

The shadow commits each step's recorded reduced gradients as a serial loop would, with a clip
coefficient that it computes itself; `check` compares everything bit by bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hytrain.kernels.cpu_adam import AdamHyper, sum_of_squares
from hytrain.model.layer_state import LayerState
from support.comparisons import assert_same_bits, assert_same_moment
from support.models import loss_of
from support.parity import shard_of
from support.reference_adam import copy_away_from_zero
from support.rounded_moments import copy_of


class Shadow:
    """Follows one engine on one rank."""

    def __init__(self, engine: Any, *, decoupled: bool = True) -> None:
        self.engine = engine
        self.states: list[LayerState] = engine.optimizer.layer_states
        engine.optimizer.flush()
        self.shards = [shard_of(state) for state in self.states]
        self.steps = max(engine.optimizer.steps)
        self.decoupled = decoupled
        self.gradients: dict[int, torch.Tensor] = {}
        self.last: dict[int, torch.Tensor] = {}
        """The reduced gradients of the last step."""
        self.coefficient = 1.0
        self._loss_unscale = 1.0
        engine.optimizer.passes.reducer.on_reduced_gradient = self._observe

    def _observe(self, state: LayerState, gradient: torch.Tensor) -> None:
        self.gradients[state.index] = gradient.detach().cpu().clone()

    def step(self) -> bool:
        """Calls engine.step() and makes the same step serially; returns whether it was skipped."""
        groups = [dict(group) for group in self.engine.optimizer.param_groups]
        self._loss_unscale = 1.0 / self.engine.optimizer.loss_scale
        self.engine.step()  # a scheduler may change param_groups at its end
        self.last, self.gradients = self.gradients, {}
        assert set(self.last) == set(range(len(self.states))), "a layer was left out"
        sums = [sum_of_squares(self.last[index]) for index in range(len(self.states))]
        norm = math.sqrt(float(torch.tensor(sums, dtype=torch.float64).sum())) * self._loss_unscale
        settings = self.engine.optimizer.pipeline.norm.settings
        skip = settings.check_overflow and not math.isfinite(norm)
        assert self.engine.optimizer.overflow is skip
        if not skip:
            self._commit(groups, norm)
        return skip

    def _commit(self, groups: list[dict[str, Any]], norm: float) -> None:
        self.steps += 1
        clipping = self.engine.gradient_clipping()
        self.coefficient = 1.0
        if clipping:
            # As in DeepSpeed without the check: a norm that is NaN counts as infinite.
            self.coefficient = min(1.0, clipping / (norm + 1e-6)) if math.isfinite(norm) else 0.0
        hypers = [
            AdamHyper(
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=self.steps,
                decoupled_decay=self.decoupled,
                bias_correction=group.get("bias_correction", True),
            )
            for group in groups
        ]
        for index, shard in enumerate(self.shards):
            shard.commit(self.last[index], self._gradient_scale(), lambda group: hypers[group])

    def _gradient_scale(self) -> float:
        return self.coefficient * self._loss_unscale

    def check_weights(self) -> None:
        """Asserts that the training copy, as anybody may read it now, is that of the last step."""
        self.engine.synchronize()
        self.assert_copy_is_current()

    def assert_copy_is_current(self) -> None:
        """Asserts the same as :meth:`check_weights`, without synchronizing first."""
        for state, shard in zip(self.states, self.shards, strict=True):
            for start, weights in state.storage.shard_slices(state.begin, state.end):
                at = start - state.begin
                p = shard.p[at : at + weights.numel()]
                expected = copy_away_from_zero(p) if shard.rounds_away else p.to(weights.dtype)
                assert_same_bits(f"copy of {state.name}", weights.detach().cpu(), expected)

    def check(self) -> None:
        """Asserts that weights, moments, training copy and step count are the last step's."""
        self.check_weights()
        self.engine.optimizer.flush()
        self.assert_copy_is_current()
        for state, shard in zip(self.states, self.shards, strict=True):
            assert_same_bits(
                f"p of {state.name}", state.read_master(0, state.shard_size).cpu(), shard.p
            )
            assert_same_moment(f"m of {state.name}", copy_of(state.exp_avg), shard.m)
            assert_same_moment(f"v of {state.name}", copy_of(state.exp_avg_sq), shard.v)
        assert set(self.engine.optimizer.steps) == {self.steps}


class Twin:
    """A copy of the model without an engine, which shows what a gradient must be."""

    def __init__(self, model: nn.Module, *, copied: bool = True) -> None:
        """Must precede the engine's build; not ``copied``: ``model`` itself is the twin."""
        self.plain = copy.deepcopy(model) if copied else model

    def gradients(
        self, engine: Any, batches: Iterable[dict[str, Any]], scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Sum of the batches' gradients at the engine's current weights, by parameter name."""
        self._take_weights(engine)
        for batch in batches:
            (loss_of(self.plain(**batch)) * scale).backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.plain.named_parameters()
        }

    def _take_weights(self, engine: Any) -> None:
        engine.synchronize()
        self.plain.zero_grad(set_to_none=True)
        with torch.no_grad():
            for p in self.plain.parameters():
                p.data = p.data.to(next(engine.module.parameters()).dtype)
            weights = dict(engine.module.named_parameters())
            for name, p in self.plain.named_parameters():
                p.copy_(weights[name])

    @staticmethod
    def assert_were_reduced(shadow: Shadow, expected: dict[str, torch.Tensor]) -> None:
        """Asserts that these were the last step's gradients, but for the order of their sums."""
        for state in shadow.states:
            for slot in state.layout.slots:
                name = slot.name
                flat = shadow.last[state.index][slot.offset : slot.offset + slot.numel]
                torch.testing.assert_close(
                    flat,
                    expected[name].flatten(),
                    rtol=1e-5,
                    atol=1e-7,
                    msg=lambda m, n=name: n + m,
                )
