"""The rates that an estimate is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _rate(default: Any, words: str) -> Any:
    return field(default=default, metadata={"words": words})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What an estimate is made from; the defaults are those of one H200 with 16 cores.

    ``hytrain explain`` has an option for each, with these words as its help.
    """

    # 6 operations a parameter and token.
    gpu_tflops: float = _rate(440.0, "forward and backward")
    tokens: int = _rate(8192, "a micro-batch on one rank")
    cpu_gparams_per_s: float = _rate(5.0, "CPU update, 1e9 parameters/s a rank")
    pcie_gb_per_s: float = _rate(55.0, "each way")
