"""What every span had to wait for: the dependency graph of all recorded steps and ranks.

Nodes are spans; kernels of one stream, layer and pass that follow each other closely are one node.
A node waits for the one before it on its stream or thread, and for its data:

    backward of layer i -> (reduce-scatter) -> gradients to host -> CPU Adam -> weights to GPU
    -> (all-gather) -> forward of layer i in the next step
    backward -> update on the GPU -> forward; with clipping updates also wait for all of backward

Data dependencies follow from layer, chunk and step, never from closeness in time. A node may begin
while another that it waits for still runs (a chunk of a layer that is being copied): it then waits
only for the other's begin.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hytrain.tools.trace import kinds
from hytrain.tools.trace.nodes import Edge, Node, nodes_of
from hytrain.tools.trace.spans import NONE, RankTrace

_ISSUED: Final = 200_000
"""The next copies are issued within this many nanoseconds after a pass."""
FUSED: Final = "commit_then_preview"
"""The task of an update that commits the step before, and previews its own."""


_LATEST: Final = 6
"""How many of the last spans of a rank's update threads may have issued a copy."""


@dataclass(slots=True)
class Pass:
    """A pass over a chunk: one span, or one of each thread that took part.

    A thread has one span in a pass. All spans of a pass have the same task and step. They need not
    overlap: a thread may arrive when the others have left nothing to do.
    """

    nodes: list[Node]

    def has(self, node: Node) -> bool:
        """Whether a span that begins now belongs to this pass."""
        first = self.nodes[0]
        is_alike = (first.step, first.detail) == (node.step, node.detail)
        return is_alike and all(one.lane != node.lane for one in self.nodes)


def _keys(node: Node) -> list[tuple[str, int]]:
    """The keys (what, layer) under which other nodes may wait for a node."""
    if node.resource == kinds.COMPUTE:
        if node.detail == kinds.BACKWARD:
            return [(kinds.BACKWARD, node.layer), ("any backward", NONE)]
        return []
    if node.resource == kinds.COMMUNICATION:
        if node.detail in kinds.EXCHANGES:
            return []
        if node.layer == NONE and node.detail == "all_reduce":
            return [("norm", NONE)]
        return [("gather" if "gather" in node.detail else "reduce", node.layer)]
    if node.resource == kinds.D2H:
        return [(node.resource, node.layer), ("any copy to the host", NONE)]
    return [(node.resource, node.layer)]


