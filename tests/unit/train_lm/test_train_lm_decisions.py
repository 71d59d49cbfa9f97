"""Decisions about k reach the metrics file once they are made, and again once measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from decisions import DecisionLog, gather_records, no_decisions


@dataclass(frozen=True)
class Decision:
    step: int
    measured_seconds: float | None = None

    def metrics_record(self) -> dict[str, Any]:
        return {"step": self.step, "placement": {"measured_seconds": self.measured_seconds}}


class Engine:
    """Its decisions, of which the newest can be measured."""

    def __init__(self) -> None:
        self.decisions = [Decision(0)]

    def measured(self, seconds: float) -> None:
        self.decisions[-1] = dataclasses.replace(self.decisions[-1], measured_seconds=seconds)

    def read(self, since: int) -> Sequence[Decision]:
        return self.decisions[since:]


def _taken(log: DecisionLog) -> list[tuple[int, float | None]]:
    return [(r["step"], r["placement"]["measured_seconds"]) for r in log.take()]


def test_each_decision_when_made_and_when_measured() -> None:
    engine = Engine()
    log = DecisionLog(engine.read)
    assert _taken(log) == [(0, None)]
    assert _taken(log) == []
    engine.measured(0.5)
    assert _taken(log) == [(0, 0.5)]
    assert _taken(log) == []
    engine.decisions.append(Decision(4))
    assert _taken(log) == [(4, None)]
    assert _taken(log) == []


def test_measured_before_the_next_one_is_made() -> None:
    engine = Engine()
    log = DecisionLog(engine.read)
    log.take()
    engine.measured(0.5)
    engine.decisions += [Decision(4), Decision(9)]
    # In this order: a reader takes a line for the end of all that comes behind its step.
    assert _taken(log) == [(0, 0.5), (4, None), (9, None)]
    engine.measured(0.25)
    assert _taken(log) == [(9, 0.25)]


def test_all_at_once() -> None:
    engine = Engine()
    engine.measured(0.5)
    engine.decisions.append(Decision(4))
    log = DecisionLog(engine.read)
    assert _taken(log) == [(0, 0.5), (4, None)]
    assert _taken(log) == []


@pytest.mark.parametrize("measured", [None, 0.5])
def test_resumed_run_leaves_the_history_out(measured: float | None) -> None:
    engine = Engine()
    engine.decisions = [Decision(0, 1.0), Decision(4, measured), Decision(10)]
    log = DecisionLog(engine.read)
    log.skip_history()
    assert _taken(log) == [(10, None)]
    engine.measured(0.25)
    assert _taken(log) == [(10, 0.25)]


def test_resumed_without_history() -> None:
    log = DecisionLog(Engine().read)
    log.skip_history()
    assert _taken(log) == [(0, None)]


def test_an_engine_that_decides_nothing() -> None:
    log = DecisionLog(no_decisions)
    log.skip_history()
    assert log.take() == []


@pytest.mark.parametrize(("rank", "expected"), [(0, [1, 2]), (1, [])])
def test_rank_0_gets_those_of_the_others(
    monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[int]
) -> None:
    own = Decision(3).metrics_record()

    def all_gather(gathered: list[Any], mine: Any) -> None:
        assert mine == ([{"rank": rank, **own}] if rank else [])
        gathered[:] = [[], [{"rank": 1, **own}], [{"rank": 2, **own}]]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    assert [r["rank"] for r in gather_records([own], rank)] == expected
