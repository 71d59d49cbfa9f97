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
        gpu_layers_before: the number before it.
        gpu_layers_target: the number to move to; the same if nothing moves.
        reason: why, for people.
        decider: who decided.
        predicted_seconds: the step at the target; None if nothing has been measured yet.
        measured_seconds: the step as measured afterwards; None until then.
        closed_form_k: the closed form's share of GPU layers; None if nothing has been measured.
        bounds: which numbers fit in memory with its reserves; a user may go beyond them.
        costs: each layer's times; None if nothing has been measured yet.
        layer_bytes: the layers' sizes, in forward order.
        limits: the memory that the rank may use.
        staging_bytes: pinned staging on the host.
        save_bytes: host bytes that a save takes: master weights that could be split are whole only
            if these stay free.
        corrections: seconds that measured steps add to what ``costs`` predict for 0..L GPU layers;
            empty if nothing was corrected.
        host_master_reason: which master weights of layers on the host are whole and which split,
            in words, if those on the GPU are split; else empty.
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
        """The decision as plain JSON values."""
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
