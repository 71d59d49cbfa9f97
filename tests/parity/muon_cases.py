"""The combinations with Muon that the parity tests train."""

from __future__ import annotations

from typing import Any

from support.covering import covering
from support.muon import MuonCase

STEPS: dict[str, Any] = {"steps": 10, "observe": (1, 6)}
VALUES = {
    "model": ("llama", "gpt2", "vit"),
    "gpu_fraction": (0.0, 0.3, 1.0),
    "clipping": ("never", "sometimes", "always", "off"),
    "accumulation": (1, 4),
    "dtype": ("bf16", "fp32"),
    "stage": (1, 2),
    "method": ("gram", "standard"),
    "moments": ("fp32", "bf16"),
}
ONE_RANK = [MuonCase(**values, **STEPS) for values in covering(VALUES)]
DELAYED = [
    MuonCase("llama", 0.0, "sometimes", **STEPS),
    MuonCase("gpt2", 0.3, "always", accumulation=4, **STEPS),
    MuonCase("vit", 0.0, "off", dtype="fp32", stage=1, **STEPS),
]
SHARED = {**VALUES, "fractions": ((0.5, 0.5), (0.7, 0.3)), "stage": (1, 2, 3)}
TWO_RANKS = [MuonCase(**values, **STEPS) for values in covering(SHARED)]
THREE_RANKS = [MuonCase("llama", 0.0, "sometimes", stage=2, fractions=(1 / 3,) * 3, **STEPS)]
HOST_WEIGHTS = [
    MuonCase("llama", 0.0, "sometimes", stage=3, offload_param=True, **STEPS),
    MuonCase("gpt2", 0.5, "always", 4, stage=3, fractions=(0.5, 0.5), offload_param=True, **STEPS),
]
