"""How far the passes between two optimizer steps have come: a phase, and what may follow it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from hytrain.errors import AbortedBackwardError


class StepPhase(Enum):
    """How far the next optimizer step has come."""

    IDLE = "idle"
    """No gradient since the last step."""
    BACKWARD = "backward"
    """Autograd runs a micro-batch's backward or, layer-major, that of all of them."""
    OPEN = "open"
    """Autograd has finished; layers of this micro-batch may not have been consumed."""
    ACCUMULATED = "accumulated"
    """Gradients of whole micro-batches are kept, or have been sent to their updates."""
    INPUTS = "inputs"
    """A backward runs that gives no trained parameter a gradient; the phase before it resumes."""
    ABORTED = "aborted"
    """A backward, or the step, ended with an exception and its gradients were discarded."""
    DROPPED = "dropped"
    """zero_grad() has discarded the gradients: step() would have nothing to update with."""
    CLOSED = "closed"
    """The engine was destroyed."""


_NEW = (StepPhase.IDLE, StepPhase.ABORTED, StepPhase.DROPPED)
"""Phases in which there is no gradient."""
_FOLLOWS: dict[StepPhase, tuple[StepPhase, ...]] = {
    StepPhase.IDLE: (*_NEW, StepPhase.BACKWARD, StepPhase.INPUTS),
    StepPhase.BACKWARD: (StepPhase.OPEN, *_NEW),
    StepPhase.OPEN: (StepPhase.ACCUMULATED, StepPhase.INPUTS, *_NEW),
    StepPhase.ACCUMULATED: (StepPhase.BACKWARD, StepPhase.INPUTS, *_NEW),
    StepPhase.INPUTS: (StepPhase.OPEN, StepPhase.ACCUMULATED, *_NEW),
    StepPhase.ABORTED: (*_NEW, StepPhase.BACKWARD, StepPhase.INPUTS),
    StepPhase.DROPPED: (*_NEW, StepPhase.BACKWARD, StepPhase.INPUTS),
    StepPhase.CLOSED: (),
}
"""What a phase may be followed by; any but CLOSED by CLOSED as well."""


@dataclass(slots=True)
class Backward:
    """The current backward, or the last one since the last step.

    Attributes:
        reduces: it passes layers on as they become final.
        layer_major: several micro-batches go back through the layers together.
        micro_batches: how many, at least 1.
        graph_task: autograd's graph task, -1 if unknown.
        is_announced: it was begun by engine.backward(), so it is a micro-batch's.
    """

    reduces: bool = False
    layer_major: bool = False
    micro_batches: int = 1
    graph_task: int = -1
    is_announced: bool = False


