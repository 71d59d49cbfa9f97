"""The recorded steps run again on paper, with something made faster: what a fix can win at most.

Every node begins when the last of what it waited for has finished, plus what it took beyond that
when it was recorded; with nothing changed this gives the recorded times exactly. A fix shortens
nodes, or takes away causes of idle time. What it gives is a ceiling: the work keeps its order, and
what a fix shortens takes no time at all, unless a measured peak bounds it. A host that would not
keep up with a faster GPU is not foreseen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hytrain.tools.trace import blockers as causes
from hytrain.tools.trace import spans as kinds
from hytrain.tools.trace.blockers import Blame
from hytrain.tools.trace.graph import Graph
from hytrain.tools.trace.nodes import Edge, Node
from hytrain.tools.trace.spans import NONE

_COMPUTES: Final = (kinds.COMPUTE, kinds.GPU_UPDATE)
_CHAIN_CAUSES: Final = frozenset(causes.CAUSES) - causes.HOST_CAUSES - {causes.UNRESOLVED}


@dataclass(frozen=True, slots=True)
class Change:
    """What is different in a replay."""

    duration: Callable[[Node], float] = lambda node: 1.0
    """By which each node's duration is multiplied."""
    without: frozenset[str] = frozenset()
    """Causes of idle time that are gone."""
    is_of_chain: bool = False
    """It shortens what the host waits for, so that the host comes earlier too."""
    without_barrier: bool = False
    """Nothing waits for all of backward."""
    without_ranks: bool = False
    """No rank waits for another."""
    begins_later: Mapping[int, int] = field(default_factory=dict[int, int])
    """Node -> nanoseconds that it begins later."""


UNCHANGED: Final = Change()


class _Run(NamedTuple):
    """Nodes' times that are known already."""

    begins: list[int | None]
    ends: list[int | None]