class Graph:
    """All nodes in the order in which they began, and their dependencies."""

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        """Builds the graph of ranks whose clocks agree."""
        self.ranks = {rank.rank: rank for rank in ranks}
        nodes = [node for rank in ranks for node in nodes_of(rank)]
        self.nodes = sorted(nodes, key=lambda node: (node.begin, node.end))
        # What has begun so far:
        self._begun: dict[tuple[int, str, int], list[Node]] = defaultdict(list)
        """(rank, what, layer) -> nodes."""
        self._passes: dict[tuple[int, int, int], list[Pass]] = defaultdict(list)
        """(rank, layer, chunk) -> passes."""
        self._updates: dict[int, list[Node]] = defaultdict(list)
        """Rank -> spans of its update threads."""
        self._lanes: dict[tuple[int, int], Node] = {}
        self._slots: dict[tuple[int, int], Node] = {}
        """(rank, slot) -> the copy of the gradient that was last put there."""
        for rank in self.ranks:
            self._link_updates_in_order(rank)
        for node in self.nodes:
            self._link_lane(node)
            before = {edge.before for edge in node.edges}
            node.edges += [e for e in _LINKS[node.resource](self, node) if e.before not in before]
            if node.resource == kinds.D2H and node.slot != NONE:
                self._link_slot(node)
            self._add(node)
        if len(ranks) > 1:
            self._link_ranks()

    def computes(self, rank: int) -> list[Node]:
        """The nodes in which a rank's GPU computes, in order."""
        own = (node for node in self.nodes if node.rank == rank)
        return [node for node in own if node.resource in kinds.COMPUTES]

    def last_copy(self, rank: int, layer: int, time: int) -> Node | None:
        """The last copy of a layer's weights that begins at or before a time; None without one."""
        copies = self._begun[rank, kinds.H2D, layer]
        index = bisect_right(copies, time, key=lambda node: node.begin)
        return copies[index - 1] if index else None

    def last_fetched(self, rank: int, time: int) -> Node | None:
        """The last update or copy to the host that ends at or before a time: what has freed the
        memory of a gradient on the GPU; None without one."""
        ended: list[Node] = []
        for nodes in self._updates[rank], self._begun[rank, "any copy to the host", NONE]:
            index = bisect_right(nodes, time, key=lambda node: node.begin)
            ended += next(([one] for one in nodes[:index][::-1] if one.end <= time), [])
        return max(ended, key=lambda node: node.end, default=None)

    def clips(self, rank: int) -> bool:
        """Whether gradient clipping was on; False if unknown."""
        header = self.ranks[rank].header
        return header is not None and bool(header.gradient_clipping)

    def _add(self, node: Node) -> None:
        for what, layer in _keys(node):
            self._begun[node.rank, what, layer].append(node)
        if node.resource == kinds.CPU_UPDATE:
            self._updates[node.rank].append(node)
            passes = self._passes[node.rank, node.layer, node.chunk]
            if passes and passes[-1].has(node):
                passes[-1].nodes.append(node)
            else:
                passes.append(Pass([node]))

    # -- edges ---------------------------------------------------------------------------------

    def _link_lane(self, node: Node) -> None:
        if (before := self._lanes.get((node.rank, node.lane))) is not None:
            node.edges.append(Edge(before, is_data=False))
            node.is_entry = (before.layer, before.detail) != (node.layer, node.detail)
        self._lanes[node.rank, node.lane] = node

    def _link_updates_in_order(self, rank: int) -> None:
        """Links updates that never overlap compute with it: they are on its stream, whatever lane
        shows them."""
        nodes = self.computes(rank)
        updates = [node for node in nodes if node.resource == kinds.GPU_UPDATE]
        if not updates or any(a.end > b.begin for a, b in itertools.pairwise(nodes)):
            return
        for one, node in itertools.pairwise(nodes):
            if one.lane != node.lane:
                node.edges.append(Edge(one, is_data=False))

    def _link_slot(self, node: Node) -> None:
        """Links a copy of a gradient into a slot with the update that has read the slot's previous
        gradient, and with the pass after which the updating thread issued the copy."""
        before = self._slots.get((node.rank, node.slot))
        if before is not None:
            node.edges += [Edge(one, is_data=True) for one in self._last_readers(before)]
        self._slots[node.rank, node.slot] = node
        ended = [one for one in self._updates[node.rank][-_LATEST:] if one.end <= node.begin]
        if ended and node.begin - ended[-1].end < _ISSUED:
            node.edges.append(Edge(ended[-1], is_data=False))

    def _last_readers(self, gradient: Node) -> list[Node]:
        """The pass that commits a gradient, after which its slot is free.

        It is a commit, or the second pass that commits the step before and previews its own. A
        gradient that is not committed before a publish has been dropped.
        """
        is_previewed, copied = False, (gradient.begin, gradient.end)
        for one in self._passes[gradient.rank, gradient.layer, gradient.chunk]:
            first = one.nodes[0]
            if (first.begin, first.end) < copied:
                continue
            if first.detail in ("commit", "publish") or (first.detail == FUSED and is_previewed):
                return one.nodes
            is_previewed = True
        return []

    def passes_before(self, node: Node) -> list[Edge]:
        """Edges to the spans of the chunk's last pass before a pass or copy of the same step."""
        passes = self._passes[node.rank, node.layer, node.chunk]
        if node.layer == NONE or not passes:
            return []
        is_within = node.resource == kinds.CPU_UPDATE and passes[-1].has(node)
        found = passes[-2:-1] if is_within else passes[-1:]
        return [
            Edge(one, is_data=True)
            for before in found
            for one in before.nodes
            if NONE in (node.step, one.step) or node.step == one.step
        ]

    def latest(self, node: Node, what: str, *, or_step_before: bool = False) -> list[Edge]:
        """An edge to the last earlier span of kind ``what`` of the node's layer, step and chunk."""
        if node.layer == NONE:
            return []
        return self._latest(node, what, node.layer, or_step_before=or_step_before)

    def _latest(
        self, node: Node, what: str, layer: int, *, or_step_before: bool = False
    ) -> list[Edge]:
        steps, chunks = (NONE, node.step, node.step - or_step_before), (NONE, node.chunk)
        for one in reversed(self._begun[node.rank, what, layer]):
            is_of_step = node.step == NONE or one.step in steps
            if is_of_step and (node.chunk == NONE or one.chunk in chunks):
                return [Edge(one, is_data=True)]
        return []

    def barrier(self, node: Node) -> list[Edge]:
        """Edges to the end of backward and to the norm's collective, if they ended before."""
        found = [e for what in ("any backward", "norm") for e in self._latest(node, what, NONE)]
        ended = [edge.before for edge in found if edge.before.end <= node.begin]
        return [Edge(one, is_data=True, is_barrier=True) for one in ended]

    def _link_ranks(self) -> None:
        by_key: dict[tuple[str, int, int], dict[int, list[Node]]] = {}
        for node in self.nodes:
            if node.resource == kinds.COMMUNICATION:
                key = node.detail, node.layer, node.step
                by_key.setdefault(key, {}).setdefault(node.rank, []).append(node)
        for of_ranks in by_key.values():
            # If ranks recorded a collective in different numbers, they cannot be matched.
            if len(of_ranks) != len(self.ranks) or len({len(n) for n in of_ranks.values()}) != 1:
                continue
            for partners in zip(*of_ranks.values(), strict=True):
                # A collective ends after its last rank has come: else these are not the same one,
                # or the clocks disagree.
                if min(one.end for one in partners) >= max(one.begin for one in partners):
                    for node in partners:
                        node.partners = partners


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
    # A second sweep over a layer in one step, or publishing old weights, is due to clipping.
    is_again = bool(again) and node.step != NONE and node.detail != "commit"
    if is_again or node.detail == "publish":
        barrier = graph.barrier(node)
        node.is_barred = bool(barrier)
        edges += barrier
    return edges + again


def _h2d(graph: Graph, node: Node) -> list[Edge]:
    # Without a pass over the same chunk, the copy or the passes are of whole layers.
    return graph.passes_before(node) or graph.latest(node, kinds.CPU_UPDATE)


_LINKS: Final = {
    kinds.COMPUTE: _compute,
    kinds.GPU_UPDATE: _gpu_update,
    kinds.COMMUNICATION: _communication,
    kinds.D2H: _d2h,
    kinds.H2D: _h2d,
    kinds.CPU_UPDATE: _cpu_update,
}
