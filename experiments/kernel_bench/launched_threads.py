"""Training steps under each way to start them: updates find the right number of threads themselves.

    python experiments/kernel_bench/launched_threads.py --turns 20

Processes that all live at the same time take turns of a few steps: started plainly, with
OMP_NUM_THREADS=1 as a launcher of several ranks sets it, and with ``cpu_threads`` set by hand.
Steps are nearly all update (many parameters, one short sequence), and torch has one thread in each.
All import at the same time; then each builds its engine, which measures how many threads are best,
and makes steps until it has tried its neighbours, while the others wait. Printed are medians, their
ratio to the best by hand, the CPU time that a process takes while it is not its turn, and the
noise: the same way to start it, measured twice.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.report import markdown
from experiments.common.runner import environment

STEPS = 3
WIDTH, BLOCKS = 1024, 8
SETTLE_SECONDS = 2.5


def _engine(threads: int | None) -> Any:
    import torch
    from torch import nn

    import hytrain

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
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
    return hytrain.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]


def _steps(engine: Any) -> float:
    """Makes a few steps and returns the seconds of one."""
    import torch

    x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=engine.device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.backward(engine(x).float().square().mean())
        engine.step()
    engine.synchronize()
    return (time.perf_counter() - begin) / STEPS


def work(connection: Connection, threads: int | None) -> None:
    """Imports, then builds and makes steps whenever it is asked to; None ends it."""
    importlib.import_module("hytrain.api")
    connection.send("imported")
    connection.recv()
    engine = _engine(threads)
    placement = engine.optimizer.placement
    end = time.perf_counter() + SETTLE_SECONDS
    _steps(engine)
    tuned = placement.tuned_threads
    while tuned is not None and not tuned.is_over and time.perf_counter() < end:
        _steps(engine)
    connection.send(placement.threads.num_threads if tuned is None else tuned.trials.chosen)
    idle_since, used = time.perf_counter(), time.process_time()
    while connection.recv() is not None:
        idle = (time.process_time() - used) / (time.perf_counter() - idle_since)
        connection.send((_steps(engine), idle))
        idle_since, used = time.perf_counter(), time.process_time()
    engine.destroy()


def race(ways: dict[str, int | None], turns: int) -> list[dict[str, Any]]:
    """Runs a process for each way to start it, and returns the rows of the table."""
    device = "cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else "cuda"
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for name, threads in ways.items():
        ends[name], own = context.Pipe()
        # A child takes its environment from here when it is started.
        os.environ.update(environment(device))
        os.environ.pop("OMP_NUM_THREADS", None)
        if name == "OMP_NUM_THREADS=1":
            os.environ["OMP_NUM_THREADS"] = "1"
        context.Process(target=work, args=(own, threads), daemon=True).start()
        own.close()  # else a process that dies would not be noticed
    for end in ends.values():
        end.recv()
    for name, end in ends.items():  # one at a time: each chooses its threads by measuring
        end.send("build")
        print(f"{name}: {end.recv()} threads", flush=True)
    for turn in range(turns + 1):  # the first one is not counted
        # Another order each time: who follows whom must not matter.
        for name in random.Random(turn).sample(list(ends), len(ends)):
            ends[name].send("steps")
            found = ends[name].recv()
            if turn:
                times[name].append(found)
    for end in ends.values():
        end.send(None)
    return _rows(times)


def _rows(times: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    seconds = {name: [one for one, _ in each] for name, each in times.items()}
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    best = min((n for n in times if n.startswith("by hand")), key=lambda n: medians[n])

    def ratio(name: str, other: str) -> float:
        """The median ratio within turns: the machine is slower for some seconds."""
        pairs = zip(seconds[name], seconds[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return [
        {
            **{"way": name, "ms": round(1e3 * medians[name], 2)},
            "least_ms": round(1e3 * min(seconds[name]), 2),
            "idle_share_of_a_core": round(statistics.median(idle for _, idle in times[name]), 4),
            "of_the_best_by_hand": ratio(name, best),
            "noise": abs(ratio(name, "plain") - 1.0) if name == "plain again" else None,
        }
        for name in times
    ]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--by-hand", type=int, nargs="+", default=[1, 2], help="threads")
    options = parser.parse_args()
    ways: dict[str, int | None] = {"plain": None, "plain again": None, "OMP_NUM_THREADS=1": None}
    ways |= {f"by hand, {count}": count for count in options.by_hand}
    print(markdown(race(ways, options.turns)))


if __name__ == "__main__":
    main()
