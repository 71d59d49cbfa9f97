"""Possible changes and the most that each of them saves, from replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hytrain.tools.trace import causes, kinds
from hytrain.tools.trace.graph import FUSED, Graph
from hytrain.tools.trace.intervals import united
from hytrain.tools.trace.nodes import Node
from hytrain.tools.trace.replay import Change, Replay
from hytrain.tools.trace.spans import NONE, RankTrace
from hytrain.tools.trace.step_times import StepTimes

GPU_LAYERS: Final = "more GPU layers"
CORES: Final = "more cores"
PCIE: Final = "faster PCIe"
BATCH: Final = "larger batch"
NO_CLIPPING: Final = "no clipping"
GRAPHS: Final = "CUDA graphs"
NO_SYNC: Final = "no synchronization"
LOADING: Final = "faster data loading"
USER_CODE: Final = "less host code"
NETWORK: Final = "faster network"
RANKS: Final = "equal ranks"
_MOST_COUNTS: Final = 12
_CHAIN: Final = frozenset((causes.SLOW_RANK, kinds.COMMUNICATION, causes.LATE_COLLECTIVE))


@dataclass(frozen=True, slots=True)
class Fix:
    """A change and its ceiling."""

    name: str
    step_seconds: float
    """The shortest step with it; for a larger batch, the time for the recorded batch's tokens."""
    gain: float
    """Share of the replayed step that it saves at most."""
    words: str
    """What was assumed."""


def fixes(
    graph: Graph, replay: Replay, steps: Mapping[int, Sequence[StepTimes]]
) -> tuple[Fix, ...]:
    """The ceilings of all changes, the largest first; ``steps``: each rank's."""
    base = replay.seconds_per_step()
    if base <= 0.0:
        return ()
    ranks = graph.ranks.values()
    found: list[tuple[str, float, str]] = []
    if any(node.resource == kinds.CPU_UPDATE and node.layer != NONE for node in graph.nodes):
        found.append((GPU_LAYERS, *_gpu_layers(graph, replay)))
    if any(len(rank[kinds.CPU_UPDATE]) for rank in ranks):
        found.append((CORES, *_cores(graph, replay)))
    copies = replay.seconds_per_step(_faster(kinds.D2H, kinds.H2D))
    found += [(PCIE, copies, "copies take no time"), (BATCH, *_batch(steps))]
    if any(graph.clips(rank) for rank in graph.ranks):
        found.append((NO_CLIPPING, *_no_clipping(graph, replay)))
    if any(len(rank[kinds.COMMUNICATION]) for rank in ranks):
        network = replay.seconds_per_step(_faster(kinds.COMMUNICATION))
        found.append((NETWORK, network, "collectives take no time once every rank has come"))
    if len(ranks) > 1:
        alone = Change(without_ranks=True, without=_CHAIN)
        fastest = min(replay.seconds_per_step(alone, rank) for rank in graph.ranks)
        found.append((RANKS, fastest, "every rank is as fast as the fastest is alone"))
    found += _host(graph, replay, steps, base)
    made = [
        Fix(name, min(seconds, base), min(max(0.0, 1.0 - seconds / base), 1.0), words)
        for name, seconds, words in found
    ]
    return tuple(sorted(made, key=lambda fix: -fix.gain))


_OF_CPU: Final = (causes.CPU_ADAM, causes.CLIPPING, causes.STARVED_CPU)


def _faster(*resources: str, by: float = 0.0) -> Change:
    """A change by which spans of these resources take ``by`` times as long."""

    def duration(node: Node) -> float:
        return by if node.resource in resources else 1.0

    gone = frozenset((*resources, *_OF_CPU * (kinds.CPU_UPDATE in resources)))
    return Change(duration=duration, without=gone, is_of_chain=True)


def _cores(graph: Graph, replay: Replay) -> tuple[float, str]:
    """CPU Adam at the peak of DRAM, if that is known; else in no time."""
    shares: list[float] = []
    for rank in graph.ranks.values():
        spans = rank[kinds.CPU_UPDATE]
        peak = rank.header.peaks.dram_bytes_per_s if rank.header is not None else None
        busy = spans.covered().length * 1e-9
        if peak is not None and busy > 0.0 and spans.size.sum() > 0.0:
            shares.append(min(1.0, float(spans.size.sum()) / busy / peak))
    share = min(shares, default=0.0)
    words = "CPU Adam takes no time: what DRAM allows was not measured"
    if share:
        words = f"CPU Adam at DRAM's peak, {share:.0%} of its time"
    return replay.seconds_per_step(_faster(kinds.CPU_UPDATE, by=share)), words


def _batch(steps: Mapping[int, Sequence[StepTimes]]) -> tuple[float, str]:
    """Per token only forward and backward are left of a step; on the rank that takes longest."""
    names = (kinds.FORWARD, kinds.BACKWARD, kinds.RECOMPUTE, kinds.OTHER)
    # Only of steps that a replay counts: the first one's beginning was not recorded.
    computes = [
        float(np.mean([sum(one.parts[name] for name in names) for one in of_rank[1:] or of_rank]))
        for of_rank in steps.values()
    ]
    return max(computes) * 1e-9, "for each token only forward and backward remain"


