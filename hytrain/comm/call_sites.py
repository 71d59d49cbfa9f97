"""Where a thread of this process stands.

It is read with faulthandler, which makes no frame objects. sys._current_frames() and frame.f_back
make them, and CPython 3.11 may collect garbage while it does: a finalizer gives up the
interpreter's lock, the thread that is looked at returns, and the new object refers to the memory of
a call that has ended.
"""

from __future__ import annotations

import faulthandler
import os
import re
from contextlib import suppress
from dataclasses import dataclass

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = tuple(
    os.sep + os.path.join("torch", "distributed", name)
    for name in ("distributed_c10d.py", "c10d_logger.py")
)
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) .*\(most recent call first\):")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Call:
    """A line that a thread executes."""

    file: str
    line: int
    function: str


def stack_of(thread: int) -> list[Call]:
    """The calls that a thread is in, the innermost first; at most 100.

    Args:
        thread: its threading.get_ident().

    Returns:
        Empty if they cannot be told: it has ended, or more than 100 threads are newer.
    """
    text = ""
    with suppress(OSError), open(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    calls: list[Call] = []
    is_it = False
    for line in text.splitlines():
        if begin := _THREAD.match(line):
            is_it = int(begin[1], 16) == thread
        elif is_it and (call := _CALL.match(line)):
            calls.append(Call(call[1], int(call[2]), call[3]))
    return calls


def is_in_torch_distributed(stack: list[Call]) -> bool:
    """Whether a thread stands in a call of torch.distributed, hytrain's or the script's."""
    return bool(stack) and stack[0].file.endswith(_TORCH)


def place_of(thread: int) -> str:
    """The innermost line of a thread outside of all libraries; "" if there is none."""
    ours = (_PACKAGE, os.path.dirname(os.__file__), "<")
    for call in stack_of(thread):
        is_library = any(part in call.file for part in _LIBRARIES)
        if not is_library and not call.file.startswith(ours):
            return f"{call.file}:{call.line} in {call.function}"
    return ""
