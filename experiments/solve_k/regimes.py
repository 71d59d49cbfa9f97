"""k solved beside the best fixed k, from launch-bound to GPU-bound: one process a cell of a grid.

    python experiments/solve_k/regimes.py --cells 0.37B/4x512/16 0.95B/2x512/4 --out DIR
    python experiments/solve_k/regimes.py --cells toy/2x16/2 --device cpu --out DIR --steps 30

A cell is MODEL/BATCHxTOKENS/CORES[/noclip]. Its process trains with k solved for --steps steps and
for --stay more, then measures the number of layers that it has come to in turns with fixed
fractions, some steps of each, several times. Before there is an engine it measures forward and
backward alone, and where everything is on the GPU (fp32 master weights, torch's fused AdamW).
DIR/regimes.json is rewritten after every cell, and a table is printed: seconds a step (medians),
solved over best, and moves after the first steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.hardware import describe
from experiments.common.processes import free_port
from experiments.common.records import Json, write_json
from experiments.common.systems.all_gpu import AllGpu
from hytrain.placement.costs import StepCosts

SHAPES = {
    # blocks, hidden, intermediate; vocabulary 32000
    "toy": (4, 32, 64),
    "0.1B": (12, 768, 2048),
    "0.37B": (24, 1024, 2816),
    "0.95B": (16, 2048, 5632),
    "2.9B": (32, 2560, 6912),
    "9.8B": (48, 4096, 11008),
}
ALL_GPU_FITS = ("toy", "0.1B", "0.37B", "0.95B", "2.9B")
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
MARK = "RESULT "


@dataclass(frozen=True)
class Cell:
    """What a process trains."""

    model: str
    batch: int
    tokens: int
    cores: int
    clips: bool

    @staticmethod
    def of(text: str) -> Cell:
        """From MODEL/BATCHxTOKENS/CORES[/noclip].

        Raises:
            SystemExit: it is of another form, or the model is unknown.
        """
        try:
            model, shape, cores, *rest = text.split("/")
            batch, tokens = shape.split("x")
            if model not in SHAPES or rest not in ([], ["noclip"]):
                raise ValueError
            return Cell(model, int(batch), int(tokens), int(cores), not rest)
        except ValueError:
            raise SystemExit(
                f"--cells: {text!r} is not MODEL/BATCHxTOKENS/CORES[/noclip] with a model of "
                f"{', '.join(SHAPES)}"
            ) from None


def _ds_config(cell: Cell) -> Json:
    return {
        "train_micro_batch_size_per_gpu": cell.batch,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        # Every step is clipped, which costs the worker most, or none is.
        "gradient_clipping": 1e-3 if cell.clips else 0.0,
        "hytrain": {},
    }


def _model(cell: Cell, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    blocks, hidden, intermediate = SHAPES[cell.model]
    heads = max(1, hidden // 128)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32000 if cell.model != "toy" else 128,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).bfloat16()


class Trainer:
    """Steps of one engine, each waited for."""

    def __init__(self, cell: Cell, device: str) -> None:
        import torch

        self._gpu = device == "cuda"
        self._model = _model(cell, device)
        shape = (cell.batch, cell.tokens)
        self._ids = torch.randint(0, self._model.config.vocab_size, shape, device=device)
        self.engine: Any = None

    def _wait(self) -> None:
        import torch

        if self._gpu:
            torch.cuda.synchronize()

    def compute(self, steps: int) -> list[float]:
        """Seconds of forward and backward alone, before there is an engine."""
        times: list[float] = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._model(input_ids=self._ids, labels=self._ids).loss.backward()
            self._model.zero_grad(set_to_none=True)
            self._wait()
            times.append(time.perf_counter() - begin)
        return times

    def all_gpu(self, steps: int, clip: float | None) -> list[float]:
        """Seconds of whole steps with everything on the GPU; the weights go on from there."""
        system = AllGpu(self._model, clip)
        times: list[float] = []
        for _ in range(steps):
            begin = time.perf_counter()
            system.step({"input_ids": self._ids, "labels": self._ids})
            self._wait()
            times.append(time.perf_counter() - begin)
        return times

    def start(self, config: Json) -> None:
        """Wraps the model."""
        import hytrain

        self.engine, *_ = hytrain.initialize(
            model=self._model, config=config, model_parameters=list(self._model.parameters())
        )

    def train(self, steps: int) -> list[float]:
        """Seconds of whole steps."""
        times: list[float] = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.engine.backward(self.engine(input_ids=self._ids, labels=self._ids).loss)
            self.engine.step()
            self._wait()
            times.append(time.perf_counter() - begin)
        return times


def _moves(engine: Any, after: int) -> list[Json]:
    return [
        {"step": d.step, "from": d.gpu_layers_before, "to": d.gpu_layers_target, "why": d.reason}
        for d in engine.optimizer.placement.decisions
        if d.step > after and d.gpu_layers_before != d.gpu_layers_target
    ]


def _rounded(costs: StepCosts | None) -> Any:
    """For a file: of times four digits say enough."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [rounded(v) for v in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return None if costs is None else rounded(costs.to_json())


