"""Builds the optimizer for a model: layers, partition, placement, state, pipeline."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hytrain.comm.collectives import ShardCollectives
from hytrain.config import HyTrainConfig
from hytrain.engine.build import BuildSettings
from hytrain.engine.build_agreement import require_one_optimizer
from hytrain.engine.build_weights import build_weights, give_shapes
from hytrain.engine.unsupported import refuse_beside_streamed
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import ConfigError
from hytrain.formats.moment_kinds import SPLIT
from hytrain.hardware.numa import call_on, on_cores
from hytrain.kernels.clipping import GradientNorm
from hytrain.kernels.host_memory import host_zeros, taking_host_memory
from hytrain.kernels.muon import MUON
from hytrain.model.layer_state import LayerState
from hytrain.model.layer_update import Placement
from hytrain.offload.cpu_updater import CpuSettings, CpuUpdater
from hytrain.offload.host_blocks import pinned_zeros
from hytrain.offload.streams import Streams
from hytrain.offload.threads import ThreadChoice, place_threads
from hytrain.offload.update_groups import LIMITS, GroupLimits
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.optimizer.engine_view import EngineView, StepSettings
from hytrain.optimizer.hyper import HyperParameters, check_optimizer, device_optimizers
from hytrain.optimizer.layer_guards import unguarded_layers
from hytrain.optimizer.loss_scaling import LossScaling
from hytrain.optimizer.model_cut import cut_model
from hytrain.placement.build import build_placement, plan_placement
from hytrain.testing.faults import injected_delays
from hytrain.zero3.layer_weights import BuiltWeights
from hytrain.zero3.weight_passes import WeightPasses

logger = logging.getLogger(__name__)


def build_optimizer(
    model: nn.Module,
    basic_optimizer: torch.optim.Optimizer,
    config: HyTrainConfig,
    settings: BuildSettings,
    collectives: ShardCollectives,
    engine: EngineView,
    group_limits: GroupLimits = LIMITS,
) -> HyTrainZeroOptimizer:
    """Takes over a model's trained parameters and their optimizer state.

    The model is in its training dtype; below ZeRO-3 on its device and equal on all ranks.

    Raises:
        ConfigError: the section does not fit the model or the job.
        UnsupportedError: the optimizer, or one of its options, is not supported.
        HostMemoryError: the host has not enough memory for the state, or for what comes with it.
        MemoryBudgetError: k is solved, and no placement fits in memory.
    """
    give_shapes(model)
    hyper = HyperParameters(basic_optimizer, decoupled=check_optimizer(basic_optimizer))
    groups = basic_optimizer.param_groups
    require_one_optimizer(model, basic_optimizer, collectives)
    hyper.read()  # refuses bad hyper-parameters before anything is touched
    group_of = {
        id(parameter): index
        for index, group in enumerate(groups)
        for parameter in group["params"]
        if parameter.requires_grad
    }
    if not group_of:
        raise ConfigError(
            "no parameter of the optimizer requires a gradient: nothing can be trained; pass "
            "model_parameters that do, or set requires_grad"
        )
    trained = [p for group in groups for p in group["params"] if id(p) in group_of]
    _check_all_found(trained, found_ids={id(p) for p in model.parameters()})
    if config.master == SPLIT:
        _check_bf16(model, group_of)
    gathers = settings.gathers
    if collectives.world_size == 1 and not settings.on_host:
        gathers = None  # no other rank could keep shards
    optimizers = device_optimizers(basic_optimizer)
    if any(optimizers):
        refuse_beside_streamed(config, type(basic_optimizer).__name__)
    if MUON in optimizers and settings.clip.max_norm > 0.0 and collectives.rank == 0:
        logger.warning(
            "\"gradient_clipping\" is %g: gradients are clipped before Muon's momentum, as torch's "
            "clip_grad_norm_ does. DeepSpeed clips Muon's updates after they are made orthogonal, "
            "which divides steps by about the root of the sum of their ranks: divide a muon_lr "
            "that was tuned so by that (DeepSpeed reports it as the norm), or set 0 on both sides",
            settings.clip.max_norm,
        )
    cut = cut_model(model, group_of, config, collectives.world_size, gathers, optimizers)
    with taking_host_memory("the engine"):
        weights = build_weights(model, cut, collectives, settings)
        try:
            return _build_on(
                weights,
                model,
                hyper,
                config,
                settings,
                collectives,
                engine,
                group_limits,
            )
        except BaseException:
            weights.close()  # no other object refers to them
            raise


def _build_on(
    weights: BuiltWeights,
    model: nn.Module,
    hyper: HyperParameters,
    config: HyTrainConfig,
    settings: BuildSettings,
    collectives: ShardCollectives,
    engine: EngineView,
    group_limits: GroupLimits,
) -> HyTrainZeroOptimizer:
    """Places and allocates the state of weights that have been built, and what updates it."""
    states = weights.states
    streams = Streams(settings.device)
    cpu_settings = CpuSettings(
        0, config.offload.chunk_elements, settings.clip.direct, *injected_delays()
    )
    first, peak_inputs = plan_placement(
        weights,
        config,
        settings.host,
        cpu_settings,
        collectives,
        streams.device,
        stage=settings.stage,
        micro_batches=engine.micro_batches,
    )
    threads = place_threads(
        settings.host,
        config.offload.cpu_threads,
        config.moments,
        collectives,
        may_bind=config.offload.numa == "auto",
    )
    for state in states:
        host: Placement = "cpu" if state.form.optimizer is None else "streamed"
        placement: Placement = "gpu" if state.index < first.gpu_layers_target else host
        _allocate_state(state, placement, threads, streams.device)
    # The worker's threads stay on these cores; the thread that registers pinned memory touches it.
    with on_cores(threads.cores):
        cpu = CpuUpdater(states, streams, replace(cpu_settings, num_threads=threads.num_threads))
    try:
        norm = GradientNorm(len(states), streams.device, settings.clip, collectives.all_reduce)
        pipeline = UpdatePipeline(states, cpu, norm, streams, collectives, group_limits)
        passes = WeightPasses(
            pipeline,
            weights.layers,
            collectives,
            settings.gathers,
            held=unguarded_layers(model, weights.layers),
            home=weights.home,
        )
        optimizer = HyTrainZeroOptimizer(
            hyper,
            pipeline,
            collectives,
            _step_settings(weights, config, settings, collectives.world_size),
            engine,
            build_placement(
                first, peak_inputs, pipeline, config, settings.host, threads, collectives
            ),
            passes,
            LossScaling(settings.scaler),
            model.parameters(),
        )
        return optimizer
    except BaseException:
        cpu.close()  # no engine will: its thread and its pinned memory would stay
        raise


def _step_settings(
    weights: BuiltWeights, config: HyTrainConfig, settings: BuildSettings, world_size: int
) -> StepSettings:
    # Even if gradients are reduced in another dtype, the sum is kept in their own.
    dtypes = {state.gradient_dtype for state in weights.states} | {settings.communication_dtype}
    return StepSettings(
        unscale=1.0 / world_size if settings.mean else 1.0,
        reduce_every_backward=settings.stage >= 2,
        overlap_forward=config.offload.overlap_forward,
        refuse_unused=settings.refuse_unused,
        communication_dtype=settings.communication_dtype,
        divide_first=settings.mean and torch.float16 in dtypes,
    )


def _check_all_found(trained: list[nn.Parameter], found_ids: set[int]) -> None:
    missing = [tuple(p.shape) for p in trained if id(p) not in found_ids]
    if missing:
        raise ConfigError(
            f"{len(missing)} parameters of the optimizer (first shape: {missing[0]}) are not "
            "parameters of the model: pass model_parameters of this model"
        )


def _check_bf16(model: nn.Module, trained: Container[int]) -> None:
    for name, parameter in model.named_parameters():
        if id(parameter) in trained and parameter.dtype != torch.bfloat16:
            raise ConfigError(
                f'"hytrain.master" is "{SPLIT}", which keeps half of a master weight in its bf16 '
                f"training copy, but parameter '{name}' is trained in {parameter.dtype}: set "
                '"bf16.enabled" to true, or "hytrain.master" to "fp32"'
            )


def _allocate_state(
    state: LayerState, placement: Placement, threads: ThreadChoice, device: torch.device
) -> None:
    """Allocates a layer's state: master weights from the training copy, and zero moments.

    On the host it is pinned if it is streamed, and pageable if the worker updates it. Pageable
    memory is touched by the threads that will use it, so that the first steps take no longer than
    later ones.
    """
    size = state.bytes_at(placement)
    purpose = f"the optimizer state of layer '{state.name}'"
    if placement == "gpu":
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
    elif placement == "streamed":
        memory = pinned_zeros(size, device, purpose)
    else:
        take = partial(
            host_zeros,
            size,
            dtype=torch.uint8,
            purpose=purpose,
            touch_threads=threads.num_threads,
        )
        memory = call_on(threads.cores, take)
    state.place(placement, memory)
    state.master_from_copy()
