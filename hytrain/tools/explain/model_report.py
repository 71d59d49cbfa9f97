"""Before a run: what it would begin with, whether the model fits, and the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hytrain.config import HyTrainConfig
from hytrain.errors import MemoryBudgetError, size_text
from hytrain.placement.costs import counted, layers_words
from hytrain.placement.first_decision import StateSizes, decide_first
from hytrain.placement.memory import gpu_peak_bytes, placed_bytes, taken_of_host
from hytrain.placement.memory_probe import limits_within
from hytrain.placement.memory_report import check_fits, missing_words
from hytrain.placement.records import Decision
from hytrain.tools.explain.candidates import candidate_rows
from hytrain.tools.explain.report import memory_text

_LITTLE = 0.05
"""Share of a GPU's memory: with less of it left for activations a run may not fit."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model as one rank holds it.

    Attributes:
        source: where the model's shape is from.
        state: what its optimizer state takes; weights that are kept on the host count as staging.
        parameters: number of parameters of each whole layer.
        training_copy_bytes: bytes of weights on this rank's GPU at the peak of a step.
        host_weights: bytes of weights that are kept on the host.
    """

    source: str
    state: StateSizes
    parameters: tuple[int, ...]
    training_copy_bytes: int
    host_weights: int = 0


def first_decision(
    config: HyTrainConfig,
    sizes: ModelSizes,
    gpu_bytes: int | None,
    host_bytes: int,
    activation_bytes: int = 0,
    *,
    shares_host: bool = False,
) -> Decision:
    """What a run begins with; ``gpu_bytes``: None without a GPU; ``activation_bytes``: the known
    ones on the GPU; ``shares_host``: whether its memory is the host's."""
    base = sizes.training_copy_bytes + activation_bytes + sizes.state.first_backward_bytes
    # Training finds the weights already on the host: a reserve is a share of what is left.
    limits = limits_within(config.solver, gpu_bytes, base, host_bytes - sizes.host_weights)
    limits = replace(limits, host=host_bytes, shares_host=shares_host)
    return decide_first(config, sizes.state, limits)


def has_room(config: HyTrainConfig, decision: Decision) -> bool:
    """Whether a run would begin: with the fixed number of GPU layers, or with any."""
    found = decision.bounds
    return found.fits if config.gpu_fraction == "solve" else found.allow(decision.gpu_layers_target)


def _misfit(sizes: ModelSizes, decision: Decision) -> str:
    """What becomes of a run whose fixed number of GPU layers does not fit with the reserves."""
    layers, limits, target = decision.layer_bytes, decision.limits, decision.gpu_layers_target
    if limits.gpu is not None and not limits.shares_host:
        # Training's check counts no activations, and no gradients that wait for their update.
        base = sizes.training_copy_bytes + sizes.state.first_backward_bytes
        if base + placed_bytes(layers, target) > limits.gpu:
            return "takes more than the GPU has: the run would be refused"
        if gpu_peak_bytes(layers, limits, target) > limits.gpu:
            return "takes more than the GPU has: the run would fail in its first step"
    if taken_of_host(layers, limits, decision.staging_bytes, target) > limits.host:
        return "takes more than the host has: the system may end the run"
    return "fits only in what is kept in reserve: the run would start, and take that"


