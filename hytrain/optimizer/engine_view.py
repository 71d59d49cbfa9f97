"""What the optimizer knows of the engine that it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the optimizer asks of the engine.

    Attributes:
        is_boundary: whether the current micro-batch ends a step.
        is_reducing: False inside ``no_sync``.
        begin_window: makes the next micro-batch the first of a step.
        micro_batches: how many a step has, as accumulation is now.
    """

    is_boundary: Callable[[], bool]
    is_reducing: Callable[[], bool]
    begin_window: Callable[[], None]
    micro_batches: Callable[[], int]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings that stay the same for all steps.

    Attributes:
        unscale: undoes the summation of gradients over ranks (1 / ranks for a mean).
        reduce_every_backward: ZeRO-2: gradients are reduce-scattered in every backward, so that
            between micro-batches a rank keeps only its shard.
        overlap_forward: step() returns before the last layers are updated.
        refuse_unused: step() raises if a trained parameter got no gradient.
        communication_dtype: dtype of gradients as they are reduced; None: as they are accumulated.
        divide_first: ``unscale`` is applied before gradients are reduced: in fp16 their sum over
            ranks would overflow at a smaller loss scale than DeepSpeed's mean.
    """

    unscale: float
    reduce_every_backward: bool
    overlap_forward: bool
    refuse_unused: bool = False
    communication_dtype: torch.dtype | None = None
    divide_first: bool = False
