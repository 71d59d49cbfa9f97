"""Before any run: what a configuration will do, and an estimate of the step from bare rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from hytrain.config import HyTrainConfig, SolverConfig
from hytrain.errors import ConfigError
from hytrain.placement.closed_form import closed_form
from hytrain.placement.costs import LayerBytes, LayerCosts, MemoryLimits, StepCosts
from hytrain.placement.errors import MemoryBudgetError
from hytrain.placement.explanation import (
    CandidateRow,
    candidate_rows,
    candidates_text,
    costs_text,
    decision_json,
    memory_text,
)
from hytrain.placement.history import Median
from hytrain.placement.memory import (
    GPU_RESERVE_SHARE,
    HOST_RESERVE_SHARE,
    LEAST_RESERVE,
    bounds,
    check_fits,
    gpu_reserve,
    host_reserve,
)
from hytrain.placement.prediction import predict
from hytrain.placement.records import Decision
from hytrain.placement.solve import solve

_GIB = 1024**3

GPU_UPDATES_PER_SECOND = 150e9
"""Parameters that the GPU's Adam updates in a second; the H200's, its memory's speed decides."""
_FIXED = "gpu_fraction is fixed"
# The passes' speeds on one machine relative to commit_then_preview, in parameters.
_COMMIT_SPEED = 4.47 / 4.19
_PREVIEW_SPEED = 5.67 / 4.19