class StepState:
    """The phase, and what is known of its step.

    Every attribute is assigned here only; each method is one transition, or begins or ends a mode.
    """

    def __init__(self) -> None:
        self.phase = StepPhase.IDLE
        self._resumed = StepPhase.IDLE  # after INPUTS
        self.backward = Backward()
        self.begun = False
        """Whether hyper-parameters of this step's updates have been read: some may have begun.

        False between the micro-batches of a step, when there are gradients and no updates."""
        self.sums_over_ranks = False
        """A mode: gradients are summed over ranks, not averaged; losses are weighted."""
        self.layer_major = False
        """A mode: several forwards, or backward passes of several micro-batches, count as one."""

    @property
    def in_backward(self) -> bool:
        """Whether a backward of the step runs."""
        return self.phase is StepPhase.BACKWARD

    @property
    def is_open(self) -> bool:
        """Whether a backward has begun and its gradients have not all been consumed."""
        return self.phase is StepPhase.BACKWARD or self.phase is StepPhase.OPEN

    @property
    def for_inputs(self) -> bool:
        """Whether a backward runs that is not part of a step."""
        return self.phase is StepPhase.INPUTS

    @property
    def is_closed(self) -> bool:
        """Whether every pass is refused from now on."""
        return self.phase is StepPhase.CLOSED

    @property
    def has_gradients(self) -> bool:
        """Whether a step is under way: a backward has begun since the last one, and what it left
        was not discarded."""
        phase = self._resumed if self.phase is StepPhase.INPUTS else self.phase
        return phase not in _NEW

    def _enter(self, phase: StepPhase) -> None:
        if self.phase is StepPhase.CLOSED:
            return  # late reports of passes that were cut off change nothing
        assert phase in _FOLLOWS[self.phase], f"{phase} after {self.phase}"
        self.phase = phase

    # -- backward --------------------------------------------------------------------------------

    def begin_backward(self, *, reduces: bool, micro_batches: int = 1) -> None:
        """Begins a backward of the step: one micro-batch's, or layer-major that of several."""
        self._enter(StepPhase.BACKWARD)
        self.backward = Backward(reduces, self.layer_major, micro_batches)

    def announce(self) -> None:
        """Marks the backward that has begun as engine.backward()'s."""
        self.backward.is_announced = True

    def enter_graph(self, task: int) -> None:
        """Notes the autograd graph task in which the backward that has begun runs."""
        self.backward.graph_task = task

    def end_backward(self) -> None:
        """Notes that autograd has finished, unless it had before."""
        if self.phase is StepPhase.BACKWARD:
            self._enter(StepPhase.OPEN)

    def complete(self) -> None:
        """Notes that no more gradients of the backward that has ended are waited for."""
        self._enter(StepPhase.ACCUMULATED)

    def begin_inputs(self) -> None:
        """Begins a backward that leaves the step as it is."""
        self._resumed = self.phase
        self._enter(StepPhase.INPUTS)

    def end_inputs(self) -> None:
        """Ends that backward, which is over or was given up."""
        self._enter(self._resumed)

    # -- the update ------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Lets updates begin from here on."""
        self.begun = True

    def end(self) -> None:
        """Ends the step: it is final, or skipped, or nothing of it is left."""
        self._enter(StepPhase.IDLE)
        self.begun = False
        self.backward = Backward()

    # -- steps that do not come to their end -----------------------------------------------------

    def abort(self) -> None:
        """Notes that a backward, or the step, raised an exception; what it left is discarded."""
        self._enter(StepPhase.ABORTED)

    def refuse_aborted(self) -> None:
        """Refuses a step between an aborted backward and the next one.

        Raises:
            AbortedBackwardError: the last backward ended with an exception.
        """
        if self.phase is StepPhase.ABORTED:
            raise AbortedBackwardError(
                "the last micro-batch did not finish, so there is no step to take: its gradients, "
                "and those of the step's earlier ones, were discarded; weights and optimizer "
                "state are those of the last step. Repeat the step from the forward of its first "
                "micro-batch"
            )

    def drop(self) -> None:
        """Notes that zero_grad() has discarded the gradients."""
        self._enter(StepPhase.DROPPED)

    def skip_dropped(self) -> bool:
        """Whether step() has nothing to update with; if so, the step is over."""
        was_dropped = self.phase is StepPhase.DROPPED
        if was_dropped:
            self._enter(StepPhase.IDLE)
        return was_dropped

    def begin_batch(self) -> None:
        """Begins a step over a global batch; a rank without samples runs no backward in it."""
        if self.phase in _NEW:
            self._enter(StepPhase.IDLE)
        if not self.is_open:
            self.backward = Backward()  # what was reduced before is not part of its reductions

    def close(self) -> None:
        """Enters the last phase: the engine is destroyed."""
        self.phase = StepPhase.CLOSED

    # -- modes -----------------------------------------------------------------------------------

    @contextmanager
    def summing_over_ranks(self) -> Generator[None]:
        """Context in which gradients are summed over ranks."""
        self.sums_over_ranks = True
        try:
            yield
        finally:
            self.sums_over_ranks = False

    @contextmanager
    def layer_by_layer(self) -> Generator[None]:
        """Context in which several forwards, or backward passes of several micro-batches, count as
        one; a backward that is still open after it counts as aborted."""
        self.layer_major = True
        try:
            yield
        finally:
            self.layer_major = False
