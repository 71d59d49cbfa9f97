"""What a configuration will do, in words, and what of it has no effect."""

from __future__ import annotations

from hytrain.config import HyTrainConfig
from hytrain.formats.moment_kinds import FP32, MASTER_BYTES, SPLIT, master_bytes, state_bytes_each
from hytrain.tools.explain.training_form import BATCH_WORDS, TrainingForm


def config_words(config: HyTrainConfig, form: TrainingForm) -> str:
    """What will happen with a configuration, and what of it has no effect."""
    return "\n".join(
        [
            _weights_words(form),
            _state_words(config, form),
            *_placement_words(config, form),
            _clipping_words(form),
            _batch_words(config, form),
        ]
    )


def _weights_words(form: TrainingForm) -> str:
    where = "all of them on every rank's GPU"
    if form.weights_on_host:
        where = "in host memory, divided among the ranks, copied to the GPU layer by layer"
    elif form.shards_weights:
        where = "divided among the ranks' GPUs, gathered layer by layer"
    return f"Weights: {form.dtype} ({form.dtype_from}); ZeRO-{form.stage}: {where}."


def _state_words(config: HyTrainConfig, form: TrainingForm) -> str:
    master, moments = master_bytes(config.master), config.moments
    whole = (
        "beside the bf16 weight, which is its other half" if config.master == SPLIT else "(fp32)"
    )
    if config.master == SPLIT and not form.is_direct:
        whole += f" (of layers on the CPU {MASTER_BYTES}, whole, where memory allows)"
    both = f"{state_bytes_each(moments, config.master) - master:.3g}"
    if form.is_muon:
        kept = "fp32" if moments == FP32 else "bf16"
        return (
            f"Muon's state: a parameter of its matrices takes {MASTER_BYTES} bytes of master "
            f"weight (fp32) and {4 if moments == FP32 else 2} of momentum ({kept}); others have "
            f"Adam state: {MASTER_BYTES} and {both} of moments ({moments})."
        )
    return (
        f"Adam state ({form.optimizer}): a parameter takes {master} bytes of master weight {whole} "
        f"and {both} of moments ({moments})."
    )


def _placement_words(config: HyTrainConfig, form: TrainingForm) -> list[str]:
    solver = config.solver
    if form.is_muon and config.gpu_fraction == "solve":
        return ["k: of the state all that fits is on the GPU, after the first steps."]
    if isinstance(config.gpu_fraction, float):
        ignored = sorted(solver.model_fields_set & {"method", "alpha", "interval"})
        return [
            f"k: fixed by gpu_fraction at {config.gpu_fraction:g}: the state of that share of the "
            "layers is on the GPU.",
            *[f"Without effect: solver.{name}." for name in ignored],
        ]
    every = "every step" if solver.interval == 1 else f"every {solver.interval} steps"
    how = "the smallest whose predicted step is within 1 % of the shortest"
    if solver.method == "closed_form":
        alpha = "measured" if solver.alpha is None else f"given: {solver.alpha:g}"
        how = f'by "closed_form", alpha {alpha}'
    start = ""
    if config.solver.start is not None:
        numbers = ", ".join(map(str, config.solver.start))
        start = f" It starts with these numbers of layers on the ranks' GPUs: {numbers}."
    return [f"k: solved while training, {every}: {how}.{start}"]


def _clipping_words(form: TrainingForm) -> str:
    what = "at the gradient norm that the trainer fills in"
    if form.clipping is not None:
        what = f"at a gradient norm of {form.clipping:g}" if form.clipping > 0.0 else "none"
    checks = "a step with inf or NaN is skipped" if form.check_overflow else "no overflow check"
    return f"Clipping: {what}; {checks}."


def _batch_words(config: HyTrainConfig, form: TrainingForm) -> str:
    order = ", layer by layer" if config.accumulation == "layer_major" else ""
    if config.batch_sizes is not None:
        sizes = ", ".join(map(str, config.batch_sizes))
        by = "" if config.plan is None else f", as {config.plan} says"
        return f"Batch: {sum(config.batch_sizes)} samples a step, {sizes} on the ranks{order}{by}."
    told = [f"{BATCH_WORDS[key]}: {number}" for key, number in form.batch.items()]
    if form.sequence_ranks > 1:
        told.append(f"{form.sequence_ranks} ranks share each sequence")
    return f"Batch: {'; '.join(told) or 'left to the trainer'}{order}."
