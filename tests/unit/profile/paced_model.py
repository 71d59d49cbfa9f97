"""A model whose modules take as long as they are told, on a clock that the test owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hytrain.tools.profiler.layer_profile import LayerProfile, LayerProfiling
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions

WIDTH = 8

Pace = Callable[[int], float]
"""Seconds against samples."""


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, clock: Any, forward: Pace, backward: Pace
    ) -> torch.Tensor:
        clock.now += forward(len(x))
        ctx.clock, ctx.backward_pace = clock, backward
        ctx.save_for_backward(x)  # recomputation goes on to the last tensor that is wanted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        assert ctx.saved_tensors[0].shape == gradient.shape
        ctx.clock.now += ctx.backward_pace(len(gradient))
        return gradient, None, None, None


class Paced(nn.Module):
    """A linear layer that takes its time."""

    def __init__(self, clock: Any, forward: Pace, backward: Pace) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.arguments = (clock, forward, backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(self.linear(x), *self.arguments)


class PacedModel(nn.Module):
    """What comes before, blocks, and a head; returns a loss."""

    def __init__(self, clock: Any, num_layers: int, block: tuple[Pace, Pace]) -> None:
        super().__init__()
        self.before = Paced(clock, lambda size: 1.0, lambda size: 2.0)
        self.blocks = nn.ModuleList([Paced(clock, *block) for _ in range(num_layers)])
        self.head = Paced(clock, lambda size: 3.0, lambda size: 4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def paced_build(clock: Any, forward: Pace, backward: Pace) -> Callable[..., Any]:
    """As ``--model`` takes it."""

    def build(num_layers: int | None, seq_len: int) -> tuple[nn.Module, Callable[[int], Any]]:
        model = PacedModel(clock, 5 if num_layers is None else num_layers, (forward, backward))

        def make_batch(size: int) -> Mapping[str, Any]:
            return {"x": torch.ones(size, WIDTH)}

        return model, make_batch

    return build


def profile_layer(
    subject: MeasuredModel, device: torch.device, options: ProfileOptions
) -> LayerProfile:
    """All that a profile measures of a layer, but for launches beside updates."""
    with LayerProfiling(subject, device, options) as layers:
        layers.measure()
        layers.launch_again()
        return layers.result()
