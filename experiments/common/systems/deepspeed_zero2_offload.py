"""DeepSpeed ZeRO-2 offload: gradients move to the host during backward, Adam runs after it."""

from __future__ import annotations

from experiments.common.model import MakeModel
from experiments.common.records import Job
from experiments.common.systems.base import System
from experiments.common.systems.deepspeed_common import build_deepspeed


def build(make_model: MakeModel, job: Job) -> System:
    """Options: `threads`, the CPU thread counts to try."""
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    return build_deepspeed(make_model, job, zero)
