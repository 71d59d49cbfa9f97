"""One training step under each way to start it: the threads of updates are right by themselves.

    python experiments/kernel_bench/launched_threads.py --turns 20

Processes that all live at the same time take turns of a few steps: started plainly, with
OMP_NUM_THREADS=1, by torchrun, and with ``cpu_threads`` set by hand. Steps are nearly all update
(many parameters, one short sequence), and torch has one thread in each. Printed are medians, what
they are of the best by hand, and the noise: the same way to start it, measured twice.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

STEPS = 3
WIDTH, BLOCKS = 1024, 8


def _engine(threads: int | None) -> Any:
    import torch
    from torch import nn

    import hytrain

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.float().square().mean()

    model = Model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "hytrain": {"gpu_fraction": 0.0},
    }
    if threads is not None:
        config["hytrain"]["offload"] = {"cpu_threads": threads}
    torch.set_num_threads(1)
    engine, *_ = hytrain.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def _work(port: int, name: str, threads: int | None) -> None:
    """Makes steps whenever it is asked to; answers with their seconds."""
    import torch
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    # DeepSpeed would compile an extension for communication between CPU processes.
    compatible_ops["deepspeed_shm_comm"] = False
    engine = _engine(threads)
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=engine.device)
    with Client(("127.0.0.1", port)) as controller:
        controller.send(name)
        while controller.recv():
            begin = time.perf_counter()
            for _ in range(STEPS):
                engine.backward(engine(x))
                engine.step()
            engine.synchronize()
            controller.send((time.perf_counter() - begin) / STEPS)
    engine.destroy()


def _start(name: str, port: int, own_port: int) -> subprocess.Popen[bytes]:
    threads = name.removeprefix("by hand, ") if name.startswith("by hand") else ""
    arguments = [__file__, "--port", str(port), "--name", name, "--threads", threads or "0"]
    variables = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK")}
    variables["MASTER_PORT"] = str(own_port)
    if name == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]
        arguments = [*launcher, "--master-port", variables["MASTER_PORT"], *arguments]
    else:
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        variables |= {**one, "MASTER_ADDR": "127.0.0.1"}
    if name == "OMP_NUM_THREADS=1":
        variables["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen([sys.executable, *arguments], env=variables)


def _measure(names: list[str], turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in names}
    with Listener(("127.0.0.1", 0)) as listener:
        port = int(listener.address[1])
        # One at a time: each chooses its threads by measuring.
        workers: dict[str, Connection] = {}
        processes: list[subprocess.Popen[bytes]] = []
        for number, name in enumerate(names):
            processes.append(_start(name, port, port + 1 + number))
            connection = listener.accept()
            workers[connection.recv()] = connection
        for turn in range(turns + 1):
            # Another order each time: who follows whom must not matter.
            for name in random.Random(turn).sample(names, len(names)):
                workers[name].send(True)
                seconds = workers[name].recv()
                if turn:
                    times[name].append(seconds)
        for connection in workers.values():
            connection.send(False)
        for process in processes:
            process.wait(timeout=60)
    return times


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--by-hand", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.port:
        _work(given.port, given.name, given.threads or None)
        return
    by_hand = [f"by hand, {count}" for count in given.by_hand]
    ways = ["plain", "plain again", "OMP_NUM_THREADS=1", "torchrun"]
    times = _measure([*ways, *by_hand], given.turns)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(medians[name] for name in by_hand)
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        print(
            f"{name:18s} {medians[name] * 1e3:7.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f}; "
            f"least {min(values) * 1e3:.2f}) {medians[name] / best:5.3f} of the best by hand"
        )
    print(f"noise: {abs(medians['plain again'] / medians['plain'] - 1):.1%}")


if __name__ == "__main__":
    main()
