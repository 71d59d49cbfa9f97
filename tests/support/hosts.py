"""Hosts for tests: namespaces of this machine, each with a name, an address and processes.

    with Hosts(2) as hosts:                       # skips the test if that is not possible
        hosts[0].run("ip", "addr")
        hosts.cut(1)                              # its cable is out; hosts.mend(1)
        hosts[1].kill()                           # the host, with all of its processes

Each host has namespaces of its own for network, processes, name and mounts. Their cables lead to a
switch, which is a namespace with a bridge. That needs root, iproute2 and util-linux. Their cores,
their clock and their file system are this machine's; a folder of a host's own is bound over a path
(``Host.bind``). A host lives as long as a pipe of this process is open: whatever becomes of the
test, nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.processes import fresh_environment

TESTS = Path(__file__).resolve().parents[1]
_NETWORK, _WIRE = "10.213.45.", "10.213.46."
_TOOLS = ("ip", "unshare", "nsenter", "mount")


def missing_tools(*names: str) -> str | None:
    """Returns what this machine lacks for hosts; None if nothing."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root can make"
    # Administration programs are not on every PATH.
    lacking = [name for name in (*_TOOLS, *names) if program(name) is None]
    return f"not installed here: {', '.join(lacking)}" if lacking else None


def program(name: str) -> str | None:
    """Returns a program's path; None if it is not installed."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Host:
    """One host."""

    def __init__(self, name: str, address: str, names: Path) -> None:
        """
        Args:
            name: the host's name.
            address: the address of its interface eth0.
            names: the file that is its /etc/hosts.
        """
        self.name, self.address = name, address
        # The kernel's boot id, by which hytrain tells machines apart.
        boot = names.with_name(f"{name}.boot_id")
        boot.write_text(f"{uuid.uuid4()}\n")
        mounts = {names: "/etc/hosts", boot: "/proc/sys/kernel/random/boot_id"}
        binds = " && ".join(f"mount --bind {own} {over}" for own, over in mounts.items())
        command = f"hostname {name} && {binds} && echo up && exec cat"
        apart = ["unshare", "-n", "-u", "-p", "-m", "-i", "-f", "--mount-proc", "sh", "-c", command]
        # The first process of its namespace: when it ends, all others do.
        self._first = subprocess.Popen(
            apart, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._first.stdout is not None
        if self._first.stdout.readline() != "up\n":
            raise OSError(f"no namespaces can be made: {self._first.communicate()[1]}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self.process = int(children.read_text())

    def inside(self, *command: str) -> list[str]:
        """Returns the command line that runs a command on the host."""
        return ["nsenter", "-t", str(self.process), "-n", "-u", "-p", "-m", "-i", *command]

    def run(self, *command: str) -> str:
        """Runs a command to its end and returns what it printed."""
        ended = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=60)
        if ended.returncode:
            raise OSError(f"{' '.join(command)} on {self.name}: {ended.stderr}")
        return ended.stdout

    def bind(self, folder: Path, over: Path) -> None:
        """Mounts a folder of the host's own over a path."""
        for each in (folder, over):
            each.mkdir(parents=True, exist_ok=True)
        self.run("mount", "--bind", str(folder), str(over))

    def close_port(self, port: int) -> None:
        """Drops packets to a port from outside, as a firewall does."""
        # Addresses of the host itself are looked up first, unless that rule is moved.
        self.run("sh", "-c", "ip rule add pref 100 lookup local; ip rule del pref 0; true")
        self.run(*f"ip rule add pref 1 iif eth0 ipproto tcp dport {port} blackhole".split())

    def kill(self) -> None:
        """Ends all of its processes at once."""
        os.kill(self.process, signal.SIGKILL)
        self._first.communicate()

    def close(self) -> None:
        """Kills the host if it still runs; may be called twice."""
        if self._first.poll() is None:
            self.kill()