def verdict_of(
    config: HyTrainConfig,
    sizes: ModelSizes,
    decision: Decision,
    advice: Sequence[str],
) -> str:
    """Whether a run fits, in a line; the arguments are those of :func:`model_text`."""
    is_fixed = config.gpu_fraction != "solve"
    limits, target, fitting = decision.limits, decision.gpu_layers_target, decision.bounds
    number = f"k = {target / decision.num_layers:.3g}"
    number += f" ({target} of {decision.num_layers} layers on the GPU)"
    if is_fixed and not has_room(config, decision):
        text = f"Does not fit: the fixed {number} {_misfit(sizes, decision)}."
        if not fitting.fits:
            return f"{text} No number fits; try {advice[0]}."
        text += f" {_fitting_words(decision)}"
        return f'{text}: set "hytrain.gpu_fraction": "solve", or a share of these.'
    if not fitting.fits:
        missing = missing_words(decision.layer_bytes, limits, decision.staging_bytes)
        what = f"{missing} missing"
        if limits.gpu is not None and sizes.training_copy_bytes > limits.gpu:
            what = f"the weights alone take {size_text(sizes.training_copy_bytes)} of the GPU's "
            what += size_text(limits.gpu)
        return f"Does not fit: {what}; try {advice[0]}."
    on_gpu = size_text(gpu_peak_bytes(decision.layer_bytes, limits, target))
    fits = f"Fits if the GPU has more than {on_gpu} (--gpu-memory was not given)"
    if limits.gpu is not None:
        fits, on_gpu = "Fits", f"{on_gpu} of the GPU's {size_text(limits.gpu)}"
    on_host = size_text(taken_of_host(decision.layer_bytes, limits, decision.staging_bytes, target))
    start, most = f"starts with {number}", fitting.max_gpu_layers
    numbers = "" if most > target else f" {_fitting_words(decision)}."
    if is_fixed:
        start, numbers = f"the fixed {number}", f" {_fitting_words(decision)}."
    elif most > target:
        start += f"; training may move up to {most} there, where activations leave room"
    each = "; of this rank" if sizes.state.num_ranks > 1 else ""
    return (
        f"{fits}: {start}: {on_gpu}, {on_host} of the host's {size_text(limits.host)}{each}."
        f"{numbers}{_room_words(decision)}"
    )


def _room_words(decision: Decision) -> str:
    """What is left for activations, if that is little."""
    limits = decision.limits
    if limits.gpu is None:
        return ""
    taken = gpu_peak_bytes(decision.layer_bytes, limits, decision.gpu_layers_target)
    left = limits.gpu - limits.gpu_reserve - taken
    if left > _LITTLE * limits.gpu:
        return ""
    return f" Activations come on top: {size_text(max(0, left))} are left for them."


def _fitting_words(decision: Decision) -> str:
    found = decision.bounds
    few, many = found.min_gpu_layers, found.max_gpu_layers
    if few < many:
        return f"{few} to {many} GPU layers fit"
    return f"Only {counted(few, 'GPU layer')} {'fits' if few == 1 else 'fit'}"


def model_text(
    config: HyTrainConfig,
    sizes: ModelSizes,
    decision: Decision,
    advice: Sequence[str],
    *,
    is_muon: bool = False,
) -> str:
    """Sizes and memory, as text; if a run would be refused, its error's table instead.

    Args:
        config: the run's.
        sizes: the model's.
        decision: what the run begins with.
        advice: what would make it fit.
        is_muon: whether Muon updates.
    """
    shared = ""
    state = sizes.state
    if state.num_ranks > 1:
        own = sum(layer.parameters for layer in state.layers)
        shared = f"; rank {state.rank} of {state.num_ranks} owns the state of {own / 1e6:,.1f} M"
    lines = [
        f"Model: {sizes.source}: {sum(sizes.parameters) / 1e6:,.1f} M parameters in "
        f"{layers_words(state.layers)}{shared}. Activations are not counted, except what --seq "
        "gives: a run measures them in its first step."
    ]
    if not is_muon:  # which has no plans
        lines[0] += " For an estimate of the step time: `hytrain plan --gpus`."
    if config.gpu_fraction == "solve" and not decision.bounds.fits:
        try:
            check_fits(
                decision.layer_bytes,
                decision.limits,
                decision.staging_bytes,
                host_weights=sizes.host_weights,
                advice=advice,
            )
        except MemoryBudgetError as error:
            return "\n".join([*lines, f"A run would be refused: {error}"])
    if decision.host_master_reason:
        reason = decision.host_master_reason
        lines.append(f"{reason[0].upper()}{reason[1:]}.")
    rows = candidate_rows(decision, lambda _: None)
    weights = sizes.host_weights, sizes.training_copy_bytes
    return "\n".join(lines) + f"\n\n{memory_text(decision, rows, None, *weights)}"
