"""How fast one large copy between a GPU and pinned host memory is."""

from __future__ import annotations

import statistics
import time

import torch


def copy_rates(num_bytes: int, device: torch.device) -> dict[str, float]:
    """Returns bytes a second of one pinned copy of `num_bytes` each way, the median of five.

    Returns:
        "offload": to the host; "reload": to the device.
    """
    here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    rates: dict[str, float] = {}
    for name, (to, source) in {"offload": (host, here), "reload": (here, host)}.items():
        times: list[float] = []
        for _ in range(5):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        rates[name] = num_bytes / statistics.median(times)
    return rates
