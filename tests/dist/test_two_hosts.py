"""Two hosts, which are namespaces: where their ranks listen, and a rank that is killed.

Skipped where namespaces cannot be made: that needs root, and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ports import free_port
from support.processes import fresh_environment

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full
FOLDER = Path(__file__).resolve().parent
SECONDS = 120
ADDRESSES = ("10.213.45.1", "10.213.45.2")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two network namespaces, which reach each other at the addresses."""
    names = [f"hytrain-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"hyt{os.getpid() % 100_000}{letter}" for letter in "ab"]
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _run("ip", "link", "set", end, "netns", name, "name", "eth0")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _run("ip", "-n", name, "link", "set", link, "up")
        _run("ip", "netns", "exec", names[0], "unshare", "-p", "-u", "-f", "--mount-proc", "true")
    except (OSError, subprocess.SubprocessError) as error:
        for name in made:
            _run("ip", "netns", "del", name)
        pytest.skip(f"no namespaces can be made: {error}")
    yield names
    for name in made:
        _run("ip", "netns", "del", name)  # the interfaces go with it


def _train(hosts: list[str], how: str) -> list[str]:
    """What each rank has printed."""
    shell = shutil.which("sh") or "/bin/sh"
    port = str(free_port())
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank, host in enumerate(hosts):
            environment = fresh_environment(
                RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_RANK="0",
                LOCAL_WORLD_SIZE="1",
                MASTER_ADDR=ADDRESSES[0],
                MASTER_PORT=port,
                GLOO_SOCKET_IFNAME="eth0",
                OMP_NUM_THREADS="1",
                PYTHONPATH=os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]),
            )
            # The shell is the first process of its namespace, which no signal from within ends.
            command = f"hostname host{rank}; {sys.executable} training_on_hosts.py {how}; true"
            apart = ["unshare", "-p", "-u", "-f", "--kill-child", "--mount-proc", shell, "-c"]
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *apart, command],
                    cwd=FOLDER,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        return [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("firewall", "the connection to rank 1 (process "),
        pytest.param("reachable", "rank 1 was killed or has crashed (process ", marks=full),
    ],
)
def test_a_rank_of_another_host_is_killed(hosts: list[str], how: str, words: str) -> None:
    first, second = _train(hosts, how)
    assert f"LISTENS {ADDRESSES[0]}\n" in first
    assert f"LISTENS {ADDRESSES[1]}\n" in second
    assert f"RAISED {words}" in first
    assert "on host host1" in first
    assert ("its watch has not answered" in first) == (how == "firewall")
