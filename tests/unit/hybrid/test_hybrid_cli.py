"""`hytrain plan hybrid`: what is printed, written and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.hybrid_plans import random_problem
from support.plan_profiles import a_profile
from test_case_files import case as case  # type: ignore[import-not-found]

from hytrain.errors import PlanError
from hytrain.formats.profile_file import write_profile
from hytrain.tools import cli
from hytrain.tools.hybrid.cost_model import plan_cost
from hytrain.tools.hybrid.plan_record import HybridPlanFile, obstacles, plan_record, write_export
from hytrain.tools.hybrid.problem import Host, Options, Plan, Problem, exposed_ms
from hytrain.tools.hybrid.profile_problem import problem_from
from hytrain.tools.hybrid.search import plan

Capture = pytest.CaptureFixture[str]


def _run(*arguments: object) -> int:
    return cli.main(["plan", "hybrid", *map(str, arguments)])


def test_table_json_and_plan(case: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "plan.json"
    assert _run("--case", case, "--top", 2, "--out", out) == 0
    text = capsys.readouterr().out
    assert "optimal: no plan of the space costs less" in text
    assert max(map(len, text.splitlines())) <= 100
    assert _run("--case", case, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    keys = {"cost", "optimal", "bound", "plan", "evaluations", "count", "seconds"}
    assert keys <= values.keys()
    assert values["optimal"]
    assert values["cost"] == values["bound"] == values["plan"]["cost_ms"]
    assert json.loads(out.read_text()) == values["plan"]
    assert _run("--case", case, "--out", out) == 0  # one of before
    assert f"plan: {out}" in capsys.readouterr().err
    out.write_text('{"version": 1, "global_batch": 8}')
    assert _run("--case", case, "--out", out) == 2
    record = HybridPlanFile.model_validate(values["plan"])
    assert sum(node.gpus for stage in record.stages for node in stage.nodes) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gbs", 4), "are for --hytrain-profile"),
    ],
)
def test_what_makes_no_sense_is_refused(
    case: Path, capsys: Capture, arguments: tuple[object, ...], words: str
) -> None:
    assert _run("--case", case, *arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert not captured.out


def test_arguments_of_plan_are_refused(case: Path, capsys: Capture) -> None:
    assert cli.main(["plan", "--batch", "8", "hybrid", "--case", str(case)]) == 2
    assert "--batch: not for `hytrain plan hybrid`" in capsys.readouterr().err


def test_a_file_of_the_case_is_not_replaced(case: Path, capsys: Capture) -> None:
    assert _run("--case", case, "--out", case / "args.json") == 2
    assert "would replace the file of --case" in capsys.readouterr().err


def test_hytrains_own_profile_is_planned(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, a_profile())
    arguments = ("--hytrain-profile", path, "--gbs", 16, "--bandwidth", 50, 10, "--json")
    assert _run(*arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["optimal"]
    assert found["plan"]["num_layers"] == 14
    assert all(stage["tp"] == 1 for stage in found["plan"]["stages"])
    assert _run("--hytrain-profile", path) == 2
    assert "needs --gbs and --bandwidth" in capsys.readouterr().err


def test_weights_and_gradients_are_as_wide_as_the_profile_says() -> None:
    """In fp32 4 bytes each: with the state 20 a parameter, where bf16 takes 16."""
    profile = a_profile()
    host = Host(memory_gb=64, update_rate=1e12, copy_rate=10)
    found: list[Problem] = []
    for dtype in ("bf16", "fp32"):
        model = profile.model.model_copy(update={"dtype": dtype, "boundary_bytes": 0})
        one = profile.model_copy(update={"model": model})
        options = Options(host=host)
        found.append(problem_from(one, gbs=16, intra=50, inter=10, options=options))
    bf16, fp32 = found
    for key, samples in fp32.samples.items():
        assert samples.memory == pytest.approx([20 / 16 * m for m in bf16.samples[key].memory])
    assert fp32.parameter_sums[-1] == 2 * bf16.parameter_sums[-1]
    seconds = [
        one.options.host.update_ms(one.parameter_sums[-1], 1, 1)
        for one in found
        if one.options.host is not None
    ]
    assert seconds[1] == pytest.approx(2 * seconds[0])  # the copies', which take longer


def test_one_stage_is_exported_for_hytrain(case: Path, tmp_path: Path, capsys: Capture) -> None:
    # Equal GPUs, little to compute: data parallel.
    (case / "hostfile").write_text("10.0.0.2 slots=2\n")
    folder = tmp_path / "export"
    assert _run("--case", case, "--export", folder) == 0
    assert f"deepspeed --hostfile {folder / 'hostfile'}" in capsys.readouterr().err
    record = HybridPlanFile.model_validate_json((folder / "plan.json").read_text())
    config = json.loads((folder / "ds_config.json").read_text())
    assert len(record.stages) == 1
    assert (folder / "hostfile").read_text() == "10.0.0.2 slots=2\n"
    ranks = record.stages[0].dp
    assert config["train_batch_size"] == 4
    accumulated = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert accumulated * ranks == 4
    assert ("hytrain" in config) == (record.stages[0].tp == 1)
    assert _run("--case", case, "--export", folder) == 2
    assert "cannot write the export" in capsys.readouterr().err


def test_what_cannot_be_run_is_said(tmp_path: Path) -> None:
    problem = random_problem(1)
    found = plan(problem, top=20).best
    refused = [plan_record(problem, one.plan, 0.0) for one in found]
    refused = [record for record in refused if obstacles(record)]
    assert refused
    with pytest.raises(PlanError, match="the plan cannot be exported"):
        write_export(tmp_path / "export", refused[0])
    assert not (tmp_path / "export").exists()


def test_host_state_frees_memory_and_costs_what_is_not_hidden(case: Path) -> None:
    from hytrain.tools.hybrid.case_files import read_case

    host = Host(memory_gb=1e-6, update_rate=1e3, copy_rate=1.0)
    problem = read_case(case, Options(host=host))
    both = ((2, 1), (2, 1))
    kept = Plan(("A", "B"), (2, 2), both, 2, (0, 2, 3))
    moved = Plan(("A", "B"), (2, 2), both, 2, (0, 2, 3), (True, False))
    on_gpu, on_host = plan_cost(problem, kept), plan_cost(problem, moved)
    # 300 B at 4 B a parameter: 75 parameters of 12 B each, on two GPUs of one node.
    assert host.state_mb(300.0) == pytest.approx(900 / 2**20)
    update = 1e3 * 75 / 2 * 2 / 1e3
    assert host.update_ms(300.0, 2, 2) == pytest.approx(update)
    time = on_gpu.stages[0].time
    assert on_host.stages[0].update == pytest.approx(update + time / 2 - time)
    assert exposed_ms(0.5, 10.0, 4) == 0.0
    assert on_gpu.stages[0].choice.on_host is False
    assert on_host.stages[0].choice.memory.shape[0] == 2
