"""Predicted and measured steps of launch-bound models, profiled and trained in one process.

    python experiments/solve_k/planned_steps.py --workloads 0.37B/4x512 0.95B/2x512
    python experiments/solve_k/planned_steps.py --workloads toy/2x16 --device cpu

In each round the workload is profiled as `hytrain profile` does it, for some seconds and its own
batch only; then an engine trains it with no, half and all layers on the GPU, there and back, and
the same numbers are predicted as `hytrain plan` predicts them, with the threads that these steps
have: a plan takes the best number, which training finds only later, by trials.

Hosts drift: in some seconds they launch kernels half as fast again as in others, and a profile is
some seconds old when training begins. So there are two predictions. One is the plan's, by the
profile alone. For the other, steps and the profile's passes over three blocks take many turns of
less than a second, and what these passes took replaces what they took in the profile: what is left
is the error of the plan, not of the host. Steps are queued as in training, and timed from decision
to decision; of steps as of passes the mean without the slowest tenth counts. After every round
DIR/planned_steps.json is rewritten and the table so far is printed: medians over the rounds, of the
times and of the ratio, with its least and its largest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from experiments.common.hardware import describe
from experiments.common.processes import end, free_port
from experiments.common.records import Json, write_json
from experiments.common.tables import markdown
from experiments.solve_k.regime_cells import SHAPES, Cell, Contest, llama
from hytrain.formats.profile_file import ProfileFile, UpdateRate
from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cost_model import Collectives, load
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from
from hytrain.tools.planner.step_simulator import StepSimulator
from hytrain.tools.profiler.layer_bench import LayerBench
from hytrain.tools.profiler.layer_profile import LayerOptions
from hytrain.tools.profiler.layer_samples import DEPTH, Row, SizeMeasurements
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.profile_report import profile_table
from hytrain.tools.profiler.run import profile_ranks

_PARTS = (0.0, 0.5, 1.0)
_TURNS = 8
"""Of each of a part's two visits in a round."""
_STEPS = 4
"""Of a turn, after one that follows on a pause and counts for none."""
HEADER = (
    "workload", "layers on the GPU", "predicted ms", "measured ms", "predicted / measured",
    "least", "largest", "by the profile alone", "least", "largest",
)  # fmt: skip


