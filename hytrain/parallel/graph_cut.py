"""Cuts a micro-batch's autograd graph at its blocks, so that each piece runs by itself.

What the user's model computes between blocks keeps its graph. A block's inputs and outputs are
cut: gradients that come to a cut are kept there until the block, or the piece before it, is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

BEFORE_ALL = -1
"""The piece in front of the first block; piece l stands behind block l."""


class NotLayerMajor(Exception):
    """The model, or what it was given, cannot be computed layer by layer; the text says why."""


@dataclass(slots=True)
class Target:
    """Where a tensor's gradient goes; it is summed up here until it can go on.

    Attributes:
        piece: which must be run back before the gradient is complete below it.
        edge: where the user's graph goes on; None for a block's output.
    """

    piece: int
    edge: GradientEdge | None = None
    gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        """In the order of arrival, as autograd adds up what comes to one node."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> torch.Tensor | None:
        """The sum so far; it begins anew."""
        gradient, self.gradient = self.gradient, None
        return gradient


class InsideBlock:
    """In place of a target where no gradient may arrive: the inputs of a block's first pass."""

    def add(self, gradient: torch.Tensor) -> None:
        """Nobody can use it: the block is computed again for its gradients."""
        raise AssertionError("a gradient went back through a block's first pass")


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        _token, data, target = inputs
        ctx.set_materialize_grads(False)
        ctx.target = target
        # The same memory and version counter; not the input itself, of which autograd would make
        # a view that nothing may be written to.
        return data.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        if gradients[0] is not None:
            ctx.target.add(gradients[0])
        return None, None, None


def cut(data: torch.Tensor, target: Target | InsideBlock) -> torch.Tensor:
    """The tensor without its graph; its gradient goes to the target.

    It is no leaf: the user's code may write to it in place.
    """
    token = torch.empty((), device=data.device, requires_grad=True)
    # Autograd would walk on into the graph of what it is given, with gradients of None.
    return cast(torch.Tensor, _Cut.apply(token, data.detach(), target))


def target_of(node: Node) -> Target | InsideBlock | None:
    """The target of a cut; None for any other node."""
    if isinstance(node, BackwardCFunction):
        found = vars(node).get("target")
        if isinstance(found, (Target, InsideBlock)):
            return found
    return None


@dataclass(slots=True)
class _Claim:
    """Nodes that one backward will run; ``piece`` is known once all of them have been seen."""

    piece: int = BEFORE_ALL


class MicroBatchGraph:
    """The pieces of one micro-batch's graph.

    Each node belongs to one piece, since a backward frees what it has run through.
    """

    def __init__(self) -> None:
        self._claims: dict[Node, _Claim] = {}
        self._targets: dict[tuple[Node, int], Target] = {}

    def target(self, tensor: torch.Tensor) -> Target | InsideBlock:
        """Where the gradient of a tensor that was given to a block must go.

        Raises:
            NotLayerMajor: its graph cannot be cut.
        """
        node = tensor.grad_fn
        found = None if node is None else target_of(node)
        if found is not None:
            return found
        edge = get_gradient_edge(tensor)
        key = edge.node, edge.output_nr
        if key not in self._targets:
            self._targets[key] = Target(self.claim(edge.node), edge)
        return self._targets[key]

    def claim_loss(self, root: Node) -> None:
        """The nodes behind the loss are run back at once; nothing is claimed after it.

        Raises:
            NotLayerMajor: as :meth:`claim`.
        """
        self.claim(root, alone=True)
        self._claims.clear()  # or they keep the whole graph

    def claim(self, root: Node, *, alone: bool = False) -> int:
        """The nodes behind this one are run back together; returns their piece.

        Args:
            root: the node of a block's input, or of the loss.
            alone: whether no other node of its piece may share a node with it.

        Raises:
            NotLayerMajor: some of them belong to another piece, or lie inside a block.
        """
        claim = _Claim()
        others: list[_Claim] = []
        stack = [root]
        while stack:
            node = stack.pop()
            target = target_of(node)
            if isinstance(target, InsideBlock):
                raise NotLayerMajor(
                    "a tensor that a block computes is used outside of it but is not among its "
                    "outputs (collected by a hook, or through an object)"
                )
            if target is not None:
                claim.piece = max(claim.piece, target.piece)
                continue
            known = self._claims.get(node)
            if known is claim:
                continue
            if known is not None:
                others.append(known)
                continue
            following = [after for after, _ in node.next_functions if after is not None]
            if following:  # leaves may be reached by many
                self._claims[node] = claim
                stack.extend(following)
        claim.piece = max([claim.piece, *(other.piece for other in others)])
        if others and (alone or any(other.piece != claim.piece for other in others)):
            raise NotLayerMajor(
                "what is computed between two blocks is used again behind a later one, other than "
                "as a block's input"
            )
        return claim.piece

    def run_back(self, piece: int) -> None:
        """The gradients of a piece go on to the parameters in it and to the blocks before it."""
        due = [t for t in self._targets.values() if t.piece == piece and t.gradient is not None]
        if due:
            edges = [cast(GradientEdge, target.edge) for target in due]
            gradients = [cast(torch.Tensor, target.take()) for target in due]
            torch.autograd.backward(edges, gradients)
        for key in [key for key, target in self._targets.items() if target.piece == piece]:
            del self._targets[key]

    def forget(self) -> None:
        """Nothing of the graph is kept alive by this object any more."""
        self._claims.clear()
        self._targets.clear()


def run_back(outputs: Sequence[torch.Tensor], targets: Sequence[Target]) -> None:
    """The gradients that came to a block's outputs go through the block.

    Args:
        outputs: of the block's second pass, with its graph.
        targets: of the same tensors of its first pass.
    """
    pairs = [(out, target.take()) for out, target in zip(outputs, targets, strict=True)]
    due = [(out, gradient) for out, gradient in pairs if gradient is not None and out.requires_grad]
    if due:
        torch.autograd.backward([out for out, _ in due], [gradient for _, gradient in due])
