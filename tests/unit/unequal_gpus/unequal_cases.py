"""Profiles of GPUs, made up."""

from __future__ import annotations

from experiments.common.records import GIB, Json

PARAMETERS = 2_900_000_000


LAYERS = 24
SIZES = (1, 2, 4, 8)


def device(speed: float, memory_gib: float, best: int = 8) -> Json:
    """A GPU that takes 6 ms of forward a sample at speed 1, twice that of backward, and a tenth
    more at sizes other than the best."""
    rows: list[Json] = []
    for size in SIZES:
        worse = 1.0 if size == best else 1.1
        rows.append(
            {
                "samples": size,
                "forward_ms": worse * 6.0 * size / LAYERS / speed,
                "backward_ms": worse * 12.0 * size / LAYERS / speed,
                "recompute_backward_ms": worse * 18.0 * size / LAYERS / speed,
                "kept_bytes": int(1.5 * GIB * size / LAYERS),
                "peak_bytes": int(1.5 * GIB * size / LAYERS),
                "recompute_peak_bytes": int(1.5 * GIB * size / LAYERS),
            }
        )
    outside = [
        {"samples": size, "forward_ms": 0.2 / speed, "backward_ms": 0.3 / speed, "peak_bytes": 0}
        for size in SIZES
    ]
    count = int(128 * speed)
    return {
        "host": "host",
        "label": f"GPU, {count} SMs, {memory_gib:.1f} GiB",
        "device": "GPU",
        "multiprocessors": count,
        "limit_bytes": int(memory_gib * GIB),
        "memory_bytes": int(memory_gib * GIB),
        "idle_bytes": GIB // 2,
        "layer": rows,
        "outside": outside,
        "update_rate": 120e9,
        "copies": dict.fromkeys(("to_host", "from_host", "to_host_both", "from_host_both"), 5e10),
        "measured": "2026-11-21T00:00:00Z",
    }


def profiled(*devices: Json) -> Json:
    """What `hytrain profile` would have written of these ranks."""
    host = {
        "host": "host",
        "ranks": [one["label"] for one in devices],
        "cores": 16 * len(devices),
        "memory_bytes": 100 * GIB * len(devices),
        "bandwidth": 4e11,
        "updates": [{"threads": 15, "rate": 4e9}],
        "measured": "2026-11-21T00:00:00Z",
    }
    times = ("all_gather_ms", "reduce_scatter_ms")
    uneven = ("uneven_all_gather_ms", "uneven_reduce_scatter_ms")
    collectives = {
        "hosts": ["host"] * len(devices),
        "backend": "nccl",
        "samples": [
            {"num_bytes": 2**28, **dict.fromkeys(times, 0.6), **dict.fromkeys(uneven, 0.7)}
        ],
        "measured": "2026-11-21T00:00:00Z",
    }
    layer = (PARAMETERS - 200_000_000) // LAYERS
    return {
        "version": 1,
        "model": {
            "name": "llama-3b",
            "num_layers": LAYERS,
            "layer_parameters": layer,
            "outside_parameters": [100_000_000, 100_000_000],
            "seq_len": 512,
            "dtype": "bf16",
            "boundary_bytes": 512 * 3072 * 2,
        },
        "devices": list({one["label"]: one for one in devices}.values()),
        "hosts": [host],
        "collectives": [collectives] if len(devices) > 1 else [],
    }
