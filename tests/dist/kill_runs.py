"""Kills ranks of a training at random moments and sees how the others end.

Each rank is a process of its own and rank 0 holds the store; see killed_training.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.ports import free_port
from support.processes import fresh_environment

TESTS = Path(__file__).resolve().parents[1]


START_SECONDS = 120.0
END_SECONDS = 45.0
"""After that a rank that was not killed counts as hanging."""
PROMISED_SECONDS = 10.0
"""From the kill to the end of the last rank, on a machine that is not busy."""
CASES = ("step", "accumulation", "train_batch", "layer_major", "save", "own", "alone")


@dataclass(frozen=True, slots=True)
class Kill:
    """One run."""

    case: str
    stage: int
    ranks: int
    victim: int
    delay: float
    """Seconds from when all ranks train."""
    signal: int = signal.SIGKILL
    """0: its script ends by itself."""
    hosts: tuple[str, ...] | None = None
    """Names of the hosts that the ranks are told to be on; None: one host."""
    without_peers: bool = False
    """The ranks cannot connect to each other, as behind a firewall: they have the store."""


@dataclass(slots=True)
class Ends:
    """How the ranks of a run ended.

    Attributes:
        codes: exit codes; None: it had not ended, and was killed in the end.
        seconds: from the kill to each rank's end.
        logs: what each rank said.
    """

    codes: list[int | None]
    seconds: list[float]
    logs: list[str]

    def faults(self, kill: Kill, *, most_seconds: float = PROMISED_SECONDS) -> list[str]:
        """What is not as promised."""
        found: list[str] = []
        for rank, code in enumerate(self.codes):
            if rank == kill.victim:
                continue
            text = self.logs[rank]
            last = text.strip().splitlines()[-12:]
            if code is None:
                found.append(f"rank {rank} hangs: {last}")
                continue
            if code != 1:
                found.append(f"rank {rank} ended with {code}: {last}")
            named = set(re.findall(r"RankFailedError: rank (\d+)", text))
            if named != {str(kill.victim)}:
                found.append(f"rank {rank} names {sorted(named)}: {last}")
            if self.seconds[rank] > most_seconds:
                found.append(f"rank {rank} took {self.seconds[rank]:.1f} s")
        return found


class Nursery:
    """Starts ranks from one process that has imported everything."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "dist")])
        environment = fresh_environment(OMP_NUM_THREADS="1", PYTHONPATH=path)
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "dist" / "killed_training.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._answers: queue.Queue[list[str]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line.split())

    def run(self, kill: Kill, folder: Path, *, seconds: float = END_SECONDS) -> Ends:
        """Starts the ranks, kills one, and waits for the others, so long at most."""
        processes = [self._start(kill, rank, folder) for rank in range(kill.ranks)]
        ended: dict[int, tuple[int, float]] = {}
        try:
            self._until_ready(kill, folder, ended)
            time.sleep(kill.delay)
            if kill.signal:
                os.kill(processes[kill.victim], kill.signal)
            begin = time.monotonic()
            while len(ended) < kill.ranks and time.monotonic() < begin + seconds:
                self._note(ended, 0.5)
            hanging = [rank for rank, process in enumerate(processes) if process not in ended]
        finally:
            for process in processes:
                if process not in ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            deadline = time.monotonic() + 20.0
            while len(ended) < kill.ranks and time.monotonic() < deadline:
                self._note(ended, 0.5)
        return Ends(
            [None if r in hanging else ended[process][0] for r, process in enumerate(processes)],
            [ended[process][1] - begin for process in processes],
            [_read_log(folder, rank) for rank in range(kill.ranks)],
        )

    def _start(self, kill: Kill, rank: int, folder: Path) -> int:
        if rank == 0:
            self._port = str(free_port())
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(kill.ranks),
            "LOCAL_WORLD_SIZE": str(kill.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port,
        }
        command: dict[str, Any] = {
            "environment": environment,
            "case": kill.case,
            "stage": kill.stage,
            "folder": str(folder),
            "log": str(folder / f"log{rank}"),
            "without_peers": kill.without_peers,
        }
        if kill.hosts is not None:
            command["host"] = kill.hosts[rank]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        while True:
            answer = self._answers.get(timeout=START_SECONDS)
            if answer[0] == "started":
                return int(answer[1])

    def _note(self, ended: dict[int, tuple[int, float]], seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            _, process, code, when = self._answers.get(timeout=seconds)
            ended[int(process)] = int(code), float(when)

    def _until_ready(self, kill: Kill, folder: Path, ended: dict[int, tuple[int, float]]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not all((folder / f"ready{rank}").exists() for rank in range(kill.ranks)):
            self._note(ended, 0.05)
            if ended or time.monotonic() > deadline:
                logs = [_read_log(folder, rank)[-3000:] for rank in range(kill.ranks)]
                raise AssertionError(f"{kill} has not begun: {ended} {logs}")


def _read_log(folder: Path, rank: int) -> str:
    return (folder / f"log{rank}").read_text(errors="replace")


def random_kill(generator: random.Random, **fixed: Any) -> Kill:
    """Any stage, case, number of ranks and victim."""
    ranks = fixed.pop("ranks", None) or generator.choice((2, 3))
    hosts = None
    if generator.random() < 0.3:  # all of them apart, or the last one
        hosts = tuple(f"host{r}" if generator.random() < 0.5 else "host0" for r in range(ranks))
    values: dict[str, Any] = {
        "case": generator.choice(CASES),
        "stage": generator.choice((1, 2, 3)),
        "ranks": ranks,
        "victim": generator.randrange(ranks),
        "delay": generator.uniform(0.0, 1.5),
        "hosts": hosts,
        # One host then: of others nobody could tell.
        "without_peers": hosts is None and generator.random() < 0.15,
        **fixed,
    }
    return Kill(**values)
