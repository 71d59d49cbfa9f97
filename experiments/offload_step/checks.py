"""The claims of this experiment, each decided from measurements of one part. Plain data.

A ratio of two systems is taken inside a part; where several parts hold both, each gives one value
and the claim is decided by the worst of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from experiments.common.checks import REFERENCE, Check, host_bytes, measured, time_ratio
from experiments.common.records import GIB, Json
from experiments.common.sizes import size_of

HOST_BYTES_PER_PARAMETER = 15.0
HOST_EXTRA_BYTES = 3 * GIB


def busy_share(label: str) -> Callable[[Json], float | None]:
    """The CPU worker's busy share, median over repeats."""

    def of_part(part: Json) -> float | None:
        shares = [result["worker_busy_share"] for result in measured(part, label)]
        shares = [share for share in shares if share is not None]
        return statistics.median(shares) if shares else None

    return of_part


def host_bytes_per_parameter(fraction: float) -> Callable[[Json], float | None]:
    """Host bytes above the allowance, for each parameter whose state is on the CPU."""
    label = f"hytrain {fraction:g}"

    def of_part(part: Json) -> float | None:
        results = measured(part, label)
        if not results:
            return None
        most = max(host_bytes(result) for result in results)
        size = size_of(part["workload"]["model"])
        return (most - HOST_EXTRA_BYTES) / size.num_cpu_parameters(fraction)

    return of_part


def gpu_peak(part: Json, label: str) -> float | None:
    """Peak allocated GPU bytes of a label in a part."""
    peaks = [result["gpu"].get("peak_allocated_bytes") for result in measured(part, label)]
    peaks = [peak for peak in peaks if peak is not None]
    return max(peaks) if peaks else None


def gpu_ratio(above: str, below: str) -> Callable[[Json], float | None]:
    """Peak GPU memory of `above` over that of `below`."""

    def of_part(part: Json) -> float | None:
        a, b = gpu_peak(part, above), gpu_peak(part, below)
        return None if a is None or b is None else a / b

    return of_part


CLAIMS: tuple[tuple[str, Callable[[Json], float | None], float | None, bool], ...] = (
    ("gpu_fraction 0: ZeRO-2 offload's time / hytrain's",
     time_ratio("zero2_offload", "hytrain 0"), 2.0, True),
    ("gpu_fraction 0: FSDP2's time / hytrain's",
     time_ratio("fsdp2", "hytrain 0"), 1.75, True),
    ("gpu_fraction 0: the CPU worker's busy share of the step",
     busy_share("hytrain 0"), 0.92, True),
    ("gpu_fraction 0.7: ZeRO-2 offload's time / hytrain's",
     time_ratio("zero2_offload", "hytrain 0.7"), 4.5, True),
    ("gpu_fraction 0.7: hytrain's time / forward and backward only",
     time_ratio("hytrain 0.7", "forward_backward"), 1.12, False),
    ("gpu_fraction 0.7: time with clipping that never triggers / direct commit",
     time_ratio("hytrain 0.7 never", "hytrain 0.7 direct"), 1.03, False),
    ("gpu_fraction 0: time with clipping that never triggers / direct commit",
     time_ratio("hytrain 0 never", "hytrain 0 direct"), 1.08, False),
    ("gpu_fraction 0.7: time with clipping at every step / direct commit",
     time_ratio("hytrain 0.7 always", "hytrain 0.7 direct"), None, False),
    ("gpu_fraction 0: time with clipping at every step / direct commit",
     time_ratio("hytrain 0 always", "hytrain 0 direct"), None, False),
    ("gpu_fraction 0: host bytes a parameter, beyond 3 GiB",
     host_bytes_per_parameter(0.0), HOST_BYTES_PER_PARAMETER, False),
    ("gpu_fraction 0.7: host bytes a parameter on the CPU side, beyond 3 GiB",
     host_bytes_per_parameter(0.7), HOST_BYTES_PER_PARAMETER, False),
    ("gpu_fraction 0: peak GPU memory / ZeRO-2 offload's",
     gpu_ratio("hytrain 0", "zero2_offload"), 1.0, False),
)  # fmt: skip
"""Text, value of a part, limit, and whether the limit is the least or the most allowed."""


CEILINGS: dict[str, Callable[[Json], float | None]] = {
    claim: time_ratio(system, REFERENCE)
    for claim, system in (
        ("gpu_fraction 0: ZeRO-2 offload's time / hytrain's", "zero2_offload"),
        ("gpu_fraction 0: FSDP2's time / hytrain's", "fsdp2"),
        ("gpu_fraction 0.7: ZeRO-2 offload's time / hytrain's", "zero2_offload"),
    )
}
"""For claims that compare with another system: its time over forward and backward only."""


def check_all(parts: Iterable[Json]) -> list[Check]:
    """Every claim, decided by the worst part that measured it."""
    parts = list(parts)
    checks = []
    for claim, value_of, limit, at_least in CLAIMS:
        best_first: list[tuple[float, Json]] = []
        for part in parts:
            value = value_of(part)
            if value is not None:
                best_first.append((value, part))
        best_first.sort(key=lambda measured: measured[0], reverse=at_least)
        if not best_first:
            checks.append(Check(claim=claim, value=None, limit=limit, at_least=at_least))
            continue
        value, part = best_first[-1]
        ceiling_of = CEILINGS.get(claim)
        checks.append(
            Check(
                claim=claim,
                value=value,
                limit=limit,
                at_least=at_least,
                part=part["part"],
                ceiling=None if ceiling_of is None else ceiling_of(part),
            )
        )
    return checks
