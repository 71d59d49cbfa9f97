"""A rank of a job that DeepSpeed's launcher starts: trains and writes down what it got.

    deepspeed ... launched_training.py FOLDER     each rank writes FOLDER/rank<n>.pt

The same :func:`train` runs in the ranks of harness.py, to compare.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from support.engines import built, make_config
from support.models import HIDDEN, make_model

STEPS = 5
SAMPLES = {3: (1, 3, 2), 4: (2, 1, 4, 1)}
SHARDS = {3: (0.2, 0.5, 0.3), 4: (0.4, 0.3, 0.1, 0.2)}
K = (0.0, 0.5, 1.0, 0.3)


def train() -> dict[str, Any]:
    """Losses, on rank 0 the state, and this rank's idea of its host."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = SAMPLES[world]
    section = {
        "batch_sizes": list(sizes),
        "micro_batch_sizes": [2] * world,
        "shard_fractions": list(SHARDS[world]),
    }
    config = make_config(gpu_fraction=K[rank], clipping=0.3, hytrain=section)
    with built(make_model("mlp"), config) as engine:
        batches = _micro_batches(sizes, rank)
        losses = [
            float(engine.train_batch(batches, num_valid=lambda batch: len(batch["inputs"])))
            for _ in range(STEPS)
        ]
        share = engine.optimizer.placement.host
        return {
            "losses": losses,
            "state": engine.fp32_state_dict(),
            "LOCAL_RANK": os.environ["LOCAL_RANK"],
            "ranks_on_host": share.ranks,
            "cores": share.cores,
        }


def _micro_batches(sizes: tuple[int, ...], rank: int) -> Any:
    """Each step's own samples, whoever computes them."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        inputs = torch.randn(sum(sizes), HIDDEN, generator=generator)
        begin = sum(sizes[:rank])
        for piece in inputs[begin : begin + sizes[rank]].split(2):
            yield {"inputs": piece}


def main(folder: str) -> None:
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    torch.set_num_threads(1)
    # DeepSpeed would compile an extension for communication between CPU processes.
    compatible_ops["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    result = train()
    torch.save(result, Path(folder) / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[-1])
