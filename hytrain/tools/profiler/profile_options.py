"""What `hytrain profile` measures, and for how long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from hytrain.errors import ConfigError
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.profile_file import MOST_SAMPLES
from hytrain.tools.profiler import collective_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure, and for how long.

    Attributes:
        micro_batches: samples of a micro-batch, ascending; None: 1, 2, 4, ... until a pass does not
            fit, or doubling to 8 or more gains less than 3 % twice in a row; then, while there is
            time, the middles of the gaps, also of the gap below the size that did not fit: a plan
            chooses among sizes that were measured.
        seconds: approximate time of measuring passes; given sizes, else at least two, are all
            measured.
        rate_seconds: time of each measurement of a rate.
        cpu_elements: elements of each array of the CPU update; None: more than the caches hold.
        collective_bytes: ascending sizes of a layer.
        multiprocessors: number that work on the current stream may use, if not all of the device's.
        settings: what makes this rank's device differ from its kind, in words.
        moments: how updates keep Adam's moments.
    """

    micro_batches: tuple[int, ...] | None = None
    seconds: float = 40.0
    rate_seconds: float = 0.25
    cpu_elements: int | None = None
    copy_bytes: int = 64 * 2**20
    collective_bytes: Sequence[int] = collective_profile.SIZES
    multiprocessors: int | None = None
    settings: str = ""
    moments: MomentsName = FP32

    def __post_init__(self) -> None:
        sizes = self.micro_batches
        if sizes is not None and (not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1):
            raise ConfigError(f"--micro-batches {sizes}: give ascending numbers of samples")
        if sizes is not None and sizes[-1] > MOST_SAMPLES:
            raise ConfigError(f"--micro-batches {sizes[-1]}: give {MOST_SAMPLES} samples at most")


class Progress:
    """Progress messages about the work."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """``stream``: None prints nothing, for ranks but the first and for callers in Python."""
        self._stream = stream
        self._begin = time.monotonic()
        self._words = ""

    def show(self, share: float, words: str) -> None:
        """Prints the share of all work that is done, in [0, 1], and what comes next."""
        if self._stream is not None and words != self._words:
            seconds = time.monotonic() - self._begin
            print(f"[{share:4.0%} {seconds:5.1f} s] {words}", file=self._stream, flush=True)
        self._words = words
