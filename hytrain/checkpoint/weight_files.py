"""Files of weights for others: safetensors as Hugging Face lays them out, or one file of torch's.

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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint.archive_writer import (
    ArchiveWriter,
    LaterTensor,
    PickledObjects,
    bytes_of,
)
from hytrain.checkpoint.files import SummingFile, sync_names
from hytrain.checkpoint.stored_weights import StoredModel, StoredWeight
from hytrain.errors import CheckpointError
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


def write_safetensors(model: StoredModel, folder: Path, max_bytes: int) -> list[Path]:
    """Writes shards and, where there are several, their index.

    Tied weights are there once, as Hugging Face has them: ``from_pretrained`` ties them again.

    ``folder``: that exists and has none of these files. ``max_bytes``: of a shard's tensors; one
    tensor that is larger has a shard of its own.

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
    """Writes files elsewhere, and gives them their names when all of them are on the disk."""
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