def subject_of(cell: Cell) -> MeasuredModel:
    """The cell's model, for a profile."""

    def build(layers: int | None, seq_len: int) -> tuple[Any, Any]:
        blocks = SHAPES[cell.model][0] if layers is None else layers
        model = llama(cell.model, None, torch.get_default_dtype(), blocks)

        def batch(samples: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(0, model.config.vocab_size, (samples, seq_len))
            return {"input_ids": ids, "labels": ids}

        return model, batch

    return MeasuredModel(cell.model, build, seq_len=cell.tokens)


def profile(cell: Cell, device: torch.device, seconds: float) -> ProfileFile:
    """Of the cell's model and batch."""
    layer = LayerOptions(micro_batches=(cell.batch,), seconds=seconds)
    options = ProfileOptions(layer=layer)
    return profile_ranks(subject_of(cell), device, options)


def with_threads(found: ProfileFile, threads: int) -> ProfileFile:
    """The profile of a host that updates with so many threads, whatever it has."""
    (host,) = found.hosts
    rows = host.updates
    counts = [row.threads for row in rows]
    rate = float(np.interp(threads, counts, [row.rate for row in rows]))
    beside = float(np.interp(threads, counts, [row.in_training or row.rate for row in rows]))
    # A straight line that is level: the planner goes on along it to the number of cores.
    level = [UpdateRate(threads=n, rate=rate, in_training=beside) for n in (1, host.cores + 1)]
    changed = host.model_copy(update={"updates": tuple(level)})
    return found.model_copy(update={"hosts": (changed,)})


def with_passes(found: ProfileFile, passes: Row) -> ProfileFile:
    """The profile with other passes of its one size."""
    (device,) = found.devices
    layer, outside = passes
    changed = device.model_copy(update={"layer": (layer,), "outside": (outside,)})
    return found.model_copy(update={"devices": (changed,)})


def predict(found: ProfileFile, cell: Cell, part: float) -> float:
    """Seconds of a step with a part of the layers on the GPU."""
    options = PlanOptions(
        batch=cell.batch,
        gpu_reserve=lambda total: 0,
        host_reserve=lambda total: 0,
        activations=("store",),
        clipped_share=1.0 if cell.clips else 0.0,
    )
    problem = problem_from(found, options)
    collectives = Collectives.of(problem, even=True)
    gpu = problem.cluster.ranks[0][1]
    work = load(problem, gpu, collectives, cell.batch, cell.batch, "store")
    share = Share(1.0, round(part * problem.model.num_layers))
    return StepSimulator(problem, [work], [share], even=True).seconds()


@dataclass(frozen=True)
class Measured:
    """With one number of layers on the GPU.

    Attributes:
        seconds: of a step, the mean of the turns without their slowest tenth.
        passes: of the profile's three blocks, between these steps.
        update_rate: parameters/s of the worker's updates; None without any.
    """

    seconds: float
    passes: Row
    update_rate: float | None


@dataclass
class _Visits:
    """What was measured of a part so far."""

    seconds: list[float] = field(default_factory=list)
    passes: SizeMeasurements | None = None
    update_rate: float | None = None

    def measured(self, size: int) -> Measured:
        """Of all visits."""
        seconds = sorted(self.seconds)
        mean = statistics.mean(seconds[: len(seconds) - len(seconds) // 10])
        assert self.passes is not None  # visited
        return Measured(mean, self.passes.row(size), self.update_rate)


@dataclass(frozen=True)
class Round:
    """A profile, the steps that followed on it, and what they should have taken.

    Attributes:
        found: the profile.
        measured: by the part of the layers on the GPU, as all that follows.
        predicted: seconds, by the passes between the steps.
        alone: by the profile alone.
        threads: of updates on the CPU.
    """

    found: ProfileFile
    measured: Mapping[float, Measured]
    predicted: Mapping[float, float]
    alone: Mapping[float, float]
    threads: int

    def record(self) -> Json:
        """For planned_steps.json."""
        return {
            "threads": self.threads,
            "profile": self.found.model_dump(mode="json"),
            "parts": {
                str(part): {
                    "seconds": one.seconds,
                    "predicted": self.predicted[part],
                    "predicted_by_the_profile_alone": self.alone[part],
                    "layer": one.passes[0].model_dump(mode="json"),
                    "outside": one.passes[1].model_dump(mode="json"),
                    "update_rate": one.update_rate,
                }
                for part, one in self.measured.items()
            },
        }


class Workload:
    """A cell's engine, whose number of update threads is settled, and the profile's passes."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        """Trains some steps; :meth:`close` frees all of it."""
        self._cell, self._device = cell, device
        self._contest = Contest(cell, device.type)
        self._contest.start_engine()
        tuned = self._placement.tuned_threads
        if tuned is not None:
            tuned.end()
        self._contest.train(4)
        subject = subject_of(cell)
        self._bench = LayerBench(subject, subject.copy(DEPTH, device), device)

    @property
    def _placement(self) -> Any:
        return self._contest.engine.optimizer.placement

    def round(self, seconds: float, *, backwards: bool) -> Round:
        """One, with a profile of so many seconds; ``backwards``: all layers on the GPU first."""
        found = profile(self._cell, self._device, seconds)
        parts = tuple(reversed(_PARTS)) if backwards else _PARTS
        visited = {part: _Visits() for part in parts}
        with self._bench.recomputing():
            # There and back: what a host does for some seconds is not one part's alone.
            for part in (*parts, *reversed(parts)):
                self._visit(part, visited[part])
        measured = {part: each.measured(self._cell.batch) for part, each in visited.items()}
        threads = int(self._placement.threads.num_threads)
        threaded = with_threads(found, threads)
        predicted = {
            part: predict(with_passes(threaded, one.passes), self._cell, part)
            for part, one in measured.items()
        }
        alone = {part: predict(threaded, self._cell, part) for part in measured}
        return Round(found, measured, predicted, alone, threads)

    def _visit(self, part: float, found: _Visits) -> None:
        """Steps and passes in turns, which are added."""
        self._contest.engine.set_gpu_fraction(part)
        self._contest.train(5)  # layers move
        pipeline = self._contest.engine.optimizer.pipeline
        pipeline.wait_all()
        size = self._cell.batch
        if found.passes is None:
            found.passes = self._bench.measure(size, 0.2)
        for _ in range(_TURNS):
            # The worker's updates after the last step would slow the passes down.
            pipeline.wait_all()
            self._bench.launch_again(size, found.passes)
            found.seconds.append(self._contest.queued_steps(_STEPS))
        found.update_rate = self._update_rate()

    def _update_rate(self) -> float | None:
        """As the engine has measured it: of updates in one pass."""
        costs = self._placement.costs()
        if costs is None or self._placement.controller.num_gpu_layers == len(costs.layers):
            return None
        size = sum(layer.parameters for layer in costs.layers)
        return size / sum(layer.cpu_update for layer in costs.layers)

    def close(self) -> None:
        """Removes the hooks and destroys the engine."""
        self._bench.close()
        self._contest.close()


def row(text: str, part: float, rounds: Sequence[Round]) -> list[str]:
    """Of the table."""
    measured = [each.measured[part].seconds for each in rounds]
    predicted = [each.predicted[part] for each in rounds]
    alone = [each.alone[part] for each in rounds]
    cells = [text, f"{part:.0%}"]
    cells += [f"{1e3 * statistics.median(times):.1f}" for times in (predicted, measured)]
    for times in (predicted, alone):
        ratios = sorted(time / step for time, step in zip(times, measured, strict=True))
        cells += [f"{each:.3f}" for each in (statistics.median(ratios), ratios[0], ratios[-1])]
    return cells


def update_line(one: Round) -> str:
    """The worker's rate with nothing on the GPU, beside the profile's."""
    (host,) = with_threads(one.found, one.threads).hosts
    rates = [host.updates[0].in_training, one.measured[0.0].update_rate]
    by_profile, in_training = ("-" if rate is None else f"{rate / 1e9:.2f}" for rate in rates)
    return (
        f"{one.threads} threads update, G parameters/s: {by_profile} by the profile, "
        f"{in_training} in training"
    )


def passes_line(one: Round) -> str:
    """Forward and backward alone, by the profile and between the steps."""
    (device,) = one.found.devices
    layers = one.found.model.num_layers

    def ms(passes: Row) -> str:
        each = [(layers, passes[0]), (1, passes[1])]
        return (
            f"{sum(n * max(p.forward_ms + p.backward_ms, p.launch_ms or 0) for n, p in each):.1f}"
        )

    between = ", ".join(ms(one.measured[part].passes) for part in _PARTS)
    return (
        f"forward and backward alone, ms: {ms((device.layer[0], device.outside[0]))} by the "
        f"profile, {between} between the steps"
    )


def run(cell: Cell, text: str, where: torch.device, seconds: float) -> Generator[Round]:
    """A workload's rounds, until nobody wants more."""
    workload = Workload(cell, where)
    try:
        for number in itertools.count():
            found = workload.round(seconds, backwards=number % 2 == 1)
            print(text, update_line(found), passes_line(found), sep="\n", flush=True)
            yield found
    finally:
        workload.close()


def arguments_of() -> argparse.Namespace:
    """The command's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workloads", nargs="+", required=True, help="MODEL/BATCHxTOKENS")
    add("--out", type=Path, default=Path(), help="folder for planned_steps.json")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--seconds", type=float, default=10.0, help="of measuring a block's passes")
    add("--rounds", type=int, default=3, help="of a profile and steps")
    return parser.parse_args()


def main() -> None:
    """The command."""
    arguments = arguments_of()
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(names, MASTER_PORT=str(free_port()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Of its memory's limit torch tells by number only.
    where = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    rows: list[list[str]] = []
    record: Json = {"command": sys.argv, "hardware": describe(arguments.device), "workloads": {}}
    for text in arguments.workloads:
        cell = Cell.of(f"{text}/{len(os.sched_getaffinity(0))}")
        rounds: list[Round] = []
        new: list[list[str]] = []
        with contextlib.closing(run(cell, text, where, arguments.seconds)) as every:
            for found in itertools.islice(every, arguments.rounds):
                rounds.append(found)
                record["workloads"][text] = [each.record() for each in rounds]
                write_json(arguments.out / "planned_steps.json", record)
                new = [row(text, part, rounds) for part in _PARTS]
                print(markdown(HEADER, rows + new), flush=True)
        rows += new
        print(profile_table(rounds[-1].found), flush=True)
    end(0)


if __name__ == "__main__":
    main()
