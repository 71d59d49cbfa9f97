"""A rank of the stress test's job: resumes from what there is, trains, saves beside training.

    deepspeed ... stressed_training.py FOLDER STEPS DELAYS      or live() in a rank that was forked

Each rank writes its process id to FOLDER/pid<rank> when it begins to train, rank 0 the steps that
are made to FOLDER/made, the step that it resumed at to FOLDER/resumed, the last state to
FOLDER/end.pt.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from support.engines import environment
from support.resume import Run, engine_of, snapshot, train

RUN = Run(fractions=(0.6, 0.4), gpu_fraction=0.3, asynchronous=True, groups=True)
TAGS = ("one", "two")
EVERY = 2
STEP_SECONDS = 0.02


def live(folder: Path, steps: int, delays: int) -> None:
    """One life, which may be ended at any time.

    Args:
        folder: what outlives it.
        steps: of the whole training.
        delays: seed of the delays that are injected into updates and saves.
    """
    rank = dist.get_rank()
    with environment("HYTRAIN_DELAYS", f"{delays}:1500"), engine_of(RUN) as engine:
        _, client = engine.load_checkpoint(folder / "saves")
        begin = 0 if client is None else int(client["next"])
        if rank == 0:
            with (folder / "resumed").open("a") as log:
                log.write(f"{begin}\n")
            (folder / "made").write_text(str(begin))
        _write(folder / f"pid{rank}", str(os.getpid()))
        for step in range(begin, steps):
            train(engine, step, step + 1)
            if rank == 0:
                _write(folder / "made", str(step + 1))
            time.sleep(STEP_SECONDS)
            if (step + 1) % EVERY == 0:
                tag = TAGS[(step + 1) // EVERY % len(TAGS)]
                engine.save_checkpoint(folder / "saves", tag=tag, client_state={"next": step + 1})
        engine.wait_for_checkpoint()
        end = snapshot(engine)
        if rank == 0:
            torch.save(end, folder / "end.tmp")
            (folder / "end.tmp").rename(folder / "end.pt")
        dist.barrier()


def _write(path: Path, text: str) -> None:
    """At once: a reader sees all of it, or what was there before."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


def main(folder: Path, steps: int, delays: int) -> None:
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    torch.set_num_threads(1)
    # DeepSpeed would compile an extension for communication between CPU processes.
    compatible_ops["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    live(folder, steps, delays)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[-3]), int(sys.argv[-2]), int(sys.argv[-1]))
