"""Launches of a host that drifts: what a profile of some length cannot know."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.solve_k import launch_drift
from experiments.solve_k.launch_drift import HEADER, Turn, measure, ratios, relative, rows


def _turns(seconds: int, speed: Any) -> list[Turn]:
    """Two a second, of two workloads, of which one takes thrice as long."""
    return [Turn(i / 2, (1e-3 * speed(i / 2), 3e-3 * speed(i / 2))) for i in range(2 * seconds + 1)]


def test_workloads_count_alike_whatever_they_take() -> None:
    turns = [Turn(0.0, (1.0, 30.0)), Turn(1.0, (3.0, 10.0))]
    assert relative(turns) == pytest.approx([1.0, 1.0])


def test_a_steady_host_is_known_from_any_window() -> None:
    found = rows(_turns(200, lambda _: 1.0))
    assert [row[0] for row in found] == ["5", "10", "20", "30", "60", "90", "120"]
    assert all(row[2:] == ["0.0%", "1.000", "1.000"] for row in found)
    assert all(len(row) == len(HEADER) for row in found)


def test_a_window_is_compared_with_the_steps_after_the_gap() -> None:
    """Half as fast from second 30 on: a window of 10 s, a gap of 20, then 36 s of steps."""
    found = ratios(_turns(80, lambda at: 1.0 if at < 30.0 else 2.0), 10.0)
    # Windows begin in seconds 0 to 14; the last one's steps end with the last turn.
    assert len(found) == 29
    assert found == pytest.approx([0.5] * 29)


def test_faster_and_slower_for_longer_than_a_profile_stays_unknown() -> None:
    """A period of twice the time from a window's middle to the steps' is the worst there is."""
    period = 2 * (2.5 + 20.0 + 18.0)
    swing = _turns(600, lambda at: 1.0 + 0.2 * math.sin(2 * math.pi * at / period))
    off = {row[0]: float(row[2].rstrip("%")) for row in rows(swing)}
    # sin's rms of 0.2 is 14 %, the steps' mean over 36 s has 7 of it, with the other sign.
    assert off["5"] == pytest.approx(23.0, abs=2.0)
    assert off["90"] < 0.6 * off["5"]


def test_short_series_have_short_profiles_only() -> None:
    assert [row[0] for row in rows(_turns(90, lambda _: 1.0))] == ["5", "10", "20", "30"]


def test_too_few_seconds_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The least that is taken has a row, of a host whose turns take a second."""
    least = int(launch_drift._LEAST_SECONDS)
    assert rows([Turn(float(i), (1e-3,)) for i in range(least)])
    command = ["launch_drift.py", "--workloads", "toy/2x16", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*command, "--seconds", str(least - 1)])
    with pytest.raises(SystemExit, match=f"--seconds {least - 1}: give {least} or more"):
        launch_drift.main()
    assert not (tmp_path / "out").exists()


def test_turns_go_on_for_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is launched: what a launch takes is given, all else is real."""
    asked: list[int] = []

    def launch_seconds(_: launch_drift.LayerBench, size: int) -> float:
        asked.append(size)
        return 0.25

    monkeypatch.setattr(launch_drift.LayerBench, "launch_seconds", launch_seconds)
    turns = measure(["toy/2x16", "toy/3x16"], torch.device("cpu"), 0.01)
    assert {turn.seconds for turn in turns} == {(0.25, 0.25)}
    assert asked == [2, 3] * len(turns)
    assert turns[-1].begin < 0.01


@pytest.mark.gpu
def test_a_gpus_host() -> None:
    turns = measure(["toy/2x16"], torch.device("cuda", 0), 1.0)
    assert len(turns) > 2
    assert all(1e-5 < turn.seconds[0] < 1.0 for turn in turns)
