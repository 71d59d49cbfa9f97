"""Every experiment's command on toy models, on a CPU: what it measures, and that its rows are those
of the results that are kept."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.ports import free_port

from experiments import report as command
from experiments.common import records
from experiments.common.records import Json, read_json

ROOT = Path(__file__).resolve().parents[3] / "experiments"
TOY = ("--device", "cpu", "--model", "toy", "--batch", "2", "--seq", "16")

pytestmark = pytest.mark.experiment


def run(out: Path, script: str, *arguments: str) -> Json:
    """A command's result, all of whose jobs have come to their end."""
    call = [sys.executable, str(ROOT / script), "--out", str(out), *arguments]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = read_json(out / "result.json")
    assert result["jobs"]
    for record in result["jobs"]:
        assert record["status"] == records.OK, record
    return result


CASES: dict[str, Sequence[str]] = {
    "layer_major": (
        *(*TOY, "--rounds", "1", "--only"),
        "forward and backward only, checkpointed blocks, turn 1",
        "layer-major, activations: offload, turn 1",
    ),
    "long_context": (
        *("--device", "cpu", "--model", "toy", "--host-gib", "5"),
        *("--only", "hytrain fp32", "forward and backward"),
    ),
    "memory": (
        *("--device", "cpu", "--sizes", "toy", "--batch", "2", "--seq", "16", "--stages", "2"),
        *("--parts", "stall", "rates", "states", "cycles", "--saves", "1", "--cycles", "30"),
    ),
    "moment_kinds": (*TOY, "--part", "k0", "--rounds", "1"),
    "muon": (
        *("--toy", "--turns", "1", "--steps", "1", "--windows", "1", "--warmup", "1"),
        *("--only", "all on the GPU, turn 1", "hytrain k=0, turn 1"),
    ),
    "offload_step": (
        *(*TOY, "--part", "A", "--windows", "2", "--steps", "2", "--warmup", "2"),
        *("--only", "forward_backward", "hytrain 0", "fsdp2"),
    ),
    "solve_k": (*TOY, "--part", "sweep", "--layers", "4", "--least-settling", "8"),
    "traces": ("--device", "cpu", "--toy", "--only", "1b k 0", "1b k 0 no clipping"),
    "unequal_gpus": (
        *("--device", "cpu", "--model", "toy", "--seq", "16", "--part", "two", "--batch-scale"),
        *("0.1", "--steps", "1", "--profile-seconds", "1"),
        *("--only", "half profile", "half alone", "half planned"),
    ),
    "weak_scaling": (
        *(*TOY, "--gpus", "2", "--sizes", "2,1", "--checkpointing", "--settle", "4"),
        *("--systems", "hytrain", "forward_backward", "fsdp2"),
    ),
    "zero3": (*TOY, "--ranks", "2", "--only", "stage2", "stage3", "unequal"),
}


@pytest.mark.parametrize("experiment", CASES)
def test_a_toy(experiment: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"{experiment}/run.py", *CASES[experiment])
    rows, claims = command.of(experiment)
    made = rows(result)
    assert made
    assert not any("words" in row for row in made)
    assert claims(made) is not None
    if experiment == "zero3":
        assert [row["largest_loss_difference_to_stage2"] for row in made] == [0.0] * 3
    kept = ROOT / experiment / "results.json"
    if kept.exists() and experiment not in ("unequal_gpus", "solve_k"):
        # A part or a system that did not run here has columns of its own.
        own = {key for row in made for key in row} | {"run", "part", "status", "clip_coefficient"}
        assert {key for row in read_json(kept)["rows"] for key in row} - own <= {
            *("cap_gib", "threads", "update_s", "exposed_s", "fix", "applied", "at_least_s"),
            "measured_s",
        }


def test_an_account_of_several_gpus(tmp_path: Path) -> None:
    options = ("--gpus", "2", "--sizes", "2", "--account", "--gpu-fraction", "1")
    result = run(tmp_path, "weak_scaling/run.py", *TOY, *options)
    rows, claims = command.of("weak_scaling")
    (row,) = rows(result)
    assert row["over_forward_backward"] > 0
    assert not claims(rows(result))


def test_a_shared_sequence_is_exact(tmp_path: Path) -> None:
    options = ("--part", "exact", "--device", "cpu", "--model", "toy", "--seq", "64")
    run(tmp_path, "long_context/run.py", *options, "--host-gib", "5")
    one, shared = command.of("long_context")[0](read_json(tmp_path / "result.json"))
    assert one["status"] == shared["status"] == records.OK
    assert shared["largest_difference"] < 1e-6 < 1e-4 < shared["moved_by"]


def test_a_cell(tmp_path: Path) -> None:
    sizes = ("--steps", "20", "--stay", "10", "--rounds", "2", "--turns", "2")
    run(tmp_path, "solve_k/regimes.py", "--cells", "toy/2x16/1", "--device", "cpu", *sizes)
    (cell,) = read_json(tmp_path / "regimes.json")["cells"].values()
    assert cell["stayed"] == 10
    assert cell["fixed"][str(cell["best"])] == min(cell["fixed"].values())
    assert {"0", str(cell["layers"]), str(cell["solved"])} <= cell["costs"].keys()
    assert cell["beside"]["queued_hytrain_over_all_gpu"] > 0.0