@dataclass(frozen=True, slots=True)
class TrainingForm:
    """What the rest of the DeepSpeed JSON says about a step.

    Attributes:
        dtype: of the training copy: "bfloat16", "float16" or "float32".
        gradient_dtype: of the gradients that wait; None: the training copy's.
        clipping: the threshold; 0 for none, None where "auto" leaves it to the trainer.
        check_overflow: whether an inf or NaN skips the step.
        accumulation: micro-batches a step.
        shards_weights: whether each rank keeps its shards of the training copy only (ZeRO-3).
        weights_on_host: whether it keeps them in host memory (``offload_param``).
        gather_keys: values of the ``stage3_*`` keys, where they are numbers.
    """

    dtype: str
    gradient_dtype: str | None
    clipping: float | None
    check_overflow: bool
    accumulation: int
    shards_weights: bool = False
    weights_on_host: bool = False
    gather_keys: Mapping[str, int] = field(default_factory=lambda: {})

    @property
    def is_direct(self) -> bool:
        """Whether updates are committed at once, since nothing about a step is left open."""
        return self.clipping == 0.0 and not self.check_overflow


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What an estimate is made from; the defaults are those of one H200 with 16 cores."""

    gpu_tflops: float = 440.0
    """Of forward and backward, 6 operations a parameter and token."""
    tokens: int = 8192
    """Of a micro-batch on one rank."""
    cpu_gparams_per_s: float = 5.0
    """Of the CPU update, on one rank."""
    pcie_gb_per_s: float = 55.0
    """Each way, on one rank."""


def read_form(config: Mapping[str, Any]) -> TrainingForm:
    """The keys of a DeepSpeed JSON that decide what a step is.

    Raises:
        ConfigError: a key has a value of the wrong kind.
    """
    bf16, fp16 = _section(config, "bf16"), _section(config, "fp16")
    if not bf16 and "bfloat16" in config:
        bf16 = _section(config, "bfloat16")
    if bf16.get("enabled"):
        dtype, check = "bfloat16", bool(bf16.get("check_grad_overflow", True))
    else:
        dtype, check = ("float16" if fp16.get("enabled") else "float32"), True
    accumulated = _section(config, "data_types").get("grad_accum_dtype")
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    clipping = config.get("gradient_clipping", 0.0)
    zero = _section(config, "zero_optimization")
    return TrainingForm(
        dtype=dtype,
        gradient_dtype=names.get(str(accumulated)),
        clipping=None if clipping == "auto" else _number("gradient_clipping", clipping),
        check_overflow=check,
        accumulation=_accumulation(config),
        shards_weights=zero.get("stage") == 3,
        weights_on_host=_section(zero, "offload_param").get("device") == "cpu",
        gather_keys={k: v for k, v in zero.items() if k.startswith("stage3_") and type(v) is int},
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{name}" must be a JSON object, got {type(section).__name__}')
    return cast("Mapping[str, Any]", section)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f'"{name}" must be a number, got {value!r}')
    return float(value)


def _accumulation(config: Mapping[str, Any]) -> int:
    value = config.get("gradient_accumulation_steps", 1)
    return 1 if value == "auto" else max(1, int(_number("gradient_accumulation_steps", value)))


# -- words -------------------------------------------------------------------------------------


def config_words(config: HyTrainConfig, form: TrainingForm, num_ranks: int | None) -> str:
    """What will happen with a configuration, for people."""
    lines = [_placement_words(config)]
    lines += [_clipping_words(form), _ranks_words(config, num_ranks)]
    lines.append(
        f"Weights: training copy in {form.dtype} on the GPU; master weights and Adam's moments in "
        f"float32, 12 bytes a parameter, on either side; gradients of layers wait for their update "
        f"in {form.gradient_dtype or form.dtype}."
    )
    if form.accumulation > 1:
        lines.append(
            f"Accumulation: {form.accumulation} micro-batches a step; updates overlap the last "
            "one's backward and the next step's first forward."
        )
    offload = config.offload
    threads = "chosen by a calibration at start"
    if offload.cpu_threads is not None:
        threads = str(offload.cpu_threads)
    waits = "each layer's next forward waits for that layer's update only"
    if not offload.overlap_forward:
        waits = "step() waits for all updates (overlap_forward is false)"
    lines.append(
        f"CPU update: threads {threads}; chunks of {offload.chunk_elements:,} parameters; {waits}."
    )
    return "\n".join(lines)


def _placement_words(config: HyTrainConfig) -> str:
    solver = config.solver
    if isinstance(config.gpu_fraction, float):
        words = (
            f"Placement: gpu_fraction is fixed at {config.gpu_fraction:g}: that share of the "
            "layers, counted from the first, is updated on the GPU; nothing is solved, and whether "
            "it fits is not checked."
        )
        return words + _ignored_words(solver)
    every = "every step" if solver.interval == 1 else f"every {solver.interval} steps"
    if solver.method == "pipeline":
        how = (
            'by "pipeline": the step is predicted for every number of GPU layers from measured '
            "times, and the shortest is taken; within 1 % of it, the fewest GPU layers; layers "
            "move where the gain pays for the move"
        )
    else:
        alpha = "measured" if solver.alpha is None else f"given: {solver.alpha:g}"
        how = (
            'by "closed_form": k = (t_U - t_B) / ((1 + alpha) t_U), t_U and t_B measured, alpha '
            f"{alpha}"
        )
    lines = [
        f'Placement: gpu_fraction is "solve": the number of GPU layers is solved {every}, {how}.',
        _start_words(config),
        f"Reserves: GPU {_reserve_words(solver.gpu_memory_reserve_bytes, GPU_RESERVE_SHARE)}, "
        f"host {_reserve_words(solver.host_memory_reserve_bytes, HOST_RESERVE_SHARE)} stay free.",
    ]
    if solver.method == "pipeline" and solver.alpha is not None:
        lines.append(
            f'"solver.alpha" ({solver.alpha:g}) stands for the speed of GPU updates until one has '
            "been measured."
        )
    return "\n".join(lines)


def _start_words(config: HyTrainConfig) -> str:
    if config.plan is not None:
        return "The first step runs with as many layers on the GPU as the plan says."
    if config.solver.start is not None:
        shares = ", ".join(f"{share:g}" for share in config.solver.start)
        return f"The first step runs with these shares of the layers on the ranks' GPUs: {shares}."
    return (
        "The first step runs with the fewest layers on the GPU that memory allows, since times and "
        "activations are not known before it."
    )


def _ignored_words(solver: SolverConfig) -> str:
    given = sorted(solver.model_fields_set & {"method", "alpha", "interval"})
    if not given:
        return ""
    return f" Without effect: {', '.join(f'solver.{name}' for name in given)}."


def _reserve_words(given: int | None, share: float) -> str:
    if given is not None:
        return f"{given / _GIB:.2f} GiB"
    return f"{share:.0%} (at least {LEAST_RESERVE / _GIB:.0f} GiB)"


def _clipping_words(form: TrainingForm) -> str:
    if form.is_direct:
        return (
            "Clipping: direct: no clipping and no overflow check, so each update is committed at "
            "once and no gradient waits."
        )
    why = "at a threshold that the trainer fills in"
    if form.clipping is not None:
        why = f"at {form.clipping:g}" if form.clipping > 0.0 else "none"
    checks = "a step with inf or NaN is skipped" if form.check_overflow else "no overflow check"
    return (
        f"Clipping: {why}; {checks}. Exact: updates are previewed during backward and committed "
        "when the step's outcome is known; until then the gradients wait."
    )


def _ranks_words(config: HyTrainConfig, num_ranks: int | None) -> str:
    if config.plan is not None:
        return (
            f"Ranks: as planned in {config.plan}, which decides batches, shards and activations; "
            "refused on any others."
        )
    shares = config.shard_fractions
    split = "equal shares" if shares is None else f"shares {', '.join(f'{s:g}' for s in shares)}"
    if num_ranks is None:
        known = "unknown here (--ranks)" if shares is None else f"{len(shares)} by shard_fractions"
        return f"Ranks: {known}; every layer's state is cut into {split}."
    return f"Ranks: {num_ranks}; every layer's state is cut into {split}."


# -- numbers -----------------------------------------------------------------------------------


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


def _not_measured(gpu_layers: int) -> Median | None:
    del gpu_layers
    return None


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
    rows = candidates_text(estimated_rows(decision))
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
        "rates": {
            "gpu_tflops": rates.gpu_tflops,
            "tokens": rates.tokens,
            "cpu_gparams_per_s": rates.cpu_gparams_per_s,
            "pcie_gb_per_s": rates.pcie_gb_per_s,
            "gpu_updates_per_s": GPU_UPDATES_PER_SECOND,
        },
        "predicted_seconds": decision.predicted_seconds,
        **decision_json(decision, _not_measured, _columns_of(decision)),
    }


def estimated_rows(decision: Decision) -> list[CandidateRow]:
    """The candidates of an estimate."""
    return candidate_rows(decision, _not_measured)
