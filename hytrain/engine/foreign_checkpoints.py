"""Loads DeepSpeed's own checkpoints, and makes DeepSpeed's functions take hytrain's.

A load converts ZeRO checkpoints to universal ones with DeepSpeed's converter. From a ZeRO-3
checkpoint, in which each rank has a file without weights, the converter makes no
``mp_rank_00_model_states.pt``: it is made here, from the master weights.

Scripts, accelerate and Lightning call ``ds_to_universal`` and ``zero_to_fp32``, which look for
shards of DeepSpeed's own format. Once an engine of hytrain was asked for, or ``register()`` called,
they take universal checkpoints as well: the first passes them on, the second reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint import torch_files
from hytrain.checkpoint.commit import (
    TagLock,
    begin_save,
    discard_replaced,
    finish_save,
    remove_save,
)
from hytrain.checkpoint.disk_room import check_room
from hytrain.checkpoint.gather import STATES
from hytrain.checkpoint.load_checks import check_plain
from hytrain.checkpoint.manifest import MANIFEST
from hytrain.checkpoint.summed_files import write_file
from hytrain.checkpoint.universal import (
    LATEST,
    MODEL_STATES_OF_ZERO3,
    RECORD,
    CheckpointPaths,
    no_parameters,
    unpack_tensor,
)
from hytrain.checkpoint.weight_files import stored_model
from hytrain.engine.deepspeed_internals import (
    convert_by,
    convert_to_universal,
    fp32_weights_of_deepspeed,
    read_fp32_weights_by,
)
from hytrain.errors import CheckpointError

logger = logging.getLogger(__name__)

_SUFFIX = "_universal"
_SHARDS = "*_optim_states.pt"
_MODEL_FILES = "zero_pp_rank_*_mp_rank_00_model_states.pt"


def universal_tag(load_dir: Path, tag: str, *, with_optimizer: bool, trusted: bool) -> str:
    """Returns the tag to load for one that DeepSpeed's ZeRO saved, which is converted if needed.

    Runs on rank 0. It is ``tag`` itself if that is universal, or has nothing to convert. Weights
    alone need no conversion below ZeRO-3.

    Raises:
        CheckpointError: ``tag`` cannot be converted. What was made is removed.
    """
    folder = load_dir / tag
    paths = CheckpointPaths(folder)
    if paths.zero.is_dir():
        _complete(paths, trusted=trusted)
        return tag
    shards = list(folder.glob(_SHARDS))
    if not shards or not (with_optimizer or not paths.model_states.is_file()):
        return tag
    target = folder.with_name(folder.name + _SUFFIX)
    name = target.relative_to(load_dir).as_posix()
    newest = max(path.stat().st_mtime for path in shards)
    found = CheckpointPaths(target).optimizer_state
    if found.is_file() and found.stat().st_mtime >= newest:
        logger.info("%s was converted before, to %s", folder, target)
        return name
    _make_universal(folder, target, trusted=trusted)
    return name


def _make_universal(folder: Path, target: Path, *, trusted: bool) -> None:
    logger.warning(
        "%s is of DeepSpeed's own format: it is converted to %s by DeepSpeed's ds_to_universal, "
        "which takes as much space and a while (all ranks wait; once)",
        folder,
        target,
    )
    lock: TagLock | None = None
    saving = target
    try:
        # Slices of all shards are written first, then the whole tensors beside them.
        needed = 2 * sum(path.stat().st_size for path in folder.glob("*.pt"))
        check_room(folder.parent, needed, "the conversion takes", "free space, and load again")
        saving, lock = begin_save(target)
        # The converter writes `latest_universal` beside its folder before that is whole: in here.
        made = saving / target.name
        options = argparse.Namespace(
            input_folder=str(folder), output_folder=str(made), strict=True,
            inject_missing_state=True, num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False,
        )  # fmt: skip
        reading = contextlib.nullcontext() if trusted else torch_files.in_place_of_torch_load()
        with contextlib.redirect_stdout(io.StringIO()), reading:
            convert_to_universal(options)
        _complete(CheckpointPaths(made), trusted=trusted)
        finish_save(made, target)
        discard_replaced(target)
    except Exception as error:
        raise CheckpointError(
            f"{folder} is of DeepSpeed's own format and could not be converted "
            f"({type(error).__name__}: {error}). {no_parameters(CheckpointPaths(folder))}"
        ) from error
    finally:
        if lock is not None:
            remove_save(saving)
            lock.release()


def _complete(paths: CheckpointPaths, *, trusted: bool) -> None:
    """Makes the model states' file that a converted ZeRO-3 checkpoint lacks.

    Raises:
        CheckpointError: it cannot be written, the checkpoint has objects that may not be made, or a
            frozen weight is not whole.
    """
    first = paths.folder / MODEL_STATES_OF_ZERO3
    if paths.model_states.is_file() or not first.is_file() or (paths.zero / MANIFEST).is_file():
        return
    ranks = sorted(paths.folder.glob(_MODEL_FILES), key=lambda path: int(path.name.split("_")[3]))
    stored = [torch_files.load(path, trusted=trusted) for path in ranks]
    states = dict(stored[0])
    for problem in check_plain(first, states):
        raise CheckpointError(problem)
    if RECORD in states:
        return  # ours, whose file is missing: reported when it is read
    module = dict(states["module"])
    module |= _trained(paths, module, states)
    module |= _frozen(paths, [rank.get("frozen_param_fragments") or {} for rank in stored], states)
    for name, source in dict(states.get("shared_params") or {}).items():
        module[name] = module[source]
    try:
        write_file(paths.model_states, {**states, "module": module})
    except OSError as error:
        raise CheckpointError(
            f"{paths.model_states}, which a checkpoint of ZeRO-3 needs to be loaded here, could "
            f"not be written ({error}): make the folder writable, or copy it to one that is"
        ) from error


def _trained(
    paths: CheckpointPaths, module: Mapping[str, Any], states: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    shapes = {name: shape for group in states["param_shapes"] for name, shape in group.items()}
    found: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        path = paths.state(name, STATES[0])
        # The converter pads tensors that do not divide evenly among the ranks.
        values = (
            unpack_tensor(torch_files.load(path), path).reshape(-1)[: shape.numel()].reshape(shape)
        )
        found[name] = values.to(module[name].dtype)
    return found


def _frozen(
    paths: CheckpointPaths, fragments: list[Mapping[str, Any]], states: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, shape in dict(states.get("frozen_param_shapes") or {}).items():
        parts = [rank[name].reshape(-1) for rank in fragments if name in rank]
        whole = torch.cat(parts) if parts else torch.empty(0)
        if whole.numel() < shape.numel():
            raise CheckpointError(
                f"{paths.folder} has {whole.numel()} of the {shape.numel()} elements of '{name}', "
                "which is not trained: a rank's file is missing"
            )
        found[name] = whole[: shape.numel()].reshape(shape)
    return found


def offer_conversions() -> None:
    """Makes DeepSpeed's functions take universal checkpoints, too. May be called again."""
    convert_by(convert)
    read_fp32_weights_by(fp32_state_dict)


