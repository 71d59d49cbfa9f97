"""What `hytrain profile` measured of two H200s on 2026-11-21, and steps that were trained then.

From experiments/unequal_gpus (parts two and memory, torch 2.11, CUDA 13.0): a Llama-shaped model of
2.915 B parameters, 512 tokens a sample, bf16, ZeRO stage 2, green contexts of 104, 48 and 24
multiprocessors. Four cases measured a profile each, so three of them the same two GPUs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from datetime import datetime, timezone

from hytrain.formats.profile_file import (
    CollectiveProfile,
    CollectiveSample,
    CopyRates,
    DeviceProfile,
    HostProfile,
    LayerSample,
    OutsideSample,
    ProfiledModel,
    ProfileFile,
    UpdateRate,
)

DAY = datetime(2026, 11, 21, tzinfo=timezone.utc)
NUM_LAYERS = 24
LAYER_PARAMETERS = 113_252_352
MODEL = ProfiledModel(
    name="llama-3b",
    num_layers=NUM_LAYERS,
    layer_parameters=LAYER_PARAMETERS,
    outside_parameters=(98_304_000, 98_307_072),
    seq_len=512,
    dtype="bf16",
    boundary_bytes=3_145_728,
)

_Row = tuple[int, float, float, float]
"""Samples; milliseconds of a layer's forward, its backward, and both outside of the layers."""

ROWS: dict[int, tuple[tuple[_Row, ...], ...]] = {
    104: (
        (
            (1, 1.739, 2.834, 4.512),
            (2, 1.500, 2.730, 3.915),
            (4, 1.558, 3.194, 4.626),
            (8, 2.744, 5.613, 7.912),
            (12, 3.876, 7.974, 11.201),
            (16, 5.176, 10.466, 14.217),
        ),
        (
            (1, 1.625, 2.699, 4.234),
            (2, 1.265, 2.585, 3.653),
            (4, 1.770, 3.207, 5.114),
            (8, 2.760, 5.634, 7.912),
            (12, 3.878, 7.990, 11.141),
            (16, 5.234, 10.630, 14.171),
        ),
        (
            (1, 1.449, 1.969, 3.918),
            (2, 1.688, 1.933, 4.291),
            (4, 1.742, 3.229, 5.415),
            (8, 2.747, 5.614, 7.924),
        ),
        (
            (1, 1.483, 3.456, 4.273),
            (2, 1.445, 2.358, 3.980),
            (4, 1.561, 3.192, 4.544),
            (8, 2.750, 5.617, 7.775),
        ),
    ),
    48: (
        (
            (1, 1.350, 2.610, 3.873),
            (2, 1.386, 2.812, 4.879),
            (4, 2.499, 4.951, 7.285),
            (8, 4.903, 9.300, 13.366),
            (12, 7.052, 13.351, 18.756),
            (16, 9.469, 17.701, 24.563),
        ),
        (
            (1, 1.633, 2.639, 4.226),
            (2, 1.926, 2.799, 5.246),
            (4, 2.488, 4.932, 7.342),
            (8, 4.898, 9.290, 13.641),
        ),
        (
            (1, 1.837, 3.429, 4.751),
            (2, 1.910, 3.326, 5.238),
            (4, 2.492, 4.935, 7.165),
            (8, 4.895, 9.289, 13.423),
        ),
    ),
    24: (
        (
            (1, 1.804, 3.073, 5.281),
            (2, 2.530, 5.110, 7.448),
            (4, 4.806, 9.374, 13.262),
            (8, 9.300, 17.498, 24.275),
            (12, 13.674, 25.633, 35.189),
            (16, 18.297, 33.883, 46.082),
        ),
    ),
}
"""By multiprocessors, a table for each case that measured them.

Of 1 and 2 samples they differ by a quarter: there the host, not the GPU, is what takes the time. A
profile now visits each size twice; here the median of the cases' tables stands for that.
"""

ADDING_MS = {104: 4.3, 48: 6.2, 24: 10.0}
"""Of adding all of the model's gradient to another in place, from part slowdown of that day (128,
72, 56, 40 and 24 multiprocessors, between which 104 and 48 are interpolated). It reads two and
writes one; a profile has the copy, which reads and writes one, in its backward already. So what was
not measured then, the difference, is a third of these."""

