"""The recorded steps run again on paper, with something made faster: what a fix can win at most.

Every node begins when the last of what it waited for has finished, plus what it took beyond that
when it was recorded; with nothing changed this gives the recorded times exactly. A fix shortens
nodes, or takes away causes of idle time. What it gives is a ceiling: the work keeps its order, and
what a fix shortens takes no time at all, unless a measured peak bounds it. A host that would not
keep up with a faster GPU is not foreseen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hytrain.tools.trace import causes, kinds
from hytrain.tools.trace.blockers import Blame
from hytrain.tools.trace.graph import Graph
from hytrain.tools.trace.nodes import Edge, Node
from hytrain.tools.trace.spans import NONE

_WEIGHTS: Final = (kinds.H2D, kinds.COMMUNICATION)
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
    begins_later: Mapping[Node, int] = field(default_factory=dict[Node, int])
    """Node -> nanoseconds that it begins later."""


UNCHANGED: Final = Change()


class _Run(NamedTuple):
    """Nodes' times that are known already."""

    begins: dict[Node, int]
    ends: dict[Node, int]


class Replay:
    """Runs the graph again."""

    def __init__(self, graph: Graph, idle: Mapping[int, Sequence[Blame]]) -> None:
        """Takes the graph, and each rank's idle time with its causes, in order."""
        self._graph = graph
        self._slack = {node: _slack(node) for node in graph.nodes}
        self._anchor = _anchors(graph)
        self._causes = {node: Counter[str]() for node in graph.nodes}
        for rank, blames in idle.items():
            self._note_causes(rank, blames)
        self._behind = self._find_behind()
        self._moments = _moments(graph)
        self.steps = self._steps()

    def _note_causes(self, rank: int, blames: Sequence[Blame]) -> None:
        """Which causes the time has that a node began after all that it waited for, or after the
        compute that it follows."""
        ends = [blame.end for blame in blames]
        for node in self._graph.nodes:
            anchor = self._anchor.get(node)
            if node.rank != rank or (node.resource not in kinds.COMPUTES and anchor is None):
                continue
            low = node.begin - self._slack[node] if anchor is None else anchor.end
            place = bisect_right(ends, low)
            while place < len(blames) and blames[place].begin < node.begin:
                if (part := blames[place].cut(low, node.begin)) is not None:
                    self._causes[node][part.cause] += part.length
                place += 1

    def _find_behind(self) -> set[Node]:
        """Where the host had to wait for the chain before, in the node's step: what it launched
        late from there on it would have launched in time, had it not waited."""
        behind: set[Node] = set()
        for rank, trace in self._graph.ranks.items():
            ends = [step.end for step in trace.steps]
            waited_in = -1
            for node in self._graph.computes(rank):
                step = bisect_right(ends, node.begin)
                edge = node.binding
                if edge and edge.is_data and edge.before.resource in _WEIGHTS:
                    waited_in = step
                if waited_in == step:
                    behind.add(node)
        return behind

    def _steps(self) -> list[list[Node]]:
        """Of every step the nodes that compute."""
        found: dict[int, list[Node]] = {}
        for rank, trace in self._graph.ranks.items():
            for node in self._graph.computes(rank):
                number = node.step
                if number == NONE:
                    inside = [s.number for s in trace.steps if s.begin <= node.begin < s.end]
                    number = inside[0] if inside else NONE
                if number != NONE:
                    found.setdefault(number, []).append(node)
        return [found[number] for number in sorted(found)]

    def seconds_per_step(self, change: Change = UNCHANGED, rank: int | None = None) -> float:
        """Of the steps after the first, from last compute to last compute; of one its compute.

        ``rank``: whose compute; None for that of all.
        """
        begins, ends = self.run(change)
        steps = [
            [node for node in step if rank is None or node.rank == rank] for step in self.steps
        ]
        last = [max(ends[node] for node in step) for step in steps if step]
        if len(last) > 1:
            return (last[-1] - last[0]) / (len(last) - 1) * 1e-9
        return (last[0] - min(begins[node] for node in steps[0])) * 1e-9 if last else 0.0

    def run(self, change: Change = UNCHANGED) -> tuple[dict[Node, int], dict[Node, int]]:
        """Begin and end of every node."""
        run = _Run({}, {})
        # As they were recorded: what a node needs is known then, however many another rank has made
        # while it waited.
        for node, is_end in self._moments:
            (self._end if is_end else self._begin)(node, change, run)
        return run

    def _end(self, node: Node, change: Change, run: _Run) -> int:
        """A collective ends so long after the last of its ranks has come."""
        if node not in run.ends:
            partners = (not change.without_ranks and node.partners) or (node,)
            # Spans of no length may stand before what they wait for: begins are made as needed.
            arrived = max(self._begin(one, change, run) for one in partners)
            run.ends[node] = arrived + self._duration(node, change)
        return run.ends[node]

    def _duration(self, node: Node, change: Change) -> int:
        duration = node.end - node.arrival.begin
        if causes.KERNEL_GAPS in change.without:
            duration -= node.gaps
        return round(duration * change.duration(node))

    def _begin(self, node: Node, change: Change, run: _Run) -> int:
        if node not in run.begins:
            ready = [
                self._ready(edge, node, change, run)
                for edge in node.edges
                if not (edge.is_barrier and change.without_barrier)
            ]
            if anchor := self._anchor.get(node):
                ready.append(self._begin(anchor, change, run) + node.begin - anchor.begin)
            later = self._slack_with(node, change) + change.begins_later.get(node, 0)
            run.begins[node] = max(ready) + later if ready else node.begin
        return run.begins[node]

    def _ready(self, edge: Edge, node: Node, change: Change, run: _Run) -> int:
        """When what an edge leads to lets the node begin."""
        before = edge.before
        if before.end <= node.begin:
            return self._end(before, change, run)
        # It streams: so much after the other began.
        lag = (node.begin - before.begin) * change.duration(before)
        return self._begin(before, change, run) + round(lag)

    def _slack_with(self, node: Node, change: Change) -> int:
        is_anchored = node in self._anchor
        slack = 0 if is_anchored else self._slack[node]
        if change.duration(node) == 0.0 and node.resource not in kinds.COMPUTES and not is_anchored:
            return 0
        found, gone = self._causes[node], set(change.without)
        has_waited = node in self._behind or found.keys() & _CHAIN_CAUSES
        if change.is_of_chain and has_waited:
            gone |= causes.HOST_CAUSES | {causes.HAND_OVER}
        return slack - sum(length for cause, length in found.items() if cause in gone)


def _moments(graph: Graph) -> list[tuple[Node, bool]]:
    """Begins and ends (True) of all nodes in the order in which they were recorded."""
    both = [(node, is_end) for node in graph.nodes for is_end in (False, True)]
    return sorted(both, key=lambda moment: moment[0].end if moment[1] else moment[0].begin)


def _slack(node: Node) -> int:
    """Nanoseconds that a node began after all that it waited for."""
    edge = node.binding
    return 0 if edge is None else node.begin - node.finished(edge)


def _anchors(graph: Graph) -> dict[Node, Node]:
    """What has no recorded cause follows the compute in which it began."""
    last: dict[int, Node] = {}
    anchors: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.resource in kinds.COMPUTES:
            last[node.rank] = node
        elif node.rank in last and not any(edge.is_data for edge in node.edges):
            anchors[node] = last[node.rank]
    return anchors
