"""Predicted and measured steps of launch-bound models, profiled and trained in one process.

    python experiments/solve_k/planned_steps.py --workloads 0.37B/4x512 0.95B/2x512
    python experiments/solve_k/planned_steps.py --workloads toy/2x16 --device cpu

In each round the workload is profiled as `hytrain profile` does it, for some seconds and its own
batch only; then an engine trains it with no, half and all layers on the GPU, there and back, and
the same numbers are predicted as `hytrain plan` predicts them, with the threads that these steps
have: a plan takes the best number, which training finds only later, by trials.

Hosts drift: in some seconds they launch kernels 1.5 times as fast as in others, and a profile is
some seconds old when training begins. So there are two predictions. One is the plan's, by the
profile alone. For the other, steps and the profile's passes over three blocks take many turns of
less than a second, and what these passes took replaces what they took in the profile: what is left
is the error of the plan, not of the host. Steps are queued as in training, and timed from decision
to decision; of steps as of passes the mean without the slowest tenth counts. The table has medians
over the rounds, of the times and of the ratio, with its least and its largest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.sizes import size_of
from experiments.common.worker import Recorder
from experiments.solve_k.regime_cells import Cell, Contest
from hytrain.formats.profile_file import ProfileFile, UpdateRate
from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cost_model import Collectives, workload
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from
from hytrain.tools.profiler.layer_bench import LayerBench
from hytrain.tools.profiler.layer_samples import DEPTH, Row, SizeMeasurements
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.run import profile_ranks

PARTS = (0.0, 0.5, 1.0)
"""Shares of the layers on the GPU."""
TURNS, STEPS = 8, 4
"""Turns in each of a part's two visits in a round; steps of a turn, besides one after the pause."""


