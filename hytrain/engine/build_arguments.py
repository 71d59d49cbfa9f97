"""Checks arguments of ``initialize`` other than the configuration, before anything is touched."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hytrain.errors import ConfigError, UnsupportedError, did_you_mean


def refuse_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raises a ConfigError if there is an argument that ``initialize`` does not have."""
    for name in unknown:
        meant = did_you_mean(name, known)
        raise ConfigError(f'"{name}" is no argument of initialize: {meant}remove it')


def checked_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the arguments of ``deepspeed.initialize``, given by name.

    Returns:
        The arguments, with parameters as a list, and callables that check what they return.

    Raises:
        ConfigError: an argument cannot be used.
        UnsupportedError: a parameter is complex, sparse or on the meta device.
    """
    checked = dict(given)
    _check_model(given["model"])
    checked["model_parameters"] = _as_list(given["model_parameters"])
    optimizer, scheduler = given["optimizer"], given["lr_scheduler"]
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
    else:
        groups = _as_groups(checked["model_parameters"])
        checked["optimizer"] = _checked_call("optimizer", optimizer, _refuse_no_optimizer)
    _check_groups(given["model"], groups)
    checked["lr_scheduler"] = _checked_scheduler(scheduler, optimizer)
    _check_others(given)
    return checked


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        if isinstance(model, type):
            seen, remedy = f"the class {model.__name__}", f"pass {model.__name__}(...)"
        else:
            seen, remedy = f"of the type {type(model).__name__}", "pass model=..."
        raise ConfigError(f"model is {seen}, not a torch.nn.Module: {remedy}")
    if next(model.parameters(), None) is None:
        raise ConfigError(
            f"the model, a {type(model).__name__}, has no parameters: nothing can be trained"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(f"'{name}' has no shape yet: call the model once before")
        if tensor.is_meta:
            raise UnsupportedError(
                f"'{name}' is on the meta device and has no values: load the weights, or call "
                'model.to_empty(device="cpu") and initialize them, before'
            )
    for name, parameter in model.named_parameters():
        if parameter.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter '{name}' is sparse ({parameter.layout}): make it dense, with "
                "nn.Parameter(parameter.to_dense())"
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise UnsupportedError(
                f"parameter '{name}' is {parameter.dtype}: hytrain trains real parameters. Keep "
                "torch.view_as_real(...) of it as the parameter, and take "
                "torch.view_as_complex(parameter) in forward"
            )


def _as_list(parameters: Any) -> list[Any] | None:
    if parameters is None:
        return None
    is_one = isinstance(parameters, (torch.Tensor, Mapping, nn.Module, str))
    if is_one or not isinstance(parameters, Iterable):
        raise ConfigError(
            f"model_parameters is a {type(parameters).__name__}: pass model.parameters(), or a "
            'list of groups, [{"params": ...}, ...]'
        )
    found: list[Any] = list(parameters)
    if not found:
        raise ConfigError(
            "model_parameters is empty: nothing would be trained. A generator, as "
            "model.parameters() gives, can be read once only"
        )
    return found


def _as_groups(parameters: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Returns parameters in groups, as an optimizer takes them."""
    groups: list[dict[str, Any]] = []
    for item in parameters or ():
        if not isinstance(item, dict):
            groups.append({"params": [item]})
        elif "params" in item:
            inner = item["params"]
            if not isinstance(inner, (torch.Tensor, list, tuple)):
                item["params"] = inner = list(inner)
            groups.append({"params": [inner] if isinstance(inner, torch.Tensor) else inner})
        else:
            raise ConfigError(
                f"a group of model_parameters has no 'params', only {', '.join(item) or 'nothing'}"
            )
    return groups


def _check_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    for index, group in enumerate(groups):
        eps = group.get("eps")  # a pair in Adafactor, which is refused later, by its name
        if isinstance(eps, (int, float)) and eps <= 0:
            raise ConfigError(
                f'parameter group {index} has "eps" {eps}: give a number above 0, as in '
                "1e-8, since a parameter without gradients is divided by it"
            )
        for item in group["params"]:
            # torch takes pairs of a name and a parameter, too.
            parameter = item[-1] if isinstance(item, tuple) and len(item) == 2 else item
            if not isinstance(parameter, torch.Tensor) or not parameter.is_leaf:
                raise ConfigError(
                    f"{parameter!r:.60} in model_parameters is not a parameter: pass "
                    "model.parameters(), or groups of these"
                )
            if id(parameter) in seen:
                name = names.get(id(parameter), str(tuple(parameter.shape)))
                raise ConfigError(f"parameter '{name}' is given twice: give each once")
            seen.add(id(parameter))
    if groups and not seen:
        raise ConfigError("the parameter groups are empty: nothing would be trained")


def _checked_call(name: str, make: Any, refuse: Callable[[Any], None]) -> Any:
    """Wraps ``make``, which makes the argument ``name``, to check what it returns."""
    if make is None:
        return None
    if not callable(make):
        refuse(make)
    try:
        inspect.signature(make).bind(None)
    except TypeError as error:
        raise ConfigError(f"{name} is called with one argument, and cannot be: {error}") from None
    except ValueError:  # it has no signature
        pass

    @functools.wraps(make, updated=())
    def call(argument: Any) -> Any:
        made = make(argument)
        refuse(made)
        return made

    return call


def _refuse_no_optimizer(found: Any) -> None:
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is, or gives, {found!r:.60}, which is no torch optimizer: pass "
            'torch.optim.AdamW(model.parameters()), or write the section "optimizer"'
        )


def _refuse_no_scheduler(found: Any) -> None:
    if not callable(getattr(found, "step", None)):
        raise ConfigError(
            f"lr_scheduler is, or gives, {found!r:.60}, which has no step(): pass a scheduler of "
            'torch\'s, a callable that makes one of an optimizer, or write the section "scheduler"'
        )


def _checked_scheduler(scheduler: Any, optimizer: Any) -> Any:
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, type):
        return _checked_call("lr_scheduler", scheduler, _refuse_no_scheduler)
    moved = getattr(scheduler, "optimizer", None)
    ours = getattr(optimizer, "param_groups", None)
    if isinstance(moved, torch.optim.Optimizer) and moved.param_groups is not ours:
        raise ConfigError(
            "lr_scheduler was made for another optimizer than the one that is trained with, whose "
            "rates it would never change: pass a callable, as in lr_scheduler=lambda optimizer: "
            f"{type(scheduler).__name__}(optimizer, ...)"
        )
    return scheduler


def _check_others(given: Mapping[str, Any]) -> None:
    mpu, mesh, collate = given["mpu"], given["mesh_param"], given["collate_fn"]
    groups = ("get_data_parallel_group", "initialize_sequence_parallel")
    if mpu is not None and not any(hasattr(mpu, name) for name in groups):
        raise ConfigError(f"mpu is {mpu!r:.60}, which has no {groups[0]}()")
    if mesh is not None and not (isinstance(mesh, (tuple, list)) and len(mesh) == 2):
        raise ConfigError(f"mesh_param is {mesh!r:.60}: give the numbers of two dimensions")
    if collate is not None and not callable(collate):
        raise ConfigError(f"collate_fn is {collate!r:.60}, which cannot be called")
    data = given["training_data"]
    is_data = all(hasattr(data, name) for name in ("__getitem__", "__len__"))
    if data is not None and not is_data and not isinstance(data, torch.utils.data.IterableDataset):
        raise ConfigError(f"training_data is {data!r:.60}: pass a torch.utils.data.Dataset")
