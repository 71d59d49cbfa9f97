"""What every span had to wait for: the dependency graph of all recorded steps and ranks.

Nodes are spans; kernels of one stream, layer and pass that follow each other closely are one node.
A node waits for the one before it on its stream or thread, and for its data:

    backward of layer i -> (reduce-scatter) -> gradient D2H -> CPU Adam -> weights H2D
    -> (all-gather) -> forward of layer i in the next step
    backward -> update on the GPU -> forward; with clipping updates also wait for all of backward

Data are told by layer, chunk and step, never by closeness in time. A node may begin while what it
waits for still runs (a chunk of a layer that is being copied): it then waits for its begin only.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from hytrain.tools.trace import spans as kinds
from hytrain.tools.trace.spans import NONE, RankTrace, Spans

CLOSE: Final = 10_000
"""Nanoseconds between kernels of one node at most."""

_ON_GRAPH: Final = (
    *(kinds.COMPUTE, kinds.GPU_UPDATE, kinds.COMMUNICATION),
    *(kinds.D2H, kinds.H2D, kinds.CPU_UPDATE),
)
_ISSUED: Final = 200_000
"""Nanoseconds after a pass in which the next copies are issued."""
FUSED: Final = "commit_then_preview"
"""The task of an update that commits the step before, and previews its own."""
_BACK: Final = 6
"""Earlier spans of a layer that are tried where the last one is of another step."""


@dataclass(slots=True)
class Node:
    """A span, or kernels that follow each other closely."""

    number: int
    rank: int
    resource: str
    begin: int
    end: int
    name: str
    layer: int
    chunk: int
    step: int
    lane: int
    detail: str
    launched: int
    slot: int
    is_entry: bool = True
    """The first of its layer and pass on its stream."""
    is_barred: bool = False
    """Work that waits for all of backward because of clipping."""
    partners: tuple[int, ...] = ()
    """The same collective on all ranks, this node among them."""
    gaps: int = 0
    """Nanoseconds between its kernels."""
    edges: list[Edge] = field(default_factory=list)


class Edge(NamedTuple):
    """What a node waited for."""

    before: int
    is_data: bool
    is_barrier: bool = False


class Graph:
    """Nodes by number, in the order in which they began, and their dependencies."""

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        """Builds the graph of ranks whose clocks agree."""
        self.ranks = {rank.rank: rank for rank in ranks}
        nodes = [node for rank in ranks for node in _nodes(rank)]
        nodes.sort(key=lambda node: (node.begin, node.end))
        for number, node in enumerate(nodes):
            node.number = number
        self.nodes = nodes
        self._index = _LayerIndex(nodes)
        self._passes = _Passes(nodes)
        self._link_lanes()
        self._link_data()
        for rank in self.ranks:
            self._link_slots(rank)
        if len(ranks) > 1:
            self._link_ranks()

    def finished(self, edge: Edge, node: Node) -> int:
        """When what an edge leads to had finished for the node: at its begin the latest."""
        return min(self.nodes[edge.before].end, node.begin)

    def binding(self, node: Node) -> Edge | None:
        """Of what a node waited for, the last to finish; data before order."""
        return max(
            node.edges, key=lambda edge: (self.finished(edge, node), edge.is_data), default=None
        )

    def arrival(self, node: Node) -> Node:
        """Of a collective the node of the rank that came last."""
        if not node.partners:
            return node
        return max((self.nodes[number] for number in node.partners), key=lambda one: one.begin)

    def computes(self, rank: int) -> list[Node]:
        """What keeps a rank's GPU computing, in order."""
        busy = (kinds.COMPUTE, kinds.GPU_UPDATE)
        return [node for node in self.nodes if node.rank == rank and node.resource in busy]

    def last_copy(self, rank: int, layer: int, time: int) -> Node | None:
        """The last copy of a layer's weights to begin at a time or before; None where none does."""
        numbers = self._index.numbers(rank, kinds.H2D, layer)
        index = bisect_right(numbers, time, key=lambda number: self.nodes[number].begin)
        return self.nodes[numbers[index - 1]] if index else None

    # -- edges ---------------------------------------------------------------------------------

    def _link_lanes(self) -> None:
        last: dict[tuple[int, int], int] = {}
        for node in self.nodes:
            before = last.get((node.rank, node.lane))
            if before is not None:
                one = self.nodes[before]
                node.edges.append(Edge(before, is_data=False))
                node.is_entry = (one.layer, one.detail) != (node.layer, node.detail)
            last[node.rank, node.lane] = node.number
        for rank in self.ranks:
            self._link_updates_in_order(rank)

    def _link_updates_in_order(self, rank: int) -> None:
        """Updates that never overlap compute are on its stream, whatever lane shows them."""
        nodes = self.computes(rank)
        updates = [node for node in nodes if node.resource == kinds.GPU_UPDATE]
        if not updates or any(a.end > b.begin for a, b in itertools.pairwise(nodes)):
            return
        for one, node in itertools.pairwise(nodes):
            if one.lane != node.lane:
                node.edges.append(Edge(one.number, is_data=False))

    def _link_data(self) -> None:
        for node in self.nodes:
            link = _LINKS[node.resource]
            found = {edge.before for edge in node.edges}
            for edge in link(self, node):
                if edge.before not in found and edge.before != node.number:
                    node.edges.append(edge)
                    found.add(edge.before)

    def _link_slots(self, rank: int) -> None:
        """A gradient is copied into a slot when the update that used the one before has read it,
        and its copy is issued by the thread that updates, between two passes."""
        held: dict[int, Node] = {}  # by the gradient that was last copied there
        passes: list[Node] = []
        for node in self.nodes:
            if node.rank != rank:
                continue
            if node.resource == kinds.CPU_UPDATE:
                passes.append(node)
            elif node.resource == kinds.D2H and node.slot != NONE:
                if (before := held.get(node.slot)) is not None:
                    readers = self._last_readers(before, node.number)
                    node.edges += [Edge(reader, is_data=True) for reader in readers]
                held[node.slot] = node
                ended = [one for one in passes[-_BACK:] if one.end <= node.begin]
                if ended and node.begin - ended[-1].end < _ISSUED:
                    node.edges.append(Edge(ended[-1].number, is_data=False))

    def _last_readers(self, gradient: Node, end: int) -> Sequence[int]:
        """The spans, before one, of the pass that commits a gradient, after which its slot is free.

        A commit; or the second of two that commit the step before and preview their own. What was
        published without has been dropped.
        """
        is_previewed = False
        for one in self._passes.of_chunk(gradient, gradient.number, end):
            detail = self.nodes[one[0]].detail
            if detail in ("commit", "publish") or (detail == FUSED and is_previewed):
                return one
            is_previewed = True
        return ()

    def passes_before(self, node: Node) -> Sequence[int]:
        """The spans of the pass over a chunk that came before a pass or a copy of its step."""
        found = self._passes.before(node)
        if found and NONE not in (node.step, step := self.nodes[found[0]].step):
            return found if step == node.step else ()
        return found

    def latest(self, node: Node, key: str, *, or_step_before: bool = False) -> list[Edge]:
        """The last span of the node's layer that began before it, by what it is."""
        number = self._index.latest(node, key, or_step_before=or_step_before)
        return [] if number is None else [Edge(number, is_data=True)]

    def barrier(self, node: Node) -> list[Edge]:
        """All of backward, and the norm's collective."""
        edges: list[Edge] = []
        for key in ("any backward", "norm"):
            number = self._index.latest(node, key, layer=NONE)
            if number is not None and self.nodes[number].end <= node.begin:
                edges.append(Edge(number, is_data=True, is_barrier=True))
        return edges

    def clips(self, rank: int) -> bool:
        """Whether gradients were clipped; unknown is not."""
        header = self.ranks[rank].header
        return header is not None and bool(header.gradient_clipping)

    def _link_ranks(self) -> None:
        by_key: dict[tuple[str, int, int], dict[int, list[int]]] = {}
        for node in self.nodes:
            if node.resource == kinds.COMMUNICATION:
                key = node.detail, node.layer, node.step
                by_key.setdefault(key, {}).setdefault(node.rank, []).append(node.number)
        for of_ranks in by_key.values():
            # A collective that not every rank recorded as often cannot be told apart.
            if len(of_ranks) != len(self.ranks) or len({len(n) for n in of_ranks.values()}) != 1:
                continue
            for partners in zip(*of_ranks.values(), strict=True):
                # A collective ends after its last rank has come: else it is none, or the clocks
                # disagree.
                last = max(self.nodes[number].begin for number in partners)
                if all(self.nodes[number].end >= last for number in partners):
                    for number in partners:
                        self.nodes[number].partners = tuple(partners)


