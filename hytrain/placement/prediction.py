"""The step that placements are solved with; see :mod:`hytrain.cost`."""

from __future__ import annotations

from hytrain.cost.prediction import HOST_BOUND_SHARE, Candidate, Prediction, predict

__all__ = ["HOST_BOUND_SHARE", "Candidate", "Prediction", "predict"]
