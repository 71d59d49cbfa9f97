"""What hytrain does not support of DeepSpeed: keys and models that are refused before a build."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.pipe.module import PipelineModule

from hytrain.config import HyTrainConfig
from hytrain.engine.deepspeed_internals import is_partitioned
from hytrain.errors import ConfigError, UnsupportedError, unquoted
from hytrain.formats.moment_kinds import SPLIT


def refuse_unsupported_model(model: torch.nn.Module, stage: int) -> None:
    """Raises an UnsupportedError if a model needs another engine or another ZeRO stage."""
    if isinstance(model, PipelineModule):
        raise UnsupportedError(
            "the model is a PipelineModule, which hytrain does not support: pass a plain "
            "torch.nn.Module"
        )
    for name, module in model.named_modules():
        if isinstance(module, (MoE, MOELayer)):
            raise UnsupportedError(
                f"module '{name}' is a layer of deepspeed.moe, whose experts are spread over "
                "process groups of their own: use a mixture of transformers, or modules of your "
                "own on every rank; these train in all stages"
            )
    for name, parameter in model.named_parameters():
        if is_partitioned(parameter) and stage != 3:
            raise UnsupportedError(
                f"parameter '{name}' was partitioned under deepspeed.zero.Init, which belongs to "
                'ZeRO-3: build the model outside of it, or set "zero_optimization.stage" to 3'
            )
    if _is_gathered_by_deepspeed(model):
        raise UnsupportedError(
            "another ZeRO-3 engine of DeepSpeed gathers this model's weights (was it built for "
            "inference?): call that engine's destroy() before"
        )


def refuse_miscounted_ranks(ranks: int) -> None:
    """Raises a ConfigError if accelerate, which deals the samples, counts ranks differently.

    Without a GPU it counts one, unless told to use the CPU: each rank would train on all samples.
    """
    module: Any = sys.modules.get("accelerate.state")
    if module is None or not module.is_initialized():
        return
    state = module.AcceleratorState()
    uses_deepspeed = state.distributed_type == module.DistributedType.DEEPSPEED
    if uses_deepspeed and state.num_processes != ranks:
        raise ConfigError(
            f"accelerate counts {state.num_processes} process(es), but the job has {ranks} ranks: "
            "each would train on the same samples. On the CPU give TrainingArguments(use_cpu=True);"
            " without Trainer, call accelerate.PartialState(cpu=True) before Accelerator()"
        )


def _is_gathered_by_deepspeed(model: torch.nn.Module) -> bool:
    """Whether a ZeRO-3 engine of DeepSpeed's has hooks on the model; ``zero.Init`` adds none."""
    hooks: Mapping[int, Any] = vars(model)["_forward_pre_hooks"]
    origins = {getattr(hook, "__module__", "") for hook in hooks.values()}
    # They are all wrapped by the function that marks them for profilers.
    return bool(origins & {"deepspeed.utils.nvtx", "deepspeed.runtime.zero.parameter_offload"})


