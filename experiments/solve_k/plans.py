"""What the measuring processes do, one function a plan; each stage is recorded as it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from experiments.common.records import Json
from experiments.common.timing import synchronize
from experiments.solve_k.bench import Bench
from experiments.solve_k.others import other
from experiments.solve_k.points import closed_form_layers, layers_of, near, up_and_down
from hytrain.placement.closed_form import closed_form
from hytrain.placement.costs import StepCosts
from hytrain.placement.memory import GPU_RESERVE_SHARE, LEAST_RESERVE, gpu_reserve
from hytrain.placement.prediction import predict

LOWERINGS = 2
"""How often the cap is lowered while training goes on."""

POINT_STEPS = 13
"""Of one fixed k: 5 to settle, 8 timed."""


def solve(bench: Bench) -> Json:
    """Settle with k solved, then time it."""
    bench.recorder.put(settling=bench.settle(**bench.options["settle"]))
    timed = bench.timed(**bench.options.get("timed", {"windows": 2, "steps": 5}))
    bench.recorder.put(solved=timed)
    bench.note_host("k solved")
    bench.write_metrics()
    return timed


def closed_form_choice(timed: Json) -> Json | None:
    """What the closed form makes of the costs at the solved k."""
    if timed["costs"] is None:
        return None
    costs = StepCosts.from_json(timed["costs"])
    share = closed_form(costs.backward_seconds, costs.cpu_seconds, costs.alpha)
    return {
        "k": share,
        "gpu_layers": closed_form_layers(share, timed["num_layers"]),
        "backward_seconds": costs.backward_seconds,
        "cpu_seconds": costs.cpu_seconds,
        "alpha": costs.alpha,
    }


def predicted_here(timed: Json, point: Json) -> float | None:
    """The prediction from the costs at the solved k, if they had known how often is clipped here.

    The model learns its few batches by heart, so that clipping fades out as the sweep goes on.
    """
    share = point.get("clipped_share")
    if timed["costs"] is None or share is None:
        return None
    costs = dataclasses.replace(StepCosts.from_json(timed["costs"]), clipped_share=share)
    return predict(costs).step_seconds[point["gpu_layers"]]


def sweep(bench: Bench) -> None:
    """The solved k beside fixed ones, between two measurements of the limit."""
    reference = bench.reference()
    bench.recorder.put(reference=reference)
    bench.start()
    timed = solve(bench)
    chosen, num_layers = timed["gpu_layers"], timed["num_layers"]
    published = closed_form_choice(timed)
    bench.recorder.put(closed_form=published)
    numbers = [
        *layers_of(bench.options["fractions"], num_layers),
        *near(chosen, bench.options["offsets"], num_layers),
        *([published["gpu_layers"]] if published else []),
    ]
    slowest = timed["step_seconds"]
    # The solved one once more at the end: what is between the two is the machine's drift.
    todo = [*up_and_down(numbers), chosen]
    while todo:
        if bench.seconds_left() < 1.5 * POINT_STEPS * slowest + 10.0:
            bench.recorder.put(left_out=todo)
            break
        point = bench.at(todo.pop(0))
        point["predicted_for_its_clipping"] = predicted_here(timed, point)
        bench.recorder.append("points", point)
        slowest = max(slowest, point.get("step_seconds", 0.0))
        bench.write_metrics()
    bench.note_host("swept")
    if bench.seconds_left() > 10.0 + 15 * reference["step_seconds"]:
        bench.close()
        bench.recorder.put(reference_again=bench.reference())


def _cap(fraction: float) -> None:
    torch.cuda.set_per_process_memory_fraction(fraction)


def capped(bench: Bench) -> None:
    """Less GPU memory than there is, from the start."""
    bench.recorder.put(cap=bench.options["cap"])
    bench.start()
    solve(bench)


def lowered_cap(peak_bytes: int) -> float:
    """Bytes that leave half of their own reserve above this peak."""
    return max(peak_bytes + LEAST_RESERVE / 2, peak_bytes / (1.0 - GPU_RESERVE_SHARE / 2))


def lowered(bench: Bench) -> None:
    """GPU memory becomes less while training goes on: k has to follow.

    No engine can undo an allocation that fails in the user's forward; against that there is the
    reserve. So half of it is taken away: nothing fails yet, and k must go down until the whole
    reserve is free again.
    """
    bench.start()
    timed = solve(bench)
    total = bench.gpu_total()
    for _ in range(LOWERINGS):
        lowering: Json = {"cap": None, "reserve_bytes": None}
        if total is not None:
            cap = lowered_cap(timed["gpu"]["peak_allocated_bytes"])
            lowering = {"cap": cap / total, "reserve_bytes": gpu_reserve(None, int(cap))}
            _cap(lowering["cap"])
        # What memory there is is looked up at every tenth step.
        lowering["following"] = bench.settle(most=60, quiet=12, least=24)
        # Until now torch may have lived on what it had cached above the cap.
        bench.empty_cache()
        timed = bench.timed(windows=2, steps=5)
        bench.recorder.append("lowerings", {**lowering, "followed": timed})
    bench.write_metrics()


def follow(bench: Bench) -> None:
    """The batch is halved while it trains, and whole again: k has to follow within 20 steps."""
    bench.start()
    solve(bench)
    whole = bench.job.workload.batch
    for batch in (max(1, whole // 2), whole):
        bench.change_batch(batch)
        following = bench.settle(most=40, quiet=12, least=24)
        timed = bench.timed(windows=2, steps=5)
        bench.recorder.append("changes", {"batch": batch, "following": following, "timed": timed})
    bench.write_metrics()


def _reference_or_checkpointing(bench: Bench) -> Json | None:
    """The limit; None where it does not fit without checkpointing, which is then on."""
    try:
        return bench.reference(warmup=2, windows=2, steps=2)
    except torch.OutOfMemoryError:
        if bench.options["checkpointing"] != "auto":
            raise
        print("without activation checkpointing the GPU's memory is not enough", flush=True)
        return None


def big(bench: Bench) -> None:
    """A model that neither side could hold alone: the limit, then k solved."""
    reference = _reference_or_checkpointing(bench)
    if reference is None:
        for parameter in bench.model.parameters():
            parameter.grad = None
        bench.empty_cache()
        bench.checkpoint_activations()
        reference = bench.reference(warmup=2, windows=2, steps=2)
    bench.recorder.put(reference=reference)
    bench.start()
    solve(bench)


PLANS: dict[str, Callable[[Bench], None]] = {
    "sweep": sweep,
    "capped": capped,
    "lowered": lowered,
    "follow": follow,
    "big": big,
    "other": other,
}


def run(bench: Bench) -> None:
    """The job's plan."""
    cap = bench.options.get("cap")
    if cap is not None and bench.device == "cuda":
        _cap(cap)
    if bench.options["plan"] != "other":
        bench.build()
    PLANS[bench.options["plan"]](bench)
    synchronize(bench.device)
