"""The spans of a trace that can wait for each other, as nodes of a graph.

Kernels of one stream, layer and pass that follow each other closely are one node.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

import numpy as np

from hytrain.tools.trace import kinds
from hytrain.tools.trace.spans import NONE, RankTrace, Span, Spans

CLOSE: Final = 10_000
"""Longest gap between kernels of one node, in nanoseconds."""

_ON_GRAPH: Final = (
    *(kinds.COMPUTE, kinds.GPU_UPDATE, kinds.COMMUNICATION),
    *(kinds.D2H, kinds.H2D, kinds.CPU_UPDATE),
)


@dataclass(slots=True, eq=False)
class Node(Span):
    """A span of a resource, or kernels that follow each other closely."""

    rank: int = NONE
    resource: str = ""
    is_entry: bool = True
    """Whether it is the first of its layer and pass on its stream."""
    is_barred: bool = False
    """Whether it waits for all of backward because of clipping."""
    partners: tuple[Node, ...] = ()
    """The same collective on all ranks, this node among them."""
    gaps: int = 0
    """The gaps between its kernels, in nanoseconds together."""
    edges: list[Edge] = field(default_factory=list)

    def finished(self, edge: Edge) -> int:
        """When one of its dependencies had finished for it: at the latest when it began."""
        return min(edge.before.end, self.begin)

    @property
    def binding(self) -> Edge | None:
        """The dependency that finished last, on a tie one on data; None without any."""
        edges = self.edges
        return max(edges, key=lambda edge: (self.finished(edge), edge.is_data), default=None)

    @property
    def arrival(self) -> Node:
        """For a collective, the node of the rank that came last; else this node."""
        return max(self.partners, key=lambda one: one.begin, default=self)


class Edge(NamedTuple):
    """A dependency: another node for which a node waited."""

    before: Node
    is_data: bool
    is_barrier: bool = False


def nodes_of(rank: RankTrace) -> list[Node]:
    """A rank's nodes, without edges, resource by resource."""
    nodes: list[Node] = []
    for resource in _ON_GRAPH:
        spans = rank[resource]
        columns = (getattr(spans, column.name).tolist() for column in fields(spans))
        found = [
            Node(*row, rank=rank.rank, resource=resource) for row in zip(*columns, strict=True)
        ]
        if rank.are_kernels and resource in kinds.COMPUTES:
            gaps = np.zeros(len(spans), np.int64)
            gaps[1:] = np.maximum(spans.begin[1:] - spans.end[:-1], 0)
            groups = _groups(spans)
            for first, last in groups:
                found[first].end = found[last].end
                found[first].gaps = int(gaps[first + 1 : last + 1].sum())
            found = [found[first] for first, _ in groups]
        nodes += found
    return nodes


def _groups(spans: Spans) -> list[tuple[int, int]]:
    """(first, last) row of each node's kernels; where streams interleave, nodes are shorter."""
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
