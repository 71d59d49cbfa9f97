"""`hytrain bench kernel`: how fast the CPU passes are beside what they compete with.

Everything is measured in one run, interleaved round by round, because the bandwidth of a host
changes from hour to hour and from machine to machine; medians over rounds; for each subject the
best number of threads.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from typing import TypeVar, cast

from hytrain import _C
from hytrain.errors import KernelArgumentError
from hytrain.formats.text_table import align
from hytrain.hardware import machine
from hytrain.kernels.cpu_adam import MAX_THREADS
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.tools.kernel_bench.subjects import (
    ARRAY_BYTES_PER_PARAM,
    BASELINES,
    BYTES_PER_PARAM,
    OURS,
    Arrays,
    Run,
    all_subjects,
    our_subjects,
)

__all__ = ["BenchOptions", "format_table", "format_variants", "run_bench", "run_variants"]

_LLC_MULTIPLE = 4  # each fp32 array is at least this many last-level caches
_MEMORY_SHARE = 0.6  # of what is free
_ELEMENT_MULTIPLE = 2**16

_PREFETCH_VARIANTS = (0, 128, 256, 512, 1024)
_BLOCK_VARIANTS = (4096, 16384, 65536)


_Subject = TypeVar("_Subject")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        num_elements: Length of each array; None: four last-level caches each, memory allowing.
        thread_counts: Counts to try; None: quarters of the usable cores.
        num_rounds: Timed rounds over all subjects; one more goes before, untimed.
        non_temporal: Whether our passes write the outgoing copy past the cache.
        with_others: Whether DeepSpeed's and torch's optimizers are measured, too.
    """

    num_elements: int | None = None
    thread_counts: tuple[int, ...] | None = None
    num_rounds: int = 7
    non_temporal: bool = True
    with_others: bool = True

    def elements(self) -> int:
        """The length in effect."""
        if self.num_elements is not None:
            return self.num_elements
        wanted = _LLC_MULTIPLE * machine.last_level_cache_bytes() // 4
        fits = int(_MEMORY_SHARE * available_host_bytes() / ARRAY_BYTES_PER_PARAM)
        rounded_up = -(-wanted // _ELEMENT_MULTIPLE) * _ELEMENT_MULTIPLE
        return max(_ELEMENT_MULTIPLE, min(rounded_up, fits))

    def threads(self) -> tuple[int, ...]:
        """The thread counts in effect.

        Raises:
            KernelArgumentError: one is above what the kernels take.
        """
        if self.thread_counts is not None:
            if max(self.thread_counts) > MAX_THREADS:
                raise KernelArgumentError(
                    f"{max(self.thread_counts)} threads: the kernels run on at most {MAX_THREADS}"
                )
            return self.thread_counts
        cores = machine.usable_cores()
        return tuple(sorted({max(1, -(-cores * quarter // 4)) for quarter in (1, 2, 3, 4)}))


def _measure(
    options: BenchOptions, subjects: Iterable[_Subject], prepare: Callable[[_Subject], Run]
) -> dict[_Subject, tuple[int, float]]:
    """For each subject the thread count with the smallest median, and that median."""
    seconds = {subject: {t: list[float]() for t in options.threads()} for subject in subjects}
    for round_index in range(options.num_rounds + 1):
        turns = list(product(options.threads(), seconds))
        # In another order each round: who runs first after a larger team of threads, or finds its
        # arrays partly cached, must not always be the same subject.
        random.Random(round_index).shuffle(turns)
        for threads, subject in turns:
            run = prepare(subject)
            begin = time.perf_counter()
            run(threads)
            elapsed = time.perf_counter() - begin
            if round_index > 0:
                seconds[subject][threads].append(elapsed)
    best: dict[_Subject, tuple[int, float]] = {}
    for subject, by_threads in seconds.items():
        medians = {threads: statistics.median(values) for threads, values in by_threads.items()}
        threads = min(medians, key=lambda threads: medians[threads])
        best[subject] = threads, medians[threads]
    return best


def _figures(name: str, num_elements: int, num_threads: int, seconds: float) -> dict[str, float]:
    params_per_s = num_elements / seconds
    return {
        "gparams_per_s": round(params_per_s / 1e9, 4),
        "gbytes_per_s": round(params_per_s * BYTES_PER_PARAM[name] / 1e9, 3),
        "num_threads": num_threads,
    }


def run_bench(options: BenchOptions) -> dict[str, object]:
    """Measures every subject.

    Returns:
        Per subject ``{"gparams_per_s", "gbytes_per_s", "num_threads"}``, or None where it is not
        installed or not asked for; and "machine", which also holds what was measured on.
    """
    num_elements = options.elements()
    subjects = all_subjects(
        Arrays.random(num_elements),
        non_temporal=options.non_temporal,
        with_others=options.with_others,
    )
    present = {name: run for name, run in subjects.items() if run is not None}
    best = _measure(options, present, lambda name: present[name])
    result: dict[str, object] = {
        name: _figures(name, num_elements, *best[name]) if name in best else None
        for name in subjects
    }
    result["machine"] = {
        **machine.describe(),
        "num_elements": num_elements,
        "thread_counts": list(options.threads()),
        "num_rounds": options.num_rounds,
        "non_temporal": options.non_temporal,
        "tuning": _tuning_as_dict(_C.tuning()),
    }
    return result


# ---- for developers: which tuning is best on this machine ----


@dataclass(frozen=True, slots=True)
class Variant:
    """One way for our passes to walk through memory."""

    isa: str
    prefetch_elements: int
    block_elements: int
    dynamic_schedule: bool
    non_temporal: bool

    def apply(self) -> None:
        """Makes it the tuning of the process."""
        _C.set_isa(self.isa)
        _C.set_tuning(_C.Tuning(self.prefetch_elements, self.block_elements, self.dynamic_schedule))


def _variants(isas: Iterable[str]) -> list[Variant]:
    """Prefetch and streaming crossed; block size and schedule varied one at a time."""
    default = _C.tuning()
    variants = [
        Variant(isa, prefetch, default.block_elements, default.dynamic_schedule, streaming)
        for isa, prefetch, streaming in product(isas, _PREFETCH_VARIANTS, (False, True))
    ]
    prefetch = default.prefetch_elements
    variants += [
        Variant(isa, prefetch, block, dynamic, True)
        for isa, block, dynamic in product(isas, _BLOCK_VARIANTS, (False, True))
    ]
    return list(dict.fromkeys(variants))


def run_variants(options: BenchOptions) -> dict[str, object]:
    """Measures our own passes under several tunings, interleaved.

    Returns:
        "variants": a list with the fields of a variant, "subject", and the figures of
        ``run_bench``; and "machine". The process's tuning is as it was.
    """
    num_elements = options.elements()
    arrays = Arrays.random(num_elements)
    runs = {flag: our_subjects(arrays, non_temporal=flag) for flag in (False, True)}
    isa, tuning = _C.active_isa(), _C.tuning()

    def prepare(subject: tuple[Variant, str]) -> Run:
        variant, name = subject
        variant.apply()
        return runs[variant.non_temporal][name]

    try:
        best = _measure(options, product(_variants([isa]), OURS), prepare)
    finally:
        _C.set_isa(isa)
        _C.set_tuning(tuning)
    rows = [
        {"subject": name, **asdict(variant), **_figures(name, num_elements, *found)}
        for (variant, name), found in best.items()
    ]
    described = {**machine.describe(), "num_elements": num_elements}
    return {"variants": rows, "machine": described}


def _tuning_as_dict(tuning: _C.Tuning) -> dict[str, int | bool]:
    return {
        "prefetch_elements": tuning.prefetch_elements,
        "block_elements": tuning.block_elements,
        "dynamic_schedule": tuning.dynamic_schedule,
    }


# ---- printing ----


def format_variants(result: dict[str, object]) -> str:
    """The result of ``run_variants`` as text, best first within each subject."""
    rows = cast("list[dict[str, float | str]]", result["variants"])
    ordered = sorted(rows, key=_by_subject_and_speed)
    heading = [name.replace("_", " ") for name in ordered[0]]
    return "\n".join(align([heading, *([str(cell) for cell in row.values()] for row in ordered)]))


def _by_subject_and_speed(row: dict[str, float | str]) -> tuple[str, float]:
    return str(row["subject"]), -float(row["gbytes_per_s"])


def format_table(result: dict[str, object]) -> str:
    """The result of ``run_bench`` as text."""
    subjects = cast("dict[str, dict[str, float] | None]", result)
    rows = [["subject", "Gparam/s", "GB/s", "of read_write", "over fp32", "threads"]]
    for name in BYTES_PER_PARAM:
        figures = subjects[name]
        if figures is None:
            rows.append([name, "not measured", "", "", "", ""])
            continue
        baseline = subjects[BASELINES.get(name, name if "read_write" in name else "read_write")]
        assert baseline is not None
        share = figures["gbytes_per_s"] / baseline["gbytes_per_s"]
        same_in_fp32 = subjects.get(name.removesuffix("_bf16").removesuffix("_8bit"))
        over = ""
        if same_in_fp32 is not None and same_in_fp32 is not figures:
            over = f"{figures['gparams_per_s'] / same_in_fp32['gparams_per_s']:.2f}"
        rows.append(
            [
                name,
                f"{figures['gparams_per_s']:.3f}",
                f"{figures['gbytes_per_s']:.1f}",
                f"{share:.1%}",
                over,
                str(figures["num_threads"]),
            ]
        )
    return "\n".join(align(rows))
