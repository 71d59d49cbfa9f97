"""Libraries that users bring: the same losses with hytrain as with plain DeepSpeed.

They are not in the environment of the other tests: ``make test-ecosystem``. Without
DS_ACCELERATOR=cpu all trainings of one rank are on the GPU. ``-s`` shows how far losses are apart.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ecosystem import samples
from support.ports import free_port

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
ON_GPU = os.environ.get("DS_ACCELERATOR") != "cpu"
TOLERANCE = 5e-4 if ON_GPU else 2e-5
"""For a loss of about 4 after six fp32 steps at a rate of 1e-2: sums over ranks have another order,
on a GPU also the sums of a backward pass."""
BF16_TOLERANCE = 5e-2
"""bf16 has 8 bits: weights that differ in a last bit of fp32 may be rounded to neighbours."""

CASES: list[tuple[str, int, int, tuple[str, ...]]] = [
    *(
        (kind, stage, ranks, more)
        for kind in ("sft", "dpo", "grpo")
        for more in ((), ("--lora",))
        for stage in (2, 3)
        for ranks in (1, 2)
    ),
    ("sft", 3, 1, ("--bf16",)),
    *(("accelerate", stage, ranks, ()) for stage in (2, 3) for ranks in (1, 2)),
    *(("lightning", stage, 1, ()) for stage in (2, 3)),
]


def train(kind: str, engine: str, stage: int, ranks: int, folder: Path, *more: str) -> Any:
    """Runs a training in processes of its own; returns what it found."""
    folder.mkdir(exist_ok=True)
    port = str(free_port())
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
        **(one if ranks == 1 else {}),
    }  # fmt: skip
    script = [str(HERE / "train.py"), kind, "--engine", engine, "--stage", str(stage)]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
                "--master-port", port] if ranks > 1 else []  # fmt: skip
    command = [sys.executable, *launcher, *script, "--folder", str(folder), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def both(kind: str, stage: int, ranks: int, folder: Path, *more: str) -> tuple[Any, Any]:
    """Runs a training with plain DeepSpeed and hytrain side by side; returns what they found."""
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(train, kind, engine, stage, ranks, folder / engine, *more)
            for engine in ("plain", "hytrain")
        ]
        plain, ours = (run.result() for run in runs)
    return plain, ours


def _assert_close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    assert len(found) == len(expected) > 0
    assert found == pytest.approx(expected, abs=tolerance)


def _assert_same(found: Any, expected: Any) -> None:
    """Asserts equality; on a GPU closeness, since a backward pass itself does not repeat."""
    if ON_GPU:
        _assert_close(found, expected)
    else:
        assert found == expected


def _note(line: str) -> None:
    """Prints a line, and appends it to the file ECOSYSTEM_NOTES in case the run is interrupted."""
    print(line)
    if "ECOSYSTEM_NOTES" in os.environ:
        with Path(os.environ["ECOSYSTEM_NOTES"]).open("a") as file:
            file.write(line + "\n")


def _needs(kind: str, ranks: int) -> None:
    library = kind.split("_")[0] if kind.startswith(("accelerate", "lightning")) else "trl"
    library = "transformers" if kind == "trainer_sequences" else library
    pytest.importorskip(library, reason="run `make test-ecosystem`")
    if ON_GPU and ranks > torch.cuda.device_count():
        pytest.skip("each rank needs a GPU of its own")


@pytest.mark.parametrize(
    ("kind", "stage", "ranks", "more"), CASES, ids=lambda value: str(value).strip("(),'")
)
def test_losses(kind: str, stage: int, ranks: int, more: tuple[str, ...], tmp_path: Path) -> None:
    _needs(kind, ranks)
    plain, ours = both(kind, stage, ranks, tmp_path, *more)
    is_bf16 = "--bf16" in more
    apart = max(abs(a - b) for a, b in zip(ours["losses"], plain["losses"], strict=True))
    what = f"{' '.join([kind, *more])}, stage {stage}, {ranks} ranks"
    _note(f"{what}: losses {apart:.1e} apart, the last {plain['losses'][-1]:.4f}")
    _note(ours["versions"])
    _assert_close(ours["losses"], plain["losses"], BF16_TOLERANCE if is_bf16 else TOLERANCE)
    assert is_bf16 or ours.get("generated") == plain.get("generated")
    if kind == "accelerate":
        _assert_same(ours["again"], ours["straight"])  # load_state: as if nothing had been
        assert ours["total"] == pytest.approx(plain["total"], rel=1e-5)
        assert ours["saved"] == pytest.approx([ours["total"]] * 2, rel=1e-6)


@pytest.mark.parametrize("kind", ["text", "vit"])
@pytest.mark.parametrize("stage", [2, 3])
def test_trainer(kind: str, stage: int, tmp_path: Path) -> None:
    plain, ours = both(kind, stage, 1, tmp_path)
    for key in ("losses", "evaluated"):
        _assert_close(ours[key], plain[key])
    assert ours["last"] == pytest.approx(min(ours["evaluated"]), abs=TOLERANCE), "the best one"
    assert ours["last"] == pytest.approx(plain["last"], abs=TOLERANCE)
    shutil.rmtree(tmp_path / "hytrain" / "out" / "checkpoint-6")
    resumed = train(kind, "hytrain", stage, 1, tmp_path / "hytrain", "--resume")
    _assert_same(resumed["losses"], ours["losses"])  # as the uninterrupted run


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_options(stage: int, ranks: int, tmp_path: Path) -> None:
    """Options of Trainer, methods of peft, trainers of TRL: some 30 short trainings."""
    for library in ("trl", "peft"):
        pytest.importorskip(library, reason="run `make test-ecosystem`")
    _needs("trl", ranks)
    plain, ours = both("options", stage, ranks, tmp_path)
    weights = [torch.load(tmp_path / engine / "weights.pt") for engine in ("plain", "hytrain")]
    assert plain["each"].keys() == ours["each"].keys()
    for name, expected in plain["each"].items():
        found = ours["each"][name]
        assert found["loss"], name
        for key in ("loss", "eval_loss"):
            assert found[key] == pytest.approx(expected[key], rel=0, abs=TOLERANCE), (name, key)
        for key in ("grad_norm", "saved"):
            assert found[key] == pytest.approx(expected[key], rel=1e-3), (name, key)
        for weight, values in weights[0][name].items():
            apart = (weights[1][name][weight] - values).abs().max()
            # Adam gives an element whose gradient is rounding noise a step of any size up to 1e-2.
            assert apart < 1e-3, (name, weight, apart)


@pytest.mark.parametrize("kind", ["trainer_sequences", "accelerate_sequences"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shared_sequences(kind: str, stage: int, tmp_path: Path) -> None:
    """Two ranks that share each sequence do what one rank does that has the whole of it."""
    _needs(kind, 2)
    found: dict[str, Any] = {}
    for name, engine, ranks in (
        ("one", "hytrain", 1),
        ("two", "hytrain", 2),
        ("plain", "plain", 2),
    ):
        found[name] = train(kind, engine, stage, ranks, tmp_path / name)
    one, two, plain = (found[name] for name in ("one", "two", "plain"))
    _note(f"{kind}, stage {stage}: plain DeepSpeed's first norm {plain['norms'][0]:.4f}, ours "
          f"{two['norms'][0]:.4f}, one rank's {one['norms'][0]:.4f}")  # fmt: skip
    _assert_close(two["losses"], one["losses"])
    _assert_close(two["norms"], one["norms"])
    assert two["batch"] == one["batch"]


def test_grpo_that_generates_with_a_copy(tmp_path: Path) -> None:
    """examples/grpo.py, with ZeRO-3 on two ranks."""
    _needs("grpo", 2)
    examples = HERE.parents[1] / "examples"
    samples.llama().save_pretrained(tmp_path / "model")
    samples.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("\n".join(samples.texts(32, 4)))
    (tmp_path / "grpo.py").write_text((examples / "grpo.py").read_text())
    config = (examples / "ds_config.json").read_text()
    assert config.count('"stage": 2') == 1
    (tmp_path / "ds_config.json").write_text(config.replace('"stage": 2', '"stage": 3'))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
        str(free_port()), "grpo.py", "--model", "model", "--text", "text", "--length", "6",
        "--steps", "10",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rewards = [float(found) for found in re.findall(r"'reward': '?([0-9.]+)", done.stdout)]
    assert len(rewards) == 2
    assert all(0.0 < each <= 1.0 for each in rewards)
    assert "hytrain 0" in done.stderr


def test_the_readme_script(tmp_path: Path) -> None:
    """Runs README.md's script as it stands, but with a small model of random weights and data."""
    script = HERE.parents[1] / "experiments" / "hf_trainer" / "readme_script.py"
    command = [sys.executable, str(script), "--toy", "--only", "readme", "--out", str(tmp_path)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=environment, check=True, timeout=600)
    found = json.loads((tmp_path / "result.json").read_text())["readme"]
    assert found["rc"] == 0, (tmp_path / "readme" / "log.txt").read_text()[-4000:]
    assert "4 steps" in found["said"][-1], "hytrain trained"
    assert (tmp_path / "readme" / "model" / "model.safetensors").exists()


def test_a_pretrained_model_beside_trainer(tmp_path: Path) -> None:
    """Runs the experiment's own command, on a small model in a folder like the hub's."""
    sys.path.insert(0, str(HERE.parents[1]))
    from experiments.hf_trainer import readme_script

    model = tmp_path / "model"
    readme_script.make_model(model, readme_script.COMMON | readme_script.TOY)
    command = [
        sys.executable,
        str(HERE.parents[1] / "experiments" / "hf_trainer" / "pretrained.py"),
    ]
    command += ["--model", str(model), "--steps", "4", "--batch", "2", "--length", "128"]
    command += ["--rate", "1e-3", "--only", "hytrain fp32", "trainer_alone", "--out", str(tmp_path)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=environment, check=True, timeout=600)
    found = json.loads((tmp_path / "result.json").read_text())
    for name, one in found.items():
        assert one["rc"] == 0, (name, one)
    ours, theirs = found["hytrain fp32"], found["trainer_alone"]
    assert ours["eval_loss"][-1] < ours["eval_loss"][0] - 0.05
    for key in ("loss", "eval_loss"):  # bf16 weights beside fp32 under autocast
        assert ours[key] == pytest.approx(theirs[key], rel=0.01)
