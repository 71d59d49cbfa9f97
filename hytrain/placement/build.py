"""The placement that a job starts with, and what will change it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import psutil
import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.config import HyTrainConfig
from hytrain.errors import ConfigError, MemoryBudgetError
from hytrain.formats.moment_kinds import FP32, MASTER_BYTES, SPLIT
from hytrain.hardware.host_share import HostShare
from hytrain.kernels.host_limits import GROUP, host_memory_pools
from hytrain.model.layer_state import LayerState
from hytrain.model.state_format import StateFormat
from hytrain.offload.cpu_updater import CpuSettings, pinned_bytes, slot_plan
from hytrain.offload.streamed_update import piece_bytes, work_bytes
from hytrain.offload.threads import ThreadChoice
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.placement.calibration import gpu_seconds_per_parameter
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.host_master import whole_on_host
from hytrain.placement.manager import PlacementManager
from hytrain.placement.measure import CostEstimator, InitialRates
from hytrain.placement.memory import Bounds, bounds, check_fits, taken_of_host
from hytrain.placement.memory_probe import MemoryProbe
from hytrain.placement.move import PlacementController
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
"""What peaks of memory follow from, by the number of layers on the GPU."""


def plan_placement(
    weights: BuiltWeights,
    config: HyTrainConfig,
    host: HostShare,
    cpu: CpuSettings,
    collectives: ShardCollectives,
    device: torch.device,
    *,
    kept_gradients: int = 0,
) -> tuple[Decision, PeakInputs]:
    """Decides, before any optimizer state is allocated, where it goes.

    A fixed ``gpu_fraction`` is taken as it is; where the host seems too small for the rest, that is
    logged. Otherwise the first step runs at the smallest k that fits: activations are not known
    yet.

    ``kept_gradients``: see :class:`PeakMemoryInputs`.

    Returns:
        where the layers are to begin with, and what peaks of memory follow from.

    Raises:
        MemoryBudgetError: the state of some rank fits in no split of GPU and host or, with a fixed
            ``gpu_fraction``, not in its own; raised on all ranks.
    """
    states = weights.states
    gpu_base = _known_gpu_bytes(weights, collectives.world_size, device)
    limits = MemoryProbe((), device).limits(config.solver, gpu_base, 0, host)
    if collectives.world_size == 1 or any(layer.sharded for layer in weights.layers):
        # Elsewhere what is known has all gradients of the first backward, which are no fewer.
        limits = replace(limits, kept_gradients=kept_gradients)
    largest = max(slot.numel for layer in weights.layers for slot in layer.slots)
    layer_bytes, staging, why = _choose_form(states, config, cpu, limits, largest)
    shared = partial(
        PeakMemoryInputs,
        layers=layer_bytes,
        home_bytes=0 if weights.home is None else weights.home.num_bytes,
        largest_parameter=largest,
        gradients=_gradients(weights),
        gpu_base=gpu_base if device.type == "cuda" else None,
        num_ranks=collectives.world_size,
        kept_gradients=kept_gradients,
        largest_frozen=weights.largest_frozen,
    )

    def peak_inputs(gpu_layers: int) -> PeakMemoryInputs:
        pinned = pinned_bytes(states, cpu, gpu_layers)
        return shared(gpu_layers=gpu_layers, pinned_bytes=pinned)

    refusal = _refusal(config, host, layer_bytes, limits, staging, peak_inputs)
    unfit = torch.tensor([float(refusal is not None)], device=device)
    # Nobody allocates before all ranks of the host have seen what it has, and that all have enough.
    collectives.all_reduce(unfit)
    if refusal is not None:
        raise refusal
    if unfit.item():
        raise MemoryBudgetError(
            "the optimizer state of another rank fits in no split between its GPU and host, or not "
            "in the one that is given: see that rank's message; nothing was allocated"
        )
    if config.gpu_fraction == "solve":
        allowed = bounds(layer_bytes, limits, staging)
        num_gpu, reason = first_number(
            config.solver.start, allowed, collectives.rank, collectives.world_size
        )
    else:
        allowed = Bounds.unlimited(len(states))
        num_gpu = round(config.gpu_fraction * len(states))
        reason = f"gpu_fraction is {config.gpu_fraction}"
        _warn_of_host(layer_bytes, num_gpu, config.gpu_fraction, limits, staging)
    decision = Decision(
        step=0,
        gpu_layers_before=num_gpu,
        gpu_layers_target=num_gpu,
        num_layers=len(states),
        reason=reason,
        bounds=allowed,
        layer_bytes=layer_bytes,
        limits=limits,
        staging_bytes=staging,
        host_master_reason=why,
    )
    return decision, peak_inputs


def _choose_form(
    states: Sequence[LayerState],
    config: HyTrainConfig,
    cpu: CpuSettings,
    limits: MemoryLimits,
    largest_parameter: int,
) -> tuple[tuple[LayerBytes, ...], int, str]:
    """Sets how the layers' state is kept; their bytes with it, pinned staging, and why it is so.

    Each rank chooses by itself: results are the same, bit for bit.
    """
    form = StateFormat(config.moments, config.moments_seed, config.master)

    def keep(form: StateFormat) -> tuple[tuple[LayerBytes, ...], int]:
        for state in states:
            state.form = form.of(state.form.optimizer)
        layers = tuple(layer_bytes_of(state, direct=cpu.direct) for state in states)
        return layers, slot_plan(states, cpu).staging_bytes

    if config.master != SPLIT or cpu.direct:
        return *keep(form), ""
    layers, staging = keep(replace(form, host_master=FP32))
    fraction = config.gpu_fraction
    fixed = None if fraction == "solve" else round(fraction * len(states))
    # A fixed number is refused where a save does not fit beside it: then late updates do.
    saved = 0 if fixed is None else 2 * MASTER_BYTES * largest_parameter
    is_whole, why = whole_on_host(layers, limits, staging + saved, fixed)
    if not is_whole:
        layers, staging = keep(form)
    return layers, staging, why


def layer_bytes_of(state: LayerState, *, direct: bool) -> LayerBytes:
    """What a layer takes on this rank; its state need not be there."""
    return LayerBytes(
        state.name,
        state.shard_size,
        state.gradient_dtype.itemsize,
        max(segment.dtype.itemsize for segment in state.layout.segments),
        keeps_pending=not direct,
        moments=state.form.name,
        master=state.form.master,
        host_master=state.form.host_master,
        streamed_states=state.form.optimizer and len(state.form.optimizer.states),
        piece_bytes=piece_bytes(state),
        work_bytes=work_bytes(state),
    )


def _gradients(weights: BuiltWeights) -> list[int]:
    """Bytes of each layer's gradient as one rank computes it."""
    return [state.layout.size * state.gradient_dtype.itemsize for state in weights.states]


