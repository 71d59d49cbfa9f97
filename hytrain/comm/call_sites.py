"""Where a thread of this process stands, for the ranks that wait for it: which line, which call."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_CALLS = os.sep + os.path.join("torch", "distributed", "distributed_c10d.py")
_TORCH = (_TORCH_CALLS, os.sep + os.path.join("torch", "distributed", "c10d_logger.py"))
_BETWEEN = (
    os.sep + os.path.join("deepspeed", "comm") + os.sep,
    os.sep + "contextlib.py",
    *_TORCH,
)
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_STANDARD = os.path.dirname(os.__file__) + os.sep

WAITS_FOR_ALL = frozenset(
    (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "monitored_barrier",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    )
)
"""Calls of torch.distributed that end when all ranks of their group have made them."""
WAITS_FOR_SOURCE = frozenset(("broadcast", "broadcast_object_list"))


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a thread stands.

    Attributes:
        place: the line of the user's own code, or "" if there is none.
        call: the function of torch.distributed that it is in and that hytrain has not called.
        group: name of the call's process group.
        ranks: global ranks of that group.
        source: global rank that sends, where one does.
        sequence: collectives that this rank has begun in that group.
        seconds: for which it has been seen in this very call, or at this very line.
    """

    place: str
    call: str | None = None
    group: str = ""
    ranks: tuple[int, ...] = ()
    source: int | None = None
    sequence: int | None = None
    seconds: float = 0.0

    @staticmethod
    def unpacked(packed: dict[str, Any]) -> Standing:
        """From its fields, as JSON has them."""
        values: dict[str, Any] = {**packed, "ranks": tuple(packed["ranks"])}
        return Standing(**values)

    def __str__(self) -> str:
        where = self.place or "no line of the script's"
        call = f"torch.distributed.{self.call}(), called at " if self.call else ""
        return f"{call}{where}, for {self.seconds:.0f} s at least"


class ThreadSampler:
    """Samples where one thread stands."""

    def __init__(self, thread: int) -> None:
        """
        Args:
            thread: its number, as threading.get_ident gives it.
        """
        self._thread = thread
        self._seen: tuple[object, ...] = ()
        self._since = time.monotonic()

    def look(self) -> Standing | None:
        """Where it stands now; None: it has ended."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return None
        now = time.monotonic()
        found = _call_of(frame)
        place = _place_of(frame)
        sequence = found.sequence if found is not None else None
        # A frame's address may come again; the group's count does not.
        seen = (id(frame), frame.f_lasti, place, sequence)
        if seen != self._seen:
            self._seen, self._since = seen, now
        if found is None:
            return Standing(place, seconds=now - self._since)
        return Standing(
            place, found.call, found.group, found.ranks, found.source, sequence, now - self._since
        )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in_torch_distributed(thread: int) -> bool:
    """Whether a thread stands in a call of torch.distributed, hytrain's or the script's."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return frame is not None and frame.f_code.co_filename.endswith(_TORCH)


def _call_of(frame: FrameType) -> Standing | None:
    """The call of torch.distributed, where the thread stands in one that is not hytrain's."""
    if not frame.f_code.co_filename.endswith(_TORCH):
        return None
    innermost, outermost = frame, frame
    for each in _frames(frame):
        name = each.f_code.co_filename
        if name.endswith(_TORCH_CALLS):
            outermost = each
        elif not any(part in name for part in _BETWEEN):
            if name.startswith(_PACKAGE):
                return None
            break
    try:
        return _described(innermost, outermost)
    except Exception:  # of another version of torch
        return Standing("", outermost.f_code.co_name)


def _described(innermost: FrameType, outermost: FrameType) -> Standing:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    name = outermost.f_code.co_name
    values = innermost.f_locals
    group: Any = values.get("group")
    if group is None:
        group = distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    ranks = tuple(dist.get_process_group_ranks(group))
    source: int | None = None
    if name in WAITS_FOR_SOURCE:
        source = outermost.f_locals.get("src")
        group_source = outermost.f_locals.get("group_src")
        if group_source is not None:
            source = ranks[int(group_source)]
    sequence = int(group._get_sequence_number_for_group())
    return Standing("", name, str(group.group_name), ranks, source, sequence)


def sequence_here(group_name: str, ranks: tuple[int, ...]) -> int | None:
    """Collectives that this rank has begun in a group; None: it is not known here.

    Args:
        group_name: as its ranks name it.
        ranks: its global ranks.
    """
    try:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        find: Any = vars(distributed_c10d)["_resolve_process_group"]
        group = find(group_name)
        if tuple(dist.get_process_group_ranks(group)) != ranks:
            return None
        return int(group._get_sequence_number_for_group())
    except Exception:  # of another version of torch
        return None


def _place_of(frame: FrameType) -> str:
    """The innermost line that is of no library."""
    for each in _frames(frame):
        name = each.f_code.co_filename
        is_library = any(part in name for part in _LIBRARIES) or name.startswith(_STANDARD)
        if not (is_library or name.startswith((_PACKAGE, "<"))):
            return f"{name}:{each.f_lineno} in {each.f_code.co_name}"
    return ""
