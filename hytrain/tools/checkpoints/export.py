"""Exports a checkpoint's weights on any machine: no GPU, no ranks, one tensor in memory at once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint import torch_files
from hytrain.checkpoint.disk_room import check_room
from hytrain.checkpoint.inspection import locate
from hytrain.checkpoint.progress import Progress
from hytrain.checkpoint.universal import CheckpointPaths
from hytrain.checkpoint.weight_files import (
    INDEX,
    SAFETENSORS,
    TORCH_FILE,
    StoredModel,
    StoredWeight,
    stored_model,
    write_safetensors,
    write_torch_file,
)
from hytrain.errors import CheckpointError, size_text
from hytrain.formats.record import parse_json

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONFIG = "config.json"
_BESIDE = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "spiece.model",
    "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip
"""Files that from_pretrained reads beside weights, as transformers' Trainer saves them."""


def export_weights(
    given: Path,
    tag: str | None,
    out: Path,
    *,
    one_file: bool,
    dtype: str | None,
    max_shard_bytes: int,
    with_frozen: bool,
) -> list[str]:
    """Writes a checkpoint's weights to files.

    Args:
        given: folder of checkpoints, or a checkpoint's own.
        tag: which checkpoint; None: the latest.
        out: folder for the files; made if missing.
        one_file: one file for torch.load, in place of safetensors.
        dtype: of parameters: "fp32", "bf16", "fp16"; None: the training copy's.
        max_shard_bytes: most bytes of a safetensors file.
        with_frozen: whether frozen parameters are exported.

    Returns:
        Lines that say what was done, for people.

    Raises:
        DamagedCheckpointError: a file of the checkpoint is not what was saved; nothing is written.
        CheckpointError: there is no such checkpoint, or the files cannot be written.
    """
    _refuse_existing(out)
    folder = locate(given, tag)
    there = out.resolve()
    if there == given.resolve() or there.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"--out {out} is the checkpoint's own folder, where files of other programs "
            "would be taken for its: give another"
        )
    _refuse_links(folder)
    read = stored_model if CheckpointPaths(folder).zero.is_dir() else _read_deepspeeds
    model = read(folder, None if dtype is None else _DTYPES[dtype], with_frozen=with_frozen)
    size = sum(weight.num_bytes for weight in model.weights)
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_room(out, size, "the weights take", "free space, or give another --out")
        progress = Progress(f"writing {out}", size)
        told = [_told(weight, progress) for weight in model.weights]
        model = replace(model, weights=told)
        if one_file:
            files = write_torch_file(model, out)
        else:
            files = write_safetensors(model, out, max_shard_bytes)
        copied = _copy_beside(folder, out)
        _say_dtype(out, model)
    except OSError as error:
        raise CheckpointError(
            f"{out} cannot be written ({type(error).__name__}: {error}): free space, or "
            "give another --out"
        ) from error
    dtypes = ", ".join(sorted({str(w.dtype).removeprefix("torch.") for w in model.weights}))
    lines = [
        f"{folder}: {len(model.weights)} tensors ({dtypes}), {size_text(size)}, written to "
        f"{out}: {files[0].name}" + (f" and {len(files) - 1} more" * (len(files) > 1))
    ]
    if model.tied:
        names = ", ".join(f"{name} = {first}" for name, first in list(model.tied.items())[:3])
        lines.append(f"tied, there once: {names}" + ", ..." * (len(model.tied) > 3))
    if copied:
        lines.append(f"copied along: {', '.join(copied)}")
    if not one_file and CONFIG not in copied:
        lines.append(
            f"for from_pretrained copy your model's {CONFIG} (and tokenizer) to {out}: "
            "there is none beside the checkpoint"
        )
    return lines


def _told(weight: StoredWeight, progress: Progress) -> StoredWeight:
    """The same weight, counted as progress when it is read, which is when it is written."""

    def read() -> torch.Tensor:
        progress.add(weight.num_bytes)
        return weight.read()

    return replace(weight, read=read)


def _refuse_existing(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"--out {out} is a file: give a folder, which is made where missing")
    for name in (SAFETENSORS, INDEX, TORCH_FILE):
        if (out / name).exists():
            raise CheckpointError(f"{out} has a {name} already: give another --out, or remove it")


def _refuse_links(folder: Path) -> None:
    """Refuses links within a checkpoint; a tag itself may be a link to another disk."""
    links = [path for path in folder.rglob("*") if path.is_symlink()]
    if links:
        raise CheckpointError(
            f"{links[0]} is a symbolic link: only files inside of a checkpoint are exported; put "
            "the file itself there"
        )


def _read_deepspeeds(folder: Path, dtype: torch.dtype | None, *, with_frozen: bool) -> StoredModel:
    """Reads a plain DeepSpeed checkpoint by DeepSpeed's own code: below ZeRO-3 that takes memory
    for all of the weights."""
    # It prints what it does.
    with contextlib.redirect_stdout(sys.stderr), torch_files.in_place_of_torch_load():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        read: Callable[..., Any] = get_fp32_state_dict_from_zero_checkpoint
        try:
            found: Mapping[str, Any] = read(
                str(folder.parent),
                tag=folder.name,
                exclude_frozen_parameters=not with_frozen,
                lazy_mode=True,
            )
        except Exception as error:
            raise CheckpointError(
                f"{folder} is no universal checkpoint, and DeepSpeed's zero_to_fp32 cannot read it "
                f"({type(error).__name__}: {error}): load another tag"
            ) from error
    weights: list[StoredWeight] = []
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in found.items():
        first = names.setdefault(id(value), name)
        if first != name:
            tied[name] = first
            continue
        made = (dtype or torch.float32) if value.dtype.is_floating_point else value.dtype
        read_one = partial(_read_one, value, made)
        weights.append(StoredWeight(name, tuple(value.shape), made, read_one))
    return StoredModel(weights, tied)


def _read_one(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    return tensor.contiguous().to(dtype)  # in stage 3 it is put together only now


def _copy_beside(folder: Path, out: Path) -> list[str]:
    copied: list[str] = []
    for name in _BESIDE:
        source = folder.parent / name
        if source.is_symlink():
            # It may lead to any of this user's files, and exported weights are given away.
            logger.warning(
                "%s is a symbolic link and is not copied: copy what you mean to give away to %s",
                source,
                out,
            )
        elif source.is_file() and not os.path.lexists(out / name):
            shutil.copyfile(source, out / name, follow_symlinks=False)
            copied.append(name)
    return copied


def _say_dtype(out: Path, model: StoredModel) -> None:
    """Corrects a dtype in the configuration, to which from_pretrained would cast the weights."""
    path = out / CONFIG
    kinds = {weight.dtype for weight in model.weights if weight.dtype.is_floating_point}
    if not path.is_file() or len(kinds) != 1:
        return
    try:
        config = parse_json(path.read_bytes(), str(path), CheckpointError)
    except CheckpointError:
        return  # whoever reads it will say so
    if not isinstance(config, dict):
        return
    name = str(kinds.pop()).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if config.get(key) not in (None, name)]
    if keys:
        config |= dict.fromkeys(keys, name)
        path.write_text(json.dumps(config, indent=2) + "\n")
