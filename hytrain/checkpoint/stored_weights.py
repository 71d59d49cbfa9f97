"""The weights in a checkpoint, one after another, without an engine: read where they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint import inert
from hytrain.checkpoint.gather import STATES
from hytrain.checkpoint.stored_files import StoredFiles
from hytrain.checkpoint.universal import CheckpointPaths, no_parameters, unpack_tensor
from hytrain.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of the model's state dict; ``read`` makes it, on the host, its own memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The weights of a checkpoint.

    Attributes:
        weights: all, in the order of the model's state dict; tied ones once.
        tied: other names of tied weights -> the name that is in ``weights``.
    """

    weights: list[StoredWeight]
    tied: Mapping[str, str]


def stored_model(folder: Path, dtype: torch.dtype | None, *, with_frozen: bool) -> StoredModel:
    """The weights of a checkpoint, of which all files that they are read from are checked here.

    Args:
        folder: the checkpoint's.
        dtype: of parameters: fp32 ones are the master weights where the checkpoint has them, others
            are rounded from these. None: each as the training copy was, rounded as that was.
            Buffers keep theirs.
        with_frozen: whether parameters that are not trained are among them.

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
        CheckpointError: there is no universal checkpoint.
        OSError: the manifest cannot be read.
    """
    paths = CheckpointPaths(folder)
    files = StoredFiles.of(paths)
    trained = files.parameters
    if not trained:
        raise CheckpointError(no_parameters(paths))
    first = f"{STATES[0]}.pt"
    wanted = {name for name in files.saved if name.endswith(f"/{first}") or "/" not in name}
    files.check(wanted | {paths.model_states.name})
    stored = inert.load_states(paths.model_states)
    module = stored.get("module")
    tensors: dict[str, torch.Tensor] = {
        name: value
        for name, value in (module.items() if isinstance(module, Mapping) else ())
        if isinstance(value, torch.Tensor)
    }
    try:
        # Of stage 3 converted by DeepSpeed these have no module.
        fragments: dict[str, Any] = dict(stored.get("frozen_param_fragments") or {})
        frozen: set[str] = set(stored.get("frozen_param_shapes") or ())
        buffers: set[str] = set(stored.get("buffer_names") or ())
        tied: dict[str, Any] = dict(stored.get("shared_params") or {})
    except (TypeError, ValueError) as error:
        raise _other_form(paths, str(error)) from error
    for listed, values, kind in (
        ("frozen_param_fragments", fragments.values(), torch.Tensor),
        ("shared_params", tied.values(), str),
    ):
        if not all(isinstance(value, kind) for value in values):
            raise _other_form(paths, f"a value of {listed} is no {kind.__name__}")
    weights: list[StoredWeight] = []
    for name in dict.fromkeys((*tensors, *fragments, *sorted(trained))):
        if name in tied or (name in frozen and not with_frozen):
            continue
        copy = tensors.get(name, fragments.get(name))
        wanted = dtype if name not in buffers else None
        if name in trained:
            weights.append(_from_master(paths, name, copy, wanted))
        elif copy is not None:
            weights.append(_from_copy(name, copy, wanted))
    return StoredModel(weights, tied)


def _other_form(paths: CheckpointPaths, how: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{paths.model_states} lists the model's weights in another form than a checkpoint does "
        f"({how}): load another tag"
    )


def _from_master(
    paths: CheckpointPaths, name: str, copy: torch.Tensor | None, dtype: torch.dtype | None
) -> StoredWeight:
    path = paths.state(name, STATES[0])

    def master() -> torch.Tensor:
        return unpack_tensor(inert.load(path), path)

    if copy is not None and copy.numel() and (dtype is None or dtype == copy.dtype):
        return _from_copy(name, copy, None)
    shape = tuple((copy if copy is not None and copy.numel() else master()).shape)
    made = dtype or torch.float32
    return StoredWeight(name, shape, made, lambda: _own(master(), made))


def _from_copy(name: str, copy: torch.Tensor, dtype: torch.dtype | None) -> StoredWeight:
    made = dtype if dtype is not None and copy.is_floating_point() else copy.dtype
    return StoredWeight(name, tuple(copy.shape), made, lambda: _own(copy, made))


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
