"""Launch-bound steps: recorded ones are predicted, and launching counts where the GPU waits for it.

experiments/solve_k/regimes.json holds what steps took and were made of on hosts with few and many
cores. A profile is made here of what it would have measured there: passes with all updates on the
GPU, and their slowdown beside updates on the CPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from planner_clusters import planned, with_hosts

from hytrain.cost.prediction import predict
from hytrain.cost.step import Launches, LayerCosts, StepCosts
from hytrain.formats.policies import Activations
from hytrain.formats.profile_file import (
    CopyRates,
    DeviceProfile,
    HostProfile,
    LayerSample,
    OutsideSample,
    ProfiledModel,
    ProfileFile,
    UpdateLaunches,
    UpdateRate,
)
from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cluster import UpdateLaunchTimes
from hytrain.tools.planner.cost_model import Collectives, workload
from hytrain.tools.planner.curves import FREE, Table
from hytrain.tools.planner.plan_report import plan_text
from hytrain.tools.planner.planned_step import PlannedStep, step_launches
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from

RECORD = Path(__file__).resolve().parents[3] / "experiments/solve_k/regimes.json"
CELLS: dict[str, Any] = {
    name: cell
    for name, cell in json.loads(RECORD.read_text())["cells"].items()
    if "failed" not in cell
    and cell.get("launch_bound", True)
    and {"0", str(cell["layers"])} <= cell["costs"].keys()
}
DAY = datetime(2026, 11, 23, tzinfo=timezone.utc)


def _compute(costs: dict[str, Any]) -> float:
    """Seconds of both passes."""
    blocks = costs["blocks"] * (costs["block"]["forward"] + costs["block"]["backward"])
    outside = sum(
        costs[part][name] for part in ("first", "last") for name in ("forward", "backward")
    )
    return blocks + outside + costs["between"]


def profile_of(cell: dict[str, Any]) -> ProfileFile:
    on_cpu, on_gpu = cell["costs"]["0"], cell["costs"][str(cell["layers"])]
    block, first, last = (on_gpu[part] for part in ("block", "first", "last"))
    forward, backward = 1e3 * block["forward"], 1e3 * block["backward"]
    outside = 1e3 * (_compute(on_gpu) - on_gpu["blocks"] * (block["forward"] + block["backward"]))
    parameters = block["parameters"]
    # The pass that all steps of a cell make: of the other few were seen. By the bytes they move.
    clips = on_cpu["clipped_share"] > 0.5
    update = 30 / 26 * on_cpu["block"]["cpu_commit"] if clips else on_cpu["block"]["cpu_update"]
    rate = parameters / update
    layers = on_gpu["blocks"] + 2
    copies = {name: 2 * parameters / block[way] for name, way in _COPIES.items()}
    device = DeviceProfile(
        host="vm",
        label="H200",
        device="NVIDIA H200",
        multiprocessors=132,
        limit_bytes=10**11,
        memory_bytes=10**11,
        layer=(
            LayerSample(
                samples=1,
                forward_ms=forward,
                backward_ms=backward,
                recompute_backward_ms=forward + backward,
                kept_bytes=0,
                peak_bytes=0,
                recompute_peak_bytes=0,
                launch_ms=forward + backward,
            ),
        ),
        outside=(
            OutsideSample(
                samples=1, forward_ms=outside, backward_ms=0.0, peak_bytes=0, launch_ms=outside
            ),
        ),
        update_rate=parameters / block["gpu_update"],
        copies=CopyRates(**copies),
        launch_slowdown=max(1.0, _compute(on_cpu) / _compute(on_gpu)),
        update_launches=UpdateLaunches(
            gpu_step_ms=0.0,
            launch_ms=0.0,
            gpu_layer_ms=1e3 * max(0.0, on_gpu["tail"] - on_cpu["tail"]) / layers,
            cpu_layer_ms=0.0,
            passes_ms=0.0,
            gpu_layer_passes_ms=0.0,
        ),
        measured=DAY,
    )
    host = HostProfile(
        host="vm",
        ranks=("H200",),
        cores=16,
        memory_bytes=10**12,
        bandwidth=1e12,
        updates=(UpdateRate(threads=16, rate=rate, in_training=rate),),
        measured=DAY,
    )
    model = ProfiledModel(
        name="llama",
        num_layers=on_gpu["blocks"],
        layer_parameters=parameters,
        outside_parameters=(first["parameters"], last["parameters"]),
        seq_len=512,
        dtype="bf16",
        boundary_bytes=0,
    )
    return ProfileFile(model=model, devices=(device,), hosts=(host,))


_COPIES = {
    "to_host": "to_host",
    "from_host": "to_device",
    "to_host_both": "to_host",
    "from_host_both": "to_device",
}


def added(**milliseconds: float) -> UpdateLaunchTimes:
    """What training adds to launches; nothing but what is given."""
    none = dict.fromkeys(UpdateLaunches.model_fields, 0.0)
    return UpdateLaunchTimes(UpdateLaunches(**none | milliseconds))


def problem_of(name: str) -> PlanProblem:
    cell = CELLS[name]
    options = PlanOptions(
        batch=1,
        gpu_reserve=lambda total: 0,
        host_reserve=lambda total: 0,
        activations=("store",),
        clipped_share=cell["costs"]["0"]["clipped_share"],
    )
    return problem_from(profile_of(cell), options)


def predicted(problem: PlanProblem, on_gpu: float) -> float:
    gpu = problem.cluster.ranks[0][1]
    work = workload(problem, gpu, Collectives.of(problem, even=True), 1, 1, "store")
    share = Share(1.0, round(on_gpu * problem.model.num_updates))
    return PlannedStep(problem, [work], [share], even=True).seconds()


def _by_own_costs(cell: dict[str, Any], number: str) -> float:
    """The step that costs recorded at this number of layers add up to."""
    record = dict(cell["costs"][number])
    first, block, last = (LayerCosts(**record.pop(key)) for key in ("first", "block", "last"))
    costs = StepCosts(layers=(first, *[block] * record.pop("blocks"), last), **record)
    (candidate,) = predict(costs, gpu_layers=[int(number)]).candidates
    return candidate.step_seconds


def _explains(cell: dict[str, Any], number: str) -> bool:
    """Costs are of five steps, steps of all turns, and the hosts drifted: where they do not even
    account for their own steps, nothing that is made of them can."""
    return abs(_by_own_costs(cell, number) / cell["fixed"][number] - 1.0) < 0.08


RECORDED = [(name, number) for name, cell in CELLS.items() for number in cell["costs"]]
EXPLAINED = [(name, number) for name, number in RECORDED if _explains(CELLS[name], number)]


def test_most_recorded_costs_account_for_their_steps() -> None:
    assert len(EXPLAINED) >= 2 / 3 * len(RECORDED)


@pytest.mark.parametrize(("name", "number"), EXPLAINED)
def test_a_recorded_launch_bound_step_is_predicted(name: str, number: str) -> None:
    cell = CELLS[name]
    found = predicted(problem_of(name), int(number) / cell["layers"])
    # Steps, and what their costs add up to: what is made of the costs can be no nearer to either.
    low, high = sorted((cell["fixed"][number], _by_own_costs(cell, number)))
    assert 0.92 * low < found < 1.08 * high


@pytest.mark.parametrize("name", CELLS)
def test_a_plan_puts_all_on_the_gpu_where_steps_are_launch_bound(name: str) -> None:
    problem = problem_of(name)
    found = planned(problem)
    (rank,) = found.ranks
    assert rank.gpu_layers == problem.model.num_updates
    assert "launches by the host" in plan_text(problem, found)
    gpu = problem.cluster.ranks[0][1]
    assert not replace(gpu, launches=None).is_launch_bound(1)


@pytest.mark.parametrize(("spread", "is_warned"), [(0.05, False), (0.4, True)])
def test_warns_of_a_host_that_drifts(spread: float, is_warned: bool) -> None:
    problem = problem_of("0.37B/4x512/16")
    host, gpu = problem.cluster.ranks[0]
    assert gpu.launches is not None
    gpu = replace(gpu, launches=replace(gpu.launches, spread=spread))
    problem = with_hosts(problem, replace(host, gpus=(gpu,)))
    found = planned(problem)
    told = "launching took 40% longer than in others" in plan_text(problem, found)
    assert told == is_warned
    # Where the GPU has more to do than the host, it makes no difference.
    layer = Table(((1.0, 0.1),))
    gpu = replace(gpu, launches=replace(gpu.launches, layer_ms=layer))
    problem = with_hosts(problem, replace(host, gpus=(gpu,)))
    assert "longer than in others" not in plan_text(problem, found)


def test_launches_count_as_far_as_the_gpu_waits_for_them() -> None:
    problem = problem_of("0.37B/4x512/16")
    step = partial(_step, problem)
    free = {"layer_ms": FREE, "outside_ms": FREE}
    for on_gpu in (0.0, 0.5):
        alone = step(on_gpu, slowdown=1.0)
        assert step(on_gpu) > 1.02 * alone
        # A host that is far ahead is not seen, whatever slows it down.
        assert step(on_gpu, slowdown=1.5, **free) == pytest.approx(
            step(on_gpu, slowdown=1.0, **free)
        )
    assert step(1.0) == step(1.0, slowdown=1.0)
    # All launches of updates come behind backward; what the GPU needs for them runs beside.
    layers = problem.model.num_updates
    once, some, none = (added(gpu_layer_ms=ms) for ms in (1.0, 0.5, 0.0))
    longer = step(1.0, updates=once) - step(1.0, updates=some)
    assert longer == pytest.approx(5e-4 * layers)
    assert step(1.0, updates=some, **free) == pytest.approx(step(1.0, updates=none, **free))
    # What the passes have of it takes longer however long updates on the GPU take.
    hooks = added(passes_ms=1.0, gpu_layer_passes_ms=0.5)
    longer = step(1.0, updates=hooks) - step(1.0, updates=none)
    assert longer == pytest.approx(1e-3 + 5e-4 * layers)
    assert step(1.0, updates=hooks, **free) == pytest.approx(step(1.0, updates=none, **free))
    # Of a layer that the CPU updates, backward and forward have it; the worker waits less then.
    handed = added(cpu_layer_ms=0.5)
    assert step(1.0, updates=handed) == step(1.0, updates=none)
    assert 2e-4 * layers <= step(0.0, updates=handed) - step(0.0, updates=none)


def _step(problem: PlanProblem, on_gpu: float, **changes: Any) -> float:
    """Of a problem whose launches are changed."""
    host, gpu = problem.cluster.ranks[0]
    assert gpu.launches is not None
    other = replace(gpu, launches=replace(gpu.launches, **changes))
    return predicted(with_hosts(problem, replace(host, gpus=(other,))), on_gpu)


def test_updates_on_the_gpu_hide_behind_launches_as_far_as_it_has_time() -> None:
    problem = problem_of("0.95B/2x512/8")
    gpu, layers = problem.cluster.ranks[0][1], problem.model.num_layers
    assert gpu.launches is not None
    update = problem.model.parameters / gpu.update_rate
    layer, outside = gpu.forward_ms.at(1) + gpu.backward_ms.at(1), gpu.outside_ms.at(1)
    taken = (layers * layer + outside) / 1e3

    def step(share: float) -> float:
        """Where the device needs a share of what passes take."""
        return _step(
            problem,
            1.0,
            layer_device_ms=Table(((1.0, share * layer),)),
            outside_device_ms=Table(((1.0, share * outside),)),
            updates=added(),
        )

    in_sequence, hidden = step(1.0), step(0.2)
    free = _step(problem, 1.0, updates=added())
    assert in_sequence == pytest.approx(free)  # where it was not measured none of it is free
    assert 0.2 * taken + update < taken
    assert in_sequence - hidden == pytest.approx(update, rel=0.4)  # the gap at the end hides some
    assert taken < hidden < in_sequence
    # What is left of it when the host is through comes at the end.
    partly = 1.0 - 0.5 * update / taken
    assert hidden < step(partly) < in_sequence
    assert step(partly) == pytest.approx(update + partly * taken, rel=0.01)


def test_the_second_passes_of_clipped_steps_slow_launching_down_too() -> None:
    """Most of the layers' first passes are over before backward is; previews slow forward down."""
    problem = problem_of("0.37B/4x512/16")
    assert problem.clipped_share == 1.0
    clipped = _step(problem, 0.75) - _step(problem, 0.75, slowdown=1.0)
    problem = replace(problem, clipped_share=0.0)
    unclipped = _step(problem, 0.75) - _step(problem, 0.75, slowdown=1.0)
    assert clipped > 1.2 * unclipped > 0.0