def _no_clipping(graph: Graph, replay: Replay) -> tuple[float, str]:
    commit = min(map(_commit_share, graph.ranks.values()))

    def duration(node: Node) -> float:
        is_norm = node.resource == kinds.COMMUNICATION and node.layer == NONE
        is_again = node.is_barred and node.resource == kinds.CPU_UPDATE
        if is_again or (is_norm and node.detail == "all_reduce"):
            return 0.0
        return commit if node.detail == FUSED else 1.0

    gone = frozenset((causes.CLIPPING,))
    change = Change(duration=duration, without=gone, is_of_chain=True, without_barrier=True)
    return replay.seconds_per_step(change), "no layer is updated twice, nothing waits for the norm"


def _commit_share(rank: RankTrace) -> float:
    """Ratio of a commit's bytes to those of a commit with the next preview, which also reads a
    second gradient: as many bytes as were copied to the host."""
    updates, copies = rank[kinds.CPU_UPDATE], rank[kinds.D2H]
    fused = updates.size[updates.detail == FUSED]
    gradients = copies.size[copies.slot != NONE]
    if not len(fused) or not len(gradients) or not np.median(fused):
        return 1.0
    return float(1.0 - np.median(gradients) / np.median(fused))


def _gpu_layers(graph: Graph, replay: Replay) -> tuple[float, str]:
    """The best number of further layers to update on the GPU, in forward order."""
    on_cpu = sorted(
        {node.layer for node in graph.nodes if node.resource == kinds.CPU_UPDATE} - {NONE}
    )
    cost = _gpu_update_cost(graph, replay)
    priced = "updates there cost as measured" if cost else "updates there cost nothing"
    found = replay.seconds_per_step(), "none is better"
    for count in sorted({round(n) for n in np.linspace(1, len(on_cpu), _MOST_COUNTS)}):
        seconds = replay.seconds_per_step(_moved(replay, on_cpu[:count], cost))
        if seconds < found[0]:
            words = f"{count} of the {len(on_cpu)} CPU layers moved to the GPU, {priced}; "
            words += "memory not checked"
            found = seconds, words
    return found


def _moved(replay: Replay, layers: Sequence[int], cost: int) -> Change:
    moved = frozenset(layers)
    resources = (kinds.CPU_UPDATE, kinds.D2H, kinds.H2D)

    def duration(node: Node) -> float:
        return 0.0 if node.resource in resources and node.layer in moved else 1.0

    later: dict[Node, int] = {}
    for step in replay.steps[1:]:
        first = {node.rank: node for node in reversed(step)}
        later |= dict.fromkeys(first.values(), cost * len(moved))
    gone = frozenset((*resources, *_OF_CPU))
    return Change(duration=duration, without=gone, is_of_chain=True, begins_later=later)


def _gpu_update_cost(graph: Graph, replay: Replay) -> int:
    """Nanoseconds that the update of a layer on the GPU adds to a step; 0 if none was recorded."""
    costs: list[float] = []
    for rank in graph.ranks.values():
        updates = rank[kinds.GPU_UPDATE]
        layers = len(set(updates.layer.tolist()) - {NONE})
        if layers:
            exposed = (updates.covered() - rank[kinds.COMPUTE].covered()).length
            costs.append(exposed / layers / max(1, len(replay.steps)))
    return round(min(costs, default=0.0))


# -- the host ----------------------------------------------------------------------------------


def _host(
    graph: Graph, replay: Replay, steps: Mapping[int, Sequence[StepTimes]], base: float
) -> Iterator[tuple[str, float, str]]:
    """Fixes of the host. A host that is earlier hides what follows, launches too: a ceiling is the
    step without any lateness of the host, or the step less the host's time that the fix saves."""
    ranks = graph.ranks.values()
    prompt = replay.seconds_per_step(Change(without=causes.HOST_CAUSES | {causes.KERNEL_GAPS}))
    of_all = [one for of_rank in steps.values() for one in of_rank]
    lost = {cause for cause in causes.HOST_CAUSES if any(one.parts[cause] for one in of_all)}
    if lost and any(len(rank[kinds.SYNC]) for rank in ranks):
        # Synchronizations drain the queue, which exposes other work of the host.
        lost.add(causes.SYNCHRONIZATION)

    def without(nanoseconds: Callable[[RankTrace], int]) -> float:
        """A step less what the host spends on something."""
        most = max(nanoseconds(rank) / len(rank.steps) for rank in ranks) * 1e-9
        return max(prompt, base - most)

    if causes.LAUNCH in lost:
        yield GRAPHS, prompt, "launching takes no time"
    if causes.SYNCHRONIZATION in lost:
        yield NO_SYNC, prompt, "the host never waits, and keeps ahead of the GPU"
    if causes.DATA_LOADING in lost:
        seconds = without(lambda rank: _within_steps(rank, kinds.DATA))
        yield LOADING, seconds, "batches are there when they are needed"
    if causes.HOST_CODE in lost:
        yield USER_CODE, without(_outside_phases), "no code outside of forward, backward and step()"


def _outside_phases(rank: RankTrace) -> int:
    whole = rank.steps[-1].end - rank.steps[0].begin
    return whole - _within_steps(rank, kinds.PHASE, kinds.DATA, kinds.SYNC, kinds.WAIT)


def _within_steps(rank: RankTrace, *resources: str) -> int:
    covered = united(rank[name].covered() for name in resources)
    return covered.within(rank.steps[0].begin, rank.steps[-1].end).length
