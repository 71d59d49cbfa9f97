"""Random clusters of the sizes that people have: 2 to 16 ranks on 1 to 4 hosts, large batches."""

from __future__ import annotations

import random
from dataclasses import replace

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.problem import Model, PlanProblem

GB = 10**9
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_POLICIES: tuple[Activations, ...] = ("store", "recompute", "keep", "offload")


def large_problem(seed: int) -> PlanProblem:
    """A cluster, a model and a batch of 64 to 65,536 samples; some of them fit nowhere."""
    draw = random.Random(seed)
    num_hosts = draw.randint(1, 4)
    num_ranks = draw.randint(max(2, num_hosts), 16)
    layers = draw.choice((12, 24, 32, 48))
    model = Model(
        "m",
        layers,
        round(draw.uniform(0.5, 7.0) * 1e9),
        draw.choice((2, 4, 8, 16)) * 2**20,
    )
    types = [_gpu(draw, number, model) for number in range(draw.randint(1, 4))]
    ranks = [draw.choice(types) for _ in range(num_ranks)]
    cuts = sorted(draw.sample(range(1, num_ranks), num_hosts - 1))
    groups = [ranks[begin:end] for begin, end in zip([0, *cuts], [*cuts, num_ranks], strict=True)]
    kind = _host(draw, types)
    hosts = tuple(
        _named(number, group, kind if draw.random() < 0.5 else _host(draw, types))
        for number, group in enumerate(groups)
    )
    network = draw.choice((0.0, 5.0, 20.0, 80.0))
    cluster = Cluster(
        hosts,
        Table(((1e6, 0.1), (1e9, 0.1 + network))),
        Table(((1e6, 0.1), (1e9, 0.1 + network))),
        contention=draw.choice((0.0, 0.1)),
    )
    number = draw.randint(1, len(_POLICIES))
    policies = tuple(sorted(draw.sample(_POLICIES, number), key=_POLICIES.index))
    stage = draw.choice((2, 2, 3))
    batch, gradient_bytes = round(2.0 ** draw.uniform(6.0, 16.0)), draw.choice((0, 2, 4))
    adding = draw.choice((0.0, 0.5))
    alike = {
        id(gpu): replace(gpu, accumulation_ms=Table(((1.0, adding), (2.0, adding))))
        for gpu in types
    }
    hosts = tuple(replace(host, gpus=tuple(alike[id(gpu)] for gpu in host.gpus)) for host in hosts)
    return PlanProblem(
        replace(cluster, hosts=hosts),
        model,
        batch=batch,
        stage=stage,
        activations=policies,
        gradient_bytes=gradient_bytes,
        allow_idle=draw.random() < 0.7,
    )


def _gpu(draw: random.Random, number: int, model: Model) -> GpuProfile:
    launch, ms = draw.uniform(0.1, 2.0), draw.uniform(0.5, 8.0)
    boundary = model.boundary_bytes / GB
    most = draw.choice((8, 16, 32))
    activations = boundary * draw.uniform(8.0, 20.0)  # of one layer and sample
    head = boundary * draw.uniform(2.0, 10.0)
    layer = {1.0: 0.5e9 + 1e9 * activations, float(most): 0.5e9 + most * 1e9 * activations}
    peak = {size: value + size * head * 1e9 for size, value in layer.items()}
    stored = {
        size: value + (model.num_layers - 1) * size * activations * 1e9
        for size, value in peak.items()
    }

    def times(factor: float) -> Table:
        # A little above a straight line between, as measured ones are.
        return Table(
            tuple((float(n), launch + factor * ms * n) for n in (1, 2, 4, 8, 16, 32) if n <= most)
        )

    return GpuProfile(
        name=f"type {number}",
        memory_bytes=draw.choice((16, 24, 40, 80)) * GB,
        forward_ms=times(1.0),
        backward_ms=times(2.0),
        peak_bytes=Table(tuple(sorted(peak.items()))),
        idle_bytes=draw.choice((0, GB // 2)),
        update_rate=draw.choice((1e10, 5e10, 1e11)),
        copy_rate=draw.choice((6e9, 1.2e10, 2.5e10, 5e10)),
        outside_ms=Table(((1.0, ms), (float(most), most * ms))),
        stored_bytes=Table(tuple(sorted(stored.items()))),
        sizes=tuple(size for size in _SIZES if size <= most),
        layer_peak_bytes=Table(tuple(sorted(layer.items()))),
    )


def _host(draw: random.Random, gpus: list[GpuProfile]) -> Host:
    rate = draw.choice((1e8, 3e8))
    return Host(
        name="",
        gpus=tuple(gpus),
        cores=draw.choice((4, 8, 16, 32)),
        memory_bytes=draw.choice((16, 32, 64, 128, 256, 512)) * GB,
        bandwidth=draw.choice((4e10, 1e11, 2e11)),
        update_rates=Table(((1.0, rate), (8.0, 8.0 * rate), (32.0, 20.0 * rate))),
    )


def _named(number: int, gpus: list[GpuProfile], like: Host) -> Host:
    return Host(
        f"host{number}",
        tuple(gpus),
        like.cores,
        like.memory_bytes,
        like.bandwidth,
        like.update_rates,
    )


def hosts_of_offloading_ranks(gigabytes: int) -> PlanProblem:
    """8 unequal ranks on 2 hosts, 4096 samples whose activations are kept or offloaded."""
    speeds = (
        (24, 1.0),
        (24, 1.1),
        (48, 0.7),
        (48, 0.8),
        (24, 4.0),
        (24, 4.4),
        (24, 2.0),
        (16, 3.0),
    )
    gpus = [
        GpuProfile(
            name=f"{size} GB, {ms} ms",
            memory_bytes=size * GB,
            forward_ms=Table(((1.0, 1.0 + ms), (16.0, 1.0 + 16.0 * ms))),
            backward_ms=Table(((1.0, 2.0 + 2.0 * ms), (16.0, 2.0 + 32.0 * ms))),
            peak_bytes=Table(((1.0, 1e9), (16.0, 8e9))),
            idle_bytes=GB // 2,
            update_rate=1e10,
            copy_rate=2e10,
            sizes=_SIZES[:8],
        )
        for size, ms in speeds
    ]
    like = Host("", tuple(gpus), 16, gigabytes * GB, 1e11, Table(((1.0, 4e8), (16.0, 4e9))))
    collective = Table(((1e6, 0.1), (1e9, 20.0)))
    return PlanProblem(
        Cluster(
            tuple(_named(number, gpus[number::2], like) for number in (0, 1)),
            collective,
            collective,
        ),
        Model("m", 24, 3 * GB, 4 * 2**20),
        batch=4096,
        activations=("keep", "offload"),
    )
