"""The experiment's table and verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.layer_major.report import REFERENCE, table, verdicts


def result(kept: float, offloaded: float, difference: float = 0.001) -> dict[str, Any]:
    seconds = {
        REFERENCE: 2.0,
        "layer-major, activations: keep": kept,
        "layer-major, activations: offload": offloaded,
        "micro-batch-major": 3.0,
    }
    return {
        "options": {
            "model": "toy",
            "micro_batches": 4,
            "batch": 2,
            "seq": 8,
            "gpu_fraction": 0.0,
            "rounds": 1,
            "steps": 2,
        },
        "hardware": {"gpu": None, "cpu": "a CPU", "cores": 2, "date": "today", "commit": "abc"},
        "flops": 4e12,
        "gradients": {"micro-batch-major": difference},
        "total_seconds": 1.0,
        "modes": [
            {
                "label": label,
                "seconds": value,
                "turns": [{"seconds": value, "loss": 1.0, "gpu": {}}],
            }
            for label, value in seconds.items()
        ],
    }


@pytest.mark.parametrize(
    ("kept", "offloaded", "difference", "expected"),
    [
        (2.15, 2.15, 0.001, [True, True, True]),
        (2.17, 2.1, 0.001, [False, True, True]),
        (2.1, 2.17, 0.03, [True, False, False]),
    ],
)
def test_verdicts(kept: float, offloaded: float, difference: float, expected: list[bool]) -> None:
    assert [holds for _, _, holds in verdicts(result(kept, offloaded, difference))] == expected


def test_table_has_every_mode_and_ratio() -> None:
    text = table(result(2.1, 2.2))
    assert "| layer-major, activations: keep | 2.100 | 1.050 |" in text
    assert "| micro-batch-major | 3.000 | 1.500 |" in text
    assert text.count("| NO |") == 1
