"""Weight files for other programs: safetensors in Hugging Face's layout, or one torch file.

A safetensors file is eight bytes with the length of a JSON header (name -> dtype, shape, place),
the header, and the tensors (https://huggingface.co/docs/safetensors). It is written one tensor at a
time, which the library of that name does not do.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint import torch_files
from hytrain.checkpoint.archive_writer import (
    ArchiveWriter,
    LaterTensor,
    PickledObjects,
    bytes_of,
)
from hytrain.checkpoint.gather import STATES
from hytrain.checkpoint.stored_files import StoredFiles
from hytrain.checkpoint.summed_files import SummingFile, sync_names
from hytrain.checkpoint.universal import CheckpointPaths, no_parameters, unpack_tensor
from hytrain.errors import CheckpointError, DamagedCheckpointError
from hytrain.kernels.host_memory import host_copy
from hytrain.model.partition import in_buckets

SAFETENSORS = "model.safetensors"
INDEX = f"{SAFETENSORS}.index.json"
TORCH_FILE = "pytorch_model.bin"

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor of the model's state dict; ``read`` gives it on the host, in its own memory."""

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
    """The weights of a checkpoint; all files that they are read from are checked here.

    Args:
        folder: the checkpoint's.
        dtype: of parameters: fp32 ones are the master weights if the checkpoint has them, others
            are rounded from these. None: each as the training copy was, rounded as that was.
            Buffers keep theirs.
        with_frozen: whether frozen parameters are included.

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
    stored = torch_files.load_states(paths.model_states)
    module = stored.get("module")
    tensors: dict[str, torch.Tensor] = {
        name: value
        for name, value in (module.items() if isinstance(module, Mapping) else ())
        if isinstance(value, torch.Tensor)
    }
    try:
        # If DeepSpeed has converted ZeRO-3, these have no module.
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
        return unpack_tensor(torch_files.load(path), path)

    if copy is not None and copy.numel() and (dtype is None or dtype == copy.dtype):
        return _from_copy(name, copy, None)
    shape = tuple((copy if copy is not None and copy.numel() else master()).shape)
    made = dtype or torch.float32
    return StoredWeight(name, shape, made, lambda: _own(master(), made))


def _from_copy(name: str, copy: torch.Tensor, dtype: torch.dtype | None) -> StoredWeight:
    made = dtype if dtype is not None and copy.is_floating_point() else copy.dtype
    return StoredWeight(name, tuple(copy.shape), made, lambda: _own(copy, made))


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # In pages of its own: malloc would keep freed tensors' memory, in all as much as the model's.
    return host_copy(tensor, dtype, purpose="a weight that is written")


def write_safetensors(model: StoredModel, folder: Path, max_bytes: int) -> list[Path]:
    """Writes shards and, if there are several, their index.

    Tied weights are written once, as Hugging Face does: ``from_pretrained`` ties them again.

    ``folder``: exists and has none of these files. ``max_bytes``: of a shard's tensors; a larger
    tensor has a shard of its own.

    Returns:
        The files, whole and on the disk; after an error there is none of them.

    Raises:
        CheckpointError: safetensors has no name for a dtype, or a weight is damaged.
        OSError: a file cannot be written.
    """
    for weight in model.weights:
        if weight.dtype not in _DTYPES:
            raise CheckpointError(
                f"'{weight.name}' is {weight.dtype}, which safetensors has no name for: use "
                "--format fp32"
            )
    shards = in_buckets(model.weights, lambda weight: weight.num_bytes, max_bytes) or [[]]
    names = [SAFETENSORS]
    if len(shards) > 1:
        stem = SAFETENSORS.removesuffix(".safetensors")
        names = [
            f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]

    contents: dict[str, Callable[[SummingFile], object]] = {
        name: partial(_write_shard, weights=shard)
        for name, shard in zip(names, shards, strict=True)
    }
    if len(shards) > 1:
        index = _index(model, names, shards)
        contents[INDEX] = lambda file: file.write(index)
    return _write_all(folder, contents)


def write_torch_file(model: StoredModel, folder: Path) -> list[Path]:
    """Writes one file for ``torch.load``: name -> tensor, tied ones under all their names.

    Raises:
        CheckpointError: a weight is damaged.
        OSError: the file cannot be written.
    """
    later = {w.name: LaterTensor(w.name, w.shape, w.dtype) for w in model.weights}
    later |= {name: later[first] for name, first in model.tied.items() if first in later}

    def write(file: SummingFile) -> None:
        archive = ArchiveWriter(file, PickledObjects(later).content)
        for weight in model.weights:
            archive.write_elements(weight.name, weight.read())
        archive.close()

    return _write_all(folder, {TORCH_FILE: write})


def _write_all(folder: Path, contents: Mapping[str, Callable[[SummingFile], object]]) -> list[Path]:
    """Writes files to a temporary folder, and moves them to ``folder`` when all are on the disk."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".hytrain-export-") as temporary:
        made = [Path(temporary, name) for name in contents]
        for path, fill in zip(made, contents.values(), strict=True):
            with closing(SummingFile(path)) as file:
                fill(file)
                file.sync()
        # The index last: a folder that has it has all that it names.
        paths = [path.replace(folder / path.name) for path in made]
        sync_names(folder, paths)
    return paths


def _write_shard(file: SummingFile, weights: Sequence[StoredWeight]) -> None:
    # Wide elements first: then each tensor begins at a multiple of its elements' size.
    ordered = sorted(weights, key=lambda weight: -weight.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for weight in ordered:
        header[weight.name] = {
            "dtype": _DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [at, at + weight.num_bytes],
        }
        at += weight.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for weight in ordered:
        file.write(bytes_of(weight.read()))
        file.check()


def _index(
    model: StoredModel, names: Sequence[str], shards: Sequence[Sequence[StoredWeight]]
) -> bytes:
    index = {
        "metadata": {"total_size": sum(weight.num_bytes for weight in model.weights)},
        "weight_map": {
            weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard
        },
    }
    return json.dumps(index, indent=2).encode() + b"\n"