def _shares(host: HostShare) -> dict[str, int]:
    """This rank's share of what each of its memory pools has left."""
    # A control group's processes may use swap beside its limit.
    swap = int(psutil.swap_memory().free)
    return {
        name: host.memory({name: left + (swap if name.startswith(GROUP) else 0)})
        for name, left in host_memory_pools().items()
    }


def _refusal(
    config: HyTrainConfig,
    host: HostShare,
    layers: Sequence[LayerBytes],
    limits: MemoryLimits,
    staging: int,
    peak_inputs: PeakInputs,
) -> MemoryBudgetError | None:
    """Why this rank's state fits nowhere, or not where it is asked for; None where it does."""
    try:
        if config.gpu_fraction == "solve":
            check_fits(layers, limits, staging, num_ranks=peak_inputs(0).num_ranks)
            return None
        inputs = peak_inputs(round(config.gpu_fraction * len(layers)))
        peaks = predict_peaks(inputs)
        # Weights that are kept on the host are among the peaks, and taken already.
        more = inputs.home_bytes - limits.host_base
        limit = hard_limit({name: left + more for name, left in _shares(host).items()})
        gpu = None if limits.shares_host else limits.gpu  # which counts no caches as free
        refuse_what_cannot_fit(peaks, limit, gpu, config.gpu_fraction)
    except MemoryBudgetError as error:
        return error
    return None


def _warn_of_host(
    layers: Sequence[LayerBytes],
    chosen: int,
    gpu_fraction: float,
    limits: MemoryLimits,
    staging: int,
) -> None:
    """Where the host seems not to hold what a given ``gpu_fraction`` leaves to it.

    A process that touches more than there is gets killed, and cannot say why. What lies in swap is
    slow, but there; no reserve is kept of what the user has decided.
    """
    number = len(layers)
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


def first_number(
    start: Sequence[int] | None, allowed: Bounds, rank: int, num_ranks: int
) -> tuple[int, str]:
    """GPU layers of the first steps, where k is solved, and why; ``start``: the solver's key."""
    if start is None:
        number = allowed.min_gpu_layers
        return number, (
            "before the first step, when times and activations are not known: the fewest GPU "
            f"layers that fit, {number} of {allowed.num_layers}"
        )
    if len(start) != num_ranks:
        raise ConfigError(
            f'"hytrain.solver.start" has {len(start)} numbers but the job has '
            f"{num_ranks} ranks: give one number a rank"
        )
    number = allowed.clamp(start[rank])
    return number, (
        f"before the first step: solver.start is {start[rank]}, which is "
        f"{number} of {allowed.num_layers} layers within the bounds of memory"
    )


def _known_gpu_bytes(weights: BuiltWeights, num_ranks: int, device: torch.device) -> int:
    """What the GPU needs beside state, as far as it is known before the first step."""
    if device.type != "cuda":
        return 0
    known = torch.cuda.memory_allocated(device) + weights.live_bytes
    gradients = _gradients(weights)
    if any(layer.sharded for layer in weights.layers):
        known += 2 * max(gradients)  # one is reduced while the next one comes
    elif num_ranks > 1:
        # The first backward learns the order of the layers and keeps all gradients until its end.
        known += sum(gradients)
    return known


def build_placement(
    first: Decision,
    peak_inputs: PeakInputs,
    pipeline: UpdatePipeline,
    config: HyTrainConfig,
    host: HostShare,
    threads: ThreadChoice,
    collectives: ShardCollectives,
) -> PlacementManager:
    """What measures the steps and moves layers, for a pipeline placed as first decided."""
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
        late=pipeline.layers[0].form.at("cpu").is_split and not pipeline.norm.settings.direct,
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
