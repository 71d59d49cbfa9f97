"""`hytrain plan pools`: what is read, printed, written and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hytrain.tools import cli
from hytrain.tools.hybrid.pools.cost import step_seconds
from hytrain.tools.hybrid.pools.pools_file import read_pools
from hytrain.tools.hybrid.pools.problem import Plan, Replicas, Stage
from hytrain.tools.hybrid.pools.schedule import schedule_seconds
from tests.support.pool_problems import random_problem

Capture = pytest.CaptureFixture[str]
LAYERS = 4


def _values() -> dict[str, Any]:
    """Two zones with eight GPUs each, one with a slower type; between them 1 GB/s."""
    profiles = [
        {
            "device": device,
            "tp": tp,
            "micro_batch": size,
            "forward_ms": [slow * size / tp] * LAYERS,
            "backward_ms": [2 * slow * size / tp] * LAYERS,
            "update_ms": [1.0] * LAYERS,
        }
        for device, slow in (("A100", 10.0), ("V100", 25.0))
        for tp in (1, 2)
        for size in (1, 2)
    ]
    return {
        "batch": 16,
        "pools": [
            {"device": "A100", "zone": "east", "gpus": 8, "memory_gib": 40, "node_gpus": 4},
            {"device": "V100", "zone": "west", "gpus": 8, "memory_gib": 16, "node_gpus": 4},
        ],
        "layers": {"parameter_bytes": [4e8] * LAYERS, "activation_bytes": [8e6] * LAYERS},
        "memory": {
            str(tp): {"parameters": [1e8 / tp] * LAYERS, "activations": [5e7 / tp] * LAYERS}
            for tp in (1, 2)
        },
        "profiles": profiles,
        "bandwidth": {"within_zone": 10, "between_zones": 1},
    }


@pytest.fixture
def case(tmp_path: Path) -> Path:
    path = tmp_path / "pools.json"
    path.write_text(json.dumps(_values()))
    return path


def _run(*arguments: object) -> int:
    return cli.main(["plan", "pools", *map(str, arguments)])


def test_table_and_json(case: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "plan.json"
    assert _run("--case", case, "--out", out) == 0
    text = capsys.readouterr().out
    assert "optimal: no plan of the space takes less" in text
    assert max(map(len, text.splitlines())) <= 100
    assert _run("--case", case, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    keys = {"cost", "optimal", "bound", "plan", "evaluations", "count", "seconds"}
    assert keys <= values.keys()
    written = json.loads(out.read_text())
    assert written["plan"] == values["plan"]
    stages = values["plan"]["stages"]
    assert [stages[0]["first_layer"], stages[-1]["stop_layer"]] == [0, LAYERS]
    # The plan as printed costs what is said.
    pools = {("A100", "east"): 0, ("V100", "west"): 1}
    plan = Plan(
        tuple(
            Stage(
                stage["first_layer"],
                stage["stop_layer"],
                tuple(
                    Replicas(pools[one["device"], one["zone"]], one["tp"], one["count"])
                    for one in stage["replicas"]
                ),
            )
            for stage in stages
        ),
        values["plan"]["micro_batch"],
    )
    assert step_seconds(read_pools(case), plan) == values["cost"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("batch",), 0, "batch: must be a number of at least 1, not 0"),
        (("pools", 0, "gpus"), None, r"pools\[0\].gpus: is missing"),
        (("pools",), [], "pools: must be a list of one or more"),
        (("pools", 1, "device"), "H100", "H100 in west: there is no profile"),
        (("profiles", 0, "forward_ms"), [1.0], r"profiles\[0\].forward_ms: must have 4 numbers"),
        (("profiles", 1, "micro_batch"), 1, r"profiles\[1\].device: .* twice"),
        (("bandwidth", "between_zones"), 0, "bandwidth.between_zones: must be a number above 0"),
        (("bandwidth", "east north"), 2, "bandwidth.east north: must be two zones"),
        (("memory", "two"), {}, "memory.two: must be a tensor parallel degree"),
        (("pools", 1), {**_values()["pools"][0]}, r"pools\[1\].zone: A100 in east is there twice"),
    ],
)
def test_bad_input_is_named(
    case: Path, path: tuple[Any, ...], value: object, words: str, capsys: Capture
) -> None:
    values: Any = _values()
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    case.write_text(json.dumps(values))
    assert _run("--case", case) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(words, error), error


def test_what_fits_nowhere_and_what_is_no_case(case: Path, capsys: Capture) -> None:
    values = _values()
    for pool in values["pools"]:
        pool["memory_gib"] = 0.1
    case.write_text(json.dumps(values))
    assert _run("--case", case) == 2
    assert "no plan fits into the memory of the GPUs" in capsys.readouterr().err
    assert _run("--case", case.with_name("none.json")) == 2
    assert "none.json" in capsys.readouterr().err
    assert cli.main(["plan", "--batch", "8", "pools", "--case", str(case)]) == 2
    assert "--batch: not for `hytrain plan pools`" in capsys.readouterr().err


def test_one_stage_played_through_is_the_formula() -> None:
    problem = random_problem(5, layers=2, gpus=(2,))
    plan = Plan((Stage(0, 2, (Replicas(0, 1, 2),)),), 1)
    expected = step_seconds(problem, plan)
    assert schedule_seconds(problem, plan) == pytest.approx(expected, rel=1e-12)


def test_two_stages_played_through_by_hand(case: Path) -> None:
    """Two micro-batches: 1F1B on two stages of one replica, transfers beside computing."""
    values = _values()
    values["batch"] = 2
    case.write_text(json.dumps(values))
    problem = read_pools(case)
    stages = (Stage(0, 2, (Replicas(0, 1, 1),)), Stage(2, 4, (Replicas(0, 1, 1),)))
    # Forward 20 ms, backward 40 ms a stage; a transfer of 8 MB at 10 GB/s 0.8 ms. The second
    # stage has F0 20.8-40.8, B0 to 80.8, F1 to 100.8, B1 to 140.8; the first ends with B1.
    expected = (140.8 + 0.8 + 40.0 + 1.0) / 1e3
    assert schedule_seconds(problem, Plan(stages, 1)) == pytest.approx(expected, rel=1e-12)


def test_unlike_pipelines_go_at_their_own_speed(case: Path) -> None:
    """A slow replica of each stage, in different pipelines: the formula takes both for the same."""
    problem = read_pools(case)
    fast, slow = Replicas(0, 1, 1), Replicas(1, 1, 1)
    crossed = Plan((Stage(0, 2, (fast, slow)), Stage(2, 4, (slow, fast))), 1)
    straight = Plan((Stage(0, 2, (fast, slow)), Stage(2, 4, (fast, slow))), 1)
    assert schedule_seconds(problem, straight) > 0.0
    assert schedule_seconds(problem, crossed) < step_seconds(problem, crossed)
