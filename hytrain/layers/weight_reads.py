"""Finds weights that a model reads outside of the modules that own them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_OF_SHAPE = frozenset(
    ("__get__", "__set__", "dim", "size", "numel", "nelement", "stride", "is_contiguous",
     "is_floating_point", "type", "element_size", "ndimension", "__len__", "__repr__", "data_ptr")
)  # fmt: skip
"""Functions of a tensor that read nothing of it (the first two are every attribute's)."""
_VIEWS = frozenset(
    id(getattr(torch.Tensor, name)) for name in ("T", "mT", "H", "mH", "data", "real", "imag")
)
"""Attributes that are another tensor with the same elements, by their descriptors."""


class WeightReads(TorchFunctionMode):
    """While it is entered, tells of every weight that a function of torch is about to read.

    Modules' hooks tell of the uses that they know of; a weight that is read elsewhere (a head that
    multiplies with the embedding's, say) shows in no hook. Functions cost some microseconds more:
    a model's first pass is watched, not the later ones.
    """

    def __init__(self, layer_of: Mapping[int, int], read: Callable[[int], None]) -> None:
        """
        Args:
            layer_of: ``id(parameter)`` -> its layer.
            read: called with the layer of a parameter before it is read.
        """
        super().__init__()
        self._layer_of = layer_of
        self._read = read

    @staticmethod
    @contextmanager
    def watched_by(layer_of: Mapping[int, int], read: Callable[[int], None]) -> Generator[None]:
        """A block in which reads are told of; what torch.compile has made runs as it was written.

        A compiled function would be compiled for this block, and again for all that follow.
        Arguments are those of the class.
        """
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # whose import takes seconds
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(WeightReads(layer_of, read))
            yield

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``func``, after having told."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_view = name == "__get__" and id(getattr(func, "__self__", None)) in _VIEWS
        if name not in _OF_SHAPE or is_view:
            for value in (*args, *kwargs.values()):
                for item in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(item, torch.Tensor) and id(item) in self._layer_of:
                        self._read(self._layer_of[id(item)])
        return func(*args, **kwargs)
