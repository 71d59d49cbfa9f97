"""``optimizer.state_dict()`` and ``load_state_dict()``: one rank's part of the state, in memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hytrain.comm.exchange import raise_together
from hytrain.formats.moment_kinds import FP32
from hytrain.kernels.moments import EightBit
from hytrain.model.layer_state import LayerState
from hytrain.offload.host_blocks import with_own_storage
from hytrain.optimizer.kept_state import KeptState

_FORMAT = "hytrain_state"
_VERSION = 1
_MOMENTS = "moments"
_MASTER = "fp32"


def state_dict(state: KeptState) -> dict[str, Any]:
    """Returns this rank's part of the state, as DeepSpeed's ZeRO optimizers do.

    ``engine.save_checkpoint`` is the better way: what it saves can be loaded on another number
    of ranks, in another layout, and has the rest of the engine.

    Returns:
        Hyper-parameters, step counts, and for each layer this rank's fp32 master weights and
        moments, as they are kept (8-bit codes with exponents beside them). The tensors are the
        optimizer's own, as with torch: save or copy them before training goes on.

    Raises:
        ConfigError: a backward is running, or updates are committed directly and have begun.
    """
    state.settle("state_dict()")
    index, groups = 0, list[dict[str, Any]]()
    for group in state.hyper.groups:
        numbers = list(range(index, index + len(group["params"])))
        index += len(numbers)
        values = {key: copy.deepcopy(v) for key, v in group.items() if key != "params"}
        groups.append({**values, "params": numbers})
    return {
        _FORMAT: _VERSION,
        "param_groups": groups,
        "steps": list(state.hyper.steps),
        "loss_scale": state.scaling.state(),
        _MOMENTS: state.form.name,
        "layers": [_pack(layer) for layer in state.layers],
    }


def load_state_dict(
    state: KeptState, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> None:
    """Restores what :func:`state_dict` gave on this rank of a job of the same layout.

    A collective. The training copy is made from the master weights; gradients since the last step
    are forgotten.

    ``given``: this rank's state, or a sequence of every rank's, as DeepSpeed takes it.

    Raises:
        CheckpointError: on some rank it is something else, or of another layout; nothing was
            touched.
    """
    found: Any = given
    if isinstance(given, Sequence) and len(given) == state.collectives.world_size:
        found = given[state.collectives.rank]
    failure = _why_not(state, found)
    raise_together(failure, state.collectives)
    state.forget_gradients()
    for layer, stored in zip(state.layers, found["layers"], strict=True):
        layer.write_master(0, stored[_MASTER])
        for kind, tensor in _moments(layer).items():
            tensor.copy_(stored[kind])
    state.hyper.steps = [int(step) for step in found["steps"]]
    state.scaling.load(found.get("loss_scale"))
    for group, saved in zip(state.hyper.groups, found["param_groups"], strict=True):
        group.update({key: copy.deepcopy(v) for key, v in saved.items() if key != "params"})
    state.publish_masters()


def _why_not(state: KeptState, found: Any) -> str | None:
    """Why a state cannot be loaded; None if it can."""
    mine = [(layer.name, layer.begin, layer.end) for layer in state.layers]
    sizes = [len(group["params"]) for group in state.hyper.groups]
    if not isinstance(found, Mapping) or found.get(_FORMAT) != _VERSION:
        seen = "it was not made by the state_dict() of this optimizer, on as many ranks"
    elif [(x["name"], x["begin"], x["end"]) for x in found["layers"]] != mine:
        seen = "its layers or shards are others than this rank's"
    elif [len(group["params"]) for group in found["param_groups"]] != sizes:
        seen = "its parameter groups are others"
    elif found.get(_MOMENTS, FP32) != state.form.name:
        seen = (
            f'its moments are kept as "{found.get(_MOMENTS, FP32)}", here "hytrain.moments" is '
            f'"{state.form.name}"'
        )
    else:
        return None
    return (
        f"the state cannot be loaded: {seen}. optimizer.load_state_dict takes what this rank's "
        "optimizer.state_dict() gave with the same model, groups, ranks and shards; use "
        "engine.save_checkpoint and engine.load_checkpoint to resume in any other form"
    )


def _moments(layer: LayerState) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for kind, part in zip(layer.form.kinds, layer.state, strict=False):
        if kind == _MASTER:
            continue
        if isinstance(part, EightBit):
            tensors |= {kind: part.codes, f"{kind}_exponents": part.exponents}
        else:
            tensors[kind] = part
    return tensors


def _pack(layer: LayerState) -> dict[str, Any]:
    tensors = {_MASTER: layer.read_master(0, layer.shard_size), **_moments(layer)}
    parts = {kind: with_own_storage(tensor) for kind, tensor in tensors.items()}
    return {"name": layer.name, "begin": layer.begin, "end": layer.end, **parts}
