"""Trainings over two hosts by each launcher: weights are plain torch's; what differs is refused.

`make test-hosts` runs all, `make test` a part.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, Program, missing_tools, program, rank_variables, run_all
from support.ports import free_port

import hytrain.version

pytestmark = pytest.mark.timeout(700)
full = pytest.mark.parity_full
SCRIPT = str(Path(__file__).with_name("training_on_hosts.py"))
SECONDS = 300.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def _torchrun(hosts: Hosts, folder: Path, what: str, ranks: int, *how: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", str(ranks), *how]
    launchers = [
        Program(host, [*command, "--node-rank", str(n), SCRIPT, what, str(folder)], folder / f"{n}")
        for n, host in enumerate(hosts)
    ]
    return run_all(launchers, SECONDS)


@full
@pytest.mark.parametrize(("ranks", "meeting"), [(1, "master"), (2, "c10d")])
def test_torchrun(hosts: Hosts, tmp_path: Path, ranks: int, meeting: str) -> None:
    port = str(free_port())
    how = ["--master-addr", "host0", "--master-port", port]
    if meeting == "c10d":
        how = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"host0:{port}", "--rdzv-id", "job"]
    texts = _torchrun(hosts, tmp_path, "train", ranks, *how)
    for text in texts:
        assert text.count("TRAINED ") == 5 * ranks
        assert "HOSTS ['host0', 'host1']" in text


@full
def test_torchrun_restarts_from_a_checkpoint(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/several_hosts.md says; torch's default leaves the first ranks' addresses in place."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    how = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"host0:{free_port()}", "--rdzv-id", "job"]
    for text in _torchrun(hosts, tmp_path, "restart", 1, *how, "--max-restarts", "1"):
        lines = [line for line in text.splitlines() if line.startswith(("FIRST", "LAST"))]
        assert lines == ["FIRST 0", "FIRST 3", "LAST 6"]


def test_what_differs_between_hosts_is_refused_with_both_values(
    hosts: Hosts, tmp_path: Path
) -> None:
    other = tmp_path / "version.py"
    here = Path(str(hytrain.version.__file__))
    other.write_text(here.read_text().replace(hytrain.version.__version__, "9.9.9"))
    hosts[1].run("mount", "--bind", str(other), str(here))
    port = free_port()
    programs = [
        Program(
            host,
            [sys.executable, SCRIPT, "differ", str(tmp_path)],
            tmp_path / f"log{n}",
            **rank_variables(n, 2, port),
        )
        for n, host in enumerate(hosts)
    ]
    both = " is {} on rank 0 (host host0); {} on rank 1 (host host1)"
    values = {
        "version": ("the version of hytrain", hytrain.version.__version__, "9.9.9"),
        "config": ('"gradient_clipping"', 1, 2),
        "seed": ('"seed"', 100, 101),
        "plan": ('"hytrain.shard_fractions"', [0.6, 0.4], [0.5, 0.5]),
        "world": ('"train_batch_size"', 2, 3),
    }
    for text in run_all(programs, SECONDS):
        assert "BUILT" not in text
        for name, (key, *values_of) in values.items():
            (line,) = [each for each in text.splitlines() if each.startswith(f"REFUSED {name} ")]
            assert key + both.format(*values_of) in line


def _serve_ssh(hosts: Hosts, folder: Path) -> None:
    """Each host lets root of the others in, with a key of this test's."""
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
    (folder / "config").write_text(
        f"IdentityFile {folder}/key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    (folder / "sshd").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\n"
        "UsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nPidFile none\n"
        "SetEnv DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=\n"
    )
    for host in hosts:
        host.bind(folder, Path.home() / ".ssh")
        host.run("mkdir", "-p", "/run/sshd")
        host.run(str(program("sshd")), "-f", str(folder / "sshd"))


@full
@pytest.mark.parametrize("slots", [(1, 1), (1, 2)], ids=str)
def test_the_deepspeed_launcher_by_ssh(
    hosts: Hosts, tmp_path: Path, slots: tuple[int, int]
) -> None:
    """A hostfile and nothing else: it finds the master's address itself, and the hosts by pdsh."""
    if (reason := missing_tools("sshd", "ssh-keygen", "pdsh")) is not None:
        pytest.skip(reason)
    (tmp_path / "ssh").mkdir()
    _serve_ssh(hosts, tmp_path / "ssh")
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"host{n} slots={s}\n" for n, s in enumerate(slots)))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    command += ["--master_port", str(free_port()), SCRIPT, "train", str(tmp_path)]
    text = run_all([Program(hosts[0], command, tmp_path / "log")], SECONDS)[0]
    assert text.count("TRAINED ") == 5 * sum(slots)
    assert "HOSTS ['host0', 'host1']" in text
    assert text.count("ENDED") == sum(slots)