def launches_of(problem: PlanProblem, number: int, how: Activations) -> Launches:
    gpu = problem.cluster.ranks[0][1]
    work = workload(problem, gpu, Collectives.of(problem, even=True), number, 1, how)
    return step_launches(problem, gpu, work, 1.0)


def test_recomputed_forwards_are_launched_again() -> None:
    problem = problem_of("0.37B/4x512/16")
    host, gpu = problem.cluster.ranks[0]
    stored, again = (launches_of(problem, 1, how) for how in ("store", "recompute"))
    assert again.passes - stored.passes == pytest.approx(gpu.forward_ms.at(1) * 24 / 1e3)
    assert launches_of(problem, 3, "store").passes == pytest.approx(3 * stored.passes)
    unmeasured = replace(host, gpus=(replace(gpu, launches=None),))
    problem = with_hosts(problem, unmeasured)
    assert launches_of(problem, 1, "store") == Launches()


def test_launches_of_updates_are_counted_as_training_groups_layers() -> None:
    problem = problem_of("0.37B/4x512/16")
    host, gpu = problem.cluster.ranks[0]
    assert gpu.launches is not None

    def found(times: UpdateLaunchTimes, parameters: int, fraction: float = 1.0) -> Launches:
        """Of a first layer of three quarters of them, and four equal ones."""
        model = Model("m", 4, parameters, outside=(parameters * 3 // 4, 0))
        own = replace(gpu, launches=replace(gpu.launches, updates=times))
        given = with_hosts(replace(problem, model=model), replace(host, gpus=(own,)))
        work = workload(given, own, Collectives.of(given, even=True), 1, 1, "store")
        return step_launches(given, own, work, fraction)

    layers = {"gpu_step_ms": 100.0, "launch_ms": 10.0, "gpu_layer_ms": 1.0, "cpu_layer_ms": 2.0}
    times = added(**layers)
    small = found(times, 8 << 20)
    assert small.on_gpu == pytest.approx((0.0, 0.111, 0.112, 0.113, 0.114, 0.115))
    assert small.in_passes == pytest.approx((0.010, 0.008, 0.006, 0.004, 0.002, 0.0))
    hooks = found(added(**layers, passes_ms=50.0, gpu_layer_passes_ms=1.0), 8 << 20)
    assert hooks.in_passes == pytest.approx((0.060, 0.059, 0.058, 0.057, 0.056, 0.055))
    assert hooks.on_gpu[-1] == pytest.approx(0.115)
    alone = found(replace(times, shares=False), 8 << 20)
    assert alone.on_gpu == pytest.approx((0.0, 0.111, 0.122, 0.133, 0.144, 0.155))
    # Of 24 Mi in all the first two layers are too many for the first launch, unless ranks share.
    assert found(times, 24 << 20).on_gpu[-1] == pytest.approx(0.125)
    assert found(times, 24 << 20, 0.5).on_gpu[-1] == pytest.approx(0.115)
