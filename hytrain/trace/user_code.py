"""Records waits of the user's code, between and in passes: for data, and for the device.

While steps are recorded, torch's DataLoader and the calls by which a program waits for the device
are replaced by ones that are timed; then the originals are restored.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils.data import dataloader

from hytrain.formats import trace_file as names
from hytrain.trace.recorder import Recorder

_OURS = ("hytrain", "deepspeed")
_LIBRARIES = ("torch", "accelerate", "transformers", "contextlib", "functools")
"""Libraries whose waits count as those of the line that has called them."""
_TENSOR_WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
_Item = TypeVar("_Item")


def watch_user_code(recorder: Recorder, device: torch.device, *, waits: bool) -> Callable[[], None]:
    """Records data loading and waits for the device.

    ``device``: the one for whose tensors waits are recorded; ``waits``: whether there is anything
    to wait for: a CPU has computed when a call returns.

    Returns:
        A function that restores the original calls.
    """
    undo = ExitStack()
    loader = dataloader._BaseDataLoaderIter  # pyright: ignore[reportPrivateUsage]
    undo.callback(_replace(loader, "__next__", lambda call: _loading(call, recorder)))
    for name in _TENSOR_WAITS if waits else ():
        watched = functools.partial(
            _wait, shown=f".{name}()", recorder=recorder, device_type=device.type
        )
        undo.callback(_replace(torch.Tensor, name, watched))
    if device.type == "cuda":
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            shown = f"{owner.__name__}.synchronize()"
            watched = functools.partial(_wait, shown=shown, recorder=recorder)
            undo.callback(_replace(owner, "synchronize", watched))
    return undo.close


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    had, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrap(old))

    def put_back() -> None:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)  # a base class has it

    return put_back


def _loading(call: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(call)
    def load(*arguments: Any) -> Any:
        with recorder.phase(names.PHASE_DATA):
            return call(*arguments)

    return load


def _wait(
    call: Callable[..., Any], shown: str, recorder: Recorder, device_type: str | None = None
) -> Callable[..., Any]:
    """The call, timed if the user makes it; a method of tensors only for those on a device of
    ``device_type``."""

    @functools.wraps(call)
    def wait(*arguments: Any, **named: Any) -> Any:
        is_meant = device_type is None or arguments[0].device.type == device_type
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        line = user_line(caller) if is_meant else None
        if line is None:
            return call(*arguments, **named)
        with recorder.host_wait(shown, line):
            return call(*arguments, **named)

    return wait


def user_line(frame: FrameType | None) -> str | None:
    """The line of a user's own call, "train.py:31"; None if hytrain or DeepSpeed makes it.

    ``frame``: the caller's.
    """
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _OURS:
            return None
        if package not in _LIBRARIES:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def timed_loading(items: Iterator[_Item], recorder: Recorder) -> Iterator[_Item]:
    """Yields the user's items; the time that each takes is recorded as data loading."""
    while True:
        with recorder.phase(names.PHASE_DATA):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item
