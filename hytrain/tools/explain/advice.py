"""What would make a configuration fit: other keys, more memory or more ranks.

For each it is computed what a run would begin with, as for the configuration itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hytrain.config import HyTrainConfig
from hytrain.errors import size_text
from hytrain.formats.moment_kinds import smaller_states
from hytrain.placement.memory import (
    HOST_RESERVE_SHARE,
    LEAST_RESERVE,
    all_split,
    gpu_peak_bytes,
    taken_of_host,
)
from hytrain.placement.memory_report import STREAMED, reserve_advice
from hytrain.placement.records import Decision
from hytrain.tools.explain.training_form import TrainingForm

Begins = Callable[[HyTrainConfig, TrainingForm, int, bool], Decision]
"""What a number of ranks begins with; without activations if the last argument is false."""

_MOST_RANKS = 16
_LESS = 0.95


def remedies(begins: Begins, config: HyTrainConfig, form: TrainingForm, ranks: int) -> list[str]:
    """Lines of which each alone would make the configuration fit.

    First those that fit in the present memory, then those that need least host memory.

    Args:
        begins: tells what a run begins with.
        config: the section that does not fit.
        form: the rest of the configuration.
        ranks: number of ranks that share the state.
    """
    own = begins(config, form, ranks, True)
    fitting: list[str] = []
    hosts: list[str] = []
    least = None
    for words, keys, other in _changes(config, form, ranks):
        found = begins(config.model_copy(update=keys), other, ranks, True)
        needed = _host_needed(found, config, ranks)
        if found.bounds.fits:
            fitting.append(words)
            break
        # What needs about as much as a smaller change is no help.
        if needed is not None and (least is None or needed < _LESS * least):
            least = needed
            hosts.append(f"{words} and " * bool(words) + f"{size_text(needed)} of host memory")
    if begins(config, form, ranks, False).bounds.fits:
        fitting.append("smaller micro-batches or shorter samples: without --seq it fits")
    fitting += reserve_advice(own.layer_bytes, own.limits, own.staging_bytes)
    found = [*fitting, *_larger_gpu(own), *hosts[::-1], *_more_ranks(begins, config, form, ranks)]
    if config.gpu_fraction != "solve" and own.gpu_layers_target:
        found = [f'{line}, with "hytrain.gpu_fraction": "solve"' for line in found]
    return found or ["a larger GPU and more host memory"]


def _changes(
    config: HyTrainConfig, form: TrainingForm, ranks: int
) -> Iterator[tuple[str, dict[str, Any], TrainingForm]]:
    """Keys to change, in words and as values, the smallest change first, beginning with none."""
    can_split = form.dtype == "bfloat16" and not form.is_muon
    states = smaller_states(config.moments, config.master, can_split=can_split)
    sharded = replace(form, stage=3, shards_weights=True)
    forms = {"": form}
    if ranks > 1 and not form.shards_weights:
        forms["ZeRO stage 3"] = sharded
    if not form.weights_on_host:
        forms[STREAMED] = replace(sharded, weights_on_host=True)
    for name, other in forms.items():
        for kind, master in states:
            words = [name] if name else []
            words += [f'"hytrain.moments": "{kind}"'] if kind != config.moments else []
            words += ['"hytrain.master": "split"'] if master != config.master else []
            yield " and ".join(words), {"moments": kind, "master": master}, other


def _host_needed(decision: Decision, config: HyTrainConfig, ranks: int) -> int | None:
    """Host bytes, for all ranks, with which all state fits there; None if the GPU is too small."""
    limits, layers = decision.limits, all_split(decision.layer_bytes)
    has_own = limits.gpu is not None and not limits.shares_host
    if has_own and gpu_peak_bytes(layers, limits, 0) > (limits.gpu or 0) - limits.gpu_reserve:
        return None
    needed = taken_of_host(layers, limits, decision.staging_bytes, 0)
    given = config.solver.host_memory_reserve_bytes
    if given is None:
        share = int(needed / (1.0 - HOST_RESERVE_SHARE)) + 1
        return ranks * max(needed + LEAST_RESERVE, share)
    return ranks * (needed + given)


def _more_ranks(
    begins: Begins, config: HyTrainConfig, form: TrainingForm, ranks: int
) -> Iterator[str]:
    """ZeRO-3 on more ranks, each with such a GPU: the fewest with more host memory, and without.

    A plan or given batches are for their own number of ranks: then there is no such line.
    """
    if config.batch_sizes is not None or config.shard_fractions is not None:
        return
    sharded, is_told = replace(form, stage=3, shards_weights=True), False
    number = 2 * ranks
    while number <= max(_MOST_RANKS, 2 * ranks):
        words = f"{number} ranks in ZeRO stage 3, each with such a GPU"
        found = begins(config, sharded, number, True)
        if found.bounds.fits:
            yield f"{words}, and this host memory for all"
            return
        needed = _host_needed(found, config, number)
        if needed is not None and not is_told:
            yield f"{words}, and {size_text(needed)} of host memory for all"
            is_told = True
        number *= 2


def _larger_gpu(decision: Decision) -> Iterator[str]:
    """A GPU that holds what the host cannot, if at most twice as large."""
    limits, fewest = decision.limits, decision.bounds.min_gpu_layers
    if limits.gpu is None or limits.shares_host or fewest > decision.num_layers:
        return
    needed = gpu_peak_bytes(decision.layer_bytes, limits, fewest) + limits.gpu_reserve
    if limits.gpu < needed <= 2 * limits.gpu:
        yield f"{size_text(needed)} of GPU memory"
