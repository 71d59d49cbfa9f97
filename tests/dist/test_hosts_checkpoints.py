"""Checkpoints of hosts that share no folder: each has a part; a part elsewhere is of no use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, Program, rank_variables, run_all
from support.ports import free_port

from hytrain.tools import cli

pytestmark = pytest.mark.timeout(700)
SCRIPT = str(Path(__file__).with_name("training_on_hosts.py"))
SECONDS = 300.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def _run(hosts: Hosts, folder: Path, what: str) -> list[str]:
    port = free_port()
    command = [sys.executable, SCRIPT, what, str(folder)]
    return run_all(
        [
            Program(host, command, folder / f"{what}{n}", **rank_variables(n, 2, port))
            for n, host in enumerate(hosts)
        ],
        SECONDS,
    )


def _states(text: str, what: str) -> list[str]:
    lines = [line.split() for line in text.splitlines() if line.startswith(f"STATE {what} ")]
    return [" ".join(line[2:]) for line in lines]


def test_each_host_has_a_part(
    hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in hosts:
        host.bind(tmp_path / host.name, tmp_path / "apart")
    text, other = _run(hosts, tmp_path, "save")
    for stage in (2, 3):
        saved = _states(text, f"saved{stage}")
        assert len(saved) == 2
        assert _states(text, f"loaded{stage}") == saved
    assert "each has saved a part of the checkpoint" in text
    assert "host0 (1 ranks), host1 (1 ranks)" in text
    assert "part of the checkpoint" not in other
    parts = [tmp_path / host.name for host in hosts]
    for part in parts:
        assert {path.name for path in part.iterdir()} == LEFT
        assert (part / "zero3" / "mp_rank_00_model_states.pt").is_file()
    states = [{str(p.relative_to(part)) for p in part.rglob("fp32.pt")} for part in parts]
    assert states[0]
    assert states[1]
    assert not states[0] & states[1]
    assert cli.main(["checkpoint", "verify", str(parts[0])]) == 1
    _merged(parts, tmp_path / "merged", capsys)
    # Host 1 is another one now, which has nothing.
    hosts[1].run("umount", str(tmp_path / "apart"))
    again, _ = _run(hosts, tmp_path, "load")
    for stage in (2, 3):
        assert _states(again, f"merged{stage}") == _states(text, f"saved{stage}")
        (refused,) = [t for t in again.splitlines() if t.startswith(f"REFUSED apart {stage} ")]
        assert "which host1 saved, are on none of the hosts host0, host1" in refused
        assert "hytrain checkpoint merge" in refused
        assert "/fp32.pt" in refused or "/exp_avg.pt" in refused


LEFT = {"zero2", "zero3", "latest", "latest_universal", "zero_to_fp32.py", "hytrain_README.txt"}


def _merged(parts: list[Path], out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Puts them together, of each tag; one alone is refused with what is missing."""
    for tag in ("zero2", "zero3"):
        command = ["checkpoint", "merge", *map(str, parts), "--out", str(out), "--tag", tag]
        assert cli.main(command) == 0
        assert cli.main(["checkpoint", "verify", str(out), "--tag", tag]) == 0
    alone = ["checkpoint", "merge", str(parts[0]), "--out", str(out), "--tag", "zero2"]
    assert cli.main(alone) == 2
    assert "give those of host1, too" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", str(out), "--tag", "zero2"]) == 0, "it is as it was"
