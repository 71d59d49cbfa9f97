"""`hytrain bench kernel`: how fast the CPU passes are, compared with what they compete with.

Everything is measured in one run, interleaved round by round, because the bandwidth of a host
changes from hour to hour and from machine to machine. Results are medians over rounds, with the
best number of threads for each subject.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from hytrain.errors import KernelArgumentError
from hytrain.formats.text_table import align
from hytrain.hardware import machine
from hytrain.kernels.cpu_adam import MAX_THREADS
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.model.partition import align_up
from hytrain.tools.kernel_bench.subjects import ARRAY_BYTES, Arrays, Subject, all_subjects

_LLC_MULTIPLE = 4  # each fp32 array is at least this many last-level caches
_MEMORY_SHARE = 0.6  # of the free memory


def _medians(
    runs: Mapping[str, Callable[[int], object]], counts: Sequence[int], num_rounds: int
) -> dict[str, tuple[float, int]]:
    """For each subject its smallest median in seconds, and the thread count that reaches it."""
    turns = list(product(counts, runs))
    seconds: dict[tuple[int, str], list[float]] = {turn: [] for turn in turns}
    for round_index in range(num_rounds + 1):
        # In another order each round: who runs first after a larger team of threads, or finds its
        # arrays partly cached, must not always be the same subject.
        random.Random(round_index).shuffle(turns)
        for threads, name in turns:
            begin = time.perf_counter()
            runs[name](threads)
            if round_index > 0:
                seconds[threads, name].append(time.perf_counter() - begin)
    return {
        name: min((statistics.median(seconds[threads, name]), threads) for threads in counts)
        for name in runs
    }


def run_bench(
    *,
    num_elements: int | None = None,
    thread_counts: tuple[int, ...] | None = None,
    num_rounds: int = 7,
    with_others: bool,
) -> dict[str, Any]:
    """Measures every subject.

    Args:
        num_elements: length of each array, rounded up to whole blocks of 8-bit moments; None: four
            last-level caches each, memory allowing.
        thread_counts: to try; None: quarters of the usable cores.
        num_rounds: timed rounds over all subjects; one more goes before, untimed.
        with_others: whether DeepSpeed's and torch's optimizers are measured, too.

    Returns:
        Per subject ``{"gparams_per_s", "gbytes_per_s", "num_threads", "of_read_write",
        "over_fp32"}``, or None if it is not installed or not asked for: G parameters/s, GB/s, the
        best number of threads, the bytes/s as a share of those of the loop that only reads and
        writes the same state, and, for moments in fewer bytes (else None), the speed relative to
        the same pass on fp32 moments. Also "machine", with the machine, array length and rounds.

    Raises:
        KernelArgumentError: a thread count is above what the kernels take.
    """
    cores = machine.usable_cores()
    quarters = sorted({max(1, -(-cores * quarter // 4)) for quarter in (1, 2, 3, 4)})
    counts = thread_counts or tuple(quarters)
    if max(counts) > MAX_THREADS:
        raise KernelArgumentError(
            f"--threads {max(counts)}: the kernels run on at most {MAX_THREADS}"
        )
    fits = int(_MEMORY_SHARE * available_host_bytes() / ARRAY_BYTES)
    beyond_caches = _LLC_MULTIPLE * machine.last_level_cache_bytes() // 4
    n = align_up(num_elements or min(beyond_caches, fits))
    subjects = all_subjects(Arrays(n), with_others=with_others)
    runs = {name: subject.run for name, subject in subjects.items() if subject.run is not None}
    best = _medians(runs, counts, num_rounds)

    def speed(name: str, num_bytes: float = 1.0) -> float:
        """Speed in 1e9 parameters per second, or bytes with ``num_bytes`` per parameter."""
        return n * num_bytes / best[name][0] / 1e9

    def figures(name: str, subject: Subject) -> dict[str, float | None]:
        sweep = subjects[subject.baseline]
        moved = speed(name, subject.num_bytes)
        fp32 = subject.in_fp32
        return {
            "gparams_per_s": round(speed(name), 4),
            "gbytes_per_s": round(moved, 3),
            "num_threads": best[name][1],
            "of_read_write": round(moved / speed(subject.baseline, sweep.num_bytes), 4),
            "over_fp32": None if fp32 is None else round(speed(name) / speed(fp32), 3),
        }

    measured_on = {"num_elements": n, "thread_counts": list(counts), "num_rounds": num_rounds}
    measured_on["beyond_caches"] = n >= beyond_caches
    return {
        **{name: figures(name, s) if name in best else None for name, s in subjects.items()},
        "machine": machine.describe() | measured_on,
    }


def headline(result: Mapping[str, Any]) -> str:
    """How fast the update is, compared with DeepSpeed's and with plain reads and writes."""
    own, other = result["commit"], result["deepspeed_adam"]
    words = f"An Adam update (commit, fp32 moments): {own['gparams_per_s']:.3g} G parameters/s"
    if other is not None:
        faster = own["gparams_per_s"] / max(other["gparams_per_s"], 1e-4)
        words += f", {faster:.1f} times DeepSpeedCPUAdam's"
    if result["machine"]["beyond_caches"]:
        return f"{words}, {own['of_read_write']:.0%} of the rate of plain reads and writes."
    return (
        f"{words}.\nThese arrays fit in the CPU's caches, those of a training do not: give more "
        "--elements, or leave it out."
    )


def format_table(result: Mapping[str, Any]) -> str:
    """The result of :func:`run_bench` as text, without what was not measured."""
    is_of_memory = result["machine"]["beyond_caches"]
    rows = [["subject", "Gparam/s", "GB/s", "of read_write", "over fp32", "threads"]]
    for name, figures in result.items():
        if name == "machine" or figures is None:
            continue
        over = figures["over_fp32"]
        rows.append(
            [
                name,
                f"{figures['gparams_per_s']:.3f}",
                f"{figures['gbytes_per_s']:.1f}",
                f"{figures['of_read_write']:.1%}" if is_of_memory else "",
                "" if over is None else f"{over:.2f}",
                str(figures["num_threads"]),
            ]
        )
    # Empty columns are left out.
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return "\n".join(align([*zip(*columns, strict=True)]))
