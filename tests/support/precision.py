"""For comparisons of fp16 with plain DeepSpeed, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def fp16_on_a_cpu() -> Iterator[None]:
    """torch computes in it; DeepSpeed asks for hardware that does."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _self: True)
        yield


@contextmanager
def autocast_forgotten() -> Iterator[None]:
    """DeepSpeed keeps for the whole process that an engine has asked for autocast."""
    from deepspeed.runtime import torch_autocast

    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"):
            patch.setattr(torch_autocast, name, vars(torch_autocast)[name])
        yield


@contextmanager
def scale_moves_after_the_step() -> Iterator[None]:
    """In DeepSpeed's ZeRO-1 and 2 it moves in the midst of it.

    Gradients of a step after which the scale doubles are divided by the doubled scale there
    (0.19.8, ``stage_1_and_2.py``): they count half.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    step: Any = DeepSpeedZeroOptimizer.step
    update: Any = vars(DeepSpeedZeroOptimizer)["_update_scale"]
    overflows: list[Any] = []

    def late(self: Any, *arguments: Any, **named: Any) -> None:
        overflows.clear()
        step(self, *arguments, **named)
        update(self, overflows[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedZeroOptimizer, "_update_scale", lambda _s, o: overflows.append(o))
        patch.setattr(DeepSpeedZeroOptimizer, "step", late)
        yield
