"""Where a thread of this process stands."""

from __future__ import annotations

import os
import sys
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = tuple(
    os.sep + os.path.join("torch", "distributed", name)
    for name in ("distributed_c10d.py", "c10d_logger.py")
)
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread, by its threading.get_ident(); None: it has ended."""
    return sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]


def is_in_torch_distributed(frame: FrameType) -> bool:
    """Whether a thread stands in a call of torch.distributed, hytrain's or the script's."""
    return frame.f_code.co_filename.endswith(_TORCH)


def place_of(thread: int) -> str:
    """The innermost line of a thread that is of no library; "" if there is none."""
    frame = frame_of(thread)
    while frame is not None:
        name = frame.f_code.co_filename
        is_library = any(part in name for part in _LIBRARIES)
        if not (is_library or name.startswith((_PACKAGE, os.path.dirname(os.__file__), "<"))):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