def subject_of(cell: Cell) -> MeasuredModel:
    """The cell's model, for a profile."""
    from transformers import AutoModelForCausalLM

    from experiments.common.model import model_config

    def build(layers: int | None, seq_len: int) -> tuple[Any, Any]:
        blocks = layers or size_of(cell.model).layers
        config = model_config({**cell.job("cpu"), "layers": blocks})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

        def batch(samples: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(0, config.vocab_size, (samples, seq_len))
            return {"input_ids": ids, "labels": ids}

        return model, batch

    return MeasuredModel(cell.model, build, seq_len=cell.tokens)


# -- predictions -------------------------------------------------------------------------------


def with_threads(found: ProfileFile, threads: int) -> ProfileFile:
    """The profile with the update rates of this number of threads, however many cores there are."""
    (host,) = found.hosts
    rows = host.updates
    counts = [row.threads for row in rows]
    rate = float(np.interp(threads, counts, [row.rate for row in rows]))
    beside = float(np.interp(threads, counts, [row.in_training or row.rate for row in rows]))
    # A level line: the planner follows it up to the number of cores.
    level = [UpdateRate(threads=n, rate=rate, in_training=beside) for n in (1, host.cores + 1)]
    changed = host.model_copy(update={"updates": tuple(level)})
    return found.model_copy(update={"hosts": (changed,)})


def with_passes(found: ProfileFile, passes: Row) -> ProfileFile:
    """The profile with other times of passes for its one size."""
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
    work = workload(problem, gpu, collectives, cell.batch, cell.batch, "store")
    share = Share(1.0, round(part * problem.model.num_updates))
    return PlannedStep(problem, [work], [share], even=True).seconds()


# -- measurements ------------------------------------------------------------------------------


class Workload:
    """A cell's engine, whose number of update threads is settled, and the profile's passes."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self._cell, self._device = cell, device
        self._contest = Contest(cell, device.type)
        self._contest.start_engine()
        if self._placement.tuned_threads is not None:
            self._placement.tuned_threads.end()
        self._contest.train(4)
        subject = subject_of(cell)
        self._bench = LayerBench(subject, subject.copy(DEPTH, device), device)

    @property
    def _placement(self) -> Any:
        return self._contest.engine.optimizer.placement

    def round(self, seconds: float, *, backwards: bool) -> Json:
        """Makes a profile of this many seconds, then steps, and predicts the steps' times.

        Returns:
            {"threads", "profile", "parts": by the part of the layers on the GPU {"seconds",
            "predicted", "predicted_by_the_profile_alone", "layer", "outside", "update_rate"}}.
        """
        cell = self._cell
        options = ProfileOptions(micro_batches=(cell.batch,), seconds=seconds)
        found = profile_ranks(subject_of(cell), self._device, options)
        parts = tuple(reversed(PARTS)) if backwards else PARTS
        steps: dict[float, list[float]] = {part: [] for part in parts}
        passes: dict[float, SizeMeasurements] = {}
        rates: dict[float, float | None] = {}
        with self._bench.recomputing():
            # There and back, so that a host's drift of some seconds does not hit one part alone.
            for part in (*parts, *reversed(parts)):
                self._visit(part, steps[part], passes)
                rates[part] = self._update_rate()
        threads = int(self._placement.threads.num_threads)
        threaded = with_threads(found, threads)

        def record(part: float) -> Json:
            times = sorted(steps[part])
            own = passes[part].row(cell.batch)
            return {
                "seconds": statistics.mean(times[: len(times) - len(times) // 10]),
                "predicted": predict(with_passes(threaded, own), cell, part),
                "predicted_by_the_profile_alone": predict(threaded, cell, part),
                "layer": own[0].model_dump(mode="json"),
                "outside": own[1].model_dump(mode="json"),
                "update_rate": rates[part],
            }

        made = {str(part): record(part) for part in parts}
        return {"threads": threads, "profile": found.model_dump(mode="json"), "parts": made}

    def _visit(
        self, part: float, steps: list[float], passes: dict[float, SizeMeasurements]
    ) -> None:
        """Adds steps and passes of a part, measured in turns."""
        self._contest.engine.set_gpu_fraction(part)
        self._contest.train(5)  # layers move
        pipeline = self._contest.engine.optimizer.pipeline
        pipeline.wait_all()
        size = self._cell.batch
        if part not in passes:
            passes[part] = self._bench.measure(size, 0.2)
        for _ in range(TURNS):
            # The worker's updates after the last step would slow the passes down.
            pipeline.wait_all()
            self._bench.launch_again(size, passes[part])
            steps.append(self._contest.queued_steps(STEPS))

    def _update_rate(self) -> float | None:
        """Parameters a second, as the engine has measured it, of updates in one pass."""
        costs = self._contest.system.costs()
        if costs is None or self._contest.system.gpu_layers() == len(costs.layers):
            return None
        size = sum(layer.parameters for layer in costs.layers)
        return size / sum(layer.cpu_update for layer in costs.layers)

    def close(self) -> None:
        """Removes the hooks and destroys the engine."""
        self._bench.close()
        self._contest.close()


def run(job: Json, recorder: Recorder) -> None:
    """The worker: a workload's rounds."""
    cell = Cell.of(f"{job['label']}/{len(os.sched_getaffinity(0))}")
    # torch tells a device's memory limit only by its number.
    device = torch.device("cuda", 0) if job["device"] == "cuda" else torch.device("cpu")
    workload = Workload(cell, device)
    for number in range(job["rounds"]):
        found = workload.round(job["profile_seconds"], backwards=number % 2 == 1)
        recorder.append("rounds", found)
        recorder.reached(f"round {number + 1}")
    workload.close()


# -- the command -------------------------------------------------------------------------------


def rows(result: Json) -> list[Json]:
    """A row for each workload and part. A ratio is of one round's times: the host differs."""
    found: list[Json] = []
    for record in result["jobs"]:
        rounds = record["ranks"][0].get("rounds", []) if record["ranks"] else []
        if record["status"] != records.OK:
            found.append({"workload": record["label"], **report.failure(record)})
        for part in map(str, PARTS) if rounds else ():
            each = [one["parts"][part] for one in rounds]
            row: Json = {"workload": record["label"], "on_the_gpu": f"{float(part):.0%}"}
            measured = [one["seconds"] for one in each]
            row["measured_ms"] = report.short(1e3 * statistics.median(measured))
            for name, key in (
                ("predicted", "predicted"),
                ("alone", "predicted_by_the_profile_alone"),
            ):
                ratios = sorted(one[key] / one["seconds"] for one in each)
                row[f"{name}_over_measured"] = report.short(statistics.median(ratios))
                row[f"{name}_least_largest"] = [report.short(ratios[at]) for at in (0, -1)]
            found.append(row)
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs the command."""
    parser = runner.parser(__doc__, model=None, budget=1800.0)
    add = parser.add_argument
    add("--workloads", nargs="+", required=True, help="MODEL/BATCHxTOKENS")
    add("--seconds", type=float, default=10.0, help="of measuring a block's passes")
    add("--rounds", type=int, default=3, help="of a profile and steps")
    options: argparse.Namespace = parser.parse_args(arguments)
    jobs = [
        {
            **{"label": text, "worker": "experiments.solve_k.planned_steps"},
            **{"device": options.device, "rounds": options.rounds},
            **{"profile_seconds": options.seconds, "seconds": 60.0 + 60.0 * options.rounds},
        }
        for text in options.workloads
    ]
    return runner.main(options, jobs, report.of_result(rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
