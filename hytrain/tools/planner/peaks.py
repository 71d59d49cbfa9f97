"""What a rank's work takes of its GPU's memory, beside the training copy, state and shards."""

from __future__ import annotations

from hytrain.formats.policies import LAYER_MAJOR, Activations
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.problem import PlanProblem


def peaks(
    problem: PlanProblem, gpu: GpuProfile, batch: int, microbatch: int, activations: Activations
) -> tuple[float, float]:
    """Bytes of the GPU beside training copy, state and shards: most in the passes, and at the end.

    The end is that of a backward, with the lowest layer's activations; the logits are gone by then.
    H200s were within 2.5 % of the larger of both, state and shards added (experiments/unequal_gpus,
    149 peaks, all policies but "offload").

    Args:
        problem: what is planned.
        gpu: the rank's.
        batch: its samples; may be 0.
        microbatch: of them at once.
        activations: policy between layers.
    """
    model = problem.model
    if not batch:
        # In several ranks' reductions it has a layer of zeros.
        zeros = 0.0
        if problem.cluster.num_ranks > 1:
            zeros = problem.gradient_bytes * model.parameters / model.num_layers
        return gpu.idle_bytes + zeros, gpu.idle_bytes + zeros
    end = gpu.layer_peak(microbatch)
    if activations in LAYER_MAJOR:
        end += batch * float(model.boundary_bytes)
    return max(end, _passes_peak(problem, gpu, batch, microbatch, activations)), end


def _passes_peak(
    problem: PlanProblem, gpu: GpuProfile, batch: int, microbatch: int, activations: Activations
) -> float:
    model = problem.model
    gradients = 0.0
    if problem.stage != 3:  # there they are reduced as they come, in every backward
        gradients = float(problem.gradient_bytes * model.parameters)
    # All gradients are whole when backward has come to the lowest layer.
    whole = gpu.layer_peak(microbatch) + gradients
    working = gpu.peak_bytes.at(microbatch)
    boundary = float(model.num_layers * model.boundary_bytes)
    if activations == "keep":
        return max(working + batch * boundary, whole)
    if activations == "offload":
        return max(working, whole)

    def stored(samples: int) -> float:
        if activations == "recompute":
            return gpu.peak_bytes.at(samples) + samples * boundary
        assert gpu.stored_bytes is not None, "checked by the problem"
        return gpu.stored_bytes.at(samples)

    peak = stored(min(batch, microbatch))
    if batch > microbatch:
        # Whole gradients wait for the last micro-batch, beside all that the second one leaves.
        return max(peak, stored(min(batch - microbatch, microbatch)) + gradients, whole)
    if problem.cluster.num_ranks > 1:
        # The first backward keeps them until it ends, when all activations are gone.
        return max(peak, whole)
    return peak
