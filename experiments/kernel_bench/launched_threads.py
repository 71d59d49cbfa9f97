"""One training step under each way to start it: the threads of updates are right by themselves.

    python experiments/kernel_bench/launched_threads.py --turns 20

Processes that all live at the same time take turns of a few steps: started plainly, with
OMP_NUM_THREADS=1, by torchrun, and with ``cpu_threads`` set by hand. Steps are nearly all update
(many parameters, one short sequence), and torch has one thread in each. All import at the same
time; then each builds its engine, which measures how many threads are best, and makes steps until
it has tried its neighbours, while the others wait. Printed are medians, what they are of the best
by hand, the CPU time that a process takes while it is not its turn, and the noise: the same way to
start it, measured twice. The command ends at its budget with what there is.
"""

from __future__ import annotations

import argparse
import importlib
import os
import queue
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

STEPS = 3
WIDTH, BLOCKS = 1024, 8
IMPORT_SHARE, BUILD_SHARE = 0.5, 0.75
"""Of the budget, after which those that have not imported, or built, are left out."""
END_SECONDS = 6.0
"""That the ends of all processes may take."""


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


class _Training:
    """An engine whose steps are timed."""

    def __init__(self, threads: int | None) -> None:
        import torch

        self.engine = _engine(threads)
        self._x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=self.engine.device)

    def steps(self) -> float:
        """Seconds of one, of a few."""
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.engine.backward(self.engine(self._x))
            self.engine.step()
        self.engine.synchronize()
        return (time.perf_counter() - begin) / STEPS

    def settle(self, seconds: float) -> int:
        """Steps until the engine has chosen its threads, or for so long; how many it has."""
        placement = self.engine.optimizer.placement
        tuned = placement.tuned_threads
        end = time.perf_counter() + seconds
        self.steps()
        while tuned is not None and not tuned.is_over and time.perf_counter() < end:
            self.steps()
        return placement.threads.num_threads if tuned is None else tuned.trials.chosen


def _prepare() -> None:
    """What a build takes long for, but for what measures: all processes do it side by side."""
    import deepspeed.comm
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    # DeepSpeed would compile an extension for communication between CPU processes.
    compatible_ops["deepspeed_shm_comm"] = False
    # Imported when they are first used: this package's engine, and torch's compiler.
    for module in ("hytrain.api", "deepspeed.runtime.zero.muon.muon_optimizer"):
        with suppress(ImportError):
            importlib.import_module(module)
    accelerator: Any = get_accelerator()
    deepspeed.comm.init_distributed(accelerator.communication_backend_name(), verbose=False)
    torch.ones(1, device=accelerator.current_device_name())


def _work(port: int, name: str, threads: int | None, settle_seconds: float) -> None:
    """Builds, and makes steps, whenever it is asked to; ends when nobody can ask any more."""
    _prepare()
    with Client(("127.0.0.1", port)) as controller, suppress(EOFError, OSError):
        controller.send((name, os.getpid()))
        if not controller.recv():
            return
        training = _Training(threads)
        controller.send(training.settle(settle_seconds))
        idle_since, used = time.perf_counter(), time.process_time()
        while controller.recv():
            begin = time.perf_counter()
            idle = (time.process_time() - used) / (begin - idle_since)
            controller.send((training.steps(), idle))
            idle_since, used = time.perf_counter(), time.process_time()
        training.engine.destroy()


