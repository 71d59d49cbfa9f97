"""What commands print fits 100 columns, with usual values and with very large ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.placement_runs import text_of, typical_run
from support.plan_profiles import a_device, a_host, a_profile

from hytrain.formats.profile_file import ProfileFile, UpdateLaunches
from hytrain.formats.text_table import WIDTH, align, fold
from hytrain.tools import cli
from hytrain.tools.explain.history import read_history
from hytrain.tools.explain.report import run_text
from hytrain.tools.profiler.profile_report import profile_table


def check_width(text: str, longest: int = WIDTH) -> None:
    assert [line for line in text.splitlines() if len(line) > longest] == []


# -- the helpers -------------------------------------------------------------------------------


def test_a_table_that_fits_is_not_folded() -> None:
    rows = [("a name", "two words"), ("x", "1"), ("longer", "22")]
    assert align(rows) == ["a name  two words", "x               1", "longer         22"]


def test_words_of_the_heading_are_folded_first_then_cells_that_hold_words() -> None:
    rows = [("n", "two words", "why"), ("1", "12345", "some words and more"), ("2", "1", "none")]
    heading, first, second = align(rows, left=(0, 2), width=30)
    assert heading.splitlines() == ["     two", "n  words  why"]
    assert first == "1  12345  some words and more"
    assert second == "2      1  none"
    _, first, second = align(rows, left=(0, 2), width=22)
    assert first.splitlines() == ["1  12345  some words", "          and more"]
    assert second == "2      1  none"


def test_numbers_stay_whole_where_nothing_else_can_be_folded() -> None:
    heading, row = align([("a", "b"), ("x", "9" * 30)], width=20)
    assert row == f"x  {'9' * 30}"
    assert heading.split() == ["a", "b"]
    assert align([("a", "b")]) == ["a  b"], "a heading alone"


def test_long_lines_are_folded_at_spaces() -> None:
    path = "/a/folder" * 12
    text = fold(f"short\n  {'word ' * 30}\n\n{path}")
    first, *folded, empty, last = text.splitlines()
    assert (first, empty, last) == ("short", "", path)
    assert folded[0].startswith("  word")
    assert all(line.startswith("    word") and len(line) <= WIDTH for line in folded[1:])
    assert " ".join(text.split()).count("word") == 30


def test_a_number_keeps_its_percent_sign() -> None:
    assert fold("a word of 3.6 %.", 14).splitlines() == ["a word of", "  3.6 %."]


# -- plan --------------------------------------------------------------------------------------

EXTREME = "NVIDIA GeForce RTX 4090 Laptop GPU with a name that nobody has given to any GPU as yet"


def profile(name: str, host: str, *, layers: int, gigabytes: float) -> ProfileFile:
    devices = [a_device(host, name, speed=speed, gigabytes=gigabytes) for speed in (1.0, 0.25)]
    made = a_profile(host, *devices)
    hosts = (a_host(host, *devices, gigabytes=2000),)
    model = made.model.model_copy(update={"num_layers": layers})
    return made.model_copy(update={"hosts": hosts, "model": model})


@pytest.mark.parametrize(
    ("name", "host", "layers", "gigabytes", "batch"),
    [("NVIDIA H200", "node-0", 32, 139.8, 256), (EXTREME, "a-host-of-" * 9, 999, 9999.9, 64)],
    ids=["realistic", "extreme"],
)
def test_plan(
    name: str, host: str, layers: int, gigabytes: float, batch: int, tmp_path: Path, capsys: Any
) -> None:
    made = profile(name, host, layers=layers, gigabytes=gigabytes)
    path = tmp_path / "profile.json"
    path.write_text(made.model_dump_json(), encoding="utf-8")
    assert cli.main(["plan", "--profile", str(path), "--batch", str(batch)]) == 0
    text = capsys.readouterr().out
    check_width(text)
    text = fold(profile_table(made))
    check_width(text)
    assert f"{100 * layers + 101:,}.0 M in all, " in " ".join(text.split())


# -- profile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_profile(factor: float) -> None:
    made = profile("NVIDIA H200", "node-0", layers=32, gigabytes=139.8)
    devices = [
        device.model_copy(
            update={
                "settings": "words about clocks and power limits " * 5,
                "launch_slowdown": 2.0 * factor,
                "launch_spread": 2.0 * factor,
                "update_launches": UpdateLaunches(
                    gpu_step_ms=0.1 * factor,
                    launch_ms=0.1 * factor,
                    gpu_layer_ms=0.1 * factor,
                    cpu_layer_ms=0.1 * factor,
                    passes_ms=0.1 * factor,
                    gpu_layer_passes_ms=0.1 * factor,
                ),
                "layer": tuple(
                    type(row)(
                        **{
                            name: type(value)(value * (1 if name == "samples" else factor))
                            for name, value in (
                                row.model_dump() | {"launch_ms": 100.0, "device_ms": 50.0}
                            ).items()
                        }
                    )
                    for row in device.layer
                ),
            }
        )
        for device in made.devices
    ]
    text = fold(profile_table(made.model_copy(update={"devices": tuple(devices)})))
    check_width(text)
    assert "launch-bound up to" in text
    (heading, *_) = [line for line in text.splitlines() if line.startswith("  samples")]
    assert heading.split()[-2:] == ["ms", "MiB"]


# -- explain -----------------------------------------------------------------------------------


def test_explain_a_run() -> None:
    records = typical_run(clipped_share=0.5)
    text = run_text(read_history(text_of(records)))
    check_width(fold(text))
    table = text.split("Candidates\n\n")[1].split("worker:")[0]
    check_width(table)
    assert "<- chosen" in table
