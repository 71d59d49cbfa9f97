"""Reads Adam's hyper-parameters from an optimizer's parameter groups, every step.

Schedulers write into ``param_groups``; ``.defaults`` is never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hytrain.errors import UnsupportedError
from hytrain.kernels.cpu_adam import AdamHyper

_DECOUPLED = {"AdamW": True, "Adam": False}


def check_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer decays weights apart from the gradient (AdamW).

    Returns:
        True for AdamW, False for Adam with L2.

    Raises:
        UnsupportedError: it is neither, or uses an option that the kernels do not have.
    """
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = _DECOUPLED[kind.__name__]
    elif kind.__name__ in ("DeepSpeedCPUAdam", "FusedAdam"):
        mode = optimizer.__dict__.get("adam_w_mode", True)
        decoupled = bool(mode)
    else:
        raise UnsupportedError(
            f"the optimizer is {kind.__module__}.{kind.__name__}, but hytrain updates with Adam or "
            'AdamW only: set "optimizer": {"type": "AdamW", ...} in the configuration or pass a '
            "torch.optim.AdamW"
        )
    for index, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option, False):
                raise UnsupportedError(
                    f"parameter group {index} sets {option}=True, which hytrain does not have: "
                    f"remove {option}"
                )
    return decoupled


@dataclass(frozen=True, slots=True)
class HyperReader:
    """Turns parameter groups into :class:`AdamHyper`, one a group."""

    decoupled: bool

    def read(
        self, groups: Sequence[Mapping[str, Any]], steps: Sequence[int]
    ) -> tuple[AdamHyper, ...]:
        """The hyper-parameters as they are now.

        Args:
            groups: the optimizer's parameter groups.
            steps: the number of the step that each group is about to make, from 1.

        Raises:
            KernelArgumentError: a value lies outside its range.
        """
        return tuple(
            self._read_group(group, step) for group, step in zip(groups, steps, strict=True)
        )

    def _read_group(self, group: Mapping[str, Any], step: int) -> AdamHyper:
        beta1, beta2 = group["betas"]
        return AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            # torch.optim.Adam can decouple as well, by an option of the group.
            decoupled_decay=bool(group.get("decoupled_weight_decay", self.decoupled)),
            bias_correction=bool(group.get("bias_correction", True)),
        )
