"""The ceiling of a fix holds where the fix is applied in the simulation; a replay repeats a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.trace_schedule import (
    BACKWARD,
    CPU,
    D2H,
    DATA,
    FORWARD,
    GATHER,
    H2D,
    LAUNCH,
    NORM,
    REDUCE,
    SYNC,
    USER,
    Schedule,
    rewrite,
    write,
)

from hytrain.formats import trace_file as names
from hytrain.tools.trace import fixes
from hytrain.tools.trace.analysis import Analysis, analyse
from hytrain.tools.trace.graph import Graph
from hytrain.tools.trace.kinds import COMPUTE, GPU_UPDATE
from hytrain.tools.trace.load import load
from hytrain.tools.trace.replay import Replay

BOUND_BY_CPU = Schedule(layers=8, steps=6).taking(**{CPU: 2600, D2H: 300, H2D: 300})
FEW_SLOTS = replace(BOUND_BY_CPU, slots=9)
"""One gradient on its way besides those that are kept."""
BOUND_BY_COPIES = Schedule(layers=8, steps=6).taking(**{CPU: 300, D2H: 2400, H2D: 2500})
CLIPPED = Schedule(layers=8, steps=6, gpu_layers=(0,), clipped=(1, 2, 3, 4, 5, 6)).taking(
    **{CPU: 1500}
)
BOUND_BY_HOST = Schedule(layers=8, steps=6, gpu_layers=tuple(range(8))).taking(**{LAUNCH: 2600})
TWO_RANKS = Schedule(layers=6, steps=6, ranks=2).taking(**{GATHER: 600, REDUCE: 700})
UNEQUAL = replace(TWO_RANKS, gpu_layers=tuple(range(6))).fault(BACKWARD, 900, rank=1)
SYNCED = Schedule(layers=6, steps=6, gpu_layers=(0, 1), sync_line="train.py:9").taking(
    **{DATA: 700, USER: 900}
)


def run(folder: Path, schedule: Schedule) -> Analysis:
    return analyse(load(write(folder, schedule, first=2)))


def step_seconds(analysis: Analysis) -> float:
    """From last compute to last compute, of steps 3 to 6."""
    ends: dict[int, int] = {}
    for rank in analysis.ranks:
        for spans in (rank[COMPUTE], rank[GPU_UPDATE]):
            for step, end in zip(spans.step.tolist(), spans.end.tolist(), strict=True):
                ends[step] = max(end, ends.get(step, 0))
    last = [ends[step] for step in sorted(ends)]
    return (last[-1] - last[0]) / (len(last) - 1) * 1e-9


def more_layers(schedule: Schedule, number: int) -> Schedule:
    return replace(schedule, gpu_layers=tuple(range(number)))


SHARP = {
    "cores": (BOUND_BY_CPU, BOUND_BY_CPU.taking(**{CPU: 0}), fixes.CORES),
    "cores, few slots": (FEW_SLOTS, FEW_SLOTS.taking(**{CPU: 0}), fixes.CORES),
    "PCIe": (BOUND_BY_COPIES, BOUND_BY_COPIES.taking(**{D2H: 0, H2D: 0}), fixes.PCIE),
    "launches": (
        BOUND_BY_HOST,
        BOUND_BY_HOST.taking(**{LAUNCH: 0, DATA: 0, USER: 0}),
        "CUDA graphs",
    ),
    "network": (TWO_RANKS, TWO_RANKS.taking(**{GATHER: 0, REDUCE: 0}), fixes.NETWORK),
    "loading": (SYNCED, SYNCED.taking(**{DATA: 0}), fixes.LOADING),
    "user code": (SYNCED, SYNCED.taking(**{USER: 0}), fixes.USER_CODE),
}
BELOW = {
    "some cores": (BOUND_BY_CPU, BOUND_BY_CPU.taking(**{CPU: 1300}), fixes.CORES),
    "half the layers": (BOUND_BY_CPU, more_layers(BOUND_BY_CPU, 4), fixes.GPU_LAYERS),
    "all layers": (BOUND_BY_CPU, more_layers(BOUND_BY_CPU, 8), fixes.GPU_LAYERS),
    "more of some": (CLIPPED, more_layers(CLIPPED, 4), fixes.GPU_LAYERS),
    "twice the PCIe": (
        BOUND_BY_COPIES,
        *(BOUND_BY_COPIES.taking(**{D2H: 1200, H2D: 1250}), fixes.PCIE),
    ),
    "no clipping": (CLIPPED, replace(CLIPPED, clipped=()), fixes.NO_CLIPPING),
    "fewer launches": (BOUND_BY_HOST, BOUND_BY_HOST.taking(**{LAUNCH: 1300}), fixes.GRAPHS),
    "no .item()": (SYNCED, replace(SYNCED, sync_line=""), fixes.NO_SYNC),
    "equal ranks": (UNEQUAL, replace(UNEQUAL, faults={}), fixes.RANKS),
    "a quick norm": (CLIPPED, CLIPPED.taking(**{NORM: 0, SYNC: 0}), fixes.NO_CLIPPING),
}


def gains(case: tuple[Schedule, Schedule, str], folder: Path) -> tuple[float, float]:
    """What a fix wins, and its ceiling."""
    before, after, name = case
    base = run(folder / "before", before)
    (fix,) = [fix for fix in base.fixes if fix.name == name]
    won = 1.0 - step_seconds(run(folder / "after", after)) / step_seconds(base)
    assert won > 0.005 or name == fixes.NO_CLIPPING, "the pair shows nothing"
    return won, fix.gain


@pytest.mark.parametrize("name", SHARP)
def test_a_ceiling_is_reached_where_it_can_be(name: str, tmp_path: Path) -> None:
    won, ceiling = gains(SHARP[name], tmp_path)
    assert won <= ceiling + 1e-9
    assert won >= 0.8 * ceiling


@pytest.mark.parametrize("name", BELOW)
def test_a_ceiling_holds(name: str, tmp_path: Path) -> None:
    won, ceiling = gains(BELOW[name], tmp_path)
    assert won <= ceiling + 1e-9


@pytest.mark.parametrize("factor", [2, 8])
def test_the_ceiling_of_a_larger_batch_holds_for_a_token(factor: int, tmp_path: Path) -> None:
    times = BOUND_BY_CPU.times
    larger = {name: factor * times[name] for name in (FORWARD, BACKWARD)}
    base = run(tmp_path / "one", BOUND_BY_CPU)
    (fix,) = [fix for fix in base.fixes if fix.name == fixes.BATCH]
    after = step_seconds(run(tmp_path / "more", BOUND_BY_CPU.taking(**larger)))
    won = 1.0 - after / factor / step_seconds(base)
    assert 0.0 < won <= fix.gain + 1e-9


def test_cores_are_bounded_by_the_peak_of_dram(tmp_path: Path) -> None:
    """Updates of 30 MB in 2.6 ms are 11.5 GB/s: at a peak of 23 GB/s they take half."""
    bounded = replace(BOUND_BY_CPU, peaks={"dram_bytes_per_s": 30e6 / 1300e-6})
    (fix,) = [f for f in run(tmp_path / "a", bounded).fixes if f.name == fixes.CORES]
    after = run(tmp_path / "b", BOUND_BY_CPU.taking(**{CPU: 1300}))
    assert fix.step_seconds == pytest.approx(step_seconds(after), rel=1e-3)


@pytest.mark.parametrize(
    "schedule", [BOUND_BY_CPU, BOUND_BY_COPIES, CLIPPED, BOUND_BY_HOST, TWO_RANKS, UNEQUAL, SYNCED]
)
def test_a_replay_without_changes_repeats_every_span(schedule: Schedule, tmp_path: Path) -> None:
    ranks = load(write(tmp_path, schedule, first=2))
    graph = Graph(ranks)
    begins, ends = Replay(graph, {}).run()
    assert begins == {node: node.begin for node in graph.nodes}
    assert ends == {node: node.end for node in graph.nodes}


def test_a_rank_may_make_any_number_of_kernels_while_another_waits(tmp_path: Path) -> None:
    """In the other's collective: nothing that is needed of it has been looked at before."""
    many, paths = 2000, [tmp_path / f"trace_rank{rank}.json" for rank in (0, 1)]
    for rank, path in enumerate(paths):
        works = [(200 * number, 100) for number in range(many)] if rank else [(0, 50)]
        begins = 200 * many if rank else 60
        events = [
            _span(rank, names.STEPS, 0, 200 * many + 1000, step=1),
            *(_span(rank, names.GPU_COMPUTE, *work, **{"pass": "forward"}) for work in works),
            _span(
                rank, names.GPU_COMMUNICATION, begins, 200 * many + 900 - begins,
                collective="all_reduce",
            ),
        ]  # fmt: skip
        header = {"format": 1, "rank": rank, "world_size": 2, "steps": [1, 1], "layers": 1}
        content = {"traceEvents": events, "hytrain": header | {"device": "GPU"}}
        path.write_text(json.dumps(content))
    graph = Graph(load(paths))
    begins, ends = Replay(graph, {}).run()
    assert begins == {node: node.begin for node in graph.nodes}
    assert ends == {node: node.end for node in graph.nodes}


