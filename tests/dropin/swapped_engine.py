"""Imported by the process that DeepSpeed's test ranks are forked from; swaps hytrain in.

With ``DROPIN_ENGINE=hytrain`` a configuration that hytrain can serve (ZeRO 1 to 3 with an Adam)
gets a "hytrain" section and the optimizer in host memory; any other is left to plain DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from unit.checkpoint import common

import hytrain.api  # before the name is replaced: it keeps what it finds there
from hytrain.engine.deepspeed_internals import load_config
from hytrain.engine.engine import HyTrainEngine

_plain = deepspeed.initialize
_plain_comparison = common.compare_model_states
_SECTION = {"gpu_fraction": 0.5, "offload": {"chunk_elements": 1024, "cpu_threads": 1}}


def _is_adam(optimizer: Any, config: Mapping[str, Any]) -> bool:
    if optimizer is None:
        kind = str((config.get("optimizer") or {}).get("type", ""))
    elif isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
    else:
        return False  # a callable makes it later
    return kind.lower() in ("adam", "adamw", "deepspeedcpuadam", "fusedadam")


def initialize(*arguments: Any, **named: Any) -> Any:
    """``deepspeed.initialize``, with hytrain's engine if that can serve the configuration."""
    given = named.get("config") or named.get("config_params")
    if arguments or given is None:
        return hytrain.initialize(*arguments, **named)
    config = load_config(given)
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") not in (1, 2, 3):
        return _plain(**named)
    if not _is_adam(named.get("optimizer"), config):
        return _plain(**named)
    zero = {**zero, "offload_optimizer": {"device": "cpu"}}
    zero.pop("cpu_offload", None)
    named.pop("config_params", None)
    named["config"] = {**config, "zero_optimization": zero, "hytrain": _SECTION}
    return hytrain.initialize(**named)


def compare_model_states(
    saved: Any, loaded: Any, compare_optimizer: bool = True, load_module_only: bool = False
) -> None:
    """DeepSpeed's helper knows its own optimizers; this one compares hytrain's, bit for bit."""
    if not isinstance(saved, HyTrainEngine):
        _plain_comparison(saved, loaded, compare_optimizer, load_module_only)
        return
    if not load_module_only:
        assert saved.skipped_steps == loaded.skipped_steps
        assert saved.global_steps == loaded.global_steps
    with saved.gathered_parameters(), loaded.gathered_parameters():
        pairs = zip(saved.module.named_parameters(), loaded.module.named_parameters(), strict=True)
        for (name, ours), (_, theirs) in pairs:
            assert ours is not theirs
            assert torch.equal(ours, theirs), name
    if compare_optimizer:
        ours, theirs = saved.fp32_state_dict(), loaded.fp32_state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensors in ours.items():
            for state, tensor in tensors.items():
                assert torch.equal(tensor, theirs[name][state]), f"{state} of {name}"


# DeepSpeed may be older than the tests, whose helper compares this attribute.
if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):
    DeepSpeedEngine.sparse_tensor_module_names = frozenset()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
if os.environ.get("DROPIN_FP16") == "1":
    # torch computes in fp16 on any CPU; DeepSpeed asks for other hardware, and skips its tests.
    type(get_accelerator()).is_fp16_supported = lambda _self: True  # pyright: ignore
if os.environ["DROPIN_ENGINE"] == "hytrain":
    deepspeed.initialize = initialize
    common.compare_model_states = compare_model_states
