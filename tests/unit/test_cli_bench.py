"""`hytrain bench kernel`: the shape of its result; not its speed, which a test cannot judge."""

from __future__ import annotations

import json
import weakref

import pytest
import torch

from hytrain.hardware import machine
from hytrain.kernels import cpu_adam
from hytrain.kernels import host_limits as host_room
from hytrain.tools import cli
from hytrain.tools.kernel_bench import subjects as kernel_subjects
from hytrain.tools.kernel_bench.subjects import BYTES_PER_PARAM

SMALL = ["--elements", "100000", "--threads", "1,2", "--repeats", "2"]


@pytest.fixture(autouse=True)
def _without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling its extension takes a minute; a benchmark on a bare machine sees the same.
    def missing(weight: torch.nn.Parameter) -> None:
        raise ImportError("deepspeed")

    monkeypatch.setattr(kernel_subjects, "build_deepspeed_adam", missing)


def test_json_has_every_subject(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernel", "--json", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {*BYTES_PER_PARAM, "machine"}
    for name, num_bytes in BYTES_PER_PARAM.items():
        if name.startswith("deepspeed"):
            assert result[name] is None
            continue
        figures = result[name]
        assert figures["num_threads"] in (1, 2)
        assert figures["gbytes_per_s"] == pytest.approx(
            figures["gparams_per_s"] * num_bytes, rel=0.02, abs=0.01
        )
    assert result["machine"]["num_elements"] == 100000
    assert result["machine"]["isa"] == cpu_adam.active_isa()


def test_table_and_variants_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernel", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "not measured" in printed  # DeepSpeed's
    assert "over fp32" in printed.splitlines()[0]
    assert cli.main(["bench", "kernel", "--ours", *SMALL]) == 0
    assert capsys.readouterr().out.count("not measured") == 3
    before = cpu_adam.active_isa()
    assert cli.main(["bench", "kernel", "--variants", *SMALL]) == 0
    heading, below, *rows = capsys.readouterr().out.splitlines()
    assert "prefetch" in heading
    assert "elements" in below
    assert rows[0].startswith("commit")
    assert cpu_adam.active_isa() == before


def test_subjects_keep_their_arrays_alive() -> None:
    """The kernel takes addresses; where DeepSpeed is missing nothing else held the tensors."""
    arrays = kernel_subjects.Arrays.random(1000)
    alive = [weakref.ref(getattr(arrays, name)) for name in ("previous", "current", "out")]
    subjects = kernel_subjects.our_subjects(arrays, non_temporal=False)
    del arrays
    assert all(reference() is not None for reference in alive)
    del subjects
    assert all(reference() is None for reference in alive)


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "kernel", "--threads", "0"])
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_machine_facts_are_sane() -> None:
    assert machine.usable_cores() >= 1
    assert machine.last_level_cache_bytes() >= 2**18
    assert 0 < host_room.available_host_bytes() < 2**50
