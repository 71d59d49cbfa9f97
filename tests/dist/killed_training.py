"""Ranks that train until one of them is killed, each a process of its own as a launcher starts it.

    python killed_training.py < commands > answers

The process imports everything once and forks a rank for every command, a line of JSON with the
rank's ``environment``, the ``case`` and ``stage``, the ``folder`` of what it writes and the ``log``
of what it says. A rank is then a script like any other: nothing catches what it raises, and rank 0
holds the store. Answers: a line ``started PID``, and ``ended PID STATUS SECONDS`` (monotonic).
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = timedelta(minutes=10)
"""Far beyond any test: nobody may wait for that."""


def _batches() -> Iterator[dict[str, Any]]:
    import torch
    from support.models import HIDDEN

    while True:
        yield {"inputs": torch.ones(1, HIDDEN)}


def train(case: str, stage: int, folder: Path) -> None:
    """Makes steps for ever, by way of ``case``; writes down when the first ones are made."""
    import torch.distributed as dist
    from rank_shadow import backward
    from support.engines import built, make_config
    from support.models import make_model

    rank, world = dist.get_rank(), dist.get_world_size()
    accumulation = 3 if case == "accumulation" else 1
    section: dict[str, Any] = {}
    if case in ("train_batch", "layer_major"):
        section = {"batch_sizes": [3, 2, 2][:world], "micro_batch_sizes": [1] * world}
    if case == "layer_major":
        section["accumulation"] = "layer_major"
    config = make_config(stage=stage, accumulation=accumulation, gpu_fraction=0.5, hytrain=section)
    batches = _batches()
    with built(make_model("mlp"), config) as engine:
        step = 0
        while True:
            if section:
                engine.train_batch(batches, num_valid=lambda _: 1)
            else:
                for _ in range(accumulation):
                    backward(engine, step)
                    engine.step()
            if case == "save" and step:
                engine.save_checkpoint(str(folder / "saved"), tag=f"step{step}")
            if case == "own" and step:
                dist.barrier()  # the script's own
            if case == "alone" and step > 1:
                (folder / f"ready{rank}").touch()
                engine.synchronize()
                if rank == 0:
                    _read_for_ever(engine, stage)
            step += 1
            if step == 3 and case != "alone":
                (folder / f"ready{rank}").touch()
                if case == "ends":
                    engine.destroy = lambda: None  # most scripts do not
                    time.sleep(6.0 * rank)  # the store is gone by then
                    return
                if case in ("raises", "exits") and rank == 1:
                    _end_alone(engine, case, folder)


def _end_alone(engine: Any, case: str, folder: Path) -> None:
    while not (folder / "ready0").exists():
        time.sleep(0.05)
    if case == "exits":
        engine.destroy = lambda: None
        sys.exit(3)
    show = sys.excepthook  # behind it the process outlives the other one's
    sys.excepthook = lambda *error: (show(*error), time.sleep(6.0))
    raise KeyError("injected: the script's own mistake")


def _read_for_ever(engine: Any, stage: int) -> None:
    """Weights, alone: in ZeRO-3 this rank's part, as the others would have to gather them too."""
    import torch
    from deepspeed.utils import safe_get_local_fp32_param

    weight = engine.module.embed.weight
    with torch.no_grad():
        while True:
            read = weight if stage < 3 else safe_get_local_fp32_param(weight)
            read.float().sum()
            time.sleep(0.01)


def rank_main(command: dict[str, Any]) -> None:
    """A rank's script."""
    import deepspeed
    import torch
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    from hytrain.comm import local_processes, peers

    if "host" in command:
        # Told to be on a host of its own: nobody looks at its process.
        local_processes.machine_identity = lambda: str(command["host"])
    if command["without_peers"]:
        peers.Link.turn = lambda *_: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    # DeepSpeed would compile an extension for communication between CPU processes.
    compatible_ops["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False, timeout=GROUP_TIMEOUT)
    train(command["case"], command["stage"], Path(command["folder"]))


def _become(command: dict[str, Any]) -> None:
    """The new process's standard streams and environment are those of a rank."""
    os.environ.update(command["environment"])
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)


def _reap() -> None:
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        print("ended", process, os.waitstatus_to_exitcode(status), time.monotonic(), flush=True)


def serve() -> dict[str, Any] | None:
    """Forks ranks; returns in each of them with its command, and in the parent at the end."""
    buffer = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.05)
        if readable:
            received = os.read(0, 65536)
            if not received:
                return None
            buffer += received
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            command = json.loads(line)
            process = os.fork()
            if process == 0:
                _become(command)
                return command
            print("started", process, flush=True)
        _reap()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - imported once for all ranks
    import rank_shadow  # noqa: F401

    import hytrain.engine
    import hytrain.engine.build_optimizer  # noqa: F401

    given = serve()
    if given is not None:
        rank_main(given)
