"""Replays the recorded steps with something made faster: the most that a fix can save.

Every node begins when the last of its dependencies has finished, plus the delay after that in the
recording; with nothing changed this gives the recorded times exactly. A fix shortens nodes or
removes causes of idle time. The result is a ceiling of what it saves: the work keeps its order, and
what a fix shortens takes no time at all, unless a measured peak bounds it. A host that could not
keep up with a faster GPU is not modelled.
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
    """The factor of each node's duration."""
    without: frozenset[str] = frozenset()
    """Causes of idle time that are gone."""
    is_of_chain: bool = False
    """Whether it shortens what the host waits for, so that the host is earlier, too."""
    without_barrier: bool = False
    """Whether nothing waits for all of backward."""
    without_ranks: bool = False
    """Whether no rank waits for another."""
    begins_later: Mapping[Node, int] = field(default_factory=dict[Node, int])
    """Node -> nanoseconds by which it begins later."""


UNCHANGED: Final = Change()


class _Run(NamedTuple):
    """The nodes' times computed so far."""

    begins: dict[Node, int]
    ends: dict[Node, int]


class Replay:
    """Replays a graph with changes."""

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
        """Notes the causes of each node's delay after its last dependency, or after the compute
        that it follows."""
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
        """Nodes before which, in the same step, the host had to wait for the chain: what it
        launched late from there on, it would have launched in time without the wait."""
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
        """The nodes of each step that compute."""
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
        """Mean time from a step's last compute to the next one's; of a single step, its compute.

        ``rank``: whose compute; None for all ranks'.
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
        # In recorded order what a node needs is known already, however many nodes another rank has
        # run while it waited.
        for node, is_end in self._moments:
            (self._end if is_end else self._begin)(node, change, run)
        return run

    def _end(self, node: Node, change: Change, run: _Run) -> int:
        """When a node ends; a collective's duration counts from when its last rank has come."""
        if node not in run.ends:
            partners = (not change.without_ranks and node.partners) or (node,)
            # Spans of zero length may precede what they wait for: begins are computed on demand.
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
        """The time from which a dependency lets the node begin."""
        before = edge.before
        if before.end <= node.begin:
            return self._end(before, change, run)
        # It streams: it begins after the other's begin by the recorded lag, scaled as the other is.
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
    """(node, whether it is its end) for the begins and ends of all nodes, in recorded order."""
    both = [(node, is_end) for node in graph.nodes for is_end in (False, True)]
    return sorted(both, key=lambda moment: moment[0].end if moment[1] else moment[0].begin)


def _slack(node: Node) -> int:
    """Nanoseconds by which a node began after its last dependency had finished."""
    edge = node.binding
    return 0 if edge is None else node.begin - node.finished(edge)


def _anchors(graph: Graph) -> dict[Node, Node]:
    """Nodes without a recorded cause -> the compute that they follow, the last to begin before."""
    last: dict[int, Node] = {}
    anchors: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.resource in kinds.COMPUTES:
            last[node.rank] = node
        elif node.rank in last and not any(edge.is_data for edge in node.edges):
            anchors[node] = last[node.rank]
    return anchors
