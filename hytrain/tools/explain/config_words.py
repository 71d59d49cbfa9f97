"""A configuration in words: what it will do, and what of it has no effect."""

from __future__ import annotations

from hytrain.config import HyTrainConfig, SolverConfig
from hytrain.formats.moment_kinds import state_bytes_each
from hytrain.placement.memory import GPU_RESERVE_SHARE, HOST_RESERVE_SHARE, LEAST_RESERVE
from hytrain.tools.explain.training_form import TrainingForm

_GIB = 1024**3
_MOMENT_WORDS = {
    "fp32": "float32",
    "bf16": "bfloat16, rounded stochastically",
    "8bit": "8-bit codes, rounded stochastically",
}


def config_words(config: HyTrainConfig, form: TrainingForm, num_ranks: int | None) -> str:
    """What will happen with a configuration, for people."""
    lines = [_placement_words(config)]
    lines += [_clipping_words(form), _ranks_words(config, num_ranks)]
    lines.append(
        f"Weights: training copy in {form.dtype} on the GPU; master weights in float32 and Adam's "
        f"moments in {_MOMENT_WORDS[config.moments]}, {state_bytes_each(config.moments):g} bytes a "
        f"parameter, on either side; gradients of layers wait for their update in "
        f"{form.gradient_dtype or form.dtype}."
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
        numbers = ", ".join(map(str, config.solver.start))
        return f"The first step runs with these numbers of layers on the ranks' GPUs: {numbers}."
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
