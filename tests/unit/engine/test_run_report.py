"""What a run says of itself: lines on rank 0, the file of "hytrain.metrics", the last steps."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.placement_runs import NUM_LAYERS, costs, decision
from support.scripts import run_script
from torch import nn

from hytrain.engine import run_report
from hytrain.engine.run_report import RunReport
from hytrain.errors import ConfigError
from hytrain.placement.costs import LayerBytes, layers_words, num_blocks
from hytrain.tools import cli

pytestmark = pytest.mark.usefixtures("process_group")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def _engine(gpu_fraction: float | str = "solve", **section: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    section["gpu_fraction"] = gpu_fraction
    with built(model, make_config(bf16=False, hytrain=section)) as engine:
        yield engine


def _steps(engine: Any, number: int) -> None:
    for _ in range(number):
        loss = engine(torch.randn(4, 32)).pow(2).mean()
        engine.backward(loss)
        engine.step()


@pytest.mark.cpu
def test_lines_at_the_start_when_k_has_settled_and_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="hytrain.run"), _engine() as engine:
        _steps(engine, 60)
    texts = [record.getMessage() for record in caplog.records if record.name == "hytrain.run"]
    assert "4,224 trained parameters in 4 layers, ZeRO-2" in texts[0]
    assert "no accelerator: everything is on the CPU" in texts[0]
    assert "k = 0.00 (0 of 4 layers), solved" in texts[0]
    assert re.match(r"hytrain: 60 steps; median of \d+: [\d.]+ ms with k = ", texts[-1])
    assert all(text.startswith("hytrain: k = ") for text in texts[1:-1])
    assert not any(
        one.split(" after ")[0] == two.split(" after ")[0] for one, two in pairwise(texts)
    )


@pytest.mark.cpu
def test_the_start_says_how_state_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(1024, 1024).bfloat16()
    solver = {"host_activation_bytes": 2**20}
    section = {"master": "split", "moments": "bf16", "solver": solver}
    with (
        caplog.at_level(logging.INFO, logger="hytrain.run"),
        built(model, make_config(bf16=True, hytrain=section)),
    ):
        pass
    start = next(record.getMessage() for record in caplog.records)
    assert "1.05 million trained parameters in 1 layer, ZeRO-2; k = 0.00 (0 of 1 layer)" in start
    assert "Adam state (split master weights, bf16 moments) 8.0 MiB;" in start  # 8 bytes each
    assert " of host memory, 1.0 MiB of offloaded activations beside it" in start
    assert start.endswith("layers on the CPU are whole, and updates there previewed")


class _Run:
    """A report of a run of which only decisions and steps exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_report, "start_line", lambda *_: "the start")
        self.decisions = [decision(0, 0, 0)]
        self.controller = SimpleNamespace(moves=SimpleNamespace(is_settled=True), solves=True)
        self.steps: list[Any] = []
        placement = SimpleNamespace(controller=self.controller, decisions=self.decisions)
        seen = SimpleNamespace(recent=lambda: self.steps)
        optimizer: Any = SimpleNamespace(placement=placement, statistics=seen)
        self.report = RunReport(None, optimizer)

    def step(self, number: int, layers: int) -> None:
        step = {"step": number, "step_seconds": 1.0, "update_seconds": 0.0, "exposed_seconds": 0.0}
        self.steps.append(SimpleNamespace(**step, gpu_fraction=layers / NUM_LAYERS))
        self.report.after_step(number)


def test_each_settled_change_of_k_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hytrain.run"):
        run = _Run(monkeypatch)
        for number in range(1, 100):
            if number in (10, 50, 53, 70):
                here = run.decisions[-1].gpu_layers_target
                target = {10: 12, 50: 14, 53: 16, 70: 16}[number]
                run.decisions.append(decision(number, here, target, measured=costs()))
            run.controller.moves.is_settled = number not in range(53, 65)
            run.step(number, run.decisions[-1].gpu_layers_target)
    told = [r.getMessage().split(":")[1] for r in caplog.records if " after step" in r.getMessage()]
    assert told == [
        f" k = {n / NUM_LAYERS:.2f} ({n} of {NUM_LAYERS} layers) after step {step}"
        for n, step in ((12, 10), (16, 53))
    ]


def test_the_summarys_k_is_that_of_the_steps_in_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hytrain.run"):
        run = _Run(monkeypatch)
        for number in range(1, 21):
            run.step(number, 4 if number < 10 else 12)
        # Made after the last step: no layer has moved.
        run.decisions.append(decision(20, 12, 16, measured=costs()))
        run.report.close()
    assert caplog.records[-1].getMessage() == (
        f"hytrain: 20 steps; median of 8: 1000.0 ms with k = {12 / NUM_LAYERS:.2f} "
        f"(12 of {NUM_LAYERS} layers), no CPU updates"
    )


def test_a_reason_is_its_first_clause() -> None:
    reason = "host-bound, but GPU updates would win nothing: CPU update 1 s; no layers to the GPU"
    assert run_report._because(replace(decision(0, 0, 0), reason=reason)) == (
        "host-bound, but GPU updates would win nothing: CPU update 1 s"
    )


def test_what_is_no_block_is_told_apart() -> None:
    names = ["before model.layers.0", "model.layers.0", "model.layers.1", "after model.layers.1"]
    layers = [LayerBytes(name, 1) for name in names]
    assert layers_words(layers) == "4 layers (2 blocks, and what comes before and after)"
    assert layers_words(layers[:3]) == "3 layers (2 blocks, and what comes before)"
    assert layers_words(layers[1:3]) == "2 layers"
    assert layers_words(layers[1:2]) == "1 layer"
    assert layers_words(layers[:2]) == "2 layers (1 block, and what comes before)"


