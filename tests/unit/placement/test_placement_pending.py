"""Direct commit keeps no gradient on the host: the budget does not count any."""

from __future__ import annotations

from dataclasses import replace

from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import bounds, gpu_peak_bytes, host_bytes

LAYERS = [LayerBytes(f"layer {i}", 1000) for i in range(4)]
DIRECT = [replace(layer, keeps_pending=False) for layer in LAYERS]
LIMITS = MemoryLimits(gpu=60_000, gpu_reserve=0, gpu_base=1000, host=36_050, host_reserve=0)


def test_pending_gradients_are_counted_where_they_are_kept() -> None:
    assert host_bytes(LAYERS, 1, 50) == 3 * 14_000 + 50
    assert host_bytes(DIRECT, 1, 50) == 3 * 12_000 + 50
    # On the GPU a gradient waits for its update either way.
    assert gpu_peak_bytes(LAYERS, LIMITS, 2) == gpu_peak_bytes(DIRECT, LIMITS, 2)


def test_more_fits_without_them() -> None:
    assert bounds(LAYERS, LIMITS, 50).min_gpu_layers == 2
    assert bounds(DIRECT, LIMITS, 50).min_gpu_layers == 1