# -- nodes -------------------------------------------------------------------------------------


def _nodes(rank: RankTrace) -> list[Node]:
    nodes: list[Node] = []
    for resource in _ON_GRAPH:
        spans = rank[resource]
        is_gpu = resource in (kinds.COMPUTE, kinds.GPU_UPDATE)
        if not (rank.are_kernels and is_gpu):
            nodes += [_node(rank.rank, resource, spans, n, n) for n in range(len(spans))]
            continue
        gaps = np.zeros(len(spans), np.int64)
        gaps[1:] = np.maximum(spans.begin[1:] - spans.end[:-1], 0)
        for first, last in _groups(spans):
            node = _node(rank.rank, resource, spans, first, last)
            node.gaps = int(gaps[first + 1 : last + 1].sum())
            nodes.append(node)
    return nodes


def _node(rank: int, resource: str, spans: Spans, first: int, last: int) -> Node:
    return Node(
        number=NONE,
        rank=rank,
        resource=resource,
        begin=int(spans.begin[first]),
        end=int(spans.end[last]),
        name=spans.name[first],
        layer=int(spans.layer[first]),
        chunk=int(spans.chunk[first]),
        step=int(spans.step[first]),
        lane=int(spans.lane[first]),
        detail=spans.detail[first],
        launched=int(spans.launched[first]),
        slot=int(spans.slot[first]),
    )


