"""What every span had to wait for: the dependency graph of all recorded steps and ranks.

Nodes are spans; kernels of one stream, layer and pass that follow each other closely are one node.
A node waits for the one before it on its stream or thread, and for its data:

    backward of layer i -> (reduce-scatter) -> gradients to host -> CPU Adam -> weights to GPU
    -> (all-gather) -> forward of layer i in the next step
    backward -> update on the GPU -> forward; with clipping updates also wait for all of backward

Data are told by layer, chunk and step, never by closeness in time. A node may begin while what it
waits for still runs (a chunk of a layer that is being copied): it then waits for its begin only.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hytrain.tools.trace import spans as kinds
from hytrain.tools.trace.nodes import Edge, Node, nodes_of
from hytrain.tools.trace.spans import NONE, RankTrace

_ISSUED: Final = 200_000
"""Nanoseconds after a pass in which the next copies are issued."""
FUSED: Final = "commit_then_preview"
"""The task of an update that commits the step before, and previews its own."""


_LATEST: Final = 6
"""Spans of the update's threads that are kept for :attr:`BegunNodes.updates`."""


@dataclass(slots=True)
class Pass:
    """A pass over a chunk: a span, or one of each thread that took part.

    A thread has one span in a pass. Those of a pass have its task and step; they need not overlap:
    a thread may come when the others have left nothing to do.
    """

    step: int
    task: str
    lanes: set[int] = field(default_factory=set[int])
    numbers: list[int] = field(default_factory=list[int])

    def has(self, node: Node) -> bool:
        """Whether a span that begins now is of this pass."""
        return (self.step, self.task) == (node.step, node.detail) and node.lane not in self.lanes


class BegunNodes:
    """What has begun so far."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, str, int], list[Node]] = {}
        """By (rank, what, layer)."""
        self._passes: dict[tuple[int, int, int], list[Pass]] = {}
        """Of (rank, layer, chunk)."""
        self.updates: dict[int, deque[Node]] = {}
        """Rank -> the last spans of its update's threads."""

    def add(self, node: Node) -> None:
        """The next node begins."""
        for what, layer in _keys(node):
            if layer != NONE or what in ("any backward", "norm"):
                self._by_key.setdefault((node.rank, what, layer), []).append(node)
        if node.resource == kinds.CPU_UPDATE:
            self.updates.setdefault(node.rank, deque(maxlen=_LATEST)).append(node)
            if node.layer != NONE:
                passes = self._passes.setdefault((node.rank, node.layer, node.chunk), [])
                if not passes or not passes[-1].has(node):
                    passes.append(Pass(node.step, node.detail))
                passes[-1].lanes.add(node.lane)
                passes[-1].numbers.append(node.number)

    def latest(
        self, node: Node, what: str, layer: int, *, or_step_before: bool = False
    ) -> Node | None:
        """The last one, of the node's step and chunk."""
        steps, chunks = (NONE, node.step, node.step - or_step_before), (NONE, node.chunk)
        for one in reversed(self._by_key.get((node.rank, what, layer), ())):
            is_of_step = node.step == NONE or one.step in steps
            if is_of_step and (node.chunk == NONE or one.chunk in chunks):
                return one
        return None

    def pass_before(self, node: Node) -> Pass | None:
        """The last pass over a chunk before a copy of it, or before the pass of a span."""
        passes = self._passes.get((node.rank, node.layer, node.chunk), [])
        if node.resource == kinds.CPU_UPDATE and passes and passes[-1].has(node):
            passes = passes[:-1]
        return passes[-1] if passes else None

    def passes_since(self, node: Node) -> Sequence[Pass]:
        """The passes over a node's chunk that have begun after it."""
        passes = self._passes.get((node.rank, node.layer, node.chunk), [])
        return [one for one in passes if one.numbers[0] >= node.number]


def _keys(node: Node) -> list[tuple[str, int]]:
    """(what, layer) that a node can be waited for as."""
    if node.resource == kinds.COMPUTE:
        if node.detail == kinds.BACKWARD:
            return [(kinds.BACKWARD, node.layer), ("any backward", NONE)]
        return []
    if node.resource == kinds.COMMUNICATION and node.detail in kinds.EXCHANGES:
        return []
    if node.resource == kinds.COMMUNICATION:
        if node.layer == NONE and node.detail == "all_reduce":
            return [("norm", NONE)]
        return [("gather" if "gather" in node.detail else "reduce", node.layer)]
    return [(node.resource, node.layer)]


