"""Cuts a micro-batch's autograd graph at its blocks, so that each piece runs by itself.

What the user's model computes between blocks keeps its graph. A block's inputs and outputs are
cut: gradients that come to a cut are kept there until the block, or the piece before it, is due.
Hooks that the user puts on a block's output see the gradient as they would in one graph: once, and
all of it. If they would not, the model is not computed layer by layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

BEFORE_ALL = -1
"""The piece before the first block; piece l follows block l."""


Add = Callable[[torch.Tensor], None]
"""Takes a gradient that comes to a cut."""


class NotLayerMajor(Exception):
    """The model, or what it was given, cannot be computed layer by layer; the text says why."""


@dataclass(slots=True)
class Target:
    """Where a tensor's gradient goes; it is summed up here until it can go on.

    Attributes:
        piece: the piece that must be run back before the gradient is complete below it.
        edge: where the user's graph goes on; None if the block itself is next.
    """

    piece: int
    edge: GradientEdge | None = None
    gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a gradient, in the order of arrival, as autograd sums what comes to one node."""
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> torch.Tensor | None:
        """Returns the sum so far, and begins a new one."""
        gradient, self.gradient = self.gradient, None
        return gradient


class BlockOutput:
    """What the user's code gets as a block's output: a tensor that it may put hooks on.

    Gradients come here through the tensor's own node, after its hooks. Those that later blocks send
    back bypass the node: :meth:`add_direct` takes them, and if there are hooks, they go through the
    node once all of them are there. Hooks on the node itself (``tensor.grad_fn.register_hook``)
    cannot be seen from here and miss them.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.times = 0
        """How often gradients came through the node."""
        self._pending: torch.Tensor | None = None
        self._edge: GradientEdge | None = None
        self._hooks: Mapping[int, Any] | None = None
        self._tensor: weakref.ref[torch.Tensor] | None = None

    def watch(self, tensor: torch.Tensor) -> None:
        """Sets the tensor that goes to the user's code, to see its hooks."""
        # torch makes the table with the first hook; later ones are put into the same table, which
        # stays with the node when the tensor has gone or has been written to.
        tensor.register_hook(_no_hook).remove()
        self._hooks = tensor._backward_hooks
        # The user's code may let the tensor go. An edge keeps its node alive, which the node's
        # Python object does not do in every version of torch.
        self._edge = get_gradient_edge(tensor)
        self._tensor = weakref.ref(tensor)

    def release(self) -> None:
        """Lets go of the node, which refers to this object: no more gradients come."""
        self._edge = None
        self._pending = None

    @property
    def has_hooks(self) -> bool:
        """Whether the user wants to see, or to change, the gradient on its way."""
        if self._hooks:
            return True
        tensor = None if self._tensor is None else self._tensor()
        return tensor is not None and tensor.retains_grad

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a gradient that came through the node."""
        self.times += 1
        self.target.add(gradient)

    def add_direct(self, gradient: torch.Tensor) -> None:
        """Adds a gradient that a later block sends back."""
        if self.has_hooks:
            known = self._pending
            self._pending = gradient if known is None else known + gradient
        else:
            self.target.add(gradient)

    def take_pending(self) -> tuple[GradientEdge, torch.Tensor] | None:
        """Returns the node's edge and what must go through it now; None: nothing."""
        pending, self._pending = self._pending, None
        return None if pending is None else (cast(GradientEdge, self._edge), pending)

    def check(self) -> None:
        """Checks, once all gradients have come, that hooks have seen their sum.

        Raises:
            NotLayerMajor: hooks have seen the gradient in parts.
        """
        if self.times > 1 and self.has_hooks:
            raise NotLayerMajor(
                "a hook is on a tensor that a block returns, and its gradient comes in parts: the "
                "tensor is used behind a later block, too"
            )


def _no_hook(_gradient: torch.Tensor) -> None:
    """A hook that does nothing."""


def inside_block(_gradient: torch.Tensor) -> None:
    """Takes no gradient: inputs of a block's first pass get none, it is computed again for them."""
    raise AssertionError("a gradient went back through a block's first pass")


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        _token, data, add, output = inputs
        ctx.set_materialize_grads(False)
        ctx.add, ctx.output = add, output
        # The same memory and version counter; not the input itself, of which autograd would make
        # a view that nothing may be written to.
        return data.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None, None]:
        if gradients[0] is not None:
            ctx.add(gradients[0])
        return None, None, None, None