def work(cell: Cell, device: str, steps: int, stay: int, rounds: int) -> Json:
    """A cell's process: k solved, then fixed fractions in turns with it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: cell.cores])
    trainer = Trainer(cell, device)
    compute = statistics.median(trainer.compute(12)[4:])
    all_gpu = None
    if cell.model in ALL_GPU_FITS:
        all_gpu = statistics.median(trainer.all_gpu(12, 1e-3 if cell.clips else None)[4:])
    trainer.start(_ds_config(cell))
    engine = trainer.engine
    trainer.train(steps)
    settled = trainer.train(stay)
    decisions = engine.optimizer.placement
    layers = decisions.decisions[0].num_layers
    solved = decisions.controller.num_gpu_layers
    early, late = _moves(engine, 0), _moves(engine, steps)
    numbers = sorted({round(f * layers) for f in FRACTIONS} | {solved})
    costs: Json = {}
    numbers = sorted({*numbers, layers // 2})
    seen: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(rounds):
        for number in numbers if turn % 2 == 0 else reversed(numbers):
            engine.set_gpu_fraction(number / layers)
            # Moves end beside the first of them.
            seen[number] += trainer.train(9)[4:]
            if number in (0, layers // 2, layers):
                costs[str(number)] = _rounded(decisions.costs())
    fixed = {number: statistics.median(times) for number, times in seen.items()}
    best = min(fixed, key=lambda number: fixed[number])
    engine.destroy()
    return {
        "layers": layers,
        "compute": compute,
        "all_gpu": all_gpu,
        "fixed": {str(number): seconds for number, seconds in fixed.items()},
        "solved": solved,
        "settled_seconds": statistics.median(settled or [0.0]),
        "best": best,
        "solved_over_best": fixed[solved] / fixed[best],
        "costs": costs,
        "moves": early,
        "late_moves": len(late),
    }


def _run(text: str, arguments: argparse.Namespace) -> Json:
    environment = dict(
        os.environ,
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    own = [sys.executable, str(Path(__file__).resolve()), "--work", text]
    own += ["--device", arguments.device, "--steps", str(arguments.steps)]
    own += ["--stay", str(arguments.stay), "--rounds", str(arguments.rounds)]
    log = arguments.out / (text.replace("/", "_") + ".log")
    with log.open("w") as errors:
        done = subprocess.run(
            own, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    results = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not results:
        return {"failed": done.returncode, "log": log.read_text()[-2000:]}
    return json.loads(results[-1][len(MARK) :])


def _row(text: str, cell: Json) -> str:
    if "failed" in cell:
        return f"{text:24} failed: see its log"
    fixed = "  ".join(f"{k}: {1e3 * float(s):.1f}" for k, s in cell["fixed"].items())
    all_gpu = f" AdamW {1e3 * cell['all_gpu']:.1f}" if cell["all_gpu"] else ""
    path = " ".join(f"{m['step']}:{m['to']}" for m in cell["moves"])
    return (
        f"{text:24} compute {1e3 * cell['compute']:.1f}{all_gpu}  [{fixed}] ms; "
        f"solved {cell['solved']} of {cell['layers']}: {cell['solved_over_best']:.3f} of the best "
        f"({cell['best']}), "
        f"{cell['late_moves']} late moves ({path})"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cells", nargs="+", default=[], help="MODEL/BATCHxTOKENS/CORES[/noclip]")
    add("--out", type=Path, default=Path(), help="folder for regimes.json and logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--steps", type=int, default=60, help="in which k is solved")
    add("--stay", type=int, default=60, help="more, in which it should not change")
    add("--rounds", type=int, default=3, help="of every fixed number")
    add("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        cell = Cell.of(arguments.work)
        result = work(cell, arguments.device, arguments.steps, arguments.stay, arguments.rounds)
        print(MARK + json.dumps(result), flush=True)
        return
    cells = {text: Cell.of(text) for text in arguments.cells}
    arguments.out.mkdir(parents=True, exist_ok=True)
    record: Json = {"command": sys.argv, "hardware": describe(arguments.device), "cells": {}}
    for text in cells:
        record["cells"][text] = _run(text, arguments)
        write_json(arguments.out / "regimes.json", record)
        print(_row(text, record["cells"][text]), flush=True)


if __name__ == "__main__":
    main()
