"""The real path through measuring processes, on the CPU at toy size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest

from experiments.common import records
from experiments.common.records import Entry, Json
from experiments.solve_k import plans, run
from experiments.solve_k.bench import Bench
from experiments.solve_k.metrics import metrics_lines
from experiments.solve_k.parts import Settings, entries_of
from experiments.solve_k.plans import lowered_cap, predicted_here
from experiments.solve_k.recorder import HOST_MEMORY_LOW
from experiments.solve_k.summary import measured_points, summary
from hytrain.placement.costs import LayerCosts, StepCosts
from hytrain.placement.memory import gpu_reserve
from hytrain.placement.prediction import predict
from hytrain.tools.explain.history import read_history

pytestmark = pytest.mark.experiment

GIB = 2**30

ARGUMENTS = [
    *["--part", "sweep", "--device", "cpu", "--model", "toy", "--layers", "4"],
    *["--batch", "2", "--seq", "16", "--least-settling", "12"],
]

SETTINGS = Settings(
    clip=1.0,
    caps=(),
    few_threads=(1,),
    layers=4,
    checkpointing="part",
    section={},
    least_settling=12,
    host_floor_gib=0.01,
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def part(out: Path) -> Json:
    """A sweep, a process that breaks half-way, and a checkpointed model on one core."""
    options = run.parse([*ARGUMENTS, "--out", str(out)])
    sweep = entries_of("sweep", SETTINGS)[0]
    broken = Entry(
        label="broken",
        system="hytrain",
        clip=1.0,
        options={**sweep.options, "section": {"gpu_fractoin": 1}},
    )
    big = entries_of("largest", SETTINGS)[0]
    big.options["cores"] = 1
    returned = run.run_part(options, [sweep, broken, big], "a command")
    written = records.read_json(out / "part_sweep.json")
    # As a file has it: tuples are lists there.
    assert written == json.loads(json.dumps(returned))
    return written


def test_the_sweep_measures_every_fixed_k_and_the_limit_twice(part: Json) -> None:
    record = part["records"][0]
    assert record["status"] == records.OK, record["log"]
    result = record["result"]
    assert result["reference"]["step_seconds"] > 0
    assert result["reference_again"]["step_seconds"] > 0
    assert result["settling"]["is_settled"]
    solved = result["solved"]["gpu_layers"]
    assert {p["gpu_layers"] for p in measured_points(result)} == {0, 1, 2, 3, 4, 5, 6}
    assert result["points"][-1]["gpu_layers"] == solved
    assert "left_out" not in result


def test_predictions_are_made_at_every_point(part: Json) -> None:
    result = part["records"][0]["result"]
    for point in measured_points(result):
        costs = StepCosts.from_json(point["costs"])
        assert point["predicted_seconds"] == list(predict(costs).step_seconds)
    assert len(result["solved"]["predicted_seconds"]) == 7


def test_the_metrics_can_be_explained(part: Json, out: Path) -> None:
    history = read_history((out / "sweep_sweep" / "metrics.jsonl").read_text())
    assert len(history.decisions) == len(part["records"][0]["result"]["settling"]["decisions"])
    # The first steps with a k do not count as steady; eight were timed.
    assert history.measured_at(6) is not None


def test_what_a_broken_process_measured_is_kept(part: Json) -> None:
    record = part["records"][1]
    assert record["status"] == records.FAILED
    assert record["result"]["reference"]["step_seconds"] > 0
    assert "gpu_fractoin" in record["result"]["error"]
    assert any("gpu_fractoin" in line for line in record["log"])


def test_a_large_model_runs_checkpointed_on_few_cores(part: Json) -> None:
    record = part["records"][2]
    assert record["status"] == records.OK, record["log"]
    result = record["result"]
    assert result["checkpointing"]
    assert len(result["cores"]) == 1
    assert result["solved"]["plain_tflops"] > 0
    assert result["host_available_least_bytes"] > 0
    assert set(result["host"]) == {"before building", "engine built", "k solved"}


def test_the_summary_has_a_line_for_each_point(part: Json) -> None:
    text = "\n".join(summary(part))
    assert "broken: failed" in text
    assert text.count("  fixed ") == len(measured_points(part["records"][0]["result"]))


@pytest.mark.parametrize("peak", [5 * GIB, 24 * GIB, 25 * GIB, 60 * GIB])
def test_a_lowered_cap_takes_half_of_the_reserve_away(peak: int) -> None:
    cap = lowered_cap(peak)
    assert cap - peak == pytest.approx(gpu_reserve(None, int(cap)) / 2)


class FakeBench:
    """k follows a cap at once: 10 layers of 3 GiB, 34 GiB beside them."""

    def __init__(self, total: int | None) -> None:
        self.options: Json = {"settle": {}}
        self.recorder = self
        self.result: Json = {}
        self.cap = total
        self.total = total

    def start(self) -> None: ...

    def note_host(self, moment: str) -> None: ...

    def write_metrics(self) -> None: ...

    def empty_cache(self) -> None: ...

    def gpu_total(self) -> int | None:
        return self.total

    def put(self, **values: Any) -> None:
        self.result.update(values)

    def append(self, key: str, value: Any) -> None:
        self.result.setdefault(key, []).append(value)

    def settle(self, **options: int) -> Json:
        return {"decisions": []}

    def timed(self, **options: int) -> Json:
        if self.cap is None:
            return {"gpu": {}, "gpu_layers": 10}
        free = self.cap - gpu_reserve(None, int(self.cap)) - 34 * GIB
        layers = min(10, int(free // (3 * GIB)))
        return {
            "gpu": {"peak_allocated_bytes": (34 + 3 * layers) * GIB},
            "gpu_layers": layers,
        }


def test_the_cap_is_lowered_twice_and_each_time_the_reserve_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = FakeBench(140 * GIB)

    def cap(share: float) -> None:
        bench.cap = int(share * 140 * GIB)

    monkeypatch.setattr(plans, "_cap", cap)
    plans.lowered(cast(Bench, bench))
    found = bench.result["lowerings"]
    assert [each["followed"]["gpu_layers"] for each in found] == [9, 8]
    before = [bench.result["solved"], found[0]["followed"]]
    for each, timed in zip(found, before, strict=True):
        # Nothing fails, but the reserve is not whole; then it is.
        cap = each["cap"] * 140 * GIB
        limit = cap - each["reserve_bytes"]
        assert limit < timed["gpu"]["peak_allocated_bytes"] < cap
        assert each["followed"]["gpu"]["peak_allocated_bytes"] <= limit


def test_without_a_gpu_there_is_no_cap_to_lower() -> None:
    bench = FakeBench(None)
    plans.lowered(cast(Bench, bench))
    assert [each["cap"] for each in bench.result["lowerings"]] == [None, None]


def test_a_prediction_can_be_given_how_often_is_clipped() -> None:
    layer = LayerCosts("a", 4, 0.1, 0.2, 0.0, 1.0, 1.0, 1.0, 0.0, 0.01)
    timed = {"costs": StepCosts((layer,), tail=0.1).to_json()}
    unclipped = predicted_here(timed, {"clipped_share": 0.0, "gpu_layers": 0})
    clipped = predicted_here(timed, {"clipped_share": 1.0, "gpu_layers": 0})
    assert unclipped is not None
    assert clipped is not None
    assert clipped > unclipped
    assert predicted_here(timed, {"clipped_share": None, "gpu_layers": 0}) is None
    assert predicted_here(timed, {"refused": "does not fit"}) is None


def test_steps_follow_the_decision_that_they_were_made_under() -> None:
    row = {"step": 3, "step_seconds": 0.1, "gpu_fraction": 0.5, "update_seconds": 0.2}
    assert metrics_lines([], [{**row, "step": 4}, row]) == [
        {"step": 3, "step_s": 0.1, "k": 0.5},
        {"step": 4, "step_s": 0.1, "k": 0.5},
    ]


def test_other_systems_are_searched_until_a_model_does_not_fit(tmp_path: Path) -> None:
    options = run.parse(
        [*["--part", "others", "--device", "cpu", "--model", "toy", "--batch", "2"],
         *["--seq", "16", "--out", str(tmp_path)]]
    )  # fmt: skip
    sizes = {"fsdp2": (2, 3, 4)}
    settings = dataclasses.replace(SETTINGS, sizes=sizes, other_threads=1)
    entries = entries_of("others", settings)
    # More than any host has is to be left free: the guard ends the second process.
    entries[1].options["host_floor_gib"] = 1e9
    part = run.run_part(options, entries, "a command")
    assert [record["status"] for record in part["records"]] == [records.OK, HOST_MEMORY_LOW]
    first = part["records"][0]["result"]
    assert first["trained"]["step_seconds"] > 0
    assert len(first["trained"]["losses"]) == 4
    assert first["size"]["layers"] == 2
    with pytest.raises(ValueError, match="fsdp3"):
        entries_of("others", dataclasses.replace(SETTINGS, sizes={"fsdp3": (1,)}))
