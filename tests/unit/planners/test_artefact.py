"""What the screen reads from a folder in the artefact's form, and what it makes of plans."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from experiments.planners import report
from experiments.planners.artefact import (
    Artefact,
    Case,
    our_plan,
    read_trace,
    size_text,
    their_plan,
)
from experiments.planners.run import our_verdict
from hytrain.errors import PlanError
from hytrain.tools.hybrid.pools.cost import step_seconds
from hytrain.tools.hybrid.pools.problem import Plan, Replicas, Stage
from hytrain.tools.hybrid.pools.search import plan_pools

LAYERS = 5
SAILOR = os.environ.get("HYTRAIN_SAILOR")


def _write(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


@pytest.fixture
def artefact(tmp_path: Path) -> Artefact:
    """Two types in two zones, five layers: made up, in the artefact's files."""
    simulations = tmp_path / "sailor" / "Planner" / "simulations"
    layers = range(LAYERS)
    row = {str(i): [0.001 * (i + 1), 0.002, 0.004] for i in layers}
    slow = {str(i): [0.003 * (i + 1), 0.005, 0.005] for i in layers}
    times = {"Q": {"1": {"1": row, "2": row}}, "S": {"1": {"1": slow}}}
    _write(simulations / "profiles_tmp.json", {"OPT-350": times})
    memory = {"params_floats": 1e6, "act_mem_floats": 1e5, "act_output_floats": 2e5}
    of_layers = {str(i): memory for i in layers}
    _write(tmp_path / "sailor/Planner/llm_info.json", {"OPT-350": {"1": of_layers, "2": of_layers}})
    training = {"global_batch_size": 8, "num_all_layers": LAYERS}
    _write(simulations / "configs" / "training_config_opt_350.json", training)
    node = {"gpus_per_node": 4, "mem_per_gpu": 1}
    _write(
        simulations / "configs" / "basic_cluster_config.json", {"Q": node, "S": node, "zone": "a"}
    )
    curve = [[0.0, 0.1, 2.0], 1.0]
    to = {zone: {name: {"1": curve, "2": curve} for name in "QS"} for zone in "ab"}
    table = {zone: {name: {"1": to, "2": to} for name in "QS"} for zone in "ab"}
    _write(tmp_path / "sailor" / "providers" / "multizone_bandwidths_het.json", table)
    return Artefact(tmp_path)


CASE = Case("two types", "OPT-350", {"Q_a": 4, "S_b": 8})
MEMORY = {"Q": 16.0, "S": 8.0}


def test_a_case_as_a_problem(artefact: Artefact) -> None:
    problem = artefact.problem(CASE, MEMORY)
    assert [(pool.device, pool.zone, pool.gpus) for pool in problem.pools] == [
        ("Q", "a", 4),
        ("S", "b", 8),
    ]
    assert problem.pools[1].memory_bytes == 8 * 2**30
    assert problem.profiles["Q", 2, 1].compute == pytest.approx([0.003, 0.004, 0.005, 0.006, 0.007])
    assert problem.activation_bytes == (8e5,) * LAYERS
    assert problem.batch == 8


def test_a_trace_is_a_case_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(",Timestamp,Q_a,Q_b,S_b\n0,17.5,4,4,8\n1,18.5,8,8,16\n")
    assert read_trace(path) == [{"Q_a": 4, "Q_b": 4, "S_b": 8}, {"Q_a": 8, "Q_b": 8, "S_b": 16}]
    assert size_text(read_trace(path)[0]) == "2 x 4 Q + 8 S"


def test_plans_go_there_and_back(artefact: Artefact) -> None:
    problem = artefact.problem(CASE, MEMORY)
    stages = (
        Stage(0, 2, (Replicas(0, 2, 1), Replicas(1, 1, 2))),
        Stage(2, LAYERS, (Replicas(1, 1, 3),)),
    )
    there = their_plan(problem, Plan(stages, 1))
    assert there["used_gpus"] == {"Q": 2, "S": 5}
    assert there["pipeline_list"][0]["layers_per_stage"] == [[0, 1], [2, 3, 4]]
    assert our_plan(problem, json.loads(json.dumps(there))) == Plan(stages, 1)


def test_a_plan_of_degrees_only_has_even_stages(artefact: Artefact) -> None:
    problem = artefact.problem(CASE, MEMORY)
    grid = {"mbs": 1, "D": 2, "P": 2, "T": 1, "gpu_type": "S", "zone": "b"}
    assert [(stage.start, stage.stop) for stage in our_plan(problem, grid).stages] == [
        (0, 3),
        (3, 5),
    ]


def test_what_the_model_does_not_know_is_said(artefact: Artefact) -> None:
    problem = artefact.problem(CASE, MEMORY)
    there = their_plan(problem, plan_pools(problem).plan)
    two = {**there, "pipeline_list": there["pipeline_list"] * 2}
    assert "2 pipelines" in our_verdict(problem, two)["note"]
    there["pipeline_list"][0]["tmp_per_stage"][0][0] = [[["Q", 4, "a"], ["Q", 4, "a"]], 2]
    assert "several nodes" in our_verdict(problem, there)["note"]


def test_a_folder_without_the_artefact(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no checkout of the Sailor artefact"):
        Artefact(tmp_path)


def test_the_report_says_where_hytrain_is_beaten() -> None:
    run = {"their_seconds": 2.0, "our_seconds": 2.0, "search_seconds": 1.0, "cpu_seconds": 1.0}
    run["schedule_seconds"] = 1.8
    mine = {**run, "optimal": False, "bound": 1.5, "best_after_cpu_seconds": 0.5}
    cases = {"one": {"hytrain": mine, "Other": {**run, "their_seconds": 1.9}}}
    assert report.shortfalls(cases) == ["one: Other 1.9 < hytrain 2 (their_seconds)"]
    assert report.shortfalls({"one": {"hytrain": mine, "Other": run}}) == []
    assert report.summary_rows(cases)[0][7] == "0.950"
    other = {**run, "schedule_seconds": 1.7}
    assert report.shortfalls({"one": {"hytrain": mine, "Other": other}}) == [
        "one: Other 1.7 < hytrain 1.8 (schedule_seconds)"
    ]


@pytest.mark.skipif(SAILOR is None, reason="HYTRAIN_SAILOR names no checkout of the artefact")
def test_the_cost_is_the_simulators() -> None:
    """On the artefact itself: hytrain's cost of its own plan is what results.json has of theirs."""
    artefact = Artefact(Path(SAILOR or ""))
    memory = {"A100-40": 40.0, "V100-16": 16.0}
    problem = artefact.problem(artefact.cases()[0], memory)
    found = plan_pools(problem)
    results = Path(report.__file__).with_name("results.json")
    row = next(
        row
        for row in json.loads(results.read_text())["rows"]
        if row["planner"] == "hytrain" and row["case"] == artefact.cases()[0].name
    )
    assert step_seconds(problem, found.plan) == pytest.approx(row["their_seconds"], rel=1e-9)