class Graph:
    """Nodes by number, in the order in which they began, and their dependencies."""

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        """Builds the graph of ranks whose clocks agree."""
        self.ranks = {rank.rank: rank for rank in ranks}
        nodes = [node for rank in ranks for node in nodes_of(rank)]
        nodes.sort(key=lambda node: (node.begin, node.end))
        for number, node in enumerate(nodes):
            node.number = number
        self.nodes = nodes
        self._begun = BegunNodes()
        self._lanes: dict[tuple[int, int], Node] = {}
        self._copies: dict[tuple[int, int], list[Node]] = {}
        """To the GPU, by (rank, layer)."""
        self._slots: dict[tuple[int, int], Node] = {}
        """By (rank, slot), the gradient that was last copied there."""
        for rank in self.ranks:
            self._link_updates_in_order(rank)
        for node in nodes:
            self._link_lane(node)
            self._link_data(node)
            if node.resource == kinds.D2H and node.slot != NONE:
                self._link_slot(node)
            self._begun.add(node)
            if node.resource == kinds.H2D:
                self._copies.setdefault((node.rank, node.layer), []).append(node)
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
        copies = self._copies.get((rank, layer), [])
        index = bisect_right(copies, time, key=lambda node: node.begin)
        return copies[index - 1] if index else None

    # -- edges ---------------------------------------------------------------------------------

    def _link_lane(self, node: Node) -> None:
        if (before := self._lanes.get((node.rank, node.lane))) is not None:
            node.edges.append(Edge(before.number, is_data=False))
            node.is_entry = (before.layer, before.detail) != (node.layer, node.detail)
        self._lanes[node.rank, node.lane] = node

    def _link_updates_in_order(self, rank: int) -> None:
        """Updates that never overlap compute are on its stream, whatever lane shows them."""
        nodes = self.computes(rank)
        updates = [node for node in nodes if node.resource == kinds.GPU_UPDATE]
        if not updates or any(a.end > b.begin for a, b in itertools.pairwise(nodes)):
            return
        for one, node in itertools.pairwise(nodes):
            if one.lane != node.lane:
                node.edges.append(Edge(one.number, is_data=False))

    def _link_data(self, node: Node) -> None:
        found = {edge.before for edge in node.edges}
        for edge in _LINKS[node.resource](self, node):
            if edge.before not in found:
                node.edges.append(edge)
                found.add(edge.before)

    def _link_slot(self, node: Node) -> None:
        """A gradient is copied into a slot when the update that used the one before has read it,
        and its copy is issued by the thread that updates, between two passes."""
        before = self._slots.get((node.rank, node.slot))
        if before is not None and (readers := self._last_readers(before)) is not None:
            node.edges += [Edge(reader, is_data=True) for reader in readers.numbers]
        self._slots[node.rank, node.slot] = node
        ended = [one for one in self._begun.updates.get(node.rank, ()) if one.end <= node.begin]
        if ended and node.begin - ended[-1].end < _ISSUED:
            node.edges.append(Edge(ended[-1].number, is_data=False))

    def _last_readers(self, gradient: Node) -> Pass | None:
        """The pass that commits a gradient, after which its slot is free.

        A commit; or the second of two that commit the step before and preview their own. What was
        published without has been dropped.
        """
        is_previewed = False
        for one in self._begun.passes_since(gradient):
            if one.task in ("commit", "publish") or (one.task == FUSED and is_previewed):
                return one
            is_previewed = True
        return None

    def passes_before(self, node: Node) -> list[Edge]:
        """The spans of the pass over a chunk that came before a pass or a copy of its step."""
        found = self._begun.pass_before(node)
        if found is None or (NONE not in (node.step, found.step) and found.step != node.step):
            return []
        return [Edge(number, is_data=True) for number in found.numbers]

    def latest(self, node: Node, key: str, *, or_step_before: bool = False) -> list[Edge]:
        """The last span of the node's layer that began before it, by what it is."""
        found = self._begun.latest(node, key, node.layer, or_step_before=or_step_before)
        return [] if found is None else [Edge(found.number, is_data=True)]

    def barrier(self, node: Node) -> list[Edge]:
        """All of backward, and the norm's collective."""
        edges: list[Edge] = []
        for key in ("any backward", "norm"):
            found = self._begun.latest(node, key, NONE)
            if found is not None and found.end <= node.begin:
                edges.append(Edge(found.number, is_data=True, is_barrier=True))
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


# -- data --------------------------------------------------------------------------------------


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
    if node.detail in kinds.EXCHANGES:
        return []
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
    again = graph.passes_before(node)
    # A second sweep over a layer in one step, or the publishing of old weights, is clipping's.
    is_again = bool(again) and node.step != NONE and node.detail != "commit"
    if is_again or node.detail == "publish":
        barrier = graph.barrier(node)
        node.is_barred = bool(barrier)
        edges += barrier
    return edges + again


def _h2d(graph: Graph, node: Node) -> list[Edge]:
    # A copy of a whole layer, or passes over whole layers.
    return graph.passes_before(node) or graph.latest(node, kinds.CPU_UPDATE)


_LINKS: Final = {
    kinds.COMPUTE: _compute,
    kinds.GPU_UPDATE: _gpu_update,
    kinds.COMMUNICATION: _communication,
    kinds.D2H: _d2h,
    kinds.H2D: _h2d,
    kinds.CPU_UPDATE: _cpu_update,
}
