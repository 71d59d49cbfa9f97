"""The dtypes in which a case's passes compute, and how its losses are scaled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from support.engines import device
from support.precision import autocast_forgotten, fp16_on_a_cpu

from fuzz.cases import Case

PRECISIONS = ("", "fp16 dynamic", "fp16 static", "autocast bfloat16", "autocast float16")
"""Precisions of cases that are not in bf16; "" is fp32."""
DYNAMIC = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
STATIC = 128.0


def sections(case: Case) -> dict[str, Any]:
    """The configuration's sections for a case's precision."""
    if case.bf16:
        given = case.check_overflow
        check = {} if given is None else {"check_grad_overflow": given}
        return {"bf16": {"enabled": True, **check}}
    kind, _, which = case.precision.partition(" ")
    if kind == "fp16":
        keys = DYNAMIC if which == "dynamic" else {"loss_scale": STATIC}
        return {"fp16": {"enabled": True, **keys}}
    if kind == "autocast":
        return {"torch_autocast": {"enabled": True, "dtype": which}}
    return {}


def copy_dtype(case: Case) -> torch.dtype:
    """The dtype of the weights with which the passes are made."""
    if case.bf16:
        return torch.bfloat16
    return torch.float16 if case.precision.startswith("fp16") else torch.float32


def autocast_dtype(case: Case) -> torch.dtype | None:
    """The dtype of matrix products under autocast; None without autocast."""
    kind, _, which = case.precision.partition(" ")
    return getattr(torch, which) if kind == "autocast" and not case.bf16 else None


def compute_dtype(case: Case) -> torch.dtype:
    """The dtype in which the passes compute."""
    return autocast_dtype(case) or copy_dtype(case)


def autocasting(case: Case) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward through the engine."""
    dtype = autocast_dtype(case)
    return torch.autocast(device().type, dtype) if dtype else contextlib.nullcontext()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Allows fp16 although DeepSpeed asks for other hardware; keeps autocast to a single case."""
    with fp16_on_a_cpu(), autocast_forgotten():
        yield


class Scale:
    """The loss scale, after steps that were made or skipped."""

    def __init__(self, case: Case) -> None:
        self.value = 1.0
        self._is_dynamic = False
        self._good_steps = 0
        if case.bf16:
            return
        if case.precision == "fp16 dynamic":
            self.value, self._is_dynamic = 2.0 ** DYNAMIC["initial_scale_power"], True
        elif case.precision == "fp16 static":
            self.value = STATIC
        elif case.precision == "autocast float16":
            self.value, self._is_dynamic = 2.0**16, True
        # torch doubles it after 2000 steps, more than a case has.
        self._window = DYNAMIC["loss_scale_window"] if "dynamic" in case.precision else 2000

    @property
    def state(self) -> tuple[float, int]:
        """The state for a checkpoint."""
        return self.value, self._good_steps

    @state.setter
    def state(self, state: tuple[float, int]) -> None:
        if self._is_dynamic:  # a static scale is the configuration's
            self.value, self._good_steps = state

    def end_step(self, *, skipped: bool) -> None:
        """Halves it on overflow; doubles it every ``window`` steps after the first good one."""
        if not self._is_dynamic:
            return
        if skipped:
            self.value, self._good_steps = self.value / 2, 0
            return
        if self._good_steps and self._good_steps % self._window == 0:
            self.value *= 2
        self._good_steps += 1
