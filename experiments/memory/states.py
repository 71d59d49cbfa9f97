"""States that leave the GPU and come back: rates beside one copy's, and growth over many cycles."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from experiments.common.copies import copy_rates
from experiments.common.memory import host_memory
from experiments.memory.case import Case

_FIRST_CYCLES = 20
_ROUNDS = 9


def growth(case: Case) -> None:
    """Part "cycles": of a small model; memory after the last cycle beside that after the 20th."""
    engine = case.build(case.model(case.job["small"]))
    for _ in range(3):
        case.step(engine)
    seen: list[tuple[int, int]] = []
    for number in range(case.job["cycles"]):
        engine.offload_states(include=[None, ["optim_states"], ["lp_params"]][number % 3])
        engine.reload_states()
        if number in (_FIRST_CYCLES - 1, case.job["cycles"] - 1):
            gc.collect()
            seen.append((host_memory().rss_bytes, _requested() if case.is_cuda else 0))
    case.step(engine)
    engine.destroy()
    case.result["cycles"] = {
        "cycles": case.job["cycles"],
        "rss_growth_bytes": seen[-1][0] - seen[0][0],
        "gpu_growth_bytes": seen[-1][1] - seen[0][1],
    }


def rates(case: Case, engine: Any) -> None:
    """Part "states": bytes a second each way, medians, and what freeing takes of it."""
    if not case.is_cuda:
        engine.offload_states()
        engine.reload_states()
        return
    engine.synchronize()
    gc.collect()
    # They are no part of the engine.
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
    torch.cuda.empty_cache()
    full = _requested()
    found: dict[str, Any] = {"full_bytes": full}
    case.result["states"] = found
    seconds: dict[str, list[float]] = {"offload": [], "reload": []}
    freeing: list[float] = []
    free = torch.cuda.empty_cache

    def timed_free() -> None:
        begin = time.perf_counter()
        free()
        freeing.append(time.perf_counter() - begin)

    torch.cuda.empty_cache = timed_free
    try:
        for _ in range(_ROUNDS):
            for name, call in (
                ("offload", engine.offload_states),
                ("reload", engine.reload_states),
            ):
                case.synchronize()
                begin = time.perf_counter()
                call()
                case.synchronize()
                seconds[name].append(time.perf_counter() - begin)
                if name == "offload":
                    found["left_bytes"] = _requested()
    finally:
        torch.cuda.empty_cache = free
    moved = full - found["left_bytes"]
    copies = copy_rates(moved, torch.device("cuda"))
    found["growth_bytes"] = _requested() - full
    found["freeing_seconds"] = statistics.median(freeing[1:])
    for name, times in seconds.items():
        usual = statistics.median(times[1:])  # the first pins memory
        found[name] = {
            "seconds": usual,
            "rate": moved / usual,
            "copy_rate": copies[name],
            "share": moved / usual / copies[name],
        }


def _requested() -> int:
    """Bytes that tensors asked the GPU's allocator for, without what it rounds up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