def _groups(spans: Spans) -> list[tuple[int, int]]:
    """(first, last) of kernels that make a node, where streams do not interleave."""
    if not len(spans):
        return []
    same = spans.begin[1:] - spans.end[:-1] <= CLOSE
    for column in (spans.layer, spans.lane, spans.step):
        same &= column[1:] == column[:-1]
    details = spans.detail
    same &= np.array([one == other for one, other in itertools.pairwise(details)], bool)
    firsts = np.concatenate([[0], np.flatnonzero(~same) + 1])
    lasts = np.concatenate([firsts[1:] - 1, [len(spans) - 1]])
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


# -- data --------------------------------------------------------------------------------------


def _keys(node: Node) -> list[tuple[str, int]]:
    """(what, layer) that a node can be waited for as."""
    if node.resource == kinds.COMPUTE:
        if node.detail == kinds.BACKWARD:
            return [(kinds.BACKWARD, node.layer), ("any backward", NONE)]
        return []
    if node.resource == kinds.COMMUNICATION:
        if node.layer == NONE and node.detail == "all_reduce":
            return [("norm", NONE)]
        return [("gather" if "gather" in node.detail else "reduce", node.layer)]
    return [(node.resource, node.layer)]


class _LayerIndex:
    """Nodes by what they do and for which layer, in order of begin."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._numbers: dict[tuple[int, str, int], list[int]] = {}
        self._of_chunk: dict[tuple[int, str, int, int], list[int]] = {}
        """Of one chunk each, and by NONE those that are of all chunks."""
        for node in nodes:
            for what, layer in _keys(node):
                if layer != NONE or what in ("any backward", "norm"):
                    key = node.rank, what, layer
                    self._numbers.setdefault(key, []).append(node.number)
                    self._of_chunk.setdefault((*key, node.chunk), []).append(node.number)

    def numbers(self, rank: int, what: str, layer: int) -> list[int]:
        """All of them."""
        return self._numbers.get((rank, what, layer), [])

    def latest(
        self, node: Node, what: str, layer: int | None = None, *, or_step_before: bool = False
    ) -> int | None:
        """The last one that began before the node, of its step and of its chunk."""
        key = node.rank, what, node.layer if layer is None else layer
        if node.chunk == NONE:
            return self._latest(node, self._numbers.get(key, []), or_step_before=or_step_before)
        found = (
            self._latest(node, self._of_chunk.get((*key, chunk), []), or_step_before=or_step_before)
            for chunk in (node.chunk, NONE)
        )
        return max((number for number in found if number is not None), default=None)

    def _latest(self, node: Node, numbers: list[int], *, or_step_before: bool) -> int | None:
        steps = (NONE, node.step, node.step - or_step_before)
        index = bisect_left(numbers, node.number)
        for number in reversed(numbers[max(0, index - _BACK) : index]):
            if node.step == NONE or self._nodes[number].step in steps:
                return number
        return None


class _Passes:
    """Passes over chunks, and their spans: one, or one of each thread that took part.

    A thread has one span in a pass. Those of a pass have its task and step; they need not overlap:
    a thread may come when the others have left nothing to do.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._found: dict[tuple[int, int, int], list[list[int]]] = {}
        self._place: dict[int, int] = {}
        """Span -> which of its chunk's passes it is of."""
        lanes: dict[tuple[int, int, int], set[int]] = {}
        for node in nodes:
            if node.resource != kinds.CPU_UPDATE or node.layer == NONE:
                continue
            key = node.rank, node.layer, node.chunk
            passes, seen = self._found.setdefault(key, []), lanes.setdefault(key, set())
            last = nodes[passes[-1][0]] if passes else None
            is_same = last is not None and (last.step, last.detail) == (node.step, node.detail)
            if not is_same or node.lane in seen:
                passes.append([])
                seen.clear()
            passes[-1].append(node.number)
            seen.add(node.lane)
            self._place[node.number] = len(passes) - 1

    def before(self, node: Node) -> Sequence[int]:
        """The last pass over a chunk that began before a pass or a copy of it."""
        passes = self._found.get((node.rank, node.layer, node.chunk), [])
        place = self._place.get(node.number)
        if place is None:
            place = bisect_left(passes, node.number, key=lambda one: one[0])
        return passes[place - 1] if place else ()

    def of_chunk(self, node: Node, begin: int, end: int) -> Sequence[Sequence[int]]:
        """The passes over a node's chunk whose first spans are in [begin, end)."""
        passes = self._found.get((node.rank, node.layer, node.chunk), [])
        low, high = (bisect_left(passes, n, key=lambda one: one[0]) for n in (begin, end))
        return passes[low:high]


