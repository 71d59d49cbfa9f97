"""DeepSpeed's ``ds_to_universal`` finds that a checkpoint of hytrain's is universal already.

It looks for shards of DeepSpeed's own format, and ends where there are none. Scripts that convert
whatever they have trained go on with its output folder: it gets the checkpoint as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from hytrain.checkpoint.universal import LATEST, CheckpointPaths
from hytrain.engine.deepspeed_internals import convert_by, convert_to_universal
from hytrain.errors import CheckpointError


def convert(arguments: argparse.Namespace) -> None:
    """DeepSpeed's conversion; what is universal is linked to, or copied, instead.

    Args:
        arguments: DeepSpeed's; ``input_folder`` is a tag's.

    Raises:
        CheckpointError: the output folder has something already, or cannot be written.
    """
    source, target = Path(arguments.input_folder), Path(arguments.output_folder)
    is_universal = CheckpointPaths(source).optimizer_state.is_file()
    if not is_universal or any(source.glob("*_optim_states.pt")):
        _convert(arguments)
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


def _convert(arguments: argparse.Namespace) -> None:
    try:
        convert_to_universal(arguments)
    except AssertionError as error:
        # It asks for what no engine of DeepSpeed's ZeRO saves by itself.
        if "universal_checkpoint_info" not in str(error) or arguments.inject_missing_state:
            raise
        raise CheckpointError(
            f"{arguments.input_folder} could not be converted ({error}): give ds_to_universal "
            "--inject_missing_state, or load the checkpoint with hytrain as it is"
        ) from error


def _link_or_copy(source: str, target: str) -> None:
    """Files of a checkpoint are never written to again: one file may have two names."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or no links there
        shutil.copy2(source, target)


def offer_conversion() -> None:
    """From now on DeepSpeed's ``ds_to_universal.main`` takes both; as often as one likes."""
    convert_by(convert)
