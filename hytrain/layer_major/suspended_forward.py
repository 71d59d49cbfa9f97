"""A model's forward that stops at every block until it is given the block's output.

The loop over the blocks is in the user's model, so each forward runs in a thread of its own. One
thread runs at a time: a thread that passes control on blocks until it gets it back. So what they
share (random states, the model's switches, the gatherer) needs no lock.
"""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils import checkpoint

from hytrain.layer_major.thread_context import Autocast, Surroundings

_END_SECONDS = 30.0
"""How long a cancelled forward may take to leave the user's code."""


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A forward's stop at a block.

    Attributes:
        autocast: the autocast contexts that the caller is in.
        context: the caller's context variables.
        with_gradients: whether the caller records a graph.
        packs_tensors: whether the caller has hooks on the tensors that a graph saves. A
            checkpoint's hooks count them, and would count the block's among its own.
    """

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast
    context: contextvars.Context
    with_gradients: bool
    packs_tensors: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The return of a forward."""

    output: Any


class _Cancelled(BaseException):
    """Unwinds a forward that will not be continued."""


class _CancelOrder:
    """Given in place of a block's output to cancel the forward."""


class SuspendedForward:
    """One micro-batch's forward; used by the thread that made it, which computes the blocks."""

    _of_thread = threading.local()

    def __init__(self, forward: Callable[[], Any], device: torch.device, name: str) -> None:
        self._forward = forward
        self._device = device
        self._surroundings = Surroundings.here(device)
        self._context = contextvars.copy_context()
        self._name = name
        self._thread: threading.Thread | None = None
        self._to_forward: SimpleQueue[Any] = SimpleQueue()
        self._to_caller: SimpleQueue[BlockCall | Finished | BaseException] = SimpleQueue()

    @staticmethod
    def current() -> SuspendedForward | None:
        """The forward whose thread this is."""
        return vars(SuspendedForward._of_thread).get("forward")

    def advance(self, output: Any = None) -> BlockCall | Finished:
        """Runs the forward up to its next block, or to its end; raises what the user's code raised.

        ``output``: that of the block at which it stands; not used by the first call.
        """
        if self._thread is None:
            # A daemon: a forward that never comes back must not keep the interpreter alive.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._to_forward.put(output)
        # Blocks until the forward is at its next block: two threads must not compute at once.
        event = self._to_caller.get()
        if isinstance(event, BlockCall):
            return event
        # The event is the thread's last act but not its end: its frames still hold tensors.
        self._thread.join()
        if isinstance(event, BaseException):
            try:
                raise event
            finally:
                del event  # this frame is in its traceback: a cycle would keep all frames' tensors
        return event

    def cancel(self) -> None:
        """Ends the forward where it stands: context managers of the user's code are exited."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._to_forward.put(_CancelOrder())
        # The user's context managers must be exited before the step goes on. With a limit: the
        # user's code may catch the exception and never return.
        self._thread.join(_END_SECONDS)

    # -- the forward's own thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._to_caller.put(Finished(self._context.run(self._run_inside)))
        except BaseException as error:
            _close_checkpoints(error)
            self._to_caller.put(error)

    def _run_inside(self) -> Any:
        vars(SuspendedForward._of_thread)["forward"] = self
        with self._surroundings.applied():
            return self._forward()

    def suspend(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stops at a block; returns its output once there is one."""
        self._to_caller.put(
            BlockCall(
                index,
                args,
                kwargs,
                Autocast.here(self._device),
                contextvars.copy_context(),
                torch.is_grad_enabled(),
                _packs_tensors(),
            )
        )
        # What the caller computes with must not be kept alive by this frame.
        del args, kwargs
        output = self._to_forward.get()
        if isinstance(output, _CancelOrder):
            # Code that swallows it and calls the next block must be stopped there again.
            self._to_forward.put(output)
            raise _Cancelled
        return output


def _close_checkpoints(error: BaseException) -> None:
    """Makes checkpoints that an exception has left remove their saved-tensor hooks, in this thread.

    Before 2.13 torch leaves that to the end of a generator that the traceback keeps alive: it would
    run in whichever thread frees the exception, and remove that thread's hooks instead.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == checkpoint.__file__:
            generator = frame.f_locals.get("gen")
            if isinstance(generator, Generator):
                generator.close()


def _packs_tensors() -> bool:
    # There is no public name; torch's own checkpoint goes this way as well.
    autograd: Any = vars(torch._C)["_autograd"]  # pyright: ignore[reportPrivateUsage]
    return autograd._top_saved_tensors_default_hooks(False) is not None
