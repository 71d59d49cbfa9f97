"""Builds the placement that a job starts with, and what changes it later."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import psutil
import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.config import HyTrainConfig
from hytrain.errors import MemoryBudgetError
from hytrain.hardware.host_share import HostShare
from hytrain.kernels.host_limits import GROUP, host_memory_pools
from hytrain.model.state_format import StateFormat
from hytrain.offload.cpu_updater import CpuSettings, pinned_bytes
from hytrain.offload.threads import ThreadChoice, measuring_bytes
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.placement.calibration import gpu_seconds_per_parameter
from hytrain.placement.controller import PlacementController
from hytrain.placement.first_decision import decide_first, state_sizes
from hytrain.placement.manager import PlacementManager
from hytrain.placement.measure import CostEstimator, InitialRates
from hytrain.placement.memory import all_split, taken_of_host
from hytrain.placement.memory_probe import MemoryProbe
from hytrain.placement.memory_report import check_fits
from hytrain.placement.peak_memory import (
    PeakMemoryInputs,
    hard_limit,
    predict_peaks,
    refuse_what_cannot_fit,
)
from hytrain.placement.records import Decision
from hytrain.placement.threads import ThreadTrials, TunedThreads
from hytrain.zero3.layer_weights import BuiltWeights

logger = logging.getLogger(__name__)


PeakInputs = Callable[[int], PeakMemoryInputs]
"""Returns what peaks of memory are predicted from, given the number of layers on the GPU."""


def plan_placement(
    weights: BuiltWeights,
    config: HyTrainConfig,
    host: HostShare,
    cpu: CpuSettings,
    collectives: ShardCollectives,
    device: torch.device,
    *,
    stage: int,
    micro_batches: Callable[[], int],
) -> tuple[Decision, PeakInputs]:
    """Decides, before any optimizer state is allocated, where it goes, and sets how it is kept.

    If the host seems too small for what a fixed ``gpu_fraction`` leaves to it, that is logged.

    Args:
        stage: the ZeRO stage.
        micro_batches: returns how many a step has with the present accumulation.

    Returns:
        where the layers are at first, and what peaks of memory are predicted from.

    Raises:
        ConfigError: ``solver.start`` is for another number of ranks.
        MemoryBudgetError: the state of some rank fits in no split of GPU and host or, with a fixed
            ``gpu_fraction``, not in its own; raised on all ranks.
    """
    states, is_cuda = weights.states, device.type == "cuda"
    form = StateFormat(config.moments, config.moments_seed, config.master)
    for state in states:
        state.form = form.of(state.form.optimizer)

    def own_micro_batches() -> int:
        return config.micro_batches(collectives.rank, stage=stage, accumulation=micro_batches())

    sizes = state_sizes(
        states,
        config,
        cpu,
        largest_parameter=max(slot.numel for layer in weights.layers for slot in layer.slots),
        rank=collectives.rank,
        num_ranks=collectives.world_size,
        shards_weights=any(layer.sharded for layer in weights.layers),
        stage=stage,
        micro_batches=own_micro_batches(),
    )
    gpu_base = 0
    if is_cuda:
        gpu_base = torch.cuda.memory_allocated(device) + weights.live_bytes
        gpu_base += sizes.first_backward_bytes
    limits = MemoryProbe((), device).limits(config.solver, gpu_base, 0, host)
    decision = decide_first(config, sizes, limits)
    for state, layer in zip(states, decision.layer_bytes, strict=True):
        state.form = replace(state.form, host_master=layer.host_master)
    shared = partial(
        PeakMemoryInputs,
        layers=decision.layer_bytes,
        home_bytes=0 if weights.home is None else weights.home.num_bytes,
        largest_parameter=sizes.largest_parameter,
        gradients=sizes.gradients,
        gpu_base=gpu_base if is_cuda else None,
        num_ranks=sizes.num_ranks,
        measuring_bytes=measuring_bytes(
            host, config.offload.cpu_threads, config.moments, may_bind=config.offload.numa == "auto"
        ),
        largest_frozen=weights.largest_frozen,
    )

    def peak_inputs(gpu_layers: int) -> PeakMemoryInputs:
        pinned = pinned_bytes(states, cpu, gpu_layers)
        kept = replace(sizes, micro_batches=own_micro_batches()).kept_gradients
        return shared(gpu_layers=gpu_layers, pinned_bytes=pinned, kept_gradients=kept)

    # No rank allocates before all have seen what their host has left, and that it is enough.
    _raise_on_all(_refusal(config, host, decision, peak_inputs), collectives, device)
    if config.gpu_fraction != "solve":
        _warn_of_host(decision, config.gpu_fraction)
    return decision, peak_inputs


def _raise_on_all(
    refusal: MemoryBudgetError | None, collectives: ShardCollectives, device: torch.device
) -> None:
    """Raises this rank's refusal, or that another rank has one."""
    unfit = torch.tensor([float(refusal is not None)], device=device)
    collectives.all_reduce(unfit)
    if refusal is not None:
        raise refusal
    if unfit.item():
        raise MemoryBudgetError(
            "the optimizer state of another rank fits in no split between its GPU and host, or not "
            "in the one that is given: see that rank's message; nothing was allocated"
        )