UPDATE_RATE = 1.36e11
"""With all multiprocessors, as the update runs in training."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A plan that was trained, and how long its step was.

    Attributes:
        multiprocessors: of both ranks.
        batches: samples of both.
        microbatches: at once.
        fractions: shards; None for even ones.
        gpu_layers: K of both.
        seconds: of a step.
    """

    multiprocessors: tuple[int, int]
    batches: tuple[int, int]
    microbatches: tuple[int, int]
    fractions: tuple[float, float] | None
    gpu_layers: tuple[int, int]
    seconds: float


RECORDED = {
    "half": Recorded((104, 48), (61, 35), (16, 12), None, (12, 11), 1.6184),
    "quarter": Recorded((104, 24), (74, 22), (15, 11), None, (12, 21), 1.9507),
    "memory": Recorded((104, 48), (30, 18), (5, 5), (0.0016, 0.9984), (24, 24), 0.9203),
    "offload": Recorded((104, 48), (17, 31), (1, 2), (0.2199, 0.7801), (4, 18), 1.9862),
    "half, even": Recorded((104, 48), (48, 48), (16, 16), None, (24, 2), 2.0573),
    "quarter, even": Recorded((104, 24), (48, 48), (16, 16), None, (24, 1), 3.9312),
}


def profile_of(multiprocessors: tuple[int, int]) -> ProfileFile:
    """A profile of two of the GPUs. Memory is left out: plans are valued, not made."""
    devices = [_device(count) for count in multiprocessors]
    host = HostProfile(
        host="vm",
        ranks=tuple(device.label for device in devices),
        cores=32,
        memory_bytes=266_777_145_344,
        bandwidth=1.7e11,
        updates=(UpdateRate(threads=8, rate=1.9e9), UpdateRate(threads=16, rate=2.5e9)),
        measured=DAY,
    )
    samples = (
        CollectiveSample(
            num_bytes=67_108_864,
            all_gather_ms=0.155,
            reduce_scatter_ms=0.167,
            uneven_all_gather_ms=0.160,
            uneven_reduce_scatter_ms=0.163,
        ),
        CollectiveSample(
            num_bytes=268_435_456,
            all_gather_ms=0.530,
            reduce_scatter_ms=0.588,
            uneven_all_gather_ms=0.572,
            uneven_reduce_scatter_ms=0.565,
        ),
    )
    collectives = CollectiveProfile(
        hosts=("vm", "vm"), backend="nccl", samples=samples, measured=DAY
    )
    return ProfileFile(
        model=MODEL, devices=tuple(devices), hosts=(host,), collectives=(collectives,)
    )


def _device(multiprocessors: int) -> DeviceProfile:
    rows: dict[int, list[_Row]] = {}
    for table in ROWS[multiprocessors]:
        for row in table:
            rows.setdefault(row[0], []).append(row)
    layer: list[LayerSample] = []
    outside: list[OutsideSample] = []
    for samples, found in rows.items():
        forward, backward, around = (
            statistics.median(row[column] for row in found) for column in (1, 2, 3)
        )
        layer.append(
            LayerSample(
                samples=samples,
                forward_ms=forward,
                backward_ms=backward,
                recompute_backward_ms=forward + backward,
                kept_bytes=0,
                peak_bytes=0,
                recompute_peak_bytes=0,
            )
        )
        outside.append(
            OutsideSample(samples=samples, forward_ms=around, backward_ms=0.0, peak_bytes=0)
        )
    share = LAYER_PARAMETERS / MODEL.parameters
    return DeviceProfile(
        host="vm",
        label=f"NVIDIA H200, {multiprocessors} SMs, 139.8 GiB",
        device="NVIDIA H200",
        multiprocessors=multiprocessors,
        limit_bytes=150_109_880_320,
        memory_bytes=148_573_847_552,
        layer=tuple(layer),
        outside=tuple(outside),
        update_rate=UPDATE_RATE,
        copies=CopyRates(
            to_host=5.3e10, from_host=5e10, to_host_both=3.3e10, from_host_both=3.3e10
        ),
        accumulation_ms=ADDING_MS[multiprocessors] / 3.0 * share,
        measured=DAY,
    )
