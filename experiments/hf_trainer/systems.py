"""What Trainer is run with: the three systems, and the workloads. No torch here."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

from experiments.common.records import Json

FORM = "MODEL/BATCHxTOKENS"
_DEEPSPEED: Json = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "steps_per_print": 10**9,
}


class System(NamedTuple):
    """How Trainer is configured, and the steps that it makes before and while it is timed."""

    config: Json | None
    warmup: int
    steps: int


def _with_hytrain() -> Json:
    return {**copy.deepcopy(_DEEPSPEED), "hytrain": {}}


SYSTEMS = {
    "trainer_alone": System(None, 10, 20),
    "zero2_offload": System(_DEEPSPEED, 4, 8),
    # k is solved in the first 60 steps.
    "hytrain": System(_with_hytrain(), 70, 20),
}
"""Trainer without DeepSpeed (bf16 autocast, fp32 weights, fused AdamW), with ZeRO-2 offload, and
the same JSON with hytrain's section; in the order in which one process runs them: what
transformers is told of DeepSpeed stays."""


@dataclass(frozen=True)
class Workload:
    """A model and its batch."""

    model: str
    batch: int
    tokens: int

    @staticmethod
    def of(text: str) -> Workload:
        """From a text of :data:`FORM`.

        Raises:
            SystemExit: it is of another form.
        """
        try:
            model, shape = text.split("/")
            batch, tokens = shape.split("x")
            return Workload(model, int(batch), int(tokens))
        except ValueError:
            raise SystemExit(f"--workloads: {text!r} is not {FORM}") from None

    def __str__(self) -> str:
        return f"{self.model}/{self.batch}x{self.tokens}"
