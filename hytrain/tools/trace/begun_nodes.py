"""The nodes that have begun, by what they do, while a graph is gone through in order of begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hytrain.tools.trace import spans as kinds
from hytrain.tools.trace.nodes import Node
from hytrain.tools.trace.spans import NONE

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
