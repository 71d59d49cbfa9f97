"""DeepSpeed Twin-Flow: ZeRO-3 offload with a part of the update left on the GPU."""

from __future__ import annotations

from experiments.common.model import MakeModel
from experiments.common.records import Job
from experiments.common.systems.base import System
from experiments.common.systems.deepspeed_common import build_deepspeed

SUB_GROUP_SIZE = 100_000_000
"""DeepSpeed splits by whole sub-groups. Its default of 1e9 elements gives a 3 B model three of
them, and a ratio of 0.5 would become two thirds on the CPU; with 1e8 it is a half."""


def build(make_model: MakeModel, job: Job) -> System:
    """Options: `threads`, the CPU thread counts to try; `ratio`, the share left to the CPU."""
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": SUB_GROUP_SIZE,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": True,
            "ratio": job.entry.options.get("ratio", 0.5),
        },
    }
    return build_deepspeed(make_model, job, zero)
