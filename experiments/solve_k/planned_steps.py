"""Predicted and measured steps of launch-bound models, profiled and trained in one process.

    python experiments/solve_k/planned_steps.py --workloads 0.37B/4x512 0.95B/2x512
    python experiments/solve_k/planned_steps.py --workloads toy/2x16 --device cpu

Hosts drift: in some seconds they launch kernels half as fast again as in others. So profiles and
steps take turns. In each round the workload is profiled as `hytrain profile` does it, for some
seconds and its own batch only; then an engine trains it with no, half and all layers on the GPU,
some steps of each, and the same numbers are predicted as `hytrain plan` predicts them, with the
threads that these steps have: a plan takes the best number, which training finds only later, by
trials. Medians over the rounds are reported, of the times and of the ratio, with its least and its
largest; the bare model's forward and backward beside the profile's, too. After every workload
DIR/planned_steps.json is rewritten and the table so far is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from experiments.common.processes import end, free_port
from experiments.common.records import Json, write_json
from experiments.common.tables import markdown
from experiments.solve_k.regime_cells import SHAPES, Cell, Contest, llama
from hytrain.formats.profile_file import ProfileFile, UpdateRate
from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cost_model import Collectives, load
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from
from hytrain.tools.planner.step_simulator import StepSimulator
from hytrain.tools.profiler.layer_profile import LayerOptions
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_report import profile_table
from hytrain.tools.profiler.run import ProfileOptions, profile_ranks

_PARTS = (0.0, 0.5, 1.0)
HEADER = (
    "workload", "layers on the GPU", "predicted ms", "measured ms", "predicted / measured",
    "least", "largest",
)  # fmt: skip


def profile(cell: Cell, device: str, seconds: float) -> ProfileFile:
    """Of the cell's model and batch."""

    def build(layers: int | None, seq_len: int) -> tuple[Any, Any]:
        blocks = SHAPES[cell.model][0] if layers is None else layers
        model = llama(cell.model, None, torch.get_default_dtype(), blocks)

        def batch(samples: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(0, model.config.vocab_size, (samples, seq_len))
            return {"input_ids": ids, "labels": ids}

        return model, batch

    subject = MeasuredModel(cell.model, build, seq_len=cell.tokens)
    layer = LayerOptions(micro_batches=(cell.batch,), seconds=seconds)
    options = ProfileOptions(layer=layer, rate_seconds=0.1)
    # Of its memory's limit torch tells by number only.
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return profile_ranks(subject, where, options)


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
    """Of one round's steps.

    Attributes:
        seconds: of a step, the median, by the part of the layers on the GPU.
        costs: what it was made of, by the same, as the engine has measured it.
        threads: of updates on the CPU.
        compute: seconds of the bare model's forward and backward meanwhile; None where the device
            does not hold a second model.
    """

    seconds: dict[float, float]
    costs: dict[float, Json]
    threads: int
    compute: float | None


@dataclass(frozen=True)
class Round:
    """A profile, the steps that followed on it, and what they should have taken by it."""

    found: ProfileFile
    measured: Measured
    predicted: dict[float, float]

    def ratio(self, part: float) -> float:
        """Predicted over measured."""
        return self.predicted[part] / self.measured.seconds[part]


def start(cell: Cell, device: str) -> Contest:
    """An engine that has trained, with its number of threads fixed."""
    contest = Contest(cell, device)
    if contest.rival_fits:
        contest.start_rival()
    contest.start_engine()
    tuned = contest.engine.optimizer.placement.tuned_threads
    if tuned is not None:
        tuned.end()
    contest.train(4)
    return contest


def measure(contest: Contest, *, backwards: bool) -> Measured:
    """Steps with each part of the layers on the GPU."""
    placement = contest.engine.optimizer.placement
    compute = contest.compute(6)[1:] if contest.rival_fits else []
    seconds: dict[float, float] = {}
    costs: dict[float, Json] = {}
    for part in reversed(_PARTS) if backwards else _PARTS:
        contest.engine.set_gpu_fraction(part)
        seconds[part] = statistics.median(contest.train(12)[4:])
        found = placement.costs()
        if found is not None:
            costs[part] = asdict(found)
    threads = placement.threads.num_threads
    return Measured(seconds, costs, threads, statistics.median(compute) if compute else None)


def rounds_of(cell: Cell, device: str, seconds: float, number: int) -> list[Round]:
    """Profiles and steps in turns."""
    contest = start(cell, device)
    rounds: list[Round] = []
    for turn in range(number):
        found = profile(cell, device, seconds)
        measured = measure(contest, backwards=turn % 2 == 1)
        threaded = with_threads(found, measured.threads)
        predicted = {part: predict(threaded, cell, part) for part in _PARTS}
        rounds.append(Round(found, measured, predicted))
        print(worker_line(found, measured), flush=True)
        print(compute_line(found, measured), flush=True)
    print(profile_table(rounds[-1].found), flush=True)
    contest.close()
    return rounds


def row(text: str, part: float, rounds: Sequence[Round]) -> list[str]:
    """Of the table."""
    times = [
        statistics.median(each.predicted[part] for each in rounds),
        statistics.median(each.measured.seconds[part] for each in rounds),
    ]
    ratios = sorted(each.ratio(part) for each in rounds)
    shown = statistics.median(ratios), ratios[0], ratios[-1]
    return [
        text, f"{part:.0%}", *(f"{1e3 * each:.1f}" for each in times),
        *(f"{each:.3f}" for each in shown),
    ]  # fmt: skip


def worker_line(found: ProfileFile, measured: Measured) -> str:
    """What the update worker reached with nothing on the GPU, beside the profile's rate."""
    (host,) = with_threads(found, measured.threads).hosts
    rates = [f"{(host.updates[0].in_training or 0.0) / 1e9:.2f} by the profile"]
    if 0.0 in measured.costs:
        layers = measured.costs[0.0]["layers"]
        size = sum(layer["parameters"] for layer in layers)
        for kind in ("cpu_update", "cpu_commit", "cpu_preview"):
            rates.append(f"{kind} {size / sum(layer[kind] for layer in layers) / 1e9:.2f}")
    return f"{measured.threads} threads update, G parameters/s: {', '.join(rates)}"


def compute_line(found: ProfileFile, measured: Measured) -> str:
    """The bare model's passes in the profile, beside those of the training's time."""
    (device,) = found.devices
    passes = [(found.model.num_layers, device.layer[0]), (1, device.outside[0])]
    profiled = sum(n * max(p.forward_ms + p.backward_ms, p.launch_ms or 0.0) for n, p in passes)
    meanwhile = "-" if measured.compute is None else f"{1e3 * measured.compute:.1f}"
    return f"forward and backward alone, ms: {profiled:.1f} by the profile, {meanwhile} meanwhile"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workloads", nargs="+", required=True, help="MODEL/BATCHxTOKENS")
    add("--out", type=Path, default=Path(), help="folder for planned_steps.json")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--seconds", type=float, default=3.0, help="of measuring a block's passes")
    add("--rounds", type=int, default=3, help="of a profile and steps")
    arguments = parser.parse_args()
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(names, MASTER_PORT=str(free_port()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[list[str]] = []
    record: Json = {"command": sys.argv, "workloads": {}}
    for text in arguments.workloads:
        cell = Cell.of(f"{text}/{len(os.sched_getaffinity(0))}")
        rounds = rounds_of(cell, arguments.device, arguments.seconds, arguments.rounds)
        rows += [row(text, part, rounds) for part in _PARTS]
        record["workloads"][text] = [
            {
                "profile": each.found.model_dump(mode="json"),
                "predicted": each.predicted,
                **asdict(each.measured),
            }
            for each in rounds
        ]
        write_json(arguments.out / "planned_steps.json", record)
        print(markdown(HEADER, rows), flush=True)
    end(0)


if __name__ == "__main__":
    main()
