"""Starts one process a GPU for a list of stages, and takes up again after a stage that broke it.

A rank that runs out of memory leaves the others waiting in a collective for ever. So a rank that
fails writes what happened and ends, everything is ended with it, and the stages that are left are
given to new processes. No torch here.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from experiments.common import records
from experiments.common.processes import REPOSITORY, extensions_dir, free_port, stop, tail
from experiments.common.records import Json

REFUSED = "refused"
"""The status of a stage that hytrain or the planner refused on all ranks: they go on."""

CONTINUED = (records.OK, REFUSED)
"""After any other status the processes end."""

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Torch's settings of its GPU allocator; newer ones read PYTORCH_ALLOC_CONF, too."""

EXPANDABLE = "expandable_segments:True"
"""A plan fills a GPU to within a GiB: that must not be lost to fragments."""

GRACE_SECONDS = 2.0
"""After the first process has ended, for the others to end by themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a group's processes run."""

    device: str
    gpus: tuple[int, ...]
    """Of the machine, one a rank; on a CPU only their number counts."""
    cores: tuple[tuple[int, ...], ...]
    """Of the machine, one set a rank."""


def worst(statuses: Sequence[str]) -> str:
    """Of a stage's ranks, what explains the others: a rank without memory fails the rest."""
    for status in (records.OUT_OF_MEMORY, records.FAILED, REFUSED):
        if status in statuses:
            return status
    return records.OK


def divide_cores(cores: Sequence[int], shares: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring cores for each of so many GPUs; where there are fewer, all share all."""
    each = len(cores) // shares
    if each == 0:
        return (tuple(cores),) * shares
    return tuple(tuple(cores[i * each : (i + 1) * each]) for i in range(shares))


def allocator_settings(device: str) -> dict[str, str]:
    """Variables by which torch's GPU allocator is set in the processes; the user's own, if any."""
    given = {
        name: os.environ[name] for name in (ALLOCATOR, "PYTORCH_ALLOC_CONF") if name in os.environ
    }
    if device == "cpu" or given:
        return given
    return {ALLOCATOR: EXPANDABLE}


def communication_settings() -> dict[str, str]:
    """What the environment says of NCCL and of hytrain, which the processes inherit."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "HYTRAIN_"))
    }


def environment(place: Place, rank: int, ports: tuple[int, int]) -> dict[str, str]:
    """A rank's environment."""
    env = dict(os.environ)
    paths = [str(REPOSITORY), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    size = str(len(place.gpus))
    env.update(
        PYTHONPATH=os.pathsep.join(paths),
        PYTHONUNBUFFERED="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(ports[0]),
        STAGES_PORT=str(ports[1]),
        STAGES_CORES=",".join(map(str, place.cores[rank])),
        OMP_NUM_THREADS=str(max(1, len(place.cores[rank]) - 1)),
        TORCH_EXTENSIONS_DIR=extensions_dir(),
        # One machine: gloo need not ask for its name.
        GLOO_SOCKET_IFNAME="lo",
        **allocator_settings(place.device),
    )
    if place.device == "cpu":
        env.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.gpus))
    return env


def describe_beside(result: Json, device: str, gpus: int) -> threading.Thread:
    """Fills in result["hardware"] while the processes start: torch takes seconds to import.

    Returns:
        The thread, to be joined before the result is used.
    """
    beside = {
        "gpus": gpus,
        "allocator": allocator_settings(device),
        "nccl": communication_settings(),
    }
    result["hardware"] = beside

    def describe() -> None:
        from experiments.common import hardware

        # One assignment: another thread may be writing the result file.
        result["hardware"] = {**hardware.describe(device), **beside}

    thread = threading.Thread(target=describe, name="hardware", daemon=True)
    thread.start()
    return thread


