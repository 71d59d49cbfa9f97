"""Reads hyper-parameters from an optimizer's parameter groups, every step.

Schedulers write into ``param_groups``; ``.defaults`` is never looked at. A step refuses what it
cannot follow: an option that the kernels do not have, or other parameters in a group.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from hytrain.errors import ConfigError, UnsupportedError
from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.kernels.device_optimizer import DeviceOptimizer, registered
from hytrain.kernels.muon import MUON

_DECOUPLED = {"AdamW": True, "Adam": False}
_MUON = "MuonWithAuxAdam"
"""DeepSpeed's class, and that of Muon's author; importing it would compile its kernels."""
_OPTIONS = ("amsgrad", "maximize", "differentiable")
"""Options of torch's Adam that the kernels do not have."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer decays weights apart from the gradient: AdamW, not Adam with L2.

    For Muon, whether its auxiliary Adam does; for a registered optimizer it means nothing.

    Raises:
        ConfigError: Muon is given what is not a matrix, or ``use_muon`` is contradictory.
        UnsupportedError: it is none of these, or uses an option that the kernels do not have.
    """
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = _DECOUPLED[kind.__name__]
    elif kind.__name__ in ("DeepSpeedCPUAdam", "FusedAdam", _MUON):
        mode = optimizer.__dict__.get("adam_w_mode", True)
        decoupled = bool(mode)
    elif registered(kind) is not None:
        return True
    else:
        raise UnsupportedError(
            f"the optimizer is {kind.__module__}.{kind.__name__}, but hytrain updates with Adam, "
            'AdamW or Muon: set "optimizer": {"type": "AdamW", ...} in the configuration, pass a '
            "torch.optim.AdamW, or register its update with hytrain.register_optimizer"
        )
    for index, group in enumerate(optimizer.param_groups):
        _refuse_options(index, group)
        if kind.__name__ == _MUON:
            _check_muons(index, group)
    return decoupled


def device_optimizers(optimizer: torch.optim.Optimizer) -> list[DeviceOptimizer | None]:
    """For each parameter group, what updates it on the device wherever its state is; None: Adam."""
    found = registered(type(optimizer))
    is_muon = type(optimizer).__name__ == _MUON
    return [MUON if is_muon and group["use_muon"] else found for group in optimizer.param_groups]


def _check_muons(index: int, group: Mapping[str, Any]) -> None:
    """Checks a group of Muon's: its ``use_muon`` decides, and a parameter's own must agree."""
    by_muon = bool(group["use_muon"])
    for parameter in group["params"]:
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if by_muon and len(shape) < 2:
            raise ConfigError(
                f"parameter group {index} has use_muon = True and a parameter of shape {shape}; "
                "Muon makes matrices orthogonal: set use_muon = False on it, or move it to a group "
                "that has"
            )
        if bool(getattr(parameter, "use_muon", by_muon)) != by_muon:
            raise ConfigError(
                f"a parameter of shape {shape} has use_muon = {not by_muon}, but its parameter "
                f"group {index} has use_muon = {by_muon}: make them alike"
            )


def _refuse_options(index: int, group: Mapping[str, Any]) -> None:
    for option in _OPTIONS:
        if group.get(option, False):
            raise UnsupportedError(
                f"parameter group {index} sets {option}=True, which hytrain does not have: "
                f"remove {option}, or set it to False"
            )


class HyperParameters:
    """The user's parameter groups, as every step reads them, and the steps that they have made."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, decoupled: bool) -> None:
        """``optimizer``: the user's; ``decoupled``: see :func:`check_optimizer`."""
        self.optimizer = optimizer
        self.steps = [0] * len(optimizer.param_groups)
        """Steps that each parameter group has made; skipped ones do not count."""
        self._decoupled = decoupled
        self._device_optimizers = device_optimizers(optimizer)
        # The groups' parameters when the engine was built, by which state is laid out.
        self._built = [list(group["params"]) for group in optimizer.param_groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The user's own list: schedulers write there."""
        return self.optimizer.param_groups

    @groups.setter
    def groups(self, groups: list[dict[str, Any]]) -> None:
        self._check(groups)
        self.optimizer.param_groups = groups

    def check(self) -> None:
        """Checks that every group still has its parameters; a copied group that has them will do.

        Once a step: identities are compared, which takes microseconds for a thousand parameters.

        Raises:
            UnsupportedError: groups or their parameters are others, or in another order.
        """
        self._check(self.groups)

    def _check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._check_number(groups)
        for index, (group, built) in enumerate(zip(groups, self._built, strict=True)):
            now = group["params"]
            if len(now) != len(built) or not all(map(operator.is_, now, built)):
                self._refuse(f"parameter group {index} has other parameters than it had")

    def _check_number(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if len(groups) != len(self._built):
            self._refuse(f"the optimizer has {len(groups)} parameter groups")

    def _refuse(self, seen: str) -> NoReturn:
        raise UnsupportedError(
            f"{seen}, but the engine was built with {len(self._built)} groups of "
            f"{', '.join(str(len(built)) for built in self._built)} parameters, and its "
            "layers' state is laid out by them. Between steps only hyper-parameters may change "
            "(lr, betas, eps, weight_decay): put the groups back as they were, or build a new "
            "engine with hytrain.initialize, whose model_parameters or optimizer has all "
            "parameters that will ever be trained"
        )

    def read(self) -> tuple[AdamHyper, ...]:
        """The current hyper-parameters, for the step to come, one item per group.

        Raises:
            KernelArgumentError: a value is outside its range.
            UnsupportedError: a group sets an option that the kernels do not have, or there are
                more groups or fewer.
        """
        self._check_number(self.groups)
        return tuple(
            self._read_group(index, group, step + 1)
            for index, (group, step) in enumerate(zip(self.groups, self.steps, strict=True))
        )

    def _read_group(self, index: int, group: Mapping[str, Any], step: int) -> AdamHyper:
        _refuse_options(index, group)
        optimizer = self._device_optimizers[index]
        if optimizer is not None:
            decay = float(group.get("weight_decay", 0.0))
            values = optimizer.read(group, step)
            return AdamHyper(lr=float(group["lr"]), weight_decay=decay, step=step, values=values)
        beta1, beta2 = group["betas"]
        return AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            # torch.optim.Adam can decouple as well, by an option of the group.
            decoupled_decay=bool(group.get("decoupled_weight_decay", self._decoupled)),
            bias_correction=bool(group.get("bias_correction", True)),
        )

    def words(self) -> dict[str, str]:
        """What :meth:`read` finds, by descriptions: for comparing ranks."""
        return {
            f'"{name}" of parameter group {index}': str(value)
            for index, hyper in enumerate(self.read())
            for name, value in asdict(hyper).items()
        }

    def count_step(self) -> None:
        """Counts a step of every group."""
        self.steps = [step + 1 for step in self.steps]