def test_planned_steps(tmp_path: Path) -> None:
    options = ("--workloads", "toy/2x16", "--device", "cpu", "--rounds", "2", "--seconds", "0.5")
    result = run(tmp_path, "solve_k/planned_steps.py", *options)
    rounds = result["jobs"][0]["ranks"][0]["rounds"]
    assert len(rounds) == 2
    for each in rounds:
        assert set(each["parts"]) == {"0.0", "0.5", "1.0"}
        assert each["parts"]["0.0"]["update_rate"] > 0.0
        assert each["parts"]["1.0"]["update_rate"] is None


def test_trainer(tmp_path: Path) -> None:
    options = (
        "--workloads",
        "toy/2x16",
        "--device",
        "cpu",
        "--systems",
        "trainer_alone",
        "hytrain",
    )
    result = run(tmp_path, "hf_trainer/run.py", *options)
    engines = [record["ranks"][0]["engine"] for record in result["jobs"]]
    assert engines[1] == "HyTrainEngine"
    assert engines[0] != "HyTrainEngine"


def test_threads_of_each_way_to_start() -> None:
    call = [sys.executable, str(ROOT / "kernel_bench/launched_threads.py"), "--turns", "2"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        *("plain", "plain again", "OMP_NUM_THREADS=1", "by hand, 1", "by hand, 2")
    ]


def test_convergence(tmp_path: Path) -> None:
    script = str(ROOT / "convergence" / "run.py")
    call = [sys.executable, script, "--out", str(tmp_path), "--device", "cpu", "--model"]
    call += ["llama-3m", "--steps", "104", "--seq-len", "16", "--micro-batch", "1", "--only"]
    call += ["8bit moments, seed 0", "--eval-every", "52", "--eval-sequences", "2"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (training,) = read_json(tmp_path / "result.json")["trainings"]
    assert (training["status"], len(training["losses"])) == (records.OK, 104)
    assert set(training["held_out"]) == {"0", "52", "104"}


def test_a_toy_mixture(tmp_path: Path) -> None:
    call = [sys.executable, str(ROOT / "mixture/run.py"), "--toy", "--out", str(tmp_path)]
    call += ["--seq", "16", "--steps", "3", "--accumulation", "2", "--clip", "0.01"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = read_json(tmp_path / "result.json")
    assert len(result["steps_s"]) == 3
    assert 0.0 < result["clip_coefficient"] < 1.0


def test_a_toy_mixture_on_two_ranks_and_on_the_host(tmp_path: Path) -> None:
    """In ZeRO-3; by itself with weights in host memory and a limit."""
    script = [str(ROOT / "mixture/run.py"), "--toy", "--seq", "16", "--steps", "2", "--blocks", "2"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port())]
    streamed = ["--streamed", "--host-gib", "20", "--clip", "0"]
    for ranks, before, behind in ((2, launcher, []), (1, [], streamed)):
        call = [sys.executable, *before, *script, "--out", str(tmp_path), *behind]
        done = subprocess.run(call, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        result = read_json(tmp_path / "result.json")
        assert (result["ranks"], len(result["steps_s"])) == (ranks, 2)
        assert (result["alone_s"] is None) == (ranks == 1)


def test_weights_that_are_handed_over() -> None:
    call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    call += ["--master-port", str(free_port()), "-m", "experiments.memory.handover"]
    call += ["--stage", "3", "--offload-param", "--rounds", "1", "--device", "cpu"]
    done = subprocess.run(
        call, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rates = dict(re.findall(r"^(.*\S) +([0-9.]+) GB/s$", done.stdout, re.MULTILINE))
    assert {"to the device", "to the host", "an all-gather", "a copy on the host"} <= rates.keys()


def test_adamw_streamed_beside_the_cpus(tmp_path: Path) -> None:
    options = ("--toy", "--steps", "1", "--windows", "1", "--warmup", "1")
    result = run(tmp_path, "muon/run.py", "--part", "third_place", *options)
    rows, claims = command.of("muon")
    table = {row["system"]: row for row in rows(result)}
    assert table["AdamW on the CPU"]["clipped"] == table["AdamW streamed"]["clipped"] == 1
    (claim,) = claims(list(table.values()))
    assert claim.value is not None


@pytest.mark.parametrize("part", ["dense", "scaling", "mixture", "context"])
def test_toys_on_two_of_eight_gpus(part: str, tmp_path: Path) -> None:
    call = [sys.executable, str(ROOT / "eight_gpus/run.py"), "--part", part, "--gpus", "2", "--toy"]
    call += ["--out", str(tmp_path), "--seconds", "270"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    results = [read_json(path) for path in tmp_path.glob("*.json")]
    assert len(results) == (2 if part == "dense" else 1)
    for result in results:
        statuses = [record["status"] for record in result.get("jobs", ())]
        assert set(statuses) <= {records.OK}, done.stdout[-2000:]
        assert statuses or result["steps_s"]
