"""A decision as it is written to metrics files and checkpoints, and read by people's tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from hytrain.cost.step import StepCosts
from hytrain.errors import PlacementError
from hytrain.formats.record import checked
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import Bounds

Decider = Literal["user", "start", "training"]
"""Who decides: the user, by ``gpu_fraction``; else hytrain, before the first step or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision about the number of GPU layers, with all that it was made from.

    Attributes:
        step: the step after which it was made; 0 for the one before the first.
        gpu_layers_before: as it was.
        gpu_layers_target: as it shall be; the same where nothing moves.
        reason: why, for people.
        decider: who decided.
        predicted_seconds: the step at the target; None where nothing has been measured yet.
        measured_seconds: the step as it turned out to be; None until then.
        closed_form_k: the closed form's share of GPU layers; None where nothing has been measured.
        bounds: which numbers fit in memory with its reserves; a user may go beyond them.
        costs: what each layer takes; None where nothing has been measured yet.
        layer_bytes: the layers' sizes, in forward order.
        limits: what the rank may use.
        staging_bytes: pinned staging on the host.
        save_bytes: of the host, that a save takes: whole master weights leave them where split ones
            would do.
        corrections: seconds that measured steps add to what ``costs`` predict for 0..L GPU layers;
            empty where nothing was corrected.
        host_master_reason: which master weights of layers on the host are whole and which split,
            in words, where those on the GPU are split; else empty.
    """

    step: int
    gpu_layers_before: int
    gpu_layers_target: int
    num_layers: int
    reason: str
    decider: Decider = "training"
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    closed_form_k: float | None = None
    bounds: Bounds
    costs: StepCosts | None = None
    layer_bytes: tuple[LayerBytes, ...]
    limits: MemoryLimits
    staging_bytes: int = 0
    save_bytes: int = 0
    corrections: tuple[float, ...] = ()
    host_master_reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return TypeAdapter(Decision).dump_python(self, mode="json")

    def metrics_record(self) -> dict[str, Any]:
        """One line of a metrics file."""
        return {"kind": "decision", "step": self.step, "placement": self.to_json()}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Decision:
        """The inverse of :meth:`to_json`.

        Raises:
            PlacementError: the record is of another form, or a value is out of its range.
        """
        return checked(Decision, record, "a placement decision", PlacementError)
