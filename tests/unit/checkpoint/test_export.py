"""`hytrain export` and `hytrain checkpoint`: a checkpoint's weights, and whether it is whole."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as to_universal  # as scripts do
from deepspeed.utils import zero_to_fp32
from support.damage import damaged, flip
from support.engines import built, make_config
from support.plain_deepspeed import conversion, plain_engine
from support.resume import Everything, Run, Snapshot, engine_of, snapshot, train
from support.scripts import run_script

from hytrain.checkpoint import progress
from hytrain.errors import CheckpointError
from hytrain.tools import cli

safetensors = pytest.importorskip("safetensors.torch", reason="transformers installs safetensors")

full = pytest.mark.parity_full
FROZEN = {"frozen.weight", "frozen.bias"}


@dataclass
class Saved:
    """A checkpoint, and what was in the engine."""

    folder: Path
    now: Snapshot

    @property
    def tag(self) -> Path:
        return self.folder / "global_step2"


STAGES = [(2, True), (3, True)]
of_both_stages = pytest.mark.parametrize("saved", STAGES, indirect=True, ids=str)


@pytest.fixture(scope="module", params=[STAGES[0], pytest.param(STAGES[1], marks=full)], ids=str)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, process_group: None
) -> Saved:
    stage, bf16 = request.param
    folder = tmp_path_factory.mktemp("saved")
    with engine_of(Run(stage=stage, bf16=bf16)) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(folder)
        return Saved(folder, snapshot(engine))


def _export(saved: Saved, out: Path, *options: str) -> None:
    assert cli.main(["export", str(saved.folder), "--out", str(out), *options]) == 0


def _assert_masters(stored: Any, saved: Saved, dtype: torch.dtype = torch.float32) -> None:
    """All trained weights are the master weights, rounded to ``dtype``."""
    for name, state in saved.now.state.items():
        assert torch.equal(stored[name], state["fp32"].to(dtype)), name


@of_both_stages
def test_safetensors_are_the_training_copy(saved: Saved, tmp_path: Path) -> None:
    _export(saved, tmp_path)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    expected = {n: t for n, t in saved.now.weights.items() if n != "head.weight"}  # tied
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor), name
    assert not list(tmp_path.glob("*.tmp*"))


def test_shards_and_their_index(saved: Saved, tmp_path: Path) -> None:
    _export(saved, tmp_path, "--dtype", "fp32", "--max-shard-size", "10KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2
    assert names == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    total = 0
    for file in names:
        tensors = safetensors.load_file(tmp_path / file)
        size = sum(4 * t.numel() for t in tensors.values())
        assert size <= 10_000 or len(tensors) == 1
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == file
            total += tensor.numel() * tensor.element_size()
            if name in saved.now.state:
                assert torch.equal(tensor, saved.now.state[name]["fp32"])
            else:
                assert torch.equal(tensor, saved.now.weights[name].to(tensor.dtype))
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_dtypes_are_rounded_from_the_master_weights(
    dtype: str, saved: Saved, tmp_path: Path
) -> None:
    made = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    _export(saved, tmp_path, "--dtype", dtype)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    assert stored["calls"].dtype == torch.int64
    _assert_masters(stored, saved, made)


@of_both_stages
def test_one_file_has_the_master_weights_and_loads_strictly(saved: Saved, tmp_path: Path) -> None:
    _export(saved, tmp_path, "--format", "fp32")
    stored = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    model = Everything()
    model.load_state_dict(stored)
    _assert_masters(stored, saved)
    assert stored["head.weight"].data_ptr() == stored["embed.weight"].data_ptr()


@pytest.mark.parametrize("with_frozen", [True, False])
def test_deepspeeds_functions_read_it(saved: Saved, with_frozen: bool) -> None:
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        str(saved.folder), exclude_frozen_parameters=not with_frozen
    )
    _assert_masters(state, saved)
    assert FROZEN & state.keys() == (FROZEN if with_frozen else set())
    Everything().load_state_dict(state, strict=with_frozen)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Everything(), str(saved.folder))
    assert torch.equal(model.norm.bias, saved.now.state["norm.bias"]["fp32"])


def test_deepspeeds_conversion_finds_it_universal(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "universal"
    arguments = conversion(saved.tag, out)
    to_universal(arguments)
    assert "is universal already" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", str(out)]) == 0
    assert (tmp_path / "latest_universal").read_text() == "universal"
    with pytest.raises(CheckpointError, match=r"that is not there yet, or load .*load_universal"):
        to_universal(arguments)
    arguments.output_folder = arguments.input_folder
    to_universal(arguments)
    assert cli.main(["checkpoint", "verify", str(saved.tag)]) == 0


def test_without_frozen(saved: Saved, tmp_path: Path) -> None:
    _export(saved, tmp_path, "--exclude-frozen")
    assert not FROZEN & safetensors.load_file(tmp_path / "model.safetensors").keys()


def test_the_script_beside_the_checkpoint(saved: Saved, tmp_path: Path) -> None:
    script = saved.folder / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    ended = run_script(script, str(saved.folder), str(tmp_path / "out"))
    assert ended.returncode == 0, ended.stderr
    stored = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    _assert_masters(stored, saved)
    elsewhere = subprocess.run(
        [sys.executable, "-S", "-I", str(script), "in", "out", "--tag", "t"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert elsewhere.returncode == 2
    assert "hytrain export in --out out --format fp32 --tag t" in elsewhere.stderr


@pytest.mark.parametrize("manifest", ["whole", "damaged", "none"])
def test_verify_names_every_damage(
    manifest: str, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tag = tmp_path / "tag"
    shutil.copytree(saved.tag, tag)
    flipped, short, *gone = sorted((tag / "zero").rglob("exp_avg.pt"))
    flipped.write_bytes(flip(8 * 300)(bytearray(flipped.read_bytes())))
    short.write_bytes(short.read_bytes()[:-40])
    for path in gone:
        path.unlink()
    named = [flipped, short, *gone]
    shutil.copytree(gone[0].parent, tag / "zero/no.such")
    path = tag / "zero/hytrain_manifest.json"
    if manifest == "whole":
        named.append(tag / "zero/no.such/fp32.pt")
    elif manifest == "damaged":
        path.write_bytes(flip(8 * 100)(bytearray(path.read_bytes())))
        named.append(path)
    else:
        path.unlink()
    assert len(gone) > 5, "more than a message of a load lists"
    assert cli.main(["checkpoint", "verify", str(tag), "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    for path in named:
        assert any(str(path) in problem for problem in verdict["problems"]), path
    assert cli.main(["checkpoint", "verify", str(tag)]) == 1
    text = capsys.readouterr().out
    assert all(str(path) in text for path in named)


def test_damage_is_refused_before_anything_is_written(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("exp_avg.pt", "step.pt"):
        with damaged(saved.tag / "zero/norm.weight" / name, flip(8 * 300)):
            assert cli.main(["checkpoint", "verify", str(saved.folder), "--all"]) == 1
    with damaged(saved.tag / "zero/embed.weight/fp32.pt", flip(8 * 700)):
        capsys.readouterr()
        assert cli.main(["export", str(saved.folder), "--out", str(tmp_path / "out")]) == 2
        assert "embed.weight" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        pair = ["--all", "--tag", "any"]
        assert cli.main(["checkpoint", "verify", str(saved.folder), *pair]) == 2
        assert cli.main(["checkpoint", "verify", str(saved.folder)]) == 1
        assert "DAMAGED" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", str(saved.folder), "--json"]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["problems"] == []
    assert verdict["has_manifest"]
    assert verdict["num_bytes"] == sum(
        path.stat().st_size for path in saved.tag.rglob("*") if path.is_file()
    )
    assert cli.main(["checkpoint", "info", str(saved.folder), "--json"]) == 0
    (fact,) = json.loads(capsys.readouterr().out)
    assert fact["num_bytes"] == verdict["num_bytes"]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "one").symlink_to(saved.folder)
    for command in (["checkpoint", "info"], ["checkpoint", "verify"]):
        assert cli.main([*command, str(tmp_path / "runs")]) == 2
        said = f"has no checkpoint, but these have: {tmp_path / 'runs' / 'one'}"
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("buffer_names", 5),
        ("shared_params", [1]),
        ("shared_params", {"a": 1}),
        ("frozen_param_fragments", {"a": 1}),
    ],
)
def test_lists_of_weights_in_another_form(
    key: str, value: Any, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    shutil.copytree(saved.folder, folder)
    (folder / saved.tag.name / "zero/hytrain_manifest.json").unlink()  # its sums would find it
    states = folder / saved.tag.name / "mp_rank_00_model_states.pt"
    torch.save(torch.load(states, weights_only=False) | {key: value}, states)
    assert cli.main(["export", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "lists the model's weights in another form" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@of_both_stages
def test_verify_misses_what_is_not_there(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = "zero/hytrain_manifest.json"
    norm = "zero/norm.weight"
    gone = [
        ["mp_rank_00_model_states.pt"], ["zero"], ["zero/optimizer_state.pt"], [norm],
        [f"{norm}/exp_avg.pt"], [f"{norm}/exp_avg_sq.pt"], [f"{norm}/fp32.pt"], [f"{norm}/step.pt"],
        [f"{norm}/exp_avg.pt", f"{norm}/exp_avg_sq.pt"],
        [path.name for path in saved.tag.glob("*_states.pt")],
        [path.name for path in saved.tag.iterdir()],
    ]  # fmt: skip
    for number, names in enumerate(gone):
        for with_manifest in (True, False):
            folder = tmp_path / f"{number}-{with_manifest}"
            shutil.copytree(saved.tag, folder / "t")
            (folder / "latest").write_text("t")
            for name in names if with_manifest else (manifest, *names):
                path = folder / "t" / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            options = ([], ["--tag", "t"], ["--all"])[number % 3]
            command = ["checkpoint", "verify", str(folder), *options]
            assert cli.main(command) == 1, (names, with_manifest, options)
            out = capsys.readouterr().out
            assert "DAMAGED" in out
            assert "whole" not in out
            # What there is of it, it says, or that it is damaged.
            assert cli.main(["checkpoint", "info", str(folder), "--json"]) in (0, 2)
            assert '"kind": "hytrain"' not in capsys.readouterr().out
    for arguments in ([str(saved.folder), "--tag", ""], [str(saved.folder), "--tag", "."]):
        assert cli.main(["checkpoint", "verify", *arguments]) == 2
        assert "names no checkpoint" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["checkpoint", "verify", str(tmp_path / "empty")]) == 2
    shutil.copytree(saved.tag, tmp_path / "hytrain-saving-t-1234")
    assert cli.main(["checkpoint", "verify", str(tmp_path / "hytrain-saving-t-1234")]) == 1
    assert cli.main(["checkpoint", "verify", str(saved.folder), "--all"]) == 0


def test_a_trainers_output_folder(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (9, 10):
        shutil.copytree(saved.folder, tmp_path / f"checkpoint-{number}")
    given = str(tmp_path)
    assert cli.main(["checkpoint", "verify", given]) == 0
    out = capsys.readouterr().out
    assert "checkpoint-10" in out
    assert "checkpoint-9" not in out
    assert cli.main(["checkpoint", "verify", given, "--all"]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    assert cli.main(["checkpoint", "info", given, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [Path(fact["folder"]).name for fact in facts] == ["checkpoint-9", "checkpoint-10"]
    assert [fact["is_latest"] for fact in facts] == [False, True], "a Trainer resumes from one"
    assert cli.main(["checkpoint", "info", given]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["folder", "tag"]
    assert [row.split()[0] for row in rows if row.startswith("checkpoint-")] == [
        "checkpoint-9",
        "checkpoint-10",
    ]
    assert cli.main(["checkpoint", "info", given, "--tag", "checkpoint-9", "--json"]) == 0
    (fact,) = json.loads(capsys.readouterr().out)
    assert Path(fact["folder"]).name == "checkpoint-9"
    assert cli.main(["checkpoint", "info", given, "--tag", "no"]) == 2
    assert "no checkpoint 'no', but global_step2" in capsys.readouterr().err
    assert cli.main(["export", given, "--out", str(tmp_path / "out")]) == 0
    assert "checkpoint-10" in capsys.readouterr().out


def test_a_dtype_that_would_be_ignored_is_refused(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--out", str(tmp_path / "out"), "--format", "fp32", "--dtype", "bf16"]
    assert cli.main(["export", str(saved.folder), *options]) == 2
    assert "--dtype bf16 is of --format safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_checkpoints_is_told_what_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["info"], ["verify"], ["verify", "--all"]):
        assert cli.main(["checkpoint", *command, str(tmp_path)]) == 2
        error = capsys.readouterr().err
        for words in ("no file 'latest'", "*_states.pt", "checkpoint-N"):
            assert words in error


def test_long_work_tells_how_far_it_is(
    saved: Saved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> list[tuple[str, ...]]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="hytrain.run"):
            assert cli.main(["checkpoint", "verify", str(saved.folder)]) == 0
            _export(saved, tmp_path / str(len(list(tmp_path.iterdir()))))
            with engine_of(Run(stage=2, bf16=True)) as engine:
                engine.load_checkpoint(saved.folder)
        lines = [record.getMessage() for record in caplog.records]
        return [tuple(line.split()) for line in lines if line.startswith(("ch", "wr", "lo"))]

    assert told() == [], "nothing of what takes no time"
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    lines = told()
    assert {line[0] for line in lines} == {"checking", "writing", "loading"}
    for kind in ("checking", "writing", "loading"):
        last = [line for line in lines if line[0] == kind][-1]
        assert last[-5:-3] == last[-2:], "all of it"


def test_info(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    (saved.folder / "hytrain-saving-x-1234").mkdir(exist_ok=True)
    assert cli.main(["checkpoint", "info", str(saved.folder), "--json"]) == 0
    facts = {fact["tag"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert facts["hytrain-saving-x-1234"]["kind"] == "unfinished"
    fact = facts["global_step2"]
    assert fact["kind"] == "hytrain"
    assert fact["is_latest"]
    assert fact["step"] == 2
    assert fact["parameters"] == sum(s["fp32"].numel() for s in saved.now.state.values())
    assert cli.main(["checkpoint", "info", str(saved.folder)]) == 0
    text = capsys.readouterr().out
    assert '"load_universal": true' in text
    assert max(map(len, text.replace(str(saved.folder), "DIR").splitlines())) <= 100


def test_links_are_not_followed(
    saved: Saved,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(saved.folder, folder)
    (tmp_path / "key").write_text("private")
    (folder / "tokenizer.json").symlink_to(tmp_path / "key")
    (folder / "config.json").write_text("[[[")
    assert cli.main(["export", str(folder), "--out", str(out)]) == 0
    assert not (out / "tokenizer.json").exists()
    assert (out / "config.json").read_text() == "[[["
    assert "tokenizer.json is a symbolic link" in caplog.text
    assert "private" not in "".join(p.read_text("latin-1") for p in out.iterdir())
    state = folder / saved.tag.name / "zero/norm.weight/fp32.pt"
    state.rename(tmp_path / "elsewhere.pt")
    state.symlink_to(tmp_path / "elsewhere.pt")
    assert cli.main(["export", str(folder), "--out", str(tmp_path / "more")]) == 2
    assert "fp32.pt is a symbolic link" in capsys.readouterr().err
    assert not (tmp_path / "more").exists()


def test_existing_files_are_not_replaced(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _export(saved, tmp_path)
    assert cli.main(["export", str(saved.folder), "--out", str(tmp_path)]) == 2
    assert "has a model.safetensors already" in capsys.readouterr().err
    for out, words in (
        (tmp_path / "model.safetensors", "is a file: give a folder"),
        (saved.folder, "is the checkpoint's own folder"),
        (saved.tag / "weights", "is the checkpoint's own folder"),
    ):
        assert cli.main(["export", str(saved.folder), "--out", str(out)]) == 2
        assert words in capsys.readouterr().err
    assert not (saved.tag / "weights").exists()


@pytest.mark.parametrize("size", ["0", "5XB", "GB", "-1GB"])
def test_sizes_are_checked(size: str, tmp_path: Path) -> None:
    command = ["export", str(tmp_path), "--out", str(tmp_path / "o"), "--max-shard-size", size]
    with pytest.raises(SystemExit):
        cli.main(command)


def test_a_failed_write_leaves_nothing(
    saved: Saved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hytrain.checkpoint.summed_files import SummingFile

    write = SummingFile.write

    def full(self: Any, data: bytes | memoryview) -> int:
        if "00003-of" in self.name:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(SummingFile, "write", full)
    command = ["export", str(saved.folder), "--out", str(tmp_path), "--max-shard-size", "5KB"]
    assert cli.main(command) == 2
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_plain_deepspeeds(
    process_group: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = plain_engine(torch.nn.Linear(4, 3), 2)
    plain.save_checkpoint(str(tmp_path / "in"))
    weights = {
        name: p.detach().float().cpu().clone() for name, p in plain.module.named_parameters()
    }
    plain.destroy()
    assert cli.main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    stored = safetensors.load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights.items())
    assert cli.main(["checkpoint", "verify", str(tmp_path / "in")]) == 0
    assert cli.main(["checkpoint", "info", str(tmp_path / "in")]) == 0
    assert "--inject_missing_state" in capsys.readouterr().out
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        (tmp_path / "in/global_step0" / name).unlink()
        assert cli.main(["checkpoint", "verify", str(tmp_path / "in")]) == 1
        assert "is missing" in " ".join(capsys.readouterr().out.split())


_MEASURE = """
import sys, threading, time
from hytrain.tools import cli
import torch, hytrain.tools.checkpoints.export, hytrain.checkpoint.inspection
def own():  # not the pages of mapped files, which are the system's cache
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
seen = [own()]
def watch():
    while True:
        seen.append(own())
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
assert cli.main(sys.argv[1:]) == 0
print(max(seen) - seen[0])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Path:
    """32 parameters of 4 MiB in fp32: 128 MiB."""
    folder = tmp_path_factory.mktemp("large")
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(32)]
    config = make_config(gpu_fraction=0.0, offload={"chunk_elements": 2**18})
    with built(torch.nn.Sequential(*layers), config) as engine:
        engine.save_checkpoint(folder)
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "fp32"])
def test_memory_is_that_of_few_tensors(kind: str, large: Path, tmp_path: Path) -> None:
    command = ["export", str(large), "--out", str(tmp_path), "--format", kind]
    ended = subprocess.run(
        [sys.executable, "-c", _MEASURE, *command], capture_output=True, text=True, check=True
    )
    grown = int(ended.stdout.splitlines()[-1])
    assert grown < 24 * 2**20, f"{grown / 2**20:.0f} MiB for a model of 128 MiB"