@dataclass
class _Way:
    """One way to start it, and what has become of it."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    connection: Connection | None = None
    pid: int | None = None
    threads: int | None = None
    times: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def ask(self, timeout: float) -> Any:
        """Has it do the next thing; None where it has not within ``timeout`` seconds, or died."""
        connection = self.connection
        assert connection is not None
        with suppress(EOFError, OSError):
            connection.send(True)
            if connection.poll(max(0.0, timeout)):
                return connection.recv()
        return None

    def signal(self, number: int) -> None:
        """Sends a signal to all of it."""
        # A launcher may have given what it starts a session of its own.
        for pid, send in ((self.process.pid, os.killpg), (self.pid, os.kill)):
            if pid is not None:
                with suppress(ProcessLookupError):
                    send(pid, number)


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(name: str, port: int, own_port: int, settle_seconds: float, folder: Path) -> _Way:
    threads = name.removeprefix("by hand, ") if name.startswith("by hand") else "0"
    arguments = [__file__, "--port", str(port), "--name", name, "--threads", threads]
    arguments += ["--settle-seconds", str(settle_seconds)]
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
    log = folder / f"{own_port}.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Way(name, process, log)


class _Race:
    """The processes, from their start to their end."""

    def __init__(self, budget_seconds: float) -> None:
        self._begun = time.monotonic()
        self._budget = budget_seconds
        self.ways: dict[str, _Way] = {}
        """By name, as they were started."""

    def left(self, share: float = 1.0) -> float:
        """Seconds until so much of the budget is over, less what the end takes."""
        return self._begun + share * self._budget - END_SECONDS - time.monotonic()

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)

    def start(self, names: Sequence[str], settle_seconds: float, folder: Path) -> None:
        """All at once; they import, and are left out where that takes too long."""
        listener = Listener(("127.0.0.1", 0), backlog=len(names))
        port = int(listener.address[1])
        for name, own_port in zip(names, _free_ports(len(names)), strict=True):
            self.ways[name] = _start(name, port, own_port, settle_seconds, folder)
        arrived: queue.SimpleQueue[tuple[Connection, Any]] = queue.SimpleQueue()

        def accept() -> None:
            with suppress(EOFError, OSError):  # nobody is waited for any more
                for _ in names:
                    connection = listener.accept()
                    arrived.put((connection, connection.recv()))

        threading.Thread(target=accept, daemon=True).start()
        waited = set(names)
        while waited and self.left(IMPORT_SHARE) > 0:
            with suppress(queue.Empty):
                connection, (name, pid) = arrived.get(timeout=0.2)
                self.ways[name].connection, self.ways[name].pid = connection, pid
                waited.discard(name)
                self.say(f"{name}: imported")
            for name in [name for name in waited if self.ways[name].process.poll() is not None]:
                waited.discard(name)
                self._leave_out(name, "has died")
        for name in waited:
            self._leave_out(name, "has not imported in time")

    def build(self) -> None:
        """One at a time: each chooses its threads by measuring."""
        for name, way in self.ways.items():
            if way.connection is None:
                continue
            way.threads = way.ask(self.left(BUILD_SHARE))
            if way.threads is None:
                self._leave_out(name, "has not been built in time, or has died")
            else:
                self.say(f"{name}: built, {way.threads} threads")

    def run(self, turns: int) -> None:
        """Turns, as many as there is time for."""
        longest = 0.0
        for turn in range(turns + 1):  # the first one is not counted
            here = [way for way in self.ways.values() if way.threads is not None]
            begin = time.monotonic()
            if not here or self.left() < longest:
                self.say(f"no time for more than {max(0, turn - 1)} turns")
                return
            # Another order each time: who follows whom must not matter.
            for way in random.Random(turn).sample(here, len(here)):
                found = way.ask(self.left())
                if found is None:
                    way.threads = None
                    self._leave_out(way.name, "has not answered in time, or has died")
                elif turn:
                    way.times.append(found[0])
                    way.idle.append(found[1])
            longest = max(longest, time.monotonic() - begin)
            if turn % 10 == 0:
                self.say(f"turn {turn} of {turns}")

    def _leave_out(self, name: str, why: str) -> None:
        self.say(f"{name} is left out: it {why}")
        for line in self.ways[name].log.read_text(errors="replace").splitlines()[-5:]:
            print(f"    {line}", flush=True)

    def end(self) -> None:
        """No process stays."""
        for way in self.ways.values():
            if way.connection is not None and way.threads is not None:
                with suppress(OSError):
                    way.connection.send(False)
            else:
                way.signal(signal.SIGTERM)
        end = time.monotonic() + END_SECONDS / 2
        for way in self.ways.values():
            with suppress(subprocess.TimeoutExpired):
                way.process.wait(max(0.0, end - time.monotonic()))
        for way in self.ways.values():
            if way.process.poll() is None:
                way.signal(signal.SIGKILL)
                way.process.wait()


def _ratio(way: _Way, other: _Way) -> float:
    """Of the same turns: a machine is slower for seconds."""
    return statistics.median(a / b for a, b in zip(way.times, other.times, strict=False))


def _print_table(ways: Sequence[_Way]) -> None:
    medians = {way.name: statistics.median(way.times) for way in ways if way.times}
    by_hand = [way for way in ways if way.times and way.name.startswith("by hand")]
    best = min(by_hand, key=lambda way: medians[way.name], default=None)
    for way in ways:
        if not way.times:
            print(f"{way.name:18s} not measured")
            continue
        low, _, high = statistics.quantiles([*way.times, *way.times], n=4)
        ratio = "" if best is None else f"; {_ratio(way, best):5.3f} of the best by hand"
        print(
            f"{way.name:18s} {medians[way.name] * 1e3:7.2f} ms ({low * 1e3:.2f} to "
            f"{high * 1e3:.2f}; least {min(way.times) * 1e3:.2f}; {len(way.times)} turns; idle "
            f"{statistics.median(way.idle):.1%} of a core){ratio}"
        )
    measured = {way.name: way for way in ways if way.times}
    if "plain" in measured and "plain again" in measured:
        print(f"noise: {abs(_ratio(measured['plain again'], measured['plain']) - 1):.1%}")


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--by-hand", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--budget-seconds", type=float, default=100.0, help="of the command")
    parser.add_argument("--settle-seconds", type=float, default=2.5, help="of steps after a build")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.port:
        _work(given.port, given.name, given.threads or None, given.settle_seconds)
        return
    by_hand = [f"by hand, {count}" for count in given.by_hand]
    names = ["plain", "plain again", "OMP_NUM_THREADS=1", "torchrun", *by_hand]
    # As an exception it ends the processes, too, and what was measured is printed.
    signal.signal(signal.SIGTERM, _exit)
    race = _Race(given.budget_seconds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            race.start(names, given.settle_seconds, Path(folder))
            race.build()
            race.run(given.turns)
        finally:
            race.end()
            _print_table(list(race.ways.values()))


if __name__ == "__main__":
    main()
