"""What `hytrain profile` measures, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.tools.profiler import collective_profile
from hytrain.tools.profiler.layer_profile import LayerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure, and for how long.

    Attributes:
        layer: sizes and seconds of the layer's passes.
        rate_seconds: of each measurement of a rate.
        cpu_elements: of each array of the CPU update; None: beyond the caches.
        copy_bytes: of a copy.
        collective_bytes: ascending sizes of a layer.
        multiprocessors: that work on the current stream may use, where these are not all of the
            device's.
        settings: what makes this rank's device differ from its kind, in words.
        moments: how updates keep Adam's moments.
    """

    layer: LayerOptions = field(default_factory=LayerOptions)
    rate_seconds: float = 0.25
    cpu_elements: int | None = None
    copy_bytes: int = 64 * 2**20
    collective_bytes: Sequence[int] = collective_profile.SIZES
    multiprocessors: int | None = None
    settings: str = ""
    moments: MomentsName = FP32
