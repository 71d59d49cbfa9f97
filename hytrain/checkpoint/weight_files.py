"""Files of weights for others: safetensors as Hugging Face lays them out, or one file of torch's.

A safetensors file is eight bytes with the length of a JSON header (name -> dtype, shape, place),
the header, and the tensors (https://huggingface.co/docs/safetensors). It is written one tensor at a
time, which the library of that name does not do.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint.archive_writer import (
    ArchiveWriter,
    LaterTensor,
    PickledObjects,
    bytes_of,
)
from hytrain.checkpoint.stored_weights import StoredModel, StoredWeight
from hytrain.checkpoint.sums import SummingFile
from hytrain.checkpoint.sync import sync_files
from hytrain.errors import CheckpointError

SAFETENSORS = "model.safetensors"
INDEX = f"{SAFETENSORS}.index.json"
TORCH_FILE = "pytorch_model.bin"

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_safetensors(model: StoredModel, folder: Path, max_bytes: int) -> list[Path]:
    """Writes shards and, where there are several, their index.

    Tied weights are there once, as Hugging Face has them: ``from_pretrained`` ties them again.

    Args:
        model: the weights.
        folder: that exists and has none of these files.
        max_bytes: of a shard's tensors; one tensor that is larger has a shard of its own.

    Returns:
        The files, whole and on the disk; on an error there is none of them.

    Raises:
        CheckpointError: a dtype has no name there, or a weight is damaged.
        OSError: a file cannot be written.
    """
    for weight in model.weights:
        if weight.dtype not in _DTYPES:
            raise CheckpointError(
                f"'{weight.name}' is {weight.dtype}, which safetensors has no name for: use "
                "--format fp32"
            )
    shards = _shards(model.weights, max_bytes)
    names = [SAFETENSORS]
    if len(shards) > 1:
        stem = SAFETENSORS.removesuffix(".safetensors")
        names = [
            f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]

    def write(files: _Files) -> None:
        for name, shard in zip(names, shards, strict=True):
            files.write(name, lambda file, shard=shard: _write_shard(file, shard))
        if len(shards) > 1:
            files.write(INDEX, lambda file: file.write(_index(model, names, shards)))

    return _written(folder, write)


def write_torch_file(model: StoredModel, folder: Path) -> list[Path]:
    """Writes one file for ``torch.load``: name -> tensor, tied ones under all their names.

    Raises:
        CheckpointError: a weight is damaged.
        OSError: the file cannot be written.
    """
    later = {w.name: LaterTensor(w.name, w.shape, w.dtype) for w in model.weights}
    later |= {name: later[first] for name, first in model.tied.items() if first in later}

    def write(file: SummingFile) -> None:
        archive = ArchiveWriter(file)
        archive.write_objects(PickledObjects(later).content)
        for weight in model.weights:
            archive.write_elements(weight.name, weight.read())
        archive.close()

    return _written(folder, lambda files: files.write(TORCH_FILE, write))


class _Files:
    """Written under other names, and given their own when all of them are on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: list[str] = []

    def write(self, name: str, fill: Callable[[SummingFile], object]) -> None:
        self._names.append(name)
        with SummingFile(self._temporary(name)) as file:
            fill(file)

    def finish(self) -> list[Path]:
        sync_files(self._folder, [self._temporary(name) for name in self._names])
        # The index last: a folder that has it has all that it names.
        paths = [self._temporary(name).replace(self._folder / name) for name in self._names]
        sync_files(self._folder, paths)
        return paths

    def remove(self) -> None:
        for name in self._names:
            self._temporary(name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}.tmp{os.getpid()}"


def _written(folder: Path, write: Callable[[_Files], object]) -> list[Path]:
    files = _Files(folder)
    try:
        write(files)
        return files.finish()
    finally:
        files.remove()


def _shards(weights: Sequence[StoredWeight], max_bytes: int) -> list[list[StoredWeight]]:
    shards: list[list[StoredWeight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + weight.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight.num_bytes
    return shards


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