def _span(rank: int, lane: str, begin: int, length: int, **arguments: Any) -> dict[str, Any]:
    place = {"pid": rank, "tid": names.LANES.index(lane), "ts": begin, "dur": length}
    return {"ph": "X", "name": lane, "cat": names.CATEGORY[lane], "args": arguments, **place}


def _by_three_threads(path: Path) -> Path:
    """The trace with lanes for update threads: the second and third come later and end sooner."""
    first = names.LANES.index(names.CPU_ADAM)

    def thirds(event: dict[str, Any]) -> list[dict[str, Any]]:
        if event.get("cat") != names.CATEGORY[names.CPU_ADAM]:
            return [event]
        args = event["args"]
        share = {"bytes": args["bytes"] / 3, "parameters": args["parameters"] / 3, "threads": 1}
        return [
            event
            | {"ts": event["ts"] + late, "dur": event["dur"] - late - sooner, "tid": tid}
            | {"args": args | share}
            for tid, late, sooner in ((first, 0, 0), (1002, 1, 2), (1003, 2, 5))
        ]

    return rewrite(path, thirds)


@pytest.mark.parametrize(
    "schedule",
    [BOUND_BY_CPU, FEW_SLOTS, CLIPPED, replace(CLIPPED, slots=16), BOUND_BY_COPIES],
    ids=["cores", "few slots", "clipped", "clipped, slots", "copies"],
)
def test_lanes_of_threads_say_what_one_lane_says(schedule: Schedule, tmp_path: Path) -> None:
    (path,) = write(tmp_path, schedule, first=2)
    one, three = (analyse(load([p])) for p in (path, _by_three_threads(path)))
    for alone, apart in zip(one.steps[0], three.steps[0], strict=True):
        assert dict(apart.parts) == pytest.approx(dict(alone.parts), abs=100_000)
    gains = {fix.name: fix.gain for fix in one.fixes}
    assert {fix.name: fix.gain for fix in three.fixes} == pytest.approx(gains, abs=0.005)
