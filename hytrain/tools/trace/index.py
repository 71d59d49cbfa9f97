"""Nodes by what they do, for which layer, on which chunk, and in which pass over it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from hytrain.tools.trace import spans as kinds
from hytrain.tools.trace.nodes import Node
from hytrain.tools.trace.spans import NONE

_BACK: Final = 6
"""Earlier spans of a layer that are tried where the last one is of another step."""


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


class LayerIndex:
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


class Passes:
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