def cut(data: torch.Tensor, add: Add, output: BlockOutput | None = None) -> torch.Tensor:
    """Returns the tensor without its graph; ``add`` takes its gradient.

    It is no leaf: the user's code may write to it in place. ``output``: given if it is a block's.
    """
    token = torch.empty((), device=data.device, requires_grad=True)
    # Autograd would walk on into the graph of what it is given, with gradients of None.
    return cast(torch.Tensor, _Cut.apply(token, data.detach(), add, output))


def _cut_at(node: Node | None) -> tuple[Add | None, BlockOutput | None]:
    """What takes the gradient that comes to a cut, and the block's output that was cut there.

    The second is None if no block's output was; both are None if the node is no cut.
    """
    found = vars(node) if isinstance(node, BackwardCFunction) else {}  # perhaps the user's own
    output = found.get("output")
    return found.get("add"), output if isinstance(output, BlockOutput) else None


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
        self._outputs: dict[int, list[BlockOutput]] = {}

    def output(self, tensor: torch.Tensor, target: Target) -> torch.Tensor:
        """Returns a block's output as the user's code gets it: cut, its gradient for ``target``."""
        output = BlockOutput(target)
        given = cut(tensor, output.add, output)
        output.watch(given)
        self._outputs.setdefault(target.piece, []).append(output)
        return given

    def target(self, tensor: torch.Tensor) -> Add:
        """Returns what takes the gradient of a tensor that was given to a block.

        Raises:
            NotLayerMajor: its graph cannot be cut.
        """
        add, output = _cut_at(tensor.grad_fn)
        if output is not None:
            return output.add_direct
        if add is inside_block:
            return inside_block
        edge = get_gradient_edge(tensor)
        key = edge.node, edge.output_nr
        if key not in self._targets:
            self._targets[key] = Target(self.claim(edge.node), edge)
        return self._targets[key].add

    def claim_loss(self, root: Node) -> None:
        """Claims the loss's nodes, which are run back at once; nothing is claimed after them.

        Raises:
            NotLayerMajor: as :meth:`claim`.
        """
        self.claim(root, alone=True)
        self._claims.clear()  # or they keep the whole graph

    def claim(self, root: Node, *, alone: bool = False) -> int:
        """Claims the nodes that ``root`` leads back to, to be run together; returns their piece.

        ``root``: the node of a block's input, or of the loss; ``alone``: whether no other root of
        its piece may share a node with it.

        Raises:
            NotLayerMajor: some of them belong to another piece, or are inside a block.
        """
        claim = _Claim()
        others: list[_Claim] = []
        stack = [root]
        while stack:
            node = stack.pop()
            add, output = _cut_at(node)
            if add is inside_block:
                raise NotLayerMajor(
                    "a tensor that a block computes is used outside of it but is not among its "
                    "outputs (collected by a hook, or through an object)"
                )
            if output is not None:
                claim.piece = max(claim.piece, output.target.piece)
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
        """Runs the gradients of a piece on to its parameters and to the blocks before it.

        Raises:
            NotLayerMajor: see :meth:`BlockOutput.check`.
        """
        # All in one backward: autograd frees a node that it has run, so a second call that reaches
        # the same node would fail.
        due = [t for t in self._targets.values() if t.piece == piece and t.gradient is not None]
        ways = [(cast(GradientEdge, t.edge), cast(torch.Tensor, t.take())) for t in due]
        outputs = self._outputs.pop(piece, ())
        ways += [way for output in outputs if (way := output.take_pending()) is not None]
        if ways:
            torch.autograd.backward([edge for edge, _ in ways], [gradient for _, gradient in ways])
        for output in outputs:
            output.check()
            output.release()
        for key in [key for key, target in self._targets.items() if target.piece == piece]:
            del self._targets[key]

    def forget(self) -> None:
        """Makes this object keep nothing of the graph alive any more."""
        self._claims.clear()
        self._targets.clear()
        for outputs in self._outputs.values():
            for output in outputs:
                output.release()
        self._outputs.clear()


def run_back(outputs: Sequence[torch.Tensor], targets: Sequence[Target]) -> None:
    """Runs gradients that came to the outputs of a block's first pass through its second pass."""
    pairs = [(out, target.take()) for out, target in zip(outputs, targets, strict=True)]
    due = [(out, gradient) for out, gradient in pairs if gradient is not None and out.requires_grad]
    if due:
        torch.autograd.backward([out for out, _ in due], [gradient for _, gradient in due])
