"""A decision as it is written to metrics files and checkpoints, and read by people's tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hytrain.errors import PlacementError
from hytrain.placement.costs import LayerBytes, MemoryLimits, StepCosts
from hytrain.placement.memory import Bounds


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about the number of GPU layers, with all that it was made from.

    Attributes:
        step: the step after which it was made; 0 for the one before the first.
        gpu_layers_before: as it was.
        gpu_layers_target: as it shall be; the same where nothing moves.
        num_layers: L.
        reason: why, for people.
        predicted_seconds: the step at the target; None where nothing has been measured yet.
        measured_seconds: the step as it turned out to be; None until then.
        closed_form_k: the closed form's share of GPU layers; None where nothing has been measured.
        bounds: which numbers fit.
        costs: what each layer takes; None where nothing has been measured yet.
        layer_bytes: the layers' sizes, in forward order.
        limits: what the rank may use.
        staging_bytes: pinned staging on the host.
        corrections: seconds that measured steps add to what ``costs`` predict for 0..L GPU layers;
            empty where nothing was corrected.
    """

    step: int
    gpu_layers_before: int
    gpu_layers_target: int
    num_layers: int
    reason: str
    predicted_seconds: float | None
    measured_seconds: float | None
    closed_form_k: float | None
    bounds: Bounds
    costs: StepCosts | None
    layer_bytes: tuple[LayerBytes, ...]
    limits: MemoryLimits
    staging_bytes: int = 0
    corrections: tuple[float, ...] = ()

    def with_measured(self, seconds: float) -> Decision:
        """The same decision, once its step has been measured."""
        return replace(self, measured_seconds=seconds)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        record = asdict(self)
        record["layer_bytes"] = list(record["layer_bytes"])
        record["corrections"] = list(record["corrections"])
        record["limits"]["gpu_base_at"] = list(self.limits.gpu_base_at)
        record["costs"] = None if self.costs is None else self.costs.to_json()
        return record

    def metrics_record(self) -> dict[str, Any]:
        """One line of a metrics file."""
        return {"step": self.step, "placement": self.to_json()}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Decision:
        """The inverse of :meth:`to_json`.

        Raises:
            PlacementError: the record is of another form, or a value is out of its range.
        """
        try:
            costs, limits = record["costs"], dict(record["limits"])
            limits["gpu_base_at"] = tuple(limits["gpu_base_at"])
            fields: dict[str, Any] = dict(record)
            fields["bounds"] = Bounds(**record["bounds"])
            fields["corrections"] = tuple(record.get("corrections", ()))  # older ones have none
            fields["costs"] = None if costs is None else StepCosts.from_json(costs)
            fields["layer_bytes"] = tuple(LayerBytes(**layer) for layer in record["layer_bytes"])
            fields["limits"] = MemoryLimits(**limits)
            return Decision(**fields)
        except PlacementError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise PlacementError(f"not a record of a placement decision: {error}") from error
