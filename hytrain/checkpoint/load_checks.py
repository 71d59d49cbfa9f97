"""Checks whether a checkpoint fits the model, before anything of the engine is touched."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint import inert, torch_files
from hytrain.checkpoint.gather import ParameterPlace
from hytrain.checkpoint.stored_files import listed, shortened
from hytrain.checkpoint.universal import (
    CheckpointPaths,
    OptimizerRecord,
    group_names,
    no_parameters,
    unpack_tensor,
)
from hytrain.errors import CheckpointError


def read_state(paths: CheckpointPaths, place: ParameterPlace, kind: str) -> torch.Tensor:
    """Loads a parameter's whole state tensor; its elements are mapped, and read when used.

    Raises:
        CheckpointError: the file is missing or damaged, or has another shape.
    """
    path = paths.state(place.name, kind)
    stored = torch_files.load(path)
    tensor = unpack_tensor(stored, path)
    if isinstance(stored, torch.Tensor) and tensor.shape == (place.numel,):
        # DeepSpeed's converter writes the tensors of ZeRO-3 without shapes.
        tensor = tensor.view(place.shape)
    if tensor.shape != place.shape:
        raise CheckpointError(
            f"{path} has shape {tuple(tensor.shape)} but parameter '{place.name}' has "
            f"{tuple(place.shape)}: build the model with the configuration that it was saved with"
        )
    return tensor


def check_names(
    paths: CheckpointPaths, stored: Set[str], places: Sequence[ParameterPlace], *, strict: bool
) -> Iterator[str]:
    """Checks that every parameter has its state, and all state (``stored``) its parameter."""
    wanted = {place.name for place in places}
    missing, extra = sorted(wanted - stored), sorted(stored - wanted)
    advice = (
        "it is a checkpoint of another model: build that model, train the same parameters, or "
        "pass load_module_strict=False to load what both have"
    )
    if not stored:
        yield no_parameters(paths)
    elif strict and missing:
        yield f"{paths.zero} has no state of {listed(missing)}: {advice}"
    if strict and stored and extra:
        yield f"{paths.zero} has state of {listed(extra)}, which the model does not train: {advice}"


def check_groups(
    paths: CheckpointPaths,
    record: OptimizerRecord,
    num_groups: int,
    places: Sequence[ParameterPlace],
    *,
    strict: bool,
) -> Iterator[str]:
    """Checks that groups are those that were saved: each has its own step count and lr."""
    if len(record.groups) != num_groups:
        yield (
            f"{paths.optimizer_state} has {len(record.groups)} parameter groups but the optimizer "
            f"has {num_groups}: build the same groups, or pass load_optimizer_states=False"
        )
        return
    if record.names is None or not strict:
        return
    for index, (saved, now) in enumerate(
        zip(record.names, group_names(places, num_groups), strict=True)
    ):
        moved = sorted(set(saved) ^ set(now))
        if moved:
            yield (
                f"parameter group {index} of {paths.optimizer_state} differs from the optimizer's "
                f"in {listed(moved)}: build the same groups, or pass load_optimizer_states=False"
            )
            return


def check_module(
    path: Path, stored: Mapping[str, Any], current: Mapping[str, Any], *, strict: bool
) -> Iterator[str]:
    """Checks the module's weights and buffers (``current``: its state dict), frozen ones, too."""
    weights = stored.get("module")
    if not isinstance(weights, Mapping):
        yield f'{path} holds no "module": it is not a checkpoint of an engine'
        return
    missing = sorted(set(current) - set(weights))
    extra = sorted(set(weights) - set(current))
    if missing and extra and len(missing) == len(current):
        # Without strictness it would load nothing, and the model's own weights would be trained.
        yield (
            f"{path} has none of the model's {len(current)} weights and buffers, such as "
            f"'{missing[0]}': {_other_prefix(missing, extra)}"
        )
        return
    if strict and missing:
        yield (
            f"{path} has no {listed(missing)}: it is a checkpoint of another model or was saved "
            "with exclude_frozen_parameters; pass load_module_strict=False to leave them as they "
            "are"
        )
    if strict and extra:
        yield (
            f"{path} has {listed(extra)}, which the model has not: build the model that was saved, "
            "or pass load_module_strict=False"
        )
    for name in sorted(set(current) & set(weights)):
        ours, theirs = current[name], weights[name]
        if not isinstance(ours, torch.Tensor):
            continue  # a module's extra state
        if not isinstance(theirs, torch.Tensor):
            yield f"{path}: '{name}' is a {type(theirs).__name__} and no tensor"
        elif ours.shape != theirs.shape:
            yield (
                f"{path}: '{name}' has shape {tuple(theirs.shape)} but the model's has "
                f"{tuple(ours.shape)}: build the model that was saved"
            )


def _other_prefix(missing: Sequence[str], extra: Sequence[str]) -> str:
    """Why two sets of names have none in common (``extra`` is the checkpoint's), and what to do."""
    for mine, others, whose in (
        (missing, set(extra), "the checkpoint's"),
        (extra, set(missing), "the model's"),
    ):
        ends = [name for name in others if name.endswith("." + mine[0])]
        for prefix in (name.removesuffix(mine[0]) for name in ends):
            if all(prefix + name in others for name in mine):
                return (
                    f"{whose} names are the same but all begin with '{prefix}', as a module has "
                    "them that wraps the model: pass hytrain.initialize the one that was saved"
                )
    return f"it has {listed(extra)}; build the model that was saved"


def check_plain(path: Path, stored: object) -> Iterator[str]:
    """Checks that what is restored or given to the user has no unmade objects (``inert.py``)."""
    unknown = {
        f"{value.name} (at '{'.'.join(where[:3])}')"
        for where, value in inert.walk(stored)
        if isinstance(value, inert.Unknown)
    }
    if unknown:
        yield (
            f"{path} has objects of other classes than tensors, containers, numbers and text: "
            f"{shortened(sorted(unknown), ', ')}. They are not made, as that runs code that the "
            "file names: save plain values, or, if you trust whoever has written the file, set "
            '"hytrain": {"checkpoint": {"run_pickled_code": true}}'
        )


def check_keys(path: Path, stored: Mapping[str, Any], keys: Collection[str]) -> Iterator[str]:
    """Checks that the model states hold what a resumed run needs."""
    missing = [key for key in keys if key not in stored]
    if missing:
        yield f"{path} holds no {listed(missing)}: it is not a checkpoint of an engine"
    for key in set(keys) - {"module"} - set(missing):
        if type(stored[key]) is not int or stored[key] < 0:
            yield f"{path}: '{key}' is {str(stored[key])[:80]!r}, which is no count"
