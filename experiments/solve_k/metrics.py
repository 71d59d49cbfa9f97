"""What `hytrain explain` reads: decisions and timed steps as lines of a metrics file."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common.records import Json
from hytrain.placement.records import Decision


def metrics_lines(decisions: Sequence[Decision], rows: Sequence[Json]) -> list[Json]:
    """In the order of steps; a decision made after a step comes before the next step.

    Args:
        decisions: of the solver.
        rows: of timed steps: "step", "step_seconds", "gpu_fraction".
    """
    steps = [
        {"step": row["step"], "step_s": row["step_seconds"], "k": row["gpu_fraction"]}
        for row in rows
    ]
    lines = [*(d.metrics_record() for d in decisions), *steps]
    return sorted(lines, key=lambda line: (line["step"], "placement" in line))