def _compute(graph: Graph, node: Node) -> list[Edge]:
    if node.layer == NONE or not node.is_entry:
        return []
    edges = graph.latest(node, "gather", or_step_before=True)
    edges += graph.latest(node, kinds.H2D, or_step_before=True)
    if node.detail == kinds.FORWARD:
        edges += graph.latest(node, kinds.GPU_UPDATE, or_step_before=True)
    return edges


def _gpu_update(graph: Graph, node: Node) -> list[Edge]:
    edges = graph.latest(node, kinds.BACKWARD) + graph.latest(node, "reduce")
    barrier = graph.barrier(node) if graph.clips(node.rank) else []
    node.is_barred = bool(barrier)
    return edges + barrier


def _communication(graph: Graph, node: Node) -> list[Edge]:
    if node.layer == NONE:
        return graph.barrier(node) if node.detail == "all_reduce" else []
    if "gather" in node.detail:
        edges = graph.latest(node, kinds.H2D, or_step_before=True)
        return edges + graph.latest(node, kinds.GPU_UPDATE, or_step_before=True)
    return graph.latest(node, kinds.BACKWARD)


def _d2h(graph: Graph, node: Node) -> list[Edge]:
    return graph.latest(node, kinds.BACKWARD) + graph.latest(node, "reduce")


def _cpu_update(graph: Graph, node: Node) -> list[Edge]:
    edges = graph.latest(node, kinds.D2H)
    again = [Edge(number, is_data=True) for number in graph.passes_before(node)]
    # A second sweep over a layer in one step, or the publishing of old weights, is clipping's.
    is_again = bool(again) and node.step != NONE and node.detail != "commit"
    if is_again or node.detail == "publish":
        barrier = graph.barrier(node)
        node.is_barred = bool(barrier)
        edges += barrier
    return edges + again


def _h2d(graph: Graph, node: Node) -> list[Edge]:
    edges = [Edge(number, is_data=True) for number in graph.passes_before(node)]
    # A copy of a whole layer, or passes over whole layers.
    return edges or graph.latest(node, kinds.CPU_UPDATE)


_LINKS: Final = {
    kinds.COMPUTE: _compute,
    kinds.GPU_UPDATE: _gpu_update,
    kinds.COMMUNICATION: _communication,
    kinds.D2H: _d2h,
    kinds.H2D: _h2d,
    kinds.CPU_UPDATE: _cpu_update,
}
