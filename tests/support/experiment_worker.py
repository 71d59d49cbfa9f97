"""A worker of experiments/common/worker.py that does what its job says, without torch."""

from __future__ import annotations

import os
import time

from experiments.common.records import Json
from experiments.common.worker import Recorder


def run(job: Json, recorder: Recorder) -> None:
    """Records, and ends as "ends" of the job says for this rank."""
    rank = int(os.environ["RANK"])
    recorder.put(cores=sorted(os.sched_getaffinity(0)), world=os.environ["WORLD_SIZE"])
    how = job["ends"][int(os.environ["LOCAL_RANK"])]
    if how == "hangs":
        time.sleep(60)
    if how == "dies":
        print("CUDA error: out of memory", flush=True)
        os._exit(1)
    if how == "fails":
        raise RuntimeError(f"rank {rank}")
    if how == "refuses":
        from hytrain.errors import ConfigError

        raise ConfigError("change a key")
