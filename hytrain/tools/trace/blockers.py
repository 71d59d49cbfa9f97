"""Finds the cause of every idle interval of a GPU by walking the chain back from what ran next.

A GPU is idle while it computes nothing: no forward, no backward, no update. What ran next waited
for the last of its dependencies to finish, that one for the last of its own, and so on back to when
the GPU fell idle. Every nanosecond of the interval goes to what the chain leads to at that time; if
nothing proves a cause, it is unresolved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from hytrain.formats.trace_file import WAITS_FOR_ROOM
from hytrain.tools.trace import causes, kinds
from hytrain.tools.trace.graph import Graph
from hytrain.tools.trace.host import HostState, HostView
from hytrain.tools.trace.intervals import Intervals
from hytrain.tools.trace.nodes import CLOSE, Node
from hytrain.tools.trace.spans import NONE

_LATE: Final = {
    kinds.D2H: causes.LATE_GRADIENT_COPY,
    kinds.H2D: causes.LATE_WEIGHT_COPY,
    kinds.CPU_UPDATE: causes.STARVED_CPU,
    kinds.COMMUNICATION: causes.LATE_COLLECTIVE,
}
_HOST_CAUSE: Final = {
    kinds.DATA: causes.DATA_LOADING,
    kinds.SYNC: causes.SYNCHRONIZATION,
    kinds.CPU_UPDATE: causes.CPU_ADAM,
    kinds.PHASE: causes.LAUNCH,
    kinds.PYTHON: causes.HOST_CODE,
}
HAND_OVER_MOST: Final = 50_000
"""Delays of up to this many ns between a dependency and what waited for it need no other cause."""
_TIMING: Final = 20_000
"""What waits for the event of a copy or collective begins within this many ns of its end."""
_LONGEST_CHAIN: Final = 10_000


class Blame(NamedTuple):
    """What the chain leads to in [begin, end)."""

    begin: int
    end: int
    cause: str
    evidence: str
    """What proves it: "dependency", "launch" (its time), "host" (its state), "timing" or ""."""
    layer: int = NONE
    rank: int = NONE
    """The rank on which the chain is at that time; NONE if it is the one that waits."""
    detail: str = ""
    """A Python line or function, a collective, or what a late rank did."""

    @property
    def length(self) -> int:
        """The duration in nanoseconds."""
        return self.end - self.begin

    def cut(self, begin: int, end: int) -> Blame | None:
        """The part in [begin, end)."""
        low, high = max(self.begin, begin), min(self.end, end)
        return self._replace(begin=low, end=high) if low < high else None


@dataclass(slots=True)
class _Walk:
    """How far a walk back along a chain has come."""

    node: Node
    """The node whose begin it has reached."""
    time: int
    limit: int
    """The time at which it ends."""
    found: list[Blame] = field(default_factory=list[Blame])
    """Latest first, from the time at which it began back to ``time``."""


class Blockers:
    """Walks the chains that lead to one rank's compute."""

    def __init__(self, graph: Graph, rank: int) -> None:
        """Prepares for a rank of the graph."""
        self.graph = graph
        self.rank = rank
        self._trace = graph.ranks[rank]
        self._hosts = {number: HostView(trace) for number, trace in graph.ranks.items()}
        self._computes = graph.computes(rank)
        self._begins = np.array([node.begin for node in self._computes], np.int64)
        self._others = [
            node
            for node in graph.nodes
            if node.rank == rank and node.resource in (kinds.D2H, kinds.H2D, kinds.COMMUNICATION)
        ]
        self._others.sort(key=lambda node: node.end)
        self._other_ends = np.array([node.end for node in self._others], np.int64)

    def next_compute(self, time: int) -> Node | None:
        """What the GPU begins first at or after a time; None if nothing."""
        index = int(np.searchsorted(self._begins, time))
        return self._computes[index] if index < len(self._computes) else None

    def idle(self, begin: int, end: int) -> list[Blame]:
        """The causes of all idle time in [begin, end), in order; they sum to it."""
        gaps = self._trace.busy().gaps(begin, end)
        long = gaps.end - gaps.begin > CLOSE
        if not self._trace.are_kernels:
            long[:] = True
        blames = self._short_gaps(Intervals(gaps.begin[~long], gaps.end[~long]))
        for low, high in Intervals(gaps.begin[long], gaps.end[long]).pairs():
            blames += self.explain(low, high)
        return sorted(blames, key=lambda blame: blame.begin)

    def _short_gaps(self, gaps: Intervals) -> list[Blame]:
        """Causes of gaps between kernels of a node: the launch, if it came after the GPU fell idle,
        else the gap itself."""
        spans = self._trace[kinds.COMPUTE]
        if not len(gaps) or not len(spans):
            return [Blame(*gap, causes.KERNEL_GAPS, "") for gap in gaps.pairs()]
        following = np.minimum(np.searchsorted(spans.begin, gaps.end), len(spans) - 1)
        is_late = spans.launched[following] >= gaps.begin
        layers = spans.layer[following].tolist()
        return [
            Blame(
                *gap,
                causes.LAUNCH if late else causes.KERNEL_GAPS,
                "launch" if late else "",
                layer=layer,
            )
            for gap, late, layer in zip(gaps.pairs(), is_late.tolist(), layers, strict=True)
        ]

    def explain(self, begin: int, end: int) -> list[Blame]:
        """The causes of an idle interval, in order."""
        node = self.next_compute(end)
        if node is None or (node.begin > end and node.begin - end > CLOSE):
            following = "nothing follows in the trace" if node is None else ""
            return self._host_blames(None, self.rank, begin, end, following)
        return self._go_back(_Walk(node, end, begin))[::-1]

    def critical_path(self, begin: int, end: int) -> list[Blame]:
        """The chain that ends at ``end``, back to ``begin``, latest first; it sums to the whole."""
        index = int(np.searchsorted(self._begins, end)) - 1
        node = self._computes[index] if index >= 0 else None
        last = begin if node is None else max(begin, min(node.end, end))
        if last < end and (following := self.next_compute(end)) is not None:
            # The wait for what came next may go on beyond ``end``: it is walked whole, then cut.
            whole = self._go_back(_Walk(following, following.begin, begin))
            return [part for blame in whole if (part := blame.cut(begin, end)) is not None]
        idle = self.explain(last, end) if last < end else []
        if node is None or last <= begin:
            return idle[::-1]
        walk = _Walk(node, last, begin, idle[::-1])
        self._through(walk, node, last)
        return self._go_back(walk)

    def _go_back(self, walk: _Walk) -> list[Blame]:
        """Walks back to the walk's limit; returns what it has found."""
        for _ in range(_LONGEST_CHAIN):
            if walk.time <= walk.limit:
                break
            self._step_back(walk)
        return walk.found

    def _step_back(self, walk: _Walk) -> None:
        """Walks from a node's begin to the begin of what it waited for."""
        node, time = walk.node, walk.time
        edge = node.binding
        before = None if edge is None else edge.before
        finished = walk.limit if edge is None else node.finished(edge)
        finished = min(max(finished, walk.limit), time)
        if finished < time:
            if (near := self._ended_near(node, finished, time)) is not None:
                if near.end < time:
                    walk.found.append(self._hand_over(near, near.end, time, "timing"))
                self._through(walk, near, near.end, "timing")
                return
            beside = self._computed_beside(node, time)
            # A predecessor on the same lane that ended later is closer than the GPU's compute.
            if beside is not None and (before is None or beside.end > finished):
                end = max(min(beside.end, time), walk.limit)
                if end < time:
                    walk.found.append(Blame(end, time, causes.UNRESOLVED, "", node.layer))
                self._through(walk, beside, end, "timing")
                return
            walk.found += self._slack(node, before, finished, time)
        if before is None or finished <= walk.limit:
            walk.time = walk.limit
        else:
            self._through(walk, before, finished)

    def _through(self, walk: _Walk, node: Node, time: int, evidence: str = "dependency") -> None:
        """Walks from a time within a node, or its end, to its begin, or that on the last rank."""
        late = node.arrival
        start = late if late.begin > node.begin else node
        low = min(max(start.begin, walk.limit), time)
        if low < time:
            walk.found.append(self._blame(node, low, time, evidence))
        walk.node, walk.time = start, low

    def _blame(self, node: Node, begin: int, end: int, evidence: str) -> Blame:
        cause, detail = node.resource, ""
        if cause == kinds.COMPUTE and node.detail != kinds.OTHER:
            cause = node.detail
        elif cause == kinds.COMMUNICATION:
            detail = node.detail
        elif cause == kinds.CPU_UPDATE:
            cause = causes.CLIPPING if node.is_barred else causes.CPU_ADAM
        return self._of_rank(node, Blame(begin, end, cause, evidence, node.layer, detail=detail))

    def _hand_over(self, node: Node, begin: int, end: int, evidence: str) -> Blame:
        return self._of_rank(node, Blame(begin, end, causes.HAND_OVER, evidence, node.layer))

    def _of_rank(self, node: Node, blame: Blame) -> Blame:
        """The blame; if the node is another rank's, as one of a slow rank."""
        if node.rank == self.rank:
            return blame
        words = blame.cause if blame.layer == NONE else f"{blame.cause} layer {blame.layer}"
        detail = f"{words}, {blame.detail}" if blame.detail else words
        return blame._replace(cause=causes.SLOW_RANK, rank=node.rank, detail=detail)

    # -- time between a dependency's end and the begin of what waited for it ---------------------

    def _slack(self, node: Node, before: Node | None, begin: int, end: int) -> list[Blame]:
        """Causes of [begin, end), latest first."""
        resources = {node.resource, before.resource} if before is not None else set[str]()
        if end - begin <= HAND_OVER_MOST and resources - {*kinds.COMPUTES} and before is not None:
            return [self._hand_over(node, begin, end, "dependency")]
        if node.resource not in kinds.COMPUTES:
            # It began late, although all that it needed was there.
            has_data = any(edge.is_data for edge in node.edges)
            cause, evidence = (
                (_LATE[node.resource], "dependency") if has_data else (causes.UNRESOLVED, "")
            )
            return [self._of_rank(node, Blame(begin, end, cause, evidence, node.layer))]
        if node.launched != NONE and node.launched <= begin:
            cause = causes.KERNEL_GAPS if end - begin <= CLOSE else causes.UNRESOLVED
            return [self._of_rank(node, Blame(begin, end, cause, "", node.layer))]
        blames = self._host_blames(node, node.rank, begin, end)
        return [self._of_rank(node, blame) for blame in reversed(blames)]

    def _ended_near(self, node: Node, begin: int, end: int) -> Node | None:
        """What a kernel that was launched in time waited for, judged by timing: the copy or
        collective that ended just before it on another stream while the GPU was idle."""
        is_computing = node.resource in kinds.COMPUTES and node.rank == self.rank
        if end - begin <= CLOSE:
            return None  # between two kernels, where some copy often ends as well
        if not is_computing or node.launched == NONE or node.launched > begin:
            return None
        index = int(np.searchsorted(self._other_ends, end, side="right")) - 1
        while index >= 0 and self._other_ends[index] > max(begin, end - _TIMING):
            if self._others[index].lane != node.lane:
                return self._others[index]
            index -= 1
        return None

    def _computed_beside(self, node: Node, time: int) -> Node | None:
        """What the GPU computed when a copy began for which no data dependency is known."""
        is_known = node.resource in kinds.COMPUTES or any(edge.is_data for edge in node.edges)
        index = int(np.searchsorted(self._begins, time)) - 1
        if is_known or node.rank != self.rank or index < 0:
            return None
        return self._computes[index]

    def _host_blames(
        self, node: Node | None, rank: int, begin: int, end: int, unresolved: str = ""
    ) -> list[Blame]:
        """What the host did in a time in which nothing else held the GPU back, in order."""
        host = self._hosts[rank]
        launched = NONE if node is None else node.launched
        layer = NONE if node is None else node.layer
        states = host.states(begin, end)
        # A change of the host's state proves that what it launched later was not launched before.
        proved = launched != NONE or len(states) > 1
        found: list[Blame] = []
        for state in states:
            if state.resource == kinds.WAIT:
                found += self._waited(rank, state)
                continue
            # A synchronization has drained the queue of launched work, which must fill again.
            sync = host.ended_between(kinds.SYNC, begin - HAND_OVER_MOST, state.begin)
            cause, detail, evidence = _HOST_CAUSE[state.resource], "", "host"
            if state.resource == kinds.SYNC:
                detail = host.line_of_sync(state.row)
            elif state.resource == kinds.PYTHON and not host.has_phases:
                cause, detail = causes.LAUNCH, host.function_in(state.begin, state.end) or ""
            elif state.resource in (kinds.PYTHON, kinds.DATA):
                detail = host.function_in(state.begin, state.end) or ""
                if sync is not None and (detail or state.resource == kinds.DATA):
                    after = f"after the synchronization of {host.line_of_sync(sync)}"
                    detail = f"{detail}, {after}" if detail else after
            is_unnamed = cause == causes.LAUNCH or (cause == causes.HOST_CODE and not detail)
            if is_unnamed and sync is not None:
                cause, detail = causes.SYNCHRONIZATION, host.line_of_sync(sync)
            elif cause == causes.LAUNCH and launched != NONE:
                evidence = "launch"
            if cause in (causes.LAUNCH, causes.HOST_CODE) and not (proved or detail):
                cause, evidence, detail = causes.UNRESOLVED, "", unresolved
            found.append(Blame(state.begin, state.end, cause, evidence, layer, detail=detail))
        return found

    def _waited(self, rank: int, state: HostState) -> list[Blame]:
        """The causes of the host's wait for a layer's weights or for room: the chain, in order."""
        waits = self.graph.ranks[rank][kinds.WAIT]
        layer, what = int(waits.layer[state.row]), str(waits.detail[state.row])
        if what == WAITS_FOR_ROOM:
            last = self.graph.last_fetched(rank, state.end)
        else:
            last = self.graph.last_copy(rank, layer, state.end + HAND_OVER_MOST)
        if last is None or last.end < state.begin:
            words = f"the host waited for {what or 'weights of which no copy was recorded'}"
            return [Blame(state.begin, state.end, causes.UNRESOLVED, "", layer, detail=words)]
        walk = _Walk(last, state.end, state.begin)
        if last.begin < state.end:
            # Else the wait ended when the layer's update issued the copy.
            if last.end < state.end:
                walk.found.append(self._hand_over(last, last.end, state.end, "dependency"))
            self._through(walk, last, min(last.end, state.end))
        return self._go_back(walk)[::-1]