def _is_universal(folder: Path) -> bool:
    return CheckpointPaths(folder).optimizer_state.is_file() and not any(folder.glob(_SHARDS))


def convert(arguments: argparse.Namespace) -> None:
    """Converts as DeepSpeed does; files of a universal checkpoint are linked or copied instead.

    Raises:
        CheckpointError: the output folder exists already or cannot be written, or the conversion
            needs ``--inject_missing_state``.
    """
    source, target = Path(arguments.input_folder), Path(arguments.output_folder)
    if not _is_universal(source):
        try:
            convert_to_universal(arguments)
        except AssertionError as error:
            # It asserts an entry that DeepSpeed's ZeRO engines do not save by themselves.
            if "universal_checkpoint_info" not in str(error) or arguments.inject_missing_state:
                raise
            raise CheckpointError(
                f"{arguments.input_folder} could not be converted ({error}): give ds_to_universal "
                "--inject_missing_state, or load the checkpoint with hytrain as it is"
            ) from error
        return
    print(f"{source} is universal already: nothing is to be converted")
    if target.resolve() == source.resolve():
        return
    try:
        shutil.copytree(source, target, copy_function=_link_or_copy)
        (target.parent / LATEST[-1]).write_text(target.name)  # as DeepSpeed's does
    except OSError as error:
        raise CheckpointError(
            f"{source}, which is universal already, could not be put in {target} too "
            f"({type(error).__name__}: {error}): pass an --output_folder that is not there yet, or "
            f'load {source} as it is, with "load_universal": true'
        ) from error


def _link_or_copy(source: str, target: str) -> None:
    """Links a file, or else copies it: a checkpoint's files are never written to again."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or no links there
        shutil.copy2(source, target)


def fp32_state_dict(
    ds_checkpoint_dir: str, exclude_frozen_parameters: bool
) -> dict[str, torch.Tensor]:
    """Returns master weights, frozen weights and buffers of a tag's folder, on the host.

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
        CheckpointError: it has no parameters.
    """
    folder = Path(ds_checkpoint_dir)
    if not _is_universal(folder):
        with torch_files.in_place_of_torch_load():
            return fp32_weights_of_deepspeed(ds_checkpoint_dir, exclude_frozen_parameters)
    model = stored_model(folder, torch.float32, with_frozen=not exclude_frozen_parameters)
    state = OrderedDict((weight.name, weight.read()) for weight in model.weights)
    for name, stored in model.tied.items():
        if stored in state:
            state[name] = state[stored]
    return state