def _get(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _seen(config: Mapping[str, Any], path: str) -> str:
    """Returns a key with its value; if it is missing, with a similar key that may be meant."""
    section: Any = config
    for part in path.split("."):
        inner = section.get(part) if isinstance(section, Mapping) else None
        if inner is None:
            near = difflib.get_close_matches(part, list(section), n=1)
            return f'"{path}" is missing' + (f' (there is "{near[0]}")' if near else "")
        section = inner
    return f'"{path}" is {section!r}'


_REFUSED: tuple[tuple[str, str], ...] = (
    ("hybrid_engine.enabled", "the hybrid engine is not supported: remove hybrid_engine"),
    ("tensor_parallel.autotp_size", "tensor parallelism is not supported: remove tensor_parallel"),
    (
        "expert_parallel.enabled",
        "AutoEP spreads experts over the ranks, which is not supported: remove expert_parallel; "
        "mixtures of transformers train as they are, ZeRO-3 shards their experts",
    ),
    ("pipeline.stages", "pipeline parallelism is not supported: remove pipeline"),
    ("zero_optimization.zenflow", "ZenFlow is another update scheme: remove zenflow"),
    ("zero_optimization.cpu_offload_param", 'set "offload_param": {"device": "cpu"} instead'),
    ("zero_optimization.offload_optimizer.super_offload", "remove super_offload"),
    ("zero_optimization.mics_shard_size", "MiCS is not supported: remove mics_shard_size"),
    ("zero_optimization.zero_hpz_partition_size", "ZeRO++ is not supported: remove it"),
    ("zero_optimization.zero_quantized_weights", "ZeRO++ is not supported: remove it"),
    ("zero_optimization.zero_quantized_gradients", "ZeRO++ is not supported: remove it"),
    ("bf16.bf16_master_weights_and_grads", "master weights are always fp32: remove it"),
    (
        "bf16.bf16_optimizer_states",
        'remove it, and set "hytrain": {"moments": "bf16"} for moments in bf16',
    ),
    ("fp16.fp16_master_weights_and_grads", "master weights are always fp32: remove it"),
    ("amp.enabled", "Apex AMP is not supported: use torch_autocast, bf16 or fp16"),
    ("compile.deepcompile", "DeepCompile is not supported: remove it"),
    ("prescale_gradients", "gradients are scaled in fp32 by the update itself: remove it"),
    ("sparse_gradients", "sparse gradients are not supported: remove it"),
    ("elasticity.enabled", "elasticity is not supported: remove it"),
    ("compression_training", "compression is not supported: remove it"),
    ("quantize_training.enabled", "quantized training is not supported: remove it"),
    ("eigenvalue.enabled", "eigenvalue is not supported: remove it"),
    ("checkpoint.writer", "checkpoints are written by hytrain: remove checkpoint.writer"),
)
_SUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "zero_optimization.offload_param.device", (None, "none", "cpu"),
        'weights are kept in host memory or on the GPU; set it to "cpu", or remove offload_param',
    ),
    (
        "zero_optimization.offload_optimizer.device", ("cpu",),
        'hytrain keeps the optimizer state in host memory; set it to "cpu" (gpu_fraction decides '
        "how much of it stays on the GPU)",
    ),
    ("zero_optimization.offload_optimizer.ratio", (None, 1), 'use "hytrain.gpu_fraction"'),
    (
        "gradient_predivide_factor", (None, 1),
        "gradients are scaled in fp32 by the update itself; remove it",
    ),
)  # fmt: skip
"""Keys, the values that are supported, and the remedy for any other."""
_TRIVIAL: tuple[Any, ...] = (None, False, 0, 1, -1, {}, [])


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises an UnsupportedError with key, value and remedy of everything unsupported that is
    asked for."""
    if found := [*_unsupported(config)]:
        raise UnsupportedError(";\n".join(found))


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    for path, remedy in _REFUSED:
        value = _get(config, path)
        # Sizes of 1 and empty sections ask for nothing; `enabled: true` equals 1 in Python.
        if value is True or value not in _TRIVIAL:
            yield f'"{path}" is {value!r}: {remedy}'
    stage = _get(config, "zero_optimization.stage")
    if type(stage) is not int or stage not in (1, 2, 3):
        seen = _seen(config, "zero_optimization.stage")
        yield f"{seen}: hytrain works with ZeRO stages 1 to 3; set 2{unquoted(stage)}"
        stage = 3
    for path, supported, remedy in _SUPPORTED:
        if _get(config, path) not in supported:
            yield f"{_seen(config, path)}: {remedy}"
    if _get(config, "zero_optimization.offload_param.device") == "cpu" and stage != 3:
        yield (
            f'"zero_optimization.offload_param.device" is "cpu" with ZeRO stage {stage}: only '
            'stage 3 streams weights; set "zero_optimization.stage" to 3, or remove offload_param'
        )
    kind = _get(config, "optimizer.type")
    if kind is not None and str(kind).lower() not in ("adam", "adamw", "muon"):
        yield f'"optimizer.type" is {kind!r}: hytrain updates with Adam, AdamW or Muon; set "AdamW"'


def refuse_beside_streamed(config: HyTrainConfig, name: str) -> None:
    """Raises an UnsupportedError for keys that do not go with updates that stream their state."""
    refused = (
        (config.master == SPLIT, f'"hytrain.master" is "{SPLIT}"', 'set it to "fp32"'),
        (config.plan is not None, '"hytrain.plan" is given', "plans know Adam only: remove it"),
        (
            config.accumulation == "layer_major",
            '"hytrain.accumulation" is "layer_major"',
            'set it to "micro_batch_major"',
        ),
    )
    for is_so, seen, remedy in refused:
        if is_so:
            raise UnsupportedError(f"{seen} and the optimizer is {name}: {remedy}, or use AdamW")
