"""The real path through two ranks on gloo, at toy size: profile, plan, train, run out of memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from unequal_cases import record, stage

from experiments.common import records
from experiments.common.group import Place, allocator_settings, environment
from experiments.common.records import Json
from experiments.unequal_gpus import checks, run
from experiments.unequal_gpus.cases import cases_of
from experiments.unequal_gpus.report import run_line, text_of

pytestmark = pytest.mark.experiment

TOY = ["--device", "cpu", "--model", "toy", "--seq", "16", "--steps", "1", "--warmup", "3"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Json:
    out = tmp_path_factory.mktemp("unequal")
    arguments = ["--part", "memory", "--out", str(out), *TOY, "--batch-scale", "0.2"]
    options = run.parse([*arguments, "--only", "offload", "--budget-seconds", "200"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_MAX_CTAS", "8")
        returned = run.measure(options, run.chosen(options), "a command")
    written = records.read_json(out / "result.json")
    assert written == json.loads(json.dumps(returned))
    return written


def test_the_machine_is_in_the_result(result: Json) -> None:
    assert result["hardware"]["gpus"] == 2
    assert "expandable_segments:True" not in result["hardware"]["allocator"].values()
    assert result["hardware"]["cores"] >= 1
    assert result["hardware"]["nccl"]["NCCL_MAX_CTAS"] == "8"
    assert "NCCL_MAX_CTAS=8 " in run_line(result)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_loses_no_memory_unless_the_user_set_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    place = Place(device="cuda", gpus=(0,), cores=((0,),))
    on_cpu = dataclasses.replace(place, device="cpu")

    def of(where: Place) -> dict[str, str]:
        variables = environment(where, 0, (1, 2))
        assert allocator_settings(where.device).items() <= variables.items()
        return {each: value for each, value in variables.items() if each.endswith("ALLOC_CONF")}

    assert of(place) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert of(on_cpu) == {}
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert of(place) == of(on_cpu) == {name: "max_split_size_mb:64"}


def test_the_plan_is_trained_by(result: Json) -> None:
    (case,) = result["cases"]
    planned, plan = checks.result_of(case, "planned"), checks.result_of(case, "plan")
    assert planned is not None, case["results"]
    assert plan is not None
    assert plan[0] == plan[1]
    for rank, trained in enumerate(planned):
        found = trained["plan_report"]["ranks"][rank]
        assert found["batch_size"] == plan[0]["planned"]["batch_sizes"][rank]
        assert trained["gpu_fraction"] == pytest.approx(
            plan[0]["planned"]["gpu_fractions"][rank], abs=0.13
        )
        assert trained["losses"][0] == pytest.approx(planned[0]["losses"][0])
        # What the steps reported: each of them, on all ranks the same share of clipped ones.
        assert trained["clipped_share"] in (0.0, 1.0)
        assert trained["clipped_share"] == planned[0]["clipped_share"]
        assert [len(trained[name]) for name in ("update_seconds", "exposed_seconds")] == [1, 1]
        assert trained["allocator"] == {}
        assert len(trained["step_times"]) == 1
        assert trained["step_times"][0] > sum(trained["collector_pauses"]) >= 0.0
    assert checks.prediction_error(case) is not None


def test_new_processes_take_up_after_one_that_ended(result: Json) -> None:
    (case,) = result["cases"]
    assert checks.status_of(case, "even_offload") == "refused"
    assert checks.status_of(case, "no_offload") == records.OUT_OF_MEMORY
    ranks = case["results"]["no_offload"]["ranks"]
    assert any(rank is not None and "simulated" in rank["error"] for rank in ranks)
    assert "out of memory: simulated" in text_of(result["cases"])


def test_backward_time_follows_forward_time(result: Json) -> None:
    (case,) = result["cases"]
    found = checks.slowdowns(case)
    assert found is not None
    # Made slower by sleeping in both passes: nobody is faster than the first by much.
    assert all(0.0 < own < 2.0 for _, *both in found for own in both)


def test_unknown_parts_and_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--part", "six", "--out", "unused", "--list"]) == 2
    assert run.main(["--part", "two", "--only", "third", "--out", "unused"]) == 2
    assert "half, quarter" in capsys.readouterr().err


def test_limits_can_be_given() -> None:
    arguments = ["--part", "memory", "--out", "unused", "--limits", "offload=0.2,0.3,10"]
    memory, offload = run.chosen(run.parse(arguments))
    assert memory.memory == (0.16, 1.0)
    assert (offload.memory, offload.host_gib) == ((0.2, 0.3), 10.0)
    short = run.parse([*arguments[:-1], "offload=0.2"])
    with pytest.raises(ValueError, match="2 shares"):
        run.chosen(short)


def test_multiprocessors_are_taken_from_part_slowdown(tmp_path: Path) -> None:
    seconds = {104: 1.0, 56: 1.9, 48: 2.0, 24: 4.1}
    rows = [{"granted_sms": n, "forward": s, "backward": 2 * s} for n, s in seconds.items()]
    case = record(cases_of("slowdown")[0], {"slowdown": stage({"rows": rows})})
    path = tmp_path / "result.json"
    records.write_json(path, {"cases": [record(cases_of("four")[0], {}), case]})
    assert run.sms_from_result(path) == {"1.0": 104, "0.5": 48, "0.25": 24}
    records.write_json(path, {"cases": []})
    with pytest.raises(ValueError, match="part slowdown"):
        run.sms_from_result(path)


def test_runs_can_be_left_out() -> None:
    arguments = ["--part", "two,memory", "--only", "half,quarter,offload", "--out", "unused"]

    def runs_of(text: str) -> list[tuple[str, ...]]:
        return [case.runs for case in run.chosen(run.parse([*arguments, "--runs", text]))]

    half, quarter, offload = runs_of("half=planned,quarter=planned+alone")
    assert (half, quarter) == (("planned",), ("alone", "planned"))
    assert offload == ("planned", "even_offload", "no_offload")
    assert runs_of("planned,quarter=even") == [("planned",), ("even",), ("planned",)]
    for text, words in (("half=slow", "no .'slow'"), ("third=even", "no cases")):
        with pytest.raises(ValueError, match=words):
            runs_of(text)


def test_the_list_shows_what_runs_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--part", "four,two", "--gpus", "4", "--out", "unused", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["wave 1", "wave 2", "wave 2"]
