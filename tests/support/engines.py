"""Builds engines for tests: a configuration from a few words, in one process group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hytrain.formats.moment_kinds import SPLIT
from hytrain.placement.costs import LayerBytes
from support.ports import free_port


def device() -> torch.device:
    """The device on which DeepSpeed's accelerator puts the model."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return torch.device(accelerator.current_device_name())


def join_process_group() -> None:
    """Joins a group of one rank, in which any number of engines may live."""
    import torch.distributed as dist
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    if dist.is_initialized():
        return
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(one_rank, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)  # toy tensors: more threads only get in each other's way
    # DeepSpeed would compile an extension for communication between CPU processes.
    compatible_ops["deepspeed_shm_comm"] = False
    backend = get_accelerator().communication_backend_name()
    for attempts_left in reversed(range(5)):
        os.environ["MASTER_PORT"] = str(free_port())
        try:
            comm.init_distributed(backend, verbose=False)
        except dist.DistNetworkError:
            # Another process of tests has taken the port since it was seen free.
            if attempts_left == 0:
                raise
        else:
            break


def from_all_ranks(value: Any) -> list[Any]:
    """Returns each rank's value; a collective."""
    import torch.distributed as dist

    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


# For models of 100 million parameters: chunks of 1024 elements, which split every toy layer into
# several, would make 100 000 hand-offs a step there.
OFFLOAD_AT_SCALE = {"chunk_elements": 2**20, "cpu_threads": 8}


GATHERS: dict[str, dict[str, int]] = {
    "each": {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 1,
        "stage3_max_reuse_distance": 0,
    },
    "kept": {"stage3_param_persistence_threshold": 0},
    "defaults": {},
}
"""DeepSpeed's keys of ZeRO-3, see :func:`make_config`; keys not listed keep their defaults."""


def make_config(
    *,
    gpu_fraction: float = 0.0,
    clipping: float = 1.0,
    bf16: bool = True,
    accumulation: int = 1,
    stage: int = 2,
    hytrain: dict[str, Any] | None = None,
    offload: dict[str, Any] | None = None,
    gathers: str = "each",
    direct: bool = False,
    **sections: Any,
) -> dict[str, Any]:
    """A DeepSpeed configuration; ``sections`` are added at the top level (None removes one).

    ``gathers``, for ZeRO-3: "each": every layer is sharded, one is gathered ahead, none is kept;
    "kept": every layer is sharded, and all else has DeepSpeed's defaults, so that layers stay for
    the next pass; "defaults": everything has them, so that toy parameters stay on every rank.

    ``direct``: without clipping and overflow check, updates are committed as gradients arrive.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": clipping,
        "bf16": {"enabled": bf16},
        "hytrain": {
            "gpu_fraction": gpu_fraction,
            "offload": {"chunk_elements": 1024, "cpu_threads": 2, **(offload or {})},
            **(hytrain or {}),
        },
    }
    if direct:
        config |= {
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True, "check_grad_overflow": False},
        }
    if stage == 3:
        config["zero_optimization"].update(GATHERS[gathers])
    config.update(sections)
    return {key: value for key, value in config.items() if value is not None}


@contextmanager
def built(model: nn.Module, config: dict[str, Any], **keywords: Any) -> Iterator[Any]:
    """An engine for the length of the block; ``keywords`` go to hytrain.initialize."""
    import hytrain

    if "model_parameters" not in keywords and "optimizer" not in keywords:
        keywords["model_parameters"] = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = hytrain.initialize(model=model, config=config, **keywords)
    try:
        yield engine
    finally:
        engine.destroy()


@contextmanager
def split_on_cpu(share: float) -> Iterator[None]:
    """Makes decisions in the block split the master weights of a share of the layers on the CPU.

    These are the last layers, whatever room the host has; on the CPU the others keep whole master
    weights, and their updates are previewed.
    """

    def first_late(layers: Sequence[LayerBytes], *_: object) -> list[int]:
        if not any(layer.master == SPLIT and layer.keeps_pending for layer in layers):
            return []
        first = first_split_on_cpu(len(layers), share)
        return [max(number, first) for number in range(len(layers) + 1)]

    with (
        patch("hytrain.placement.memory.first_late_layers", first_late),
        patch("hytrain.placement.controller.first_late_layers", first_late),
    ):
        yield


def first_split_on_cpu(num_layers: int, share: float) -> int:
    """Returns the index of the first of these last layers."""
    return num_layers - round(share * num_layers)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable for the length of the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
