"""The convergence experiment: how curves are held against each other, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.convergence import report
from experiments.convergence.cases import (
    HYTRAIN,
    ZERO2,
    ZERO2_EAGER,
    Case,
    all_cases,
    ds_config,
)
from experiments.convergence.curves import (
    WINDOW,
    largest_difference,
    last_common_step,
    read_curve,
    smoothed,
)
from experiments.convergence.run import furthest


def test_cases_differ_in_what_is_compared_alone() -> None:
    cases = all_cases()
    assert len({case.label for case in cases}) == len(cases)
    sections: set[tuple[str, int]] = set()
    for case in cases:
        config = ds_config(case, micro_batch=4, cpu_threads=1, on_gpu=True)
        assert ("hytrain" in config) is (case.engine == "hytrain")
        assert config["gradient_clipping"] == 1.0
        params = config["optimizer"]["params"]
        assert (params["lr"], params["betas"]) == (6e-4, [0.9, 0.999])
        if "hytrain" in config:
            sections.add((config["hytrain"]["moments"], config["hytrain"]["moments_seed"]))
    assert sections == {
        (moments, seed) for moments in ("fp32", "bf16", "8bit") for seed in range(3)
    }


def test_a_curve_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_curve(path).losses == []
    lines: list[Any] = [
        {"step": 0, "eval_loss": 5.0},
        {"step": 1, "loss": 4.000004, "k": 0.5},
        {"step": 0, "placement": {"reason": "none"}},
        {"step": 2, "loss": None, "k": 1.0},
        {"step": 2, "eval_loss": 3.5},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    curve = read_curve(path)
    assert curve.losses[0] == 4.0
    assert np.isnan(curve.losses[1])
    assert (curve.held_out, curve.k) == ({"0": 5.0, "2": 3.5}, 1.0)


def test_smoothed_differences() -> None:
    noise = np.random.default_rng(0).normal(size=500)
    one, other = 3.0 + noise, 3.0 + noise + 0.25 * (np.arange(500) >= 300)
    assert smoothed(one)[7] == pytest.approx(one[7 : 7 + WINDOW].mean())
    largest, mean = largest_difference(one.tolist(), other.tolist())
    assert largest == pytest.approx(0.25)
    assert mean == pytest.approx(0.25 * (101 + 49.5) / 401, rel=0.02)
    with pytest.raises(ValueError, match="fewer than the 100"):
        largest_difference(one.tolist(), [1.0] * 99)
    assert last_common_step([{"0": 1.0, "500": 1.0, "1000": 1.0}, {"0": 1.0, "500": 1.0}]) == 500


def _training(case: Case, offset: float, steps: int = 400) -> dict[str, Any]:
    losses = [4.0 - 0.005 * step + offset for step in range(steps)]
    held_out = {str(step): 4.0 - 0.005 * step + offset for step in range(0, steps + 1, 100)}
    about = {"kind": case.kind, "seed": case.seed, "status": "ok" if steps == 400 else "stopped"}
    return {**about, "losses": losses, "held_out": held_out, "k": None}


def test_the_tables_of_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = {ZERO2: 0.0, ZERO2_EAGER: 0.005, HYTRAIN: 0.001}
    trainings = [
        _training(case, offsets.get(case.kind, 0.002) + 0.1 * case.seed,
                  300 if case.kind == ZERO2 else 400)
        for case in all_cases()
    ]  # fmt: skip
    result = {"hardware": {"gpu": None}, "options": {"model": "m"}, "trainings": trainings}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert f"| {ZERO2} / {ZERO2_EAGER} | 1 | 300 | 0.0050 | 0.0050 |" in text
    assert f"| {HYTRAIN} / {ZERO2} | 0 | 300 | 0.0010 | 0.0010 |" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {HYTRAIN}, 8bit"))
    assert row.endswith("| 0.2000 | +0.0010 | 0.0010 |")
    assert f"{ZERO2}, seed 0: stopped after 300" in text
    assert (tmp_path / "convergence.png").stat().st_size > 10_000


def test_a_run_goes_on_with_another_s_trainings() -> None:
    one, two = all_cases()[:2]
    earlier = [_training(one, 0.0), _training(two, 0.0, 300)]
    found = furthest([*earlier, _training(two, 0.0, 200)])
    assert [len(training["losses"]) for training in found] == [400, 300]
    found = furthest([*earlier, _training(two, 0.0, 400)])
    assert [len(training["losses"]) for training in found] == [400, 400]
