"""Before any run: what a configuration will do, and an estimate of the step from bare rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hytrain.config import HyTrainConfig
from hytrain.errors import MemoryBudgetError
from hytrain.placement.choose import solve
from hytrain.placement.closed_form import closed_form
from hytrain.placement.costs import LayerBytes, LayerCosts, MemoryLimits, StepCosts
from hytrain.placement.memory import bounds, check_fits, gpu_reserve, host_reserve
from hytrain.placement.prediction import predict
from hytrain.placement.records import Decision
from hytrain.tools.explain.candidates import candidate_rows, not_measured
from hytrain.tools.explain.decision_report import (
    candidates_text,
    costs_text,
    decision_json,
    memory_text,
)
from hytrain.tools.explain.rates import Rates

_GIB = 1024**3

GPU_UPDATES_PER_SECOND = 150e9
"""Parameters that the GPU's Adam updates in a second; the H200's, its memory's speed decides."""
_FIXED = "gpu_fraction is fixed"
# The passes' speeds on one machine relative to commit_then_preview, in parameters.
_COMMIT_SPEED = 4.47 / 4.19
_PREVIEW_SPEED = 5.67 / 4.19


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model as one rank holds it.

    Attributes:
        source: where the model's shape is from.
        layers: this rank's shards, in forward order.
        parameters: of each whole layer.
        training_copy_bytes: of weights on this rank's GPU at the peak of a step.
        staging_bytes: pinned staging on the host, weights that are kept there included.
        num_ranks: ranks that share the state.
        rank: this one.
    """

    source: str
    layers: tuple[LayerBytes, ...]
    parameters: tuple[int, ...]
    training_copy_bytes: int
    staging_bytes: int
    num_ranks: int
    rank: int
    shards_weights: bool = False
    """ZeRO-3: the first backward keeps no whole gradients."""


def memory_limits(
    config: HyTrainConfig, sizes: ModelSizes, gpu_bytes: int | None, host_bytes: int
) -> MemoryLimits:
    """What a rank may use before anything but the weights' size is known.

    Args:
        config: its reserves count.
        sizes: the model's.
        gpu_bytes: of the rank's GPU; None for none.
        host_bytes: that the rank may take.
    """
    solver = config.solver
    base = sizes.training_copy_bytes
    if sizes.num_ranks > 1:
        # The first backward learns the order of the layers and keeps all gradients until its end.
        whole = zip(sizes.parameters, sizes.layers, strict=True)
        gradients = [parameters * layer.gradient_itemsize for parameters, layer in whole]
        # Under ZeRO-3 one is reduced while the next one comes.
        base += 2 * max(gradients) if sizes.shards_weights else sum(gradients)
    return MemoryLimits(
        gpu=gpu_bytes,
        gpu_reserve=gpu_reserve(solver.gpu_memory_reserve_bytes, gpu_bytes or 0),
        gpu_base=base,
        host=host_bytes,
        host_reserve=host_reserve(solver.host_memory_reserve_bytes, host_bytes),
    )


def estimate_costs(
    sizes: ModelSizes,
    rates: Rates,
    *,
    accumulation: int,
    chunk_elements: int,
    alpha: float | None = None,
) -> StepCosts:
    """A step's costs from bare rates: a guess, good for orders of magnitude.

    A layer computes 6 operations a parameter and token, a third of them forward. Attention and
    recomputation are left out, communication between ranks too; no step is clipped.

    Args:
        sizes: the model's.
        rates: what else is known.
        accumulation: micro-batches a step.
        chunk_elements: see :class:`~hytrain.placement.costs.StepCosts`.
        alpha: GPU over CPU update time; None: from the usual speed of GPU updates.
    """
    layers: list[LayerCosts] = []
    for shard, parameters in zip(sizes.layers, sizes.parameters, strict=True):
        compute = 6.0 * parameters * rates.tokens / (rates.gpu_tflops * 1e12)
        update = shard.parameters / (rates.cpu_gparams_per_s * 1e9)
        copy = shard.parameters / (rates.pcie_gb_per_s * 1e9)
        layers.append(
            LayerCosts(
                name=shard.name,
                parameters=shard.parameters,
                forward=compute / 3.0,
                backward=compute * 2.0 / 3.0,
                to_host=copy * shard.gradient_itemsize,
                cpu_update=update,
                cpu_commit=update / _COMMIT_SPEED,
                cpu_preview=update / _PREVIEW_SPEED,
                to_device=copy * shard.weights_itemsize,
                gpu_update=(
                    shard.parameters / GPU_UPDATES_PER_SECOND if alpha is None else alpha * update
                ),
            )
        )
    micro_batch = sum(layer.forward + layer.backward for layer in layers)
    return StepCosts(
        tuple(layers),
        between=(accumulation - 1) * micro_batch,
        chunk_elements=chunk_elements,
    )


def expected_decision(
    config: HyTrainConfig, sizes: ModelSizes, limits: MemoryLimits, costs: StepCosts
) -> Decision:
    """The decision that these costs would lead to.

    Where nothing fits, the fixed number of GPU layers, or none.
    """
    fit = bounds(sizes.layers, limits, sizes.staging_bytes)
    num_layers = len(sizes.layers)
    alpha = costs.alpha if config.solver.alpha is None else config.solver.alpha
    if isinstance(config.gpu_fraction, float):
        target, reason = round(config.gpu_fraction * num_layers), _FIXED
    elif fit.fits:
        solution = solve(costs, config.solver.method, fit, alpha=alpha)
        target, reason = solution.gpu_layers, solution.reason
    else:
        target, reason = 0, "no number of GPU layers fits"
    return Decision(
        step=0,
        gpu_layers_before=target,
        gpu_layers_target=target,
        num_layers=num_layers,
        reason=reason,
        predicted_seconds=predict(costs, gpu_layers=[target]).step_seconds[0],
        measured_seconds=None,
        closed_form_k=closed_form(costs.backward_seconds, costs.cpu_seconds, alpha),
        bounds=fit,
        costs=costs,
        layer_bytes=sizes.layers,
        limits=limits,
        staging_bytes=sizes.staging_bytes,
    )


def explain_model(decision: Decision, sizes: ModelSizes, rates: Rates) -> str:
    """Sizes, memory and the estimate, for people."""
    total = sum(sizes.parameters)
    of_rank = ""
    if sizes.num_ranks > 1:
        own = sum(layer.parameters for layer in sizes.layers)
        of_rank = f"; rank {sizes.rank} of {sizes.num_ranks} owns the state of {own / 1e6:,.1f} M"
    target, num_layers = decision.gpu_layers_target, decision.num_layers
    if decision.bounds.fits or decision.reason == _FIXED:
        memory = memory_text(decision, _columns_of(decision))
        if not decision.bounds.allow(target):
            memory += (
                f"\nThe fixed number of GPU layers, {target}, does not fit: the run would start "
                "and take the reserve, or run out of memory."
            )
    else:
        memory = _refusal(decision, sizes)
    memory += (
        "\nActivations are not counted: they are measured in the first step and bound k from then "
        "on.\nThe model's line is the training copy and the waiting gradients."
    )
    estimate = (
        f"An estimate, not a measurement: from {rates.gpu_tflops:g} TFLOP/s for {rates.tokens:,} "
        f"tokens a\nmicro-batch, {rates.cpu_gparams_per_s:g} G parameters/s of CPU update, "
        f"{GPU_UPDATES_PER_SECOND / 1e9:g} of GPU update, {rates.pcie_gb_per_s:g} GB/s of PCIe\n"
        "each way. No attention, recomputation or communication, no clipped step. A run measures\n"
        "all this and decides by that."
    )
    choice = (
        f"{target} of {num_layers} layers on the GPU, {decision.predicted_seconds:.3f} s a step"
    )
    rows = candidates_text(candidate_rows(decision))
    assert decision.costs is not None
    parts = [
        f"Model: {sizes.source}: {total / 1e6:,.1f} M parameters in {num_layers} layers{of_rank}.",
        f"Memory, on one rank\n\n{memory}",
        f"Estimate\n\n{estimate}\nEstimated: {choice} ({decision.reason}).\n\n"
        f"{costs_text(decision.costs)}",
        f"Candidates, estimated\n\n{rows}",
    ]
    return "\n\n".join(parts)


def _columns_of(decision: Decision) -> list[int]:
    return sorted({0, decision.gpu_layers_target, decision.num_layers})


def _refusal(decision: Decision, sizes: ModelSizes) -> str:
    """What a run would say before it ends, where nothing fits."""
    try:
        check_fits(sizes.layers, decision.limits, sizes.staging_bytes, num_ranks=sizes.num_ranks)
    except MemoryBudgetError as error:
        return f"A run would be refused: {error}"
    raise AssertionError("nothing fits, but the check passed")


def model_json(decision: Decision, sizes: ModelSizes, rates: Rates) -> dict[str, Any]:
    """Sizes, memory and the estimate, as plain JSON values."""
    return {
        "model": sizes.source,
        "num_ranks": sizes.num_ranks,
        "rank": sizes.rank,
        "parameters": sum(sizes.parameters),
        "is_estimate": True,
        "rates": {**asdict(rates), "gpu_updates_per_s": GPU_UPDATES_PER_SECOND},
        "predicted_seconds": decision.predicted_seconds,
        **decision_json(decision, not_measured, _columns_of(decision)),
    }
