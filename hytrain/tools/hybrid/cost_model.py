"""What a plan costs: pure functions of a problem and a plan.

The published model (Metis, USENIX ATC 2024, and its code), for a step of B micro-batches::

    (B-1)*max t_s + sum t_s + B*fb_sync(last) + max update_s + max gradients_s
        + sum activations_s + B*batch_generator

The cost of a stage's strategy on given GPUs is linear in its layers: a :class:`Choice` holds sums
over the layers before each, from which both a plan's cost and the search's tables
(:mod:`.stage_tables`) are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.hybrid.problem import Floats, Plan, Problem, Samples, exposed_ms

BANDWIDTH_UNIT = 2.0**20
"""Bytes per millisecond at 1 GB/s, in the published model."""

NOTHING_MB = 0.001
"""Memory that a stage needs besides its layers, in the published model."""

Ranks = Sequence[tuple[str, int]]
"""GPUs, each a (device type, number of its machine's first node)."""


# -- the samples of a stage --------------------------------------------------------------------


def charged_types(problem: Problem, types: Sequence[str]) -> tuple[str, ...]:
    """Returns the types of a tensor-parallel group of which the slowest sets its speed."""
    # Equal types are neighbours.
    if problem.options.tp_speed == "first" or types[0] == types[-1]:
        return (types[0],)
    return tuple(sorted(set(types)))


def proportional_split(
    problem: Problem, types: Sequence[str], dp: int, tp: int, samples: int
) -> tuple[int, ...]:
    """Returns the samples of each replica, in proportion to its speed with one sample.

    The samples left by rounding down go one each to the largest remainders, the first if equal.

    Args:
        types: of the GPUs; each replica has ``len(types) // dp`` consecutive ones.
        dp: replicas.
        tp: tensor parallel degree whose profile has the speeds.
        samples: of a micro-batch, all replicas together.

    Raises:
        PlanError: a replica's type has no profile with one sample.
    """
    key = ("split", tuple(types), dp, tp, samples)
    if key not in problem.memo:
        problem.memo[key] = _proportional_split(problem, types, dp, tp, samples)
    return problem.memo[key]


def _proportional_split(
    problem: Problem, types: Sequence[str], dp: int, tp: int, samples: int
) -> tuple[int, ...]:
    size = len(types) // dp
    groups = [charged_types(problem, types[rank * size : (rank + 1) * size]) for rank in range(dp)]
    whole = {
        group: max(float(problem.profiled(device, tp, 1).time_sums[-1]) for device in group)
        for group in dict.fromkeys(groups)
    }
    speeds = [1.0 / whole[group] for group in groups]
    total = sum(speeds)
    exact = [samples * (speed / total) for speed in speeds]
    split = [int(value) for value in exact]
    by_rest = sorted(range(dp), key=lambda i: exact[i] - split[i], reverse=True)
    for i in by_rest[: samples - sum(split)]:
        split[i] += 1
    return tuple(split)


def micro_batch_slices(samples: int) -> list[int]:
    """Returns the sizes in which a replica of a mixed stage runs its samples: their binary digits.

    >>> micro_batch_slices(11)
    [8, 2, 1]
    """
    return [1 << bit for bit in reversed(range(samples.bit_length())) if samples >> bit & 1]


def _slices(problem: Problem, device: str, tp: int, samples: int) -> list[Samples]:
    """Returns the profiles of the slices that a replica of a mixed stage runs in turn."""
    return [problem.profiled(device, tp, size) for size in micro_batch_slices(samples)]


# -- bandwidth ---------------------------------------------------------------------------------


def bandwidth(problem: Problem, ranks: Ranks) -> float:
    """Returns the GB/s between some GPUs.

    As published, it is the least intra-node bandwidth of the nodes, wherever the GPUs are, unless
    ``inter_node`` is set and they are on several machines.
    """
    devices = [problem.device[name] for name in {name for name, _ in ranks}]
    if problem.options.inter_node and len({node for _, node in ranks}) > 1:
        return min(device.inter_bandwidth for device in devices)
    return min(device.intra_bandwidth for device in devices)


# -- a stage on given GPUs ---------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A strategy of a stage on given GPUs, for any layers."""

    dp: int
    tp: int
    on_host: bool
    split: tuple[int, ...]
    """Samples of each replica; empty if the GPUs are equal."""

    share: int
    """Mean samples of a micro-batch per replica, rounded down."""

    times: Floats
    """(kinds of replica, layers + 1): summed ms of the layers before each; the slowest counts."""

    memory: Floats
    """(places, layers + 1): summed MB of the layers before each, scaled to ``capacity``."""

    capacity: float
    """MB that the demand at each place must not exceed."""

    fb_sync: float
    """Time of a micro-batch that belongs to no layer, ms; counted in the last stage."""

    update: float
    """Optimizer time: ms per layer on the GPU, ms per byte of parameters on the host."""

    gradients: float
    """All-reduce, ms per byte of parameters."""


def choices(
    problem: Problem,
    cluster: Ranks,
    first: int,
    strategy: tuple[int, int],
    micro_batches: int,
) -> list[Choice]:
    """Returns the choices of a stage on given GPUs with a given strategy: state on GPU or host.

    Args:
        cluster: all ranks in the plan's order of types (``Problem.ranks``).
        first: the stage's first rank.
        strategy: (data parallel, tensor parallel) degree.

    Raises:
        PlanError: the batch cannot be dealt in this way, or a (tp, micro-batch size) that the
            stage runs at was not profiled.
    """
    dp, tp = strategy
    ranks = cluster[first : first + dp * tp]
    types = [device for device, _ in ranks]
    samples = problem.gbs // micro_batches
    share = samples // dp
    is_even = len(set(types)) == 1
    if share == 0 or problem.gbs % micro_batches or (is_even and samples % dp):
        raise PlanError(
            f"{problem.gbs} samples cannot be divided into {micro_batches} micro-batches for {dp} "
            "replicas"
        )
    if share > problem.max_batch or tp > problem.max_tp:
        raise PlanError(
            f"tp {tp} with micro-batches of {share}: only up to tp {problem.max_tp} and "
            f"{problem.max_batch} samples were profiled"
        )
    sync = max(problem.profiled(device, tp, share).fb_sync for device in set(types))
    if is_even:
        times = problem.profiled(types[0], tp, share).time_sums[None]
        split: tuple[int, ...] = ()
    else:
        split = proportional_split(problem, types, dp, tp, samples)
        times = _replica_times(problem, types, split, tp)
    memory, capacity = _stage_memory(problem, cluster, types, split, strategy, samples)
    link = bandwidth(problem, ranks)
    on_gpu = Choice(
        dp=dp,
        tp=tp,
        on_host=False,
        split=split,
        share=share,
        times=times,
        memory=memory,
        capacity=capacity,
        fb_sync=sync,
        update=problem.constants.optimizer_ms / tp / problem.num_layers,
        gradients=2 * (dp - 1) / (dp * link * BANDWIDTH_UNIT) / tp,
    )
    return [on_gpu] if problem.options.host is None else [on_gpu, _on_host(problem, ranks, on_gpu)]


def _replica_times(problem: Problem, types: Sequence[str], split: Sequence[int], tp: int) -> Floats:
    found = {
        (device, share)
        for rank, share in enumerate(split)
        for device in charged_types(problem, types[rank * tp : (rank + 1) * tp])
    }
    none = np.zeros(problem.num_layers + 1)
    return np.stack(
        [
            sum((one.time_sums for one in _slices(problem, device, tp, share)), none)
            for device, share in sorted(found)
        ]
    )


def _stage_memory(
    problem: Problem,
    cluster: Ranks,
    types: Sequence[str],
    split: Sequence[int],
    strategy: tuple[int, int],
    samples: int,
) -> tuple[Floats, float]:
    """Returns the demand by layer and the capacity of a stage.

    As published, the capacity is the group's sum, and the demand one replica's if the GPUs are
    equal, else all replicas' (see :func:`_mixed_memory`). With ``per_gpu_memory`` both are each
    GPU's own, scaled to the smallest one.
    """
    dp, tp = strategy
    none = np.zeros(problem.num_layers + 1)
    if problem.options.per_gpu_memory:
        least = min(problem.device[device].memory_mb for device in types)
        places = {
            (device, split[rank // tp] if split else samples // dp)
            for rank, device in enumerate(types)
        }
        rows: list[Floats] = []
        for device, share in sorted(places):
            held = (
                _slices(problem, device, tp, share)
                if split
                else [problem.profiled(device, tp, share)]
            )
            unit = least / problem.device[device].memory_mb
            rows.append(sum((one.memory_sums for one in held), none) * unit)
        return problem.mem_coef * np.stack(rows), least
    capacity = sum(problem.device[device].memory_mb for device in types)
    if split:
        demand = _mixed_memory(problem, cluster, strategy, samples)
    else:
        demand = problem.profiled(types[0], tp, samples // dp).memory_sums
    return problem.mem_coef * demand[None], capacity


def _mixed_memory(
    problem: Problem, cluster: Ranks, strategy: tuple[int, int], samples: int
) -> Floats:
    """Returns the summed MB of the layers before each that a mixed stage is taken to hold.

    As published, the samples are dealt as if the whole cluster were the stage.
    """
    dp, tp = strategy
    key = ("memory", tuple(cluster), dp, tp, samples)
    if key not in problem.memo:
        everyone = [device for device, _ in cluster]
        dealt = proportional_split(problem, everyone, dp, tp, samples)
        firsts = everyone[:: len(everyone) // dp]
        replicas = Counter(zip(firsts, dealt, strict=False))
        problem.memo[key] = sum(
            (
                count * one.memory_sums
                for (device, share), count in replicas.items()
                for one in _slices(problem, device, tp, share)
            ),
            np.zeros(problem.num_layers + 1),
        )
    return problem.memo[key]


def most_on_a_machine(problem: Problem, ranks: Ranks) -> int:
    """Returns the GPUs of the largest machine that the ranks are on: they share its host."""
    return max(problem.machine_gpus(node) for node in {node for _, node in ranks})


def _on_host(problem: Problem, ranks: Ranks, on_gpu: Choice) -> Choice:
    """Returns the same with optimizer state in host memory, which is a further place."""
    host = problem.options.host
    assert host is not None
    gpus = len(ranks)
    node_gpus = most_on_a_machine(problem, ranks)
    state = host.state_mb(problem.parameter_sums)
    freed = state / on_gpu.tp if problem.options.per_gpu_memory else state
    used = state / gpus * node_gpus * (on_gpu.capacity / (host.memory_gb * 1024))
    return replace(
        on_gpu,
        on_host=True,
        memory=np.vstack([on_gpu.memory - freed, used]),
        update=float(host.update_ms(1.0, gpus, node_gpus)),
    )


# -- stages and plans --------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What one stage adds to a plan's cost."""

    choice: Choice
    time: float
    """Time of a micro-batch, ms."""

    update: float
    """Optimizer time, ms."""

    gradients: float
    """All-reduce, ms."""

    activation: float
    """Bytes that a micro-batch sends to the next stage; counted in all stages but the last."""

    demand: float
    """MB needed of ``choice.capacity``."""

    @property
    def fits(self) -> bool:
        return self.demand <= self.choice.capacity


def stage(problem: Problem, choice: Choice, start: int, stop: int) -> Stage:
    """Returns a stage of the layers from ``start`` to before ``stop``."""
    time = float((choice.times[:, stop] - choice.times[:, start]).max())
    parameters = float(problem.parameter_sums[stop] - problem.parameter_sums[start])
    layers = stop - start
    if choice.on_host:
        update = float(exposed_ms(choice.update * parameters, time, layers))
    else:
        update = choice.update * layers
    is_before_head = stop == problem.num_layers - 1
    width = problem.vocab_size / choice.tp if is_before_head else problem.hidden_size
    return Stage(
        choice=choice,
        time=time,
        update=update,
        gradients=choice.gradients * parameters,
        activation=choice.share * problem.sequence_length * width,
        demand=NOTHING_MB + float((choice.memory[:, stop] - choice.memory[:, start]).max()),
    )


@dataclass(frozen=True)
class PlanCost:
    """A plan's cost and what it is made of, ms."""

    total: float
    stages: tuple[Stage, ...]
    sends: tuple[float, ...]
    """Time to send activations from each stage to the next."""

    @property
    def fits(self) -> bool:
        """Whether every stage's memory suffices."""
        return all(one.fits for one in self.stages)


def plan_cost(problem: Problem, plan: Plan) -> PlanCost:
    """Returns the cost of a plan, whether it fits or not.

    Raises:
        PlanError: a stage of it was not profiled.
    """
    cluster = problem.ranks(plan.order)
    stages: list[Stage] = []
    sends: list[float] = []
    first = 0
    for number, strategy in enumerate(plan.strategies):
        found = choices(problem, cluster, first, strategy, plan.micro_batches)
        choice = found[int(plan.offloads(number))]
        stages.append(stage(problem, choice, *plan.partition[number : number + 2]))
        if number + 1 < plan.stages:
            both = cluster[first : first + sum(plan.groups[number : number + 2])]
            sends.append(stages[-1].activation / (bandwidth(problem, both) * BANDWIDTH_UNIT))
        first += plan.groups[number]
    total = (
        (plan.micro_batches - 1) * max(one.time for one in stages)
        + sum(one.time for one in stages)
        + stages[-1].choice.fb_sync * plan.micro_batches
        + max(one.update for one in stages)
        + max(one.gradients for one in stages)
        + sum(sends)
        + problem.constants.batch_generator_ms * plan.micro_batches
    )
    return PlanCost(total, tuple(stages), tuple(sends))
