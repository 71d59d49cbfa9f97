"""`hytrain bench kernel`: the shape of its result; not its speed, which a test cannot judge."""

from __future__ import annotations

import json
import re

import pytest
import torch

from hytrain.hardware import machine
from hytrain.kernels import cpu_adam
from hytrain.kernels import host_limits as host_room
from hytrain.tools import cli
from hytrain.tools.kernel_bench import subjects as kernel_subjects

SMALL = ["--elements", "100000", "--threads", "1,2", "--repeats", "2"]


@pytest.fixture(autouse=True)
def _without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling its extension takes a minute; a benchmark on a bare machine sees the same.
    def missing(weight: torch.nn.Parameter) -> None:
        raise ImportError("deepspeed")

    monkeypatch.setattr(kernel_subjects, "build_deepspeed_adam", missing)


BYTES = {
    "commit": 28,
    "commit_then_preview": 30,
    "preview": 16,
    "read_write": 24,
    "commit_bf16": 20,
    "commit_then_preview_bf16": 22,
    "preview_bf16": 12,
    "read_write_bf16": 16,
    "commit_8bit": 16 + 1 / 16,
    "commit_then_preview_8bit": 18 + 1 / 16,
    "preview_8bit": 10 + 1 / 32,
    "read_write_8bit": 12 + 1 / 16,
    "torch_fused": 28,
}
"""That a parameter moves: counted by hand."""


def test_json_has_every_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernel", "--beside", "--json", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {*BYTES, "deepspeed_adam", "deepspeed_path", "machine"}
    assert result["deepspeed_adam"] is result["deepspeed_path"] is None
    for name, num_bytes in BYTES.items():
        figures = result[name]
        assert figures["num_threads"] in (1, 2)
        assert figures["gbytes_per_s"] == pytest.approx(
            figures["gparams_per_s"] * num_bytes, rel=0.02, abs=0.01
        )
        _, _, kind = name.rpartition("_")
        assert (figures["over_fp32"] is None) == (kind not in ("bf16", "8bit"))
        if name.startswith("read_write"):
            assert figures["of_read_write"] == 1.0
    assert result["machine"]["num_elements"] == 100032  # whole blocks of codes
    assert result["machine"]["isa"] == cpu_adam.active_isa()


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernel", "--beside", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("An Adam update (commit, fp32 moments): ")
    assert "over fp32" in printed.splitlines()[4]
    # Arrays that fit in the caches say nothing about memory.
    assert "fit in the CPU's caches" in printed
    assert "%" not in printed
    told = "not measured, since it could not be built: deepspeed_adam, deepspeed_path"
    assert printed.count(told) == 1
    assert "is not known. " in " ".join(printed.split())  # nothing of what was not measured
    assert cli.main(["bench", "kernel", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "not measured" not in printed
    assert "of read_write" not in " ".join(printed.split())  # a column without a number


def test_the_headline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 1000)

    def measured(weight: torch.nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([weight], lr=1e-6)

    monkeypatch.setattr(kernel_subjects, "build_deepspeed_adam", measured)
    assert cli.main(["bench", "kernel", "--beside", *SMALL]) == 0
    head = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
    assert re.fullmatch(
        r"An Adam update \(commit, fp32 moments\): [\d.]+ G parameters/s, [\d.]+ times "
        r"DeepSpeedCPUAdam's, \d+% of the rate of plain reads and writes\.",
        head,
    )


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "kernel", "--threads", "0"])
    assert "is not a whole number of at least 1" in capsys.readouterr().err
    assert cli.main(["bench", "kernel", "--threads", "1,1025"]) == 2
    assert "--threads 1025: the kernels run on at most 1024" in capsys.readouterr().err


def test_machine_facts_are_sane() -> None:
    assert machine.usable_cores() >= 1
    assert machine.last_level_cache_bytes() >= 2**18
    assert 0 < host_room.available_host_bytes() < 2**50


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    text = capsys.readouterr().out
    commands = {"bench", "profile", "plan", "explain", "doctor", "export", "checkpoint", "trace"}
    assert commands <= set(text.split())


@pytest.mark.parametrize(
    ("words", "meant"),
    [("trce", "trace"), ("trace reprt", "report"), ("checkpoint verfy x", "verify")],
)
def test_a_misspelt_command(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert f'did you mean "{meant}"?' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command", "told"),
    [
        ("trace report f --html x --jsn", "trace report", 'did you mean "--json"?'),
        ("explain --modle m f", "explain", 'did you mean "--model"?'),
        ("plan --strage 3", "plan", 'unknown option --strage: did you mean "--stage"?'),
        (  # it would be another option, shortened
            "plan --gpu-memory 78",
            "plan",
            'unknown option --gpu-memory: did you mean "--gpu-memory-reserve"?',
        ),
        ("plan hybrid --cse x", "plan hybrid", 'did you mean "--case"?'),
        ("checkpoint verify a b", "checkpoint verify", "unrecognized arguments: b"),
        ("doctor -q", "doctor", "unknown option -q (`hytrain doctor --help` lists all)"),
    ],
)
def test_an_option_that_a_command_has_not(
    words: str, command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words.split())
    text = capsys.readouterr().err
    assert text.startswith(f"hytrain {command}: ")
    assert told in text
    assert text.count("\n") == 1, "one line"
