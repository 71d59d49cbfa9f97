"""Tells where a training pass is, block by block, and lets some blocks recompute.

A block's forward lies between its module's hooks, its backward between the gradients of its output
and of the previous block's output. The points of a pass over n blocks, in order:

    BEGIN, (ENTER, 0), (LEAVE, 0), ..., (LEAVE, n - 1), LOSS,
    (GRADIENT, n - 1), ..., (GRADIENT, 0), (GRADIENT, -1), END

(GRADIENT, i) is when the gradient of block i's output is available; -1 stands for the first block's
input, and is left out if that needs no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hytrain.model.backward_hooks import before_backward

Kind = Literal["begin", "enter", "leave", "loss", "gradient", "end"]
Point = tuple[Kind, int]

BEGIN: Point = ("begin", 0)
LOSS: Point = ("loss", 0)
END: Point = ("end", 0)


class BlockHooks:
    """Hooks on the blocks of a model, until :meth:`close`."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """``blocks``: in the order of their forwards."""
        self.tell: Callable[[Point], None] = ignore
        """Called at each point but BEGIN, LOSS and END, on the thread that reaches it."""
        self.boundary_bytes = 0
        """Bytes of the last block's inputs that need a gradient; known after a pass."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for number, block in enumerate(blocks):
            self._handles.append(
                block.register_forward_pre_hook(self._entering(number), with_kwargs=True)
            )
            self._handles.append(block.register_forward_hook(self._leaving(number)))

    def close(self) -> None:
        """Removes the hooks and stops calling :attr:`tell`. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # The callback usually holds these hooks: a cycle that would keep the model alive.
        self.tell = ignore

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            inputs = list(_with_gradient([args, kwargs]))
            self.boundary_bytes = sum(t.nbytes for t in inputs)
            if number == 0 and inputs:
                self._on_gradient(inputs[0], -1)
            self.tell(("enter", number))

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            self.tell(("leave", number))
            first = next(_with_gradient(output), None)
            if first is not None:
                self._on_gradient(first, number)

        return hook

    def _on_gradient(self, tensor: torch.Tensor, number: int) -> None:
        def hook(_: object) -> None:
            self.tell(("gradient", number))

        before_backward(tensor, hook)


def ignore(point: Point) -> None:
    """Does nothing: for passes whose points nobody records."""


def _with_gradient(value: object) -> Iterator[torch.Tensor]:
    """Tensors in nested containers that require a gradient, in order."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        for part in cast("Mapping[object, object]", value).values():
            yield from _with_gradient(part)
    elif isinstance(value, (tuple, list)):
        for part in cast("Sequence[object]", value):
            yield from _with_gradient(part)


class Recomputation:
    """Blocks that keep only their input until backward and are recomputed there."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = list(blocks)
        self._recomputes = [True] * len(self._blocks)

    def choose(self, keeps: int | None) -> None:
        """Lets all blocks recompute, except the block ``keeps``."""
        self._recomputes = [number != keeps for number in range(len(self._blocks))]

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """While this lasts, the blocks do what was chosen last."""
        own = [vars(block).get("forward") for block in self._blocks]
        for number, block in enumerate(self._blocks):
            block.forward = self._wrapped(number, block.forward)
        try:
            yield
        finally:
            for block, before in zip(self._blocks, own, strict=True):
                if before is None:
                    del block.forward
                else:
                    block.forward = before

    def _wrapped(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._recomputes[number]:
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return run