class Group:
    """One start of a group's processes."""

    def __init__(self, module: str, job: Json, place: Place, folder: Path) -> None:
        """
        Args:
            module: run as `python -m module JOB.json FOLDER`.
            job: what its processes are given.
            place: where they run.
            folder: for the job, the logs, and each rank's results; made anew.
        """
        self.folder = folder
        self._size = len(place.gpus)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*"):
            old.unlink()
        records.write_json(folder / "job.json", job)
        ports = (free_port(), free_port())
        command = [sys.executable, "-m", module, str(folder / "job.json"), str(folder)]
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(self._size):
            with (folder / f"rank{rank}.log").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=REPOSITORY,
                        env=environment(place, rank, ports),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
        self._ended_at: float | None = None

    def is_running(self) -> bool:
        """Whether to go on waiting; ends the others a while after one has ended."""
        codes = [process.poll() for process in self._processes]
        if all(code is not None for code in codes):
            return False
        if any(code is not None for code in codes):
            self._ended_at = self._ended_at or time.monotonic()
            if time.monotonic() - self._ended_at > GRACE_SECONDS:
                self.stop()
                return False
        return True

    def stop(self) -> None:
        """Ends all of its processes."""
        for process in self._processes:
            stop(process)

    def results(self) -> list[Json]:
        """What each rank has written: {stage's name: result}."""
        paths = [self.folder / f"rank{rank}.json" for rank in range(self._size)]
        return [records.read_json(path) if path.exists() else {} for path in paths]

    def log(self, lines: int = 30) -> list[str]:
        """The end of the log of the rank that says why; of rank 0 where none does."""
        failed = [r for r, p in enumerate(self._processes) if p.poll() not in (0, None, -9)]
        return tail(self.folder / f"rank{failed[0] if failed else 0}.log", lines)


@dataclasses.dataclass
class Work:
    """A list of stages for one group of GPUs, with the results so far.

    Attributes:
        label: its own.
        stages: each {"name", "kind", "case", ...}.
        size: ranks.
        results: stage's name -> {"status", "ranks": [a result a rank]}.
    """

    label: str
    stages: list[Json]
    size: int
    results: Json = dataclasses.field(default_factory=dict)
    starts: int = 0
    group: Group | None = None
    _is_explained: bool = False

    def left(self) -> list[Json]:
        """Stages without a result whose needs were met."""
        bad = {name for name, found in self.results.items() if found["status"] != records.OK}
        found: list[Json] = []
        for stage in self.stages:
            if bad & set(stage.get("needs", ())):
                bad.add(stage["name"])
            elif stage["name"] not in self.results:
                found.append(stage)
        return found

    def take(
        self, ranks: Sequence[Json], log: Sequence[str], ended: Literal["", "ended", "late"]
    ) -> None:
        """Takes over what the ranks have written; once they have ended, also what is missing.

        A stage has the status of the rank that failed. Where no rank says why the processes ended,
        it was the first stage without a result.
        """
        for stage in self.left():
            name = stage["name"]
            found = [rank.get(name) for rank in ranks]
            reported = [one for one in found if one is not None]
            bad = [one for one in reported if one["status"] != records.OK]
            if len(reported) < len(found) and not (ended and bad):
                continue
            status = worst([one["status"] for one in reported])
            self.results[name] = {"status": status, "ranks": found}
            if status not in CONTINUED:
                self.results[name]["log"] = list(log)
                self._is_explained = True
        left = self.left()
        if ended and left and not self._is_explained:
            status = records.TIMED_OUT if ended == "late" else records.FAILED
            self.results[left[0]["name"]] = {"status": status, "ranks": [], "log": list(log)}
        if ended:
            self._is_explained = False


def run_all(
    works: Sequence[Work],
    module: str,
    place_of: Callable[[Sequence[Work]], list[Place]],
    folder: Path,
    until: float,
    on_news: Callable[[], None],
) -> None:
    """Runs lists of stages side by side, each on its own GPUs, until they are through.

    Args:
        works: of one wave; their results are filled in.
        module: of the processes.
        place_of: GPUs and cores for each.
        folder: a folder a start is made here.
        until: time.monotonic() at which everything is ended.
        on_news: called whenever a stage has a result.
    """
    places = place_of(works)

    def start(work: Work, place: Place) -> None:
        job: Json = {"stages": work.left(), "known": work.results, "device": place.device}
        work.starts += 1
        work.group = Group(module, job, place, folder / f"{work.label}_{work.starts}")

    for work, place in zip(works, places, strict=True):
        start(work, place)
    try:
        while any(work.group is not None for work in works):
            time.sleep(0.1)
            for work, place in zip(works, places, strict=True):
                if work.group is None:
                    continue
                is_late = time.monotonic() > until
                ended = is_late or not work.group.is_running()
                if is_late:
                    work.group.stop()
                before = len(work.results)
                how = "late" if is_late else "ended" if ended else ""
                work.take(work.group.results(), work.group.log(), how)
                if len(work.results) > before:
                    on_news()
                if ended:
                    work.group = None
                    if work.left() and not is_late:
                        start(work, place)
    finally:
        for work in works:
            if work.group is not None:
                work.group.stop()
