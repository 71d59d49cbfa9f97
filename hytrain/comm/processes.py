"""Which process a rank is, for the others, and whether that process is still there.

A process number alone says little: it is given to another process when the first one is gone. With
its start time it is unique as long as the kernel runs, among the processes of one pid namespace.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _FLAGS, _START = 0, 6, 19
"""Fields 3, 9 and 22 of /proc/*/stat (proc_pid_stat(5)), counted from behind the name."""
_PF_EXITING = 0x4  # Linux, include/linux/sched.h


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process.

    Attributes:
        machine: the same for all processes that see each other in /proc, and for no others.
        network: the same for all that share a loopback interface.
        host: the host's name, for people.
        pid: its number there.
        start: when it was started, in the kernel's ticks.
    """

    machine: str
    network: str
    host: str
    pid: int
    start: int

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def machine_identity() -> str:
    """The running kernel and the pid namespace; "" where they cannot be told."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def this_process() -> Process:
    """The calling one."""
    machine, network, start = machine_identity(), "", 0
    with suppress(OSError):
        network = f"{machine} {os.readlink(_PROC / 'self/ns/net')}"
    with suppress(OSError, ValueError, IndexError):
        start = int(_fields(_PROC / "self/stat")[_START])
    return Process(machine, network, socket.gethostname(), os.getpid(), start)


def can_look_at(process: Process, here: Process) -> bool:
    """Whether :func:`is_gone` can tell: the process is of this machine and seen right now.

    A machine may hide processes of others (hidepid), or have no /proc at all.
    """
    if not process.machine or process.machine != here.machine:
        return False
    return not is_gone(process)


def is_gone(process: Process) -> bool:
    """Whether a process of this machine has ended, or is about to and will do nothing any more.

    A stopped one, or one that waits for a disk, is there. A killed one may take many seconds to
    give its memory back, with its connections open: that it is exiting is seen from the beginning.
    """
    folder = _PROC / str(process.pid)
    try:
        fields = _fields(folder / "stat")
        if int(fields[_START]) != process.start:
            return True
        if fields[_STATE] not in "ZX" and not int(fields[_FLAGS]) & _PF_EXITING:
            return False
        # The first thread may have ended alone.
        return all(_is_exiting(task) for task in (folder / "task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, IndexError):
        return False


def _is_exiting(task: Path) -> bool:
    try:
        fields = _fields(task / "stat")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[_STATE] in "ZX" or bool(int(fields[_FLAGS]) & _PF_EXITING)


def _fields(path: Path) -> list[str]:
    # The name is in parentheses and may contain anything.
    return path.read_text(errors="replace").rpartition(")")[2].split()