def _shares(host: HostShare) -> dict[str, int]:
    """This rank's share of what each of its memory pools has left."""
    # A control group's processes may use swap beside its limit.
    swap = int(psutil.swap_memory().free)
    return {
        name: host.memory({name: left + (swap if name.startswith(GROUP) else 0)})
        for name, left in host_memory_pools().items()
    }


def _refusal(
    config: HyTrainConfig, host: HostShare, decision: Decision, peak_inputs: PeakInputs
) -> MemoryBudgetError | None:
    """Why this rank's state fits nowhere, or not where it is asked for; None if it does."""
    layers, limits = decision.layer_bytes, decision.limits
    inputs = peak_inputs(decision.gpu_layers_target)
    try:
        if config.gpu_fraction == "solve":
            check_fits(layers, limits, decision.staging_bytes, num_ranks=inputs.num_ranks)
            return None
        peaks = predict_peaks(inputs)
        # Weights that are kept on the host are part of the peaks, and allocated already.
        more = inputs.home_bytes - limits.host_base
        limit = hard_limit({name: left + more for name, left in _shares(host).items()})
        gpu = None if limits.shares_host else limits.gpu  # which counts no caches as free
        refuse_what_cannot_fit(peaks, limit, gpu, config.gpu_fraction)
    except MemoryBudgetError as error:
        return error
    return None


def _warn_of_host(decision: Decision, gpu_fraction: float) -> None:
    """Warns if the host seems too small for what a given ``gpu_fraction`` leaves to it.

    A process that touches more memory than there is gets killed and cannot say why. Swap is slow,
    but counts; no reserve is demanded of a placement that the user has chosen.
    """
    layers, limits = all_split(decision.layer_bytes), decision.limits
    staging = decision.staging_bytes
    number, chosen = decision.num_layers, decision.gpu_layers_target
    room = limits.host + int(psutil.swap_memory().free)
    needed = [taken_of_host(layers, limits, staging, k) for k in range(number + 1)]
    if needed[chosen] <= room:
        return
    enough = next((k for k in range(chosen, number + 1) if needed[k] <= room), number)
    logger.warning(
        '"hytrain.gpu_fraction" is %s: the state of %d of %d layers and its pinned gradients%s '
        "take %.2f GiB of this rank's host memory, which has %.2f GiB left; the system may end "
        'this process. At least %.2f fits, and "solve" finds out by itself; more ranks, or a host '
        "with more memory, help as well",
        gpu_fraction,
        number - chosen,
        number,
        " and all that the GPU holds, which has no memory of its own," * limits.shares_host,
        (needed[chosen] - limits.host_base) / 2**30,
        (limits.host - limits.host_base) / 2**30,
        math.ceil(100 * enough / number) / 100,
    )


def build_placement(
    first: Decision,
    peak_inputs: PeakInputs,
    pipeline: UpdatePipeline,
    config: HyTrainConfig,
    host: HostShare,
    threads: ThreadChoice,
    collectives: ShardCollectives,
) -> PlacementManager:
    """Builds what measures the steps and moves layers, for a pipeline placed as first decided."""
    device = pipeline.streams.device
    solver = config.solver
    solves = config.gpu_fraction == "solve"
    cpu_rate = threads.seconds_per_parameter
    if solver.alpha is not None:
        gpu_rate = solver.alpha * cpu_rate
    else:
        dtype = pipeline.layers[0].gradient_dtype
        gpu_rate = gpu_seconds_per_parameter(device, dtype, config.moments, config.master)
    estimator = CostEstimator(
        first.layer_bytes,
        config.offload.chunk_elements,
        InitialRates(cpu_rate, gpu_rate),
        updates_overlap=device.type == "cuda",
    )
    tuned = None
    if config.offload.cpu_threads is None:
        tuned = TunedThreads(
            ThreadTrials(threads.candidates, threads.num_threads),
            pipeline.cpu.set_threads,
            lambda values: collectives.maximum(values, "the agreement on update threads"),
        )
    return PlacementManager(
        pipeline,
        PlacementController(pipeline.layers, pipeline.mover, solver, first, solves=solves),
        estimator,
        solver,
        host,
        peak_inputs,
        threads,
        tuned,
    )