class Hosts(Sequence[Host]):
    """Hosts host0, host1, ... on one switch."""

    def __init__(self, number: int) -> None:
        """Starts ``number`` hosts; skips the test if that is not possible."""
        if (reason := missing_tools()) is not None:
            pytest.skip(reason)
        self._folder = tempfile.TemporaryDirectory(prefix="hosts")
        addresses = [f"{_NETWORK}{n + 1}" for n in range(number)]
        names = Path(self._folder.name) / "hosts"
        lines = [f"{address} host{n}\n" for n, address in enumerate(addresses)]
        names.write_text("127.0.0.1 localhost\n" + "".join(lines))
        self._hosts: list[Host] = []
        self._wire: subprocess.Popen[str] | None = None
        try:
            self._switch = Host("switch", "", names)
            self._hosts += [Host(f"host{n}", a, names) for n, a in enumerate(addresses)]
            self._connect()
        except OSError as error:
            self.close()
            pytest.skip(f"no network namespaces can be made here: {error}")

    def _connect(self) -> None:
        switch = self._switch
        switch.run("sh", "-c", "ip link add switch type bridge && ip link set switch up")
        for number, host in enumerate(self._hosts):
            there = f"type veth peer name port{number} netns {switch.process}"
            _run(*f"ip link add eth0 netns {host.process} {there}".split())
            switch.run("ip", "link", "set", f"port{number}", "master", "switch", "up")
            up = "ip link set lo up && ip link set eth0 up"
            host.run("sh", "-c", f"ip addr add {host.address}/24 dev eth0 && {up}")

    def __getitem__(self, number: Any) -> Any:
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    def cut(self, number: int) -> None:
        """Pulls a host's cable out: it has no carrier, and no packet is answered."""
        self._switch.run("ip", "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        """Plugs the cable in again."""
        self._switch.run("ip", "link", "set", f"port{number}", "up")

    def add_wire(self, bits_per_second: float, delay: float = 5e-4) -> str:
        """Connects the first two by another cable (slow_wire.py); returns the first's address."""
        addresses = [f"{_WIRE}{n + 1}" for n in range(2)]
        ends = [str(self[0].process), addresses[0], str(self[1].process), addresses[1]]
        command = [sys.executable, str(TESTS / "support" / "slow_wire.py"), *ends]
        self._wire = subprocess.Popen(
            [*command, str(bits_per_second), str(delay)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != "carries\n":
            pytest.skip("no TUN interfaces can be made here")
        return addresses[0]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all hosts, the switch and the wire."""
        for host in [*self._hosts, *([self._switch] if hasattr(self, "_switch") else [])]:
            host.close()
        if self._wire is not None:
            self._wire.communicate()
        self._folder.cleanup()


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if ended.returncode:
        raise OSError(f"{' '.join(command)}: {ended.stderr}")


class Program:
    """A command that runs on a host, and what it has printed so far."""

    def __init__(self, host: Host, command: Sequence[str], log: Path, **variables: str) -> None:
        """
        Args:
            host: where it runs.
            command: the command line.
            log: the file for its output.
            variables: added to its environment.
        """
        path = os.pathsep.join([str(TESTS), str(TESTS / "dist"), os.environ.get("PYTHONPATH", "")])
        shared = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                host.inside(*command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=fresh_environment(**{**shared, **variables}),
                cwd=TESTS / "dist",
            )

    @property
    def text(self) -> str:
        """What the command has printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """The exit status; None while the command runs."""
        return self._process.poll()

    def line(self, begin: str) -> str:
        """The rest of the first line that begins with ``begin``; "" if there is none."""
        lines = [line for line in self.text.splitlines() if line.startswith(begin)]
        return lines[0].removeprefix(begin).strip() if lines else ""

    def close(self) -> None:
        """Kills the command; processes that it started end with the host."""
        self._process.kill()
        self._process.wait()


def wait_until(met: Callable[[], Any], programs: Sequence[Program], seconds: float) -> float:
    """Waits until ``met()`` is true; returns the seconds that took."""
    begin = time.monotonic()
    while not met():
        if time.monotonic() - begin > seconds:
            logs = "\n".join(f"-- ended: {each.code}\n{each.text[-3000:]}" for each in programs)
            raise AssertionError(f"not within {seconds:.0f} s:\n{logs}")
        time.sleep(0.1)
    return time.monotonic() - begin


def run_all(programs: Sequence[Program], seconds: float) -> list[str]:
    """Waits for all programs to end, which must be with status 0; returns their output."""
    wait_until(lambda: all(p.code is not None for p in programs), programs, seconds)
    for each in programs:
        assert each.code == 0, each.text[-4000:]
    return [each.text for each in programs]


def rank_variables(rank: int, world_size: int, port: int) -> Mapping[str, str]:
    """A rank's variables, as a launcher sets them: one rank per host, the master on the first."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": str(port),
    }
