"""Tells other ranks which process a rank is, and whether a process of this host has ended."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FLAGS = 6  # field 9 of /proc/*/stat (proc_pid_stat(5)), counted from behind the name
_PF_EXITING = 0x4  # Linux, include/linux/sched.h


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process.

    Attributes:
        machine: the same for all processes that can watch each other, and for no others; "": none.
    """

    machine: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def machine_identity() -> str:
    """The running kernel and the pid namespace; "" if processes cannot be watched."""
    try:
        os.close(os.pidfd_open(os.getpid()))  # Linux 5.3; a container may forbid it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, AttributeError):
        return ""


def this_process() -> Process:
    """The calling process."""
    return Process(machine_identity(), socket.gethostname(), os.getpid())


def are_of_one_host(processes: Sequence[Process]) -> bool:
    """Whether all of them can watch each other."""
    return len({process.machine for process in processes}) == 1 and bool(processes[0].machine)


class WatchedProcess:
    """A process of this host, by the kernel's handle, which holds even if its number is reused."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        with suppress(ProcessLookupError):  # it has ended
            self._handle = os.pidfd_open(pid)

    def is_gone(self) -> bool:
        """Whether the process has ended, or is about to end and will do nothing any more.

        A process that is stopped, or waits for a disk, is not gone.
        """
        if self._handle is None:
            return True
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        if not ended.poll(0) and not self._is_exiting():
            return False
        self.close()
        return True

    def _is_exiting(self) -> bool:
        # The kernel gives a killed process's memory back before it says that it has ended: with
        # hundreds of GiB of pinned state that takes longer than others may wait.
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text(errors="replace")
            fields = stat.rpartition(")")[2].split()  # the name may contain anything
            return bool(int(fields[_FLAGS]) & _PF_EXITING)
        except (OSError, ValueError, IndexError):
            return False  # hidden, or just gone: the handle tells

    def close(self) -> None:
        """Closes the handle."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def watched_by(rank: int, processes: Sequence[Process]) -> dict[int, WatchedProcess]:
    """The processes of the other ranks on one rank's host, by rank."""
    watched: dict[int, WatchedProcess] = {}
    for other, process in enumerate(processes):
        if other != rank and process.machine and process.machine == processes[rank].machine:
            with suppress(OSError):  # it may not be watched after all
                watched[other] = WatchedProcess(process.pid)
    return watched
