"""The combinations that the parity tests train."""

from __future__ import annotations

from support.covering import covering, every
from support.models import TRANSFORMERS
from support.parity import Case

VALUES = {
    "model": TRANSFORMERS,
    "gpu_fraction": (0.0, 0.3, 1.0),
    "clipping": ("never", "sometimes", "always"),
    "accumulation": (1, 4),
    "dtype": ("bf16", "fp32"),
    "stage": (1, 2),
}
SHARDS = ((0.5, 0.5), (0.7, 0.3))
SHARED = {"fractions": SHARDS, **VALUES, "stage": (1, 2, 3)}

ONE_RANK = [Case(**values) for values in covering(VALUES)]
ONE_RANK_FULL = [Case(**values) for values in every(VALUES)]
TWO_RANKS = [Case(**values) for values in covering(SHARED)]
TWO_RANKS_FULL = [Case(**values) for values in every(SHARED)]

DELAYED = [
    Case("llama", 0.0, "sometimes", 1, "bf16"),
    Case("gpt2", 0.3, "always", 1, "bf16"),
    Case("vit", 0.0, "never", 4, "fp32"),
]
