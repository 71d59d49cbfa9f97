"""DeepSpeed's functions that turn a checkpoint into fp32 weights read hytrain's checkpoints, too.

``deepspeed.utils.zero_to_fp32`` looks for the optimizer's shards as DeepSpeed's ZeRO saves them;
scripts, accelerate and Lightning call it. Once an engine of hytrain was asked for, or
``register()`` called, a universal checkpoint will do.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch

from hytrain.checkpoint import inert
from hytrain.checkpoint.stored_weights import open_checkpoint, stored_model
from hytrain.checkpoint.universal import CheckpointPaths
from hytrain.engine.deepspeed_internals import fp32_weights_of_deepspeed, read_fp32_weights_by


def fp32_state_dict(
    ds_checkpoint_dir: str, exclude_frozen_parameters: bool
) -> dict[str, torch.Tensor]:
    """The master weights, frozen weights and buffers of a checkpoint, on the host.

    Args:
        ds_checkpoint_dir: folder of the tag.
        exclude_frozen_parameters: leave frozen weights out.

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
        CheckpointError: it has no parameters.
    """
    folder = Path(ds_checkpoint_dir)
    is_universal = CheckpointPaths(folder).optimizer_state.is_file()
    if not is_universal or any(folder.glob("*_optim_states.pt")):
        with inert.in_place_of_torch_load():
            return fp32_weights_of_deepspeed(ds_checkpoint_dir, exclude_frozen_parameters)
    files, listing = open_checkpoint(folder)
    model = stored_model(files, listing, torch.float32, with_frozen=not exclude_frozen_parameters)
    state = OrderedDict((weight.name, weight.read()) for weight in model.weights)
    for name, stored in model.tied.items():
        if stored in state:
            state[name] = state[stored]
    return state


def offer_fp32_weights() -> None:
    """From now on DeepSpeed's functions read both; as often as one likes."""
    read_fp32_weights_by(fp32_state_dict)
