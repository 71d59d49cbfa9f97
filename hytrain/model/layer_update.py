"""Where a layer's update has got to: from its reduced gradient to weights that compute may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hytrain.model.weight_reads import WatchedParameters

Side = Literal["cpu", "gpu"]
"""Where an update is made."""
Placement = Literal["cpu", "streamed", "gpu"]
"""Where a layer's state is: on the host, in the update worker's hands; there, but updated on the
device, piece by piece; or on the device."""


@dataclass(slots=True)
class LayerUpdate:
    """One layer's part in the current step, and what of the last one is still to be waited for.

    Attributes are read anywhere and assigned by its methods only, each of which is one transition.
    """

    gradient: torch.Tensor | None = None
    """This rank's reduced gradient, owned here until it has left the device or been applied."""
    gradient_ready: torch.cuda.Event | None = None
    """The gradient and its norm are there; set once, recorded for every step."""
    weights_ready: torch.cuda.Event | None = None
    """The newest weights have come from the host; set once, recorded for every update there."""
    updated: torch.cuda.Event | None = None
    """The last update on the device is done, of this layer and of those that it was made with."""
    sent: bool = False
    """The gradient of a step that is not final yet has been sent to the update."""
    is_measured: bool = True
    """The sum of its squares is on its way; else it is taken with others', when all are there."""
    updated_by: Side = "cpu"
    """Who made the newest weights; differs from ``placement`` after a move, until the next step."""
    gather_due: bool = False
    """Other ranks' shards of the newest weights are still to be gathered."""
    reads: WatchedParameters | None = None
    """Told of reads while :attr:`waited` is not true; None where storage is sharded, or before."""
    waited: bool = True
    """The compute stream has waited for the newest weights.

    While it has not, the training copy is an old one, or being overwritten."""

    @property
    def ready(self) -> torch.cuda.Event | None:
        """What is behind the newest weights, or the part of them that this rank makes."""
        return self.updated if self.updated_by == "gpu" else self.weights_ready

    def send(self, gradient: torch.Tensor, *, is_measured: bool) -> None:
        """The final reduced gradient is sent to the update, which may begin at once."""
        self.gradient = gradient
        self.sent = True
        self.is_measured = is_measured

    def measure(self) -> None:
        """The sum of the gradient's squares is on its way."""
        self.is_measured = True

    def release_gradient(self) -> None:
        """The gradient has left the device, has been applied, or its ownership has passed on."""
        self.gradient = None

    def apply(self, updated: torch.cuda.Event | None) -> None:
        """An update on the device is queued, with ``updated`` to follow; the gradient is let go."""
        self.gradient = None
        self.updated = updated
        self.overwrite()

    def overwrite(self) -> None:
        """The training copy will be overwritten, or is: it must not be read before a wait."""
        if self.waited:
            self.waited = False
            if self.reads is not None:
                self.reads.disallow_all()

    def wait(self) -> None:
        """The compute stream has waited for the weights, or they are the old ones again."""
        if not self.waited:
            self.waited = True
            if self.reads is not None:
                self.reads.allow()

    def withdraw(self) -> None:
        """The step is not taken with what was sent."""
        self.sent = False

    def forget(self) -> None:
        """What was sent is committed and about to be replaced."""
        self.sent = False
        self.gradient = None
        self.wait()

    def end_step(self, updated_by: Side) -> None:
        """The step is final, or skipped; new weights, or the old ones, are on their way."""
        self.sent = False
        self.updated_by = updated_by
        if updated_by == "cpu":  # else :meth:`apply` has reported it
            self.overwrite()

    def make_gather_due(self, *, is_due: bool) -> None:
        """There are newer weights; ``is_due``: other ranks' shards of them are missing here."""
        self.gather_due = is_due

    def end_gather(self) -> None:
        """Other ranks' shards are on their way."""
        self.gather_due = False
