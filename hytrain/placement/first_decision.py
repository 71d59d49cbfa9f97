"""The decision that a job begins with, before anything but sizes is known: training makes it, and
``hytrain explain`` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hytrain.config import HyTrainConfig
from hytrain.errors import ConfigError
from hytrain.formats.moment_kinds import MASTER_BYTES
from hytrain.model.layer_state import LayerState
from hytrain.offload.cpu_updater import CpuSettings, slot_plan
from hytrain.offload.streamed_update import piece_bytes, work_bytes
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import Bounds, as_kept, bounds
from hytrain.placement.memory_report import master_words
from hytrain.placement.records import Decision


@dataclass(frozen=True, slots=True)
class StateSizes:
    """What a rank's first decision is made from, beside the limits of memory.

    Attributes:
        layers: this rank's shards, in forward order; split master weights are split on both sides.
        gradients: bytes of each layer's gradient as one rank computes it.
        staging_bytes: pinned staging on the host.
        largest_parameter: elements of the largest parameter.
        rank: this rank's number.
        num_ranks: ranks that share the state.
        shards_weights: whether ZeRO-3 keeps only shards of the training copy: the first backward
            keeps no whole gradients.
        micro_batches: how many a step has with the present accumulation.
        summed_gradients: bytes of gradients that a step of several keeps from one to the next.
    """

    layers: tuple[LayerBytes, ...]
    gradients: tuple[int, ...]
    staging_bytes: int
    largest_parameter: int
    rank: int = 0
    num_ranks: int = 1
    shards_weights: bool = False
    micro_batches: int = 1
    summed_gradients: int = 0

    @property
    def kept_gradients(self) -> int:
        """Bytes of gradients that a step keeps from one micro-batch to the next."""
        return self.summed_gradients if self.micro_batches > 1 else 0

    @property
    def first_backward_bytes(self) -> int:
        """GPU bytes of gradients in the first backward, beside those that wait for an update."""
        if self.shards_weights:
            return 2 * max(self.gradients)  # one is reduced, or sent, while the next one comes
        # On several ranks it learns the order of the layers and keeps all gradients until its end.
        return sum(self.gradients) if self.num_ranks > 1 else 0


def state_sizes(
    states: Sequence[LayerState],
    config: HyTrainConfig,
    cpu: CpuSettings,
    *,
    largest_parameter: int,
    rank: int,
    num_ranks: int,
    shards_weights: bool,
    stage: int,
    micro_batches: int,
) -> StateSizes:
    """The sizes of layers whose state need not exist yet; ``micro_batches``: those of a step."""
    plan, summed = slot_plan(states, cpu), 0
    # Layer-major, the first step keeps them only if committed updates would not let it restart.
    if config.accumulation != "layer_major" or cpu.direct:
        is_reduced = stage >= 2 and num_ranks > 1
        summed = sum(
            (state.shard_size if is_reduced else state.layout.size) * state.gradient_dtype.itemsize
            for state in states
        )
    return StateSizes(
        layers=tuple(_layer_bytes(state, direct=cpu.direct) for state in states),
        gradients=tuple(state.layout.size * state.gradient_dtype.itemsize for state in states),
        staging_bytes=plan.staging_bytes,
        largest_parameter=largest_parameter,
        rank=rank,
        num_ranks=num_ranks,
        shards_weights=shards_weights,
        micro_batches=micro_batches,
        summed_gradients=summed,
    )


def _layer_bytes(state: LayerState, *, direct: bool) -> LayerBytes:
    """A layer's memory on this rank."""
    return LayerBytes(
        state.name,
        state.shard_size,
        state.gradient_dtype.itemsize,
        max(segment.dtype.itemsize for segment in state.layout.segments),
        keeps_pending=not direct,
        moments=state.form.name,
        master=state.form.master,
        streamed_states=state.form.optimizer and len(state.form.optimizer.states),
        piece_bytes=piece_bytes(state),
        work_bytes=work_bytes(state),
    )


def decide_first(config: HyTrainConfig, sizes: StateSizes, limits: MemoryLimits) -> Decision:
    """Decides where a rank's layers are at first.

    A fixed ``gpu_fraction`` is taken as it is. Otherwise the first step runs at the smallest k that
    fits, or at ``solver.start``: activations are not known yet. If none fits, the decision's
    ``bounds`` say so.

    Each rank chooses by itself how master weights on the host are kept: results are the same, bit
    for bit.

    Raises:
        ConfigError: ``solver.start`` is for another number of ranks.
    """
    if sizes.num_ranks == 1 or sizes.shards_weights:
        # Otherwise ``gpu_base`` has all gradients of the first backward, which are no fewer.
        limits = replace(limits, kept_gradients=sizes.kept_gradients)
    fitting = bounds(sizes.layers, limits, sizes.staging_bytes)
    number, reason = _first_number(config, sizes, fitting)
    save_bytes = 2 * MASTER_BYTES * sizes.largest_parameter
    layers = as_kept(sizes.layers, limits, sizes.staging_bytes + save_bytes, number)
    return Decision(
        step=0,
        gpu_layers_before=number,
        gpu_layers_target=number,
        num_layers=len(layers),
        reason=reason,
        decider="start" if config.gpu_fraction == "solve" else "user",
        bounds=fitting,
        layer_bytes=layers,
        limits=limits,
        staging_bytes=sizes.staging_bytes,
        save_bytes=save_bytes,
        host_master_reason=master_words(layers, number),
    )


def _first_number(config: HyTrainConfig, sizes: StateSizes, allowed: Bounds) -> tuple[int, str]:
    """GPU layers of the first steps, and why."""
    fraction, start = config.gpu_fraction, config.solver.start
    if fraction != "solve":
        return round(fraction * allowed.num_layers), f"gpu_fraction is {fraction}"
    if start is not None and len(start) != sizes.num_ranks:
        raise ConfigError(
            f'"hytrain.solver.start" has {len(start)} numbers but the job has '
            f"{sizes.num_ranks} ranks: give one number a rank"
        )
    if not allowed.fits:
        return 0, "no number fits"
    if start is None:
        number = allowed.min_gpu_layers
        return number, (
            "before the first step, when times and activations are not known: the fewest GPU "
            f"layers that fit, {number} of {allowed.num_layers}"
        )
    number = allowed.clamp(start[sizes.rank])
    return number, (
        f"before the first step: solver.start is {start[sizes.rank]}, which is "
        f"{number} of {allowed.num_layers} layers within the bounds of memory"
    )
