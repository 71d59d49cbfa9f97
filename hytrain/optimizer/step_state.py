"""The step that is not final yet: all its flags, set and read in one place."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from hytrain.errors import AbortedBackwardError


class StepState:
    """Where the passes between two optimizer steps have got to.

    Every attribute is assigned here only; each method is one transition.
    """

    def __init__(self) -> None:
        self.begun = False
        """The hyper-parameters of this step's updates have been read: updates may begin."""
        self.is_reducing = False
        """The current backward passes layers on as they become final."""
        self.was_reduced = False
        """One of the backward passes since the last step did."""
        self.has_gradients = False
        """A backward has begun since the last step, and what it left was not discarded."""
        self.sums_over_ranks = False
        """Gradients of this step are summed over ranks, not averaged: losses are weighted."""
        self.by_layer = False
        """The micro-batches of this step go through the layers together."""
        self.was_aborted = False
        """The last backward did not finish, and no other has begun since."""
        self.was_dropped = False
        """zero_grad() has discarded the gradients, and no backward has begun since."""
        self.graph_task = -1
        """The autograd graph task of the current backward; -1: not known."""
        self.for_inputs = False
        """A backward runs that gives no trained parameter a gradient: it is no part of a step."""
        self.is_announced = False
        """The current backward was begun by engine.backward(): it is a micro-batch's."""

    # -- backward --------------------------------------------------------------------------------

    def begin_backward(self, *, reduces: bool) -> None:
        """A backward begins; ``reduces``: it passes layers on as they become final."""
        self.graph_task = -1
        self.is_announced = False
        self.was_aborted = False
        self.was_dropped = False
        self.is_reducing = reduces
        self.was_reduced |= reduces
        self.has_gradients = True

    def begin_for_inputs(self) -> None:
        """A backward begins that leaves the step as it is."""
        self.for_inputs = True

    def end_for_inputs(self) -> None:
        """It is over, or was given up."""
        self.for_inputs = False

    def announce(self) -> None:
        """The backward that has begun is engine.backward()'s."""
        self.is_announced = True

    def enter_graph(self, task: int) -> None:
        """The backward that has begun runs in this autograd graph task."""
        self.graph_task = task

    # -- the update ------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Updates may begin from here on."""
        self.begun = True

    def end(self) -> None:
        """The step is final, or skipped."""
        self.begun = False
        self.was_reduced = False
        self.has_gradients = False

    # -- steps that do not come to their end -----------------------------------------------------

    def discard(self) -> None:
        """Nothing of the step is left."""
        self.end()
        self.was_aborted = False

    def abort(self) -> None:
        """A backward, or the step, has ended with an exception; what it left is discarded."""
        self.was_aborted = True

    def refuse_aborted(self) -> None:
        """There is no step before another backward.

        Raises:
            AbortedBackwardError: the last backward ended with an exception.
        """
        if self.was_aborted:
            raise AbortedBackwardError(
                "the last micro-batch did not finish, so there is no step to take: its gradients, "
                "and those of the step's earlier ones, were discarded; weights and optimizer "
                "state are those of the last step. Repeat the step from the forward of its first "
                "micro-batch"
            )

    def drop(self) -> None:
        """zero_grad() has discarded the gradients."""
        self.discard()
        self.was_dropped = True

    def skip_dropped(self) -> bool:
        """Whether step() has nothing to update with; if so, it is over."""
        was_dropped, self.was_dropped = self.was_dropped, False
        return was_dropped

    # -- a step over a global batch, and layer by layer ------------------------------------------

    @contextmanager
    def summing_over_ranks(self) -> Generator[None]:
        """While it lasts, gradients are summed over ranks."""
        self.sums_over_ranks = True
        try:
            yield
        finally:
            self.sums_over_ranks = False

    def begin_batch(self) -> None:
        """A step over a global batch begins; a rank without samples makes no backward."""
        self.was_aborted = False

    def enter_layers(self) -> None:
        """Several forwards, or the backward passes of several micro-batches, count as one."""
        self.by_layer = True

    def leave_layers(self) -> None:
        """What follows is one forward or backward at a time."""
        self.by_layer = False