def test_what_is_between_two_stacks_is_no_piece_of_a_block() -> None:
    names = ["before a.0", "a.0", "a.1", "before b.0", "b.0", "b.1", "after b.1"]
    words = "7 layers (4 blocks, and what comes before and after)"
    assert layers_words([LayerBytes(name, 1) for name in names]) == words


def test_pieces_of_a_block_are_one_block() -> None:
    names = ["before blocks.0", "blocks.0", "blocks.0, piece 2", "blocks.1", "after blocks.1"]
    layers = [LayerBytes(name, 1) for name in names]
    assert num_blocks(layers) == 2
    words = "5 layers (2 blocks in 3 pieces, and what comes before and after)"
    assert layers_words(layers) == words


def test_a_fixed_k_is_not_said_to_have_settled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hytrain.run"), _engine(0.5) as engine:
        _steps(engine, 20)
    start, end = (r.getMessage() for r in caplog.records if r.name == "hytrain.run")
    assert "k = 0.50 (2 of 4 layers), fixed" in start
    assert "k = 0.50 (2 of 4 layers)" in end


def test_a_progress_bar_is_not_written_into() -> None:
    code = (
        "import os, sys; from hytrain.engine import run_report\n"
        "ours, theirs = os.openpty(); os.dup2(theirs, 2)\n"
        "sys.stderr.write('50%'); run_report.show_lines(); run_report.logger.info('seen')\n"
        "seen = b''\n"
        "while not seen.endswith(b'\\n'): seen += os.read(ours, 1000)\n"
        "print(seen)"
    )
    assert r"50%\r\x1b[Khytrain: seen\r\n" in run_script(code, timeout=60.0).stdout


@pytest.mark.parametrize("quiet", [False, True])
def test_a_script_shows_them_unless_it_sets_a_level(quiet: bool) -> None:
    text = (
        "import logging\nfrom hytrain.engine import run_report\n"
        + ("logging.getLogger('hytrain').setLevel(logging.WARNING)\n" if quiet else "")
        + "run_report.show_lines()\nrun_report.logger.info('seen')\n"
        "logging.getLogger('hytrain.placement').warning('a warning of %d', 1)\n"
    )
    shown = run_script(text).stderr
    assert shown.count("hytrain: seen") == (0 if quiet else 1)
    assert shown.count("hytrain: a warning of 1") == 1


@pytest.mark.cpu
def test_metrics_are_what_explain_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    with _engine(metrics=str(path)) as engine:
        _steps(engine, 12)
        seconds = [each.step_seconds for each in engine.recent_steps()]
    lines = _lines(path)
    steps = [line for line in lines if "step_s" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["step_s"] for line in steps] == seconds
    assert {"k", "update_s", "exposed_s", "hidden_share", "host_memory_gib"} <= set(steps[0])
    assert [line["kind"] for line in steps] == ["step"] * 12
    decisions = [line for line in lines if line["kind"] == "decision"]
    assert decisions == [line for line in lines if "placement" in line]
    assert lines[0]["placement"]["gpu_layers_target"] == 0, "the first decision"
    assert cli.main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Decisions" in text
    assert text.startswith("There was no GPU: ")


def test_a_resumed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with _engine(metrics=str(path)) as engine:
        _steps(engine, 2)
        engine.save_checkpoint(tmp_path / "saved")
        _steps(engine, 1)
    with path.open("a") as file:
        file.write('{"rank": 0, "half a line')
    with _engine(metrics=str(path)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        _steps(engine, 2)
    steps = [line["step"] for line in _lines(path) if "step_s" in line]
    assert steps == [1, 2, 3, 3, 4]
    assert cli.main(["explain", str(path)]) == 0


def test_decisions_are_written_once_where_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def move(engine: Any, *fractions: float) -> None:
        for fraction in fractions:
            engine.set_gpu_fraction(fraction)
            _steps(engine, 1)

    with _engine(metrics=str(path)) as engine:
        move(engine, 1.0)
        engine.save_checkpoint(tmp_path / "saved")
        move(engine, 0.0, 0.5, 1.0)
        before = len(_lines(path))
        engine.load_checkpoint(tmp_path / "saved")
        move(engine, 0.0)
    after = [line["placement"] for line in _lines(path)[before:] if line["kind"] == "decision"]
    # Where layers are when it is loaded, and the moves; nothing that the checkpoint keeps.
    assert [each["gpu_layers_target"] for each in after] == [4, 0]


def test_a_load_without_decisions_writes_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with _engine(1.0, metrics=str(path)) as engine:
        _steps(engine, 1)
        assert engine.load_checkpoint(tmp_path) == (None, None)
        _steps(engine, 1)
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        _steps(engine, 1)
    assert [line["kind"] for line in _lines(path)] == ["decision", "step", "step", "step"]


@pytest.mark.parametrize("content", ["no newline at all", 'lines\n{"other": 1'])
def test_another_file_is_refused_and_left_as_it_is(content: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text(content)
    engine = _engine(metrics=str(tmp_path / "notes"))
    with pytest.raises(ConfigError, match="is no metrics file"), engine:
        pass
    assert (tmp_path / "notes").read_text() == content


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unwritable = _engine(metrics=str(tmp_path / "file" / "metrics.jsonl"))
    with pytest.raises(ConfigError, match=r'"hytrain.metrics" is .* cannot be written'), unwritable:
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_file_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with _engine(metrics=str(tmp_path / "metrics.jsonl")) as engine:
        _steps(engine, 3)
        assert engine.global_steps == 3
    assert sum("no more metrics" in record.getMessage() for record in caplog.records) == 1
