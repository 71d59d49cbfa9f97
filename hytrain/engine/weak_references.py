"""What parameters are given of an engine: references that keep none alive.

Autograd's nodes refer to parameters, unseen by Python, and the engine keeps those nodes. An engine
that is reachable from its parameters would be a cycle that is never freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import nn

from hytrain.errors import EngineClosedError


def _gone() -> EngineClosedError:
    return EngineClosedError(
        "a parameter was asked for state of an engine that is gone: keep the engine that "
        "hytrain.initialize returns as long as its model is used"
    )


class _Unpickled:
    """None in every copy and file: parameters are pickled with all of their attributes."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return NoneType, ()


class WeakPart(_Unpickled):
    """A part of the engine, with its attributes."""

    def __init__(self, part: object) -> None:
        self._part = weakref.ref(part)

    def __getattr__(self, name: str) -> Any:
        """
        Raises:
            EngineClosedError: the engine is gone.
        """
        part = self._part()
        if part is None:
            raise _gone()
        return getattr(part, name)


class WeakCall(_Unpickled):
    """A method of a part of the engine that is called with a parameter first."""

    def __init__(self, method: Callable[..., Any], parameter: nn.Parameter) -> None:
        self._method = weakref.WeakMethod(method)
        self._parameter = weakref.ref(parameter)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """
        Raises:
            EngineClosedError: the engine is gone.
        """
        method, parameter = self._method(), self._parameter()
        if method is None or parameter is None:
            raise _gone()
        return method(parameter, *arguments, **named)
