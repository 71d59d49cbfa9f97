"""The plans of measuring processes that do more than time one system (run.py names them)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from experiments.common.bench import Bench, empty_cache, limit_memory, make_model
from experiments.common.records import Json
from experiments.common.sizes import size_of
from experiments.common.systems import REFERENCE
from experiments.common.worker import Recorder
from hytrain.cost.prediction import predict
from hytrain.cost.step import StepCosts
from hytrain.placement.choose_gpu_layers import closed_form
from hytrain.placement.memory import GPU_RESERVE_SHARE, LEAST_RESERVE

LOWERINGS = 2
"""How often the cap is lowered while training goes on."""
SETTLING_STEPS, TIMED = 5, {"windows": 2, "steps": 4}
"""Steps of a fixed k: before it is timed, and timed."""


def up_and_down(numbers: Iterable[int]) -> list[int]:
    """Each number once: every second one going up, the others coming down.

    So neighbours are measured far apart in time, and a drift of the machine shows as a sawtooth
    instead of a slope.
    """
    ordered = sorted(set(numbers))
    return [*ordered[::2], *ordered[1::2][::-1]]


def metrics_lines(decisions: Sequence[Any], rows: Sequence[Json]) -> list[Json]:
    """What `hytrain explain` reads; a decision made after a step comes before the next step."""
    steps = [
        {"step": row["step"], "step_s": row["step_seconds"], "k": row["gpu_fraction"]}
        for row in rows
    ]
    lines = [*(each.metrics_record() for each in decisions), *steps]
    return sorted(lines, key=lambda line: (line["step"], "placement" in line))


def _solve(bench: Bench) -> Json:
    """Settles with k solved, then times it."""
    job, recorder = bench.job, bench.recorder
    recorder.put(settling=bench.settle(**job["settle"]))
    timed = bench.timed(windows=2, steps=5)
    recorder.put(solved=timed)
    lines = metrics_lines(bench.system.decisions(), timed["observations"])
    path = Path(job["folder"]) / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return timed


def _reference(job: Json, recorder: Recorder, model: Any) -> Json:
    """Times forward and backward only, of the bare model."""
    bench = Bench({**job, "system": REFERENCE}, recorder, lambda _: model)
    for _ in range(3):
        bench.stepper.step()
    timed = bench.timed(windows=2, steps=4)
    bench.close()
    return timed


def _closed_form_layers(timed: Json) -> int | None:
    """GPU layers by the published closed form, from the costs at the solved k; halves round up."""
    if "costs" not in timed:
        return None
    costs = TypeAdapter(StepCosts).validate_python(timed["costs"])
    share = closed_form(costs.backward_seconds, costs.cpu_seconds, costs.alpha)
    return math.floor(share * timed["of"] + 0.5)


def _point(bench: Bench, layers: int, solved: Json) -> Json:
    """Times a fixed number of GPU layers, or says why it is refused; adds the prediction from the
    costs at the solved k, given the share of steps that are clipped here.

    The model learns its few batches by heart, so that clipping fades out as the sweep goes on.
    """
    try:
        bench.system.place(layers)
    except ValueError as error:
        return {"gpu_layers": layers, "refused": str(error)}
    for _ in range(SETTLING_STEPS):
        bench.step()
    timed = bench.timed(**TIMED)
    if "costs" in solved and timed["clipped"] is not None:
        costs = TypeAdapter(StepCosts).validate_python(solved["costs"])
        costs = dataclasses.replace(costs, clipped_share=timed["clipped"])
        timed["predicted_for_its_clipping"] = predict(costs).step_seconds[timed["gpu_layers"]]
    return timed


def sweep(job: Json, recorder: Recorder) -> None:
    """Times the solved k and fixed ones, between two measurements of the limit, in one process."""
    model = make_model(job, torch.bfloat16)
    reference = _reference(job, recorder, model)
    recorder.put(reference=reference)
    bench = Bench(job, recorder, lambda _: model)
    solved = _solve(bench)
    published = _closed_form_layers(solved)
    recorder.put(closed_form_gpu_layers=published)
    layers = {round(fraction * solved["of"]) for fraction in job["fractions"]}
    layers |= {solved["gpu_layers"] + offset for offset in job["offsets"]}
    layers |= {published} if published is not None else set()
    # The solved one once more at the end: the difference of the two is the machine's drift.
    todo = [*up_and_down(layers & set(range(solved["of"] + 1))), solved["gpu_layers"]]
    slowest, steps = solved["step_seconds"], SETTLING_STEPS + 8
    while todo and recorder.seconds_left() > 1.5 * steps * slowest + 10.0:
        point = _point(bench, todo.pop(0), solved)
        recorder.append("points", point)
        slowest = max(slowest, point.get("step_seconds", 0.0))
    recorder.put(left_out=todo)
    bench.close()
    if recorder.seconds_left() > 10.0 + 15 * reference["step_seconds"]:
        recorder.put(reference_again=_reference(job, recorder, model))


def lowered_cap(peak_bytes: int) -> float:
    """The cap in bytes that leaves half of its own reserve above this peak."""
    return max(peak_bytes + LEAST_RESERVE / 2, peak_bytes / (1.0 - GPU_RESERVE_SHARE / 2))


def lowered(job: Json, recorder: Recorder) -> None:
    """Lowers GPU memory while training goes on: k has to follow.

    No engine can undo an allocation that fails in the user's forward; the reserve protects against
    that. So half of it is taken away: nothing fails yet, and k must go down until the whole reserve
    is free again.
    """
    bench = Bench(job, recorder)
    timed = _solve(bench)
    for _ in range(LOWERINGS):
        cap = None
        if job["device"] == "cuda":
            cap = lowered_cap(timed["gpu"]["peak_allocated_bytes"]) / torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(cap)
        # The available memory is looked up at every tenth step.
        following = bench.settle(most=60, quiet=12, least=24)
        # Until now torch may have used memory that it had cached above the cap.
        empty_cache()
        timed = bench.timed(windows=2, steps=5)
        what = "cap lowered"
        recorder.append("followed", {**timed, "what": what, "cap": cap, "settling": following})


def follow(job: Json, recorder: Recorder) -> None:
    """Halves the batch while it trains, then restores it: k has to follow within 20 steps."""
    bench = Bench(job, recorder)
    _solve(bench)
    for batch in (max(1, job["batch"] // 2), job["batch"]):
        bench.use_batch(batch)
        following = bench.settle(most=40, quiet=12, least=24)
        timed = bench.timed(windows=2, steps=5)
        recorder.append("followed", {**timed, "what": f"batch {batch}", "settling": following})


def run(job: Json, recorder: Recorder) -> None:
    """Runs the job's plan."""
    limit_memory(job)
    recorder.put(num_parameters=size_of(job["model"], job.get("layers")).num_parameters)
    {"sweep": sweep, "lowered": lowered, "follow": follow}[job["plan"]](job, recorder)