class Replay:
    """Runs the graph again."""

    def __init__(self, graph: Graph, idle: Mapping[int, Sequence[Blame]]) -> None:
        """Takes the graph, and each rank's idle time with its causes, in order."""
        self._graph = graph
        self._slack = [_slack(graph, node) for node in graph.nodes]
        self._anchor = _anchors(graph)
        self._causes: list[dict[str, int]] = [{} for _ in graph.nodes]
        for rank, blames in idle.items():
            self._note_causes(rank, blames)
        self._is_behind = self._find_behind()
        self.steps = self._steps()

    def _note_causes(self, rank: int, blames: Sequence[Blame]) -> None:
        """Which causes the time has that a node began after all that it waited for, or after the
        compute that it follows."""
        nodes, ends = self._graph.nodes, [blame.end for blame in blames]
        for node in nodes:
            anchor = self._anchor[node.number]
            if node.rank != rank or (node.resource not in _COMPUTES and anchor is None):
                continue
            low = node.begin - self._slack[node.number] if anchor is None else nodes[anchor[0]].end
            place = bisect_right(ends, low)
            while place < len(blames) and blames[place].begin < node.begin:
                if (part := blames[place].cut(low, node.begin)) is not None:
                    found = self._causes[node.number]
                    found[part.cause] = found.get(part.cause, 0) + part.length
                place += 1

    def _find_behind(self) -> list[bool]:
        """Whether the host had to wait for the chain before, in the node's step: what it launched
        late from there on it would have launched in time, had it not waited."""
        is_behind = [False] * len(self._graph.nodes)
        for rank, trace in self._graph.ranks.items():
            ends = [step.end for step in trace.steps]
            waited_in = -1
            for node in self._graph.computes(rank):
                step = bisect_right(ends, node.begin)
                if self._waited_for_weights(node):
                    waited_in = step
                is_behind[node.number] = waited_in == step
        return is_behind

    def _waited_for_weights(self, node: Node) -> bool:
        edge = self._graph.binding(node)
        if edge is None or not edge.is_data:
            return False
        return self._graph.nodes[edge.before].resource in (kinds.H2D, kinds.COMMUNICATION)

    def _steps(self) -> list[list[int]]:
        """Of every step the nodes that compute, by number."""
        found: dict[int, list[int]] = {}
        for rank, trace in self._graph.ranks.items():
            for node in self._graph.computes(rank):
                number = node.step
                if number == NONE:
                    inside = [s.number for s in trace.steps if s.begin <= node.begin < s.end]
                    number = inside[0] if inside else NONE
                if number != NONE:
                    found.setdefault(number, []).append(node.number)
        return [found[number] for number in sorted(found)]

    def seconds_per_step(self, change: Change = UNCHANGED, rank: int | None = None) -> float:
        """Of the steps after the first, from last compute to last compute; of one its compute.

        ``rank``: whose compute; None for that of all.
        """
        begins, ends = self.run(change)
        steps = [
            [n for n in step if rank is None or self._graph.nodes[n].rank == rank]
            for step in self.steps
        ]
        last = [max(ends[number] for number in step) for step in steps if step]
        if len(last) > 1:
            return (last[-1] - last[0]) / (len(last) - 1) * 1e-9
        return (last[0] - min(begins[number] for number in steps[0])) * 1e-9 if last else 0.0

    def run(self, change: Change = UNCHANGED) -> tuple[list[int], list[int]]:
        """Begin and end of every node."""
        nodes = self._graph.nodes
        run = _Run([None] * len(nodes), [None] * len(nodes))
        begins = [self._begin(node, change, run) for node in nodes]
        return begins, [self._end(node, change, run) for node in nodes]

    def _end(self, node: Node, change: Change, run: _Run) -> int:
        """A collective ends so long after the last of its ranks has come."""
        end = run.ends[node.number]
        if end is None:
            alone = change.without_ranks or not node.partners
            partners = (node.number,) if alone else node.partners
            nodes = self._graph.nodes
            # Spans of no length may stand before what they wait for: begins are made as needed.
            arrived = max(self._begin(nodes[number], change, run) for number in partners)
            end = run.ends[node.number] = arrived + self._duration(node, change)
        return end

    def _duration(self, node: Node, change: Change) -> int:
        begin = self._graph.arrival(node).begin
        duration = node.end - begin
        if causes.KERNEL_GAPS in change.without:
            duration -= node.gaps
        return round(duration * change.duration(node))

    def _begin(self, node: Node, change: Change, run: _Run) -> int:
        begin = run.begins[node.number]
        if begin is None:
            ready = [
                self._ready(edge, node, change, run)
                for edge in node.edges
                if not (edge.is_barrier and change.without_barrier)
            ]
            anchor = self._anchor[node.number]
            if anchor is not None:
                ready.append(self._begin(self._graph.nodes[anchor[0]], change, run) + anchor[1])
            later = self._slack_with(node, change) + change.begins_later.get(node.number, 0)
            begin = run.begins[node.number] = max(ready) + later if ready else node.begin
        return begin

    def _ready(self, edge: Edge, node: Node, change: Change, run: _Run) -> int:
        """When what an edge leads to lets the node begin."""
        before = self._graph.nodes[edge.before]
        if before.end <= node.begin:
            return self._end(before, change, run)
        # It streams: so much after the other began.
        lag = (node.begin - before.begin) * change.duration(before)
        return self._begin(before, change, run) + round(lag)

    def _slack_with(self, node: Node, change: Change) -> int:
        is_anchored = self._anchor[node.number] is not None
        slack = 0 if is_anchored else self._slack[node.number]
        if change.duration(node) == 0.0 and node.resource not in _COMPUTES and not is_anchored:
            return 0
        found = self._causes[node.number]
        gone = set(change.without)
        has_waited = self._is_behind[node.number] or found.keys() & _CHAIN_CAUSES
        if change.is_of_chain and has_waited:
            gone |= causes.HOST_CAUSES | {causes.HAND_OVER}
        return slack - sum(length for cause, length in found.items() if cause in gone)


def _slack(graph: Graph, node: Node) -> int:
    """Nanoseconds that a node began after all that it waited for."""
    edge = graph.binding(node)
    return 0 if edge is None else node.begin - graph.finished(edge, node)


def _anchors(graph: Graph) -> list[tuple[int, int] | None]:
    """What has no recorded cause follows the compute in which it began: (node, lag)."""
    last: dict[int, Node] = {}
    anchors: list[tuple[int, int] | None] = []
    for node in graph.nodes:
        has_cause = node.resource in _COMPUTES or any(edge.is_data for edge in node.edges)
        compute = last.get(node.rank)
        if has_cause or compute is None:
            anchors.append(None)
        else:
            anchors.append((compute.number, node.begin - compute.begin))
        if node.resource in _COMPUTES:
            last[node.rank] = node
    return anchors
