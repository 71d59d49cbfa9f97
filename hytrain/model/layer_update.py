"""The progress of a layer's update, from its reduced gradient to weights that compute may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hytrain.model.weight_reads import WatchedParameters

Side = Literal["cpu", "gpu"]
"""Where an update is made."""
Placement = Literal["cpu", "streamed", "gpu"]
"""Where a layer's state is: on the host, updated by the update worker; on the host, but updated on
the device, piece by piece; or on the device."""


@dataclass(slots=True)
class LayerUpdate:
    """A layer's part in the current step, and what of the last one is still to be waited for.

    Attributes are read anywhere, but assigned only by the methods, each of which is one transition.
    """

    gradient: torch.Tensor | None = None
    """This rank's reduced gradient, owned here until it has left the device or been applied."""
    gradient_ready: torch.cuda.Event | None = None
    """Event behind the gradient and its norm; set once, recorded for every step."""
    weights_ready: torch.cuda.Event | None = None
    """Event behind the newest weights' copy from the host; set once, recorded per update there."""
    updated: torch.cuda.Event | None = None
    """Event behind the last update on the device, of this layer and of those updated with it."""
    sent: bool = False
    """Whether the gradient of a step that is not final yet has been sent to the update."""
    is_measured: bool = True
    """Whether the sum of the gradient's squares is queued; else it is taken together with other
    layers', when all gradients are there."""
    updated_by: Side = "cpu"
    """Side that made the newest weights; after a move it differs from ``placement`` until the next
    step."""
    gather_due: bool = False
    """Whether other ranks' shards of the newest weights are still to be gathered."""
    reads: WatchedParameters | None = None
    """Told of reads while :attr:`waited` is false; None if storage is sharded, or not set yet."""
    waited: bool = True
    """Whether the compute stream has waited for the newest weights.

    Until it has, the training copy is an old one, or being overwritten."""

    @property
    def ready(self) -> torch.cuda.Event | None:
        """The event behind the newest weights, or behind the part of them that this rank makes."""
        return self.updated if self.updated_by == "gpu" else self.weights_ready

    def send(self, gradient: torch.Tensor, *, is_measured: bool) -> None:
        """Records that the final reduced gradient goes to the update, which may begin at once."""
        self.gradient = gradient
        self.sent = True
        self.is_measured = is_measured

    def measure(self) -> None:
        """Records that the sum of the gradient's squares is queued."""
        self.is_measured = True

    def release_gradient(self) -> None:
        """Drops the gradient: it has left the device, has been applied, or has another owner."""
        self.gradient = None

    def apply(self, updated: torch.cuda.Event | None) -> None:
        """Records an update queued on the device, ``updated`` behind it; drops the gradient."""
        self.gradient = None
        self.updated = updated
        self.overwrite()

    def overwrite(self) -> None:
        """Records that the training copy is or will be overwritten: no read before a wait."""
        if self.waited:
            self.waited = False
            if self.reads is not None:
                self.reads.disallow_all()

    def wait(self) -> None:
        """Records that the compute stream has waited for the weights, or the old ones are back."""
        if not self.waited:
            self.waited = True
            if self.reads is not None:
                self.reads.allow()

    def withdraw(self) -> None:
        """Records that the step is not taken with what was sent."""
        self.sent = False

    def forget(self) -> None:
        """Drops what was sent: it is committed and about to be replaced."""
        self.sent = False
        self.gradient = None
        self.wait()

    def end_step(self, updated_by: Side) -> None:
        """Records that the step is final or skipped: new weights, or old ones, are on their way."""
        self.sent = False
        self.updated_by = updated_by
        if updated_by == "cpu":  # else :meth:`apply` has reported it
            self.overwrite()

    def make_gather_due(self, *, is_due: bool) -> None:
        """Records newer weights; ``is_due``: other ranks' shards of them are missing here."""
        self.gather_due = is_due

    def end_gather(self) -> None:
        """Records that other ranks' shards are on their way."""
        self.gather_due = False
