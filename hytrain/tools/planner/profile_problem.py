"""Makes a planning problem from measured profiles, a batch and options.

Measurements are of one block and of everything outside of the blocks; the problem's
tables are of a rank's whole work. Reserves are taken off memory here: a plan may fill the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from hytrain.errors import PlanError
from hytrain.formats.dtypes import ITEMSIZE
from hytrain.formats.moment_kinds import FP32, SPLIT, MasterName, state_bytes_each
from hytrain.formats.policies import Activations
from hytrain.formats.profile_file import (
    CollectiveProfile,
    CollectiveSample,
    DeviceProfile,
    HostProfile,
    LayerSample,
    OutsideSample,
    ProfiledModel,
    ProfileFile,
)
from hytrain.tools.planner.cluster import (
    UNEVEN_FACTOR,
    Cluster,
    GpuProfile,
    Host,
    LaunchTimes,
    UpdateLaunchTimes,
)
from hytrain.tools.planner.curves import FREE, Table
from hytrain.tools.planner.problem import Model, PlanProblem

# At most, per rank: pinned buffers through which gradients and new weights pass. Their size does
# not grow with the model (offload/slots.py).
_STAGING_BYTES = 2**29
# If that was not measured: share of a CPU update's rate, measured alone, that is left beside copies
# both ways and the launching thread. On an H200's host 0.91 to 0.92 with 8 to 15 of 16 cores, 0.80
# with all (2026-11-22, experiments/zero3/results.json).
_BESIDE_TRAINING = 0.87
# If ranks share sequences: how many one-way exchanges of attention each time includes.
_EXCHANGES = {"forward_ms": 1, "backward_ms": 1, "recompute_backward_ms": 2, "device_ms": 2}
# In stage 3, layers whose training copy is gathered at once, if no number is given: one in use, the
# others on their way.
_GATHERED_LAYERS = 3
UNMEASURED = 1.05
"""Time of a micro-batch between two measured sizes, relative to linear interpolation.

On H200 steps with such sizes took 1 to 8 % longer than by the line (5 samples between 4 and 8;
13, 14 and 15 between 12 and 16), once all else was counted.
"""
# A doubled micro-batch that takes at most this many times the smallest's time waits for the host.
_HOST_BOUND = 1.05
# Within a host a collective delays what is computed beside it by its whole duration: it takes
# multiprocessors, and NVLink brings bytes about as fast as they can be added. Steps of two H200
# were longer than their passes by the time of all collectives. Over a network there is little to do
# at a time, and waiting costs nothing.
_CONTENTION = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of a plan.

    Attributes:
        batch: samples of the global batch.
        gpu_reserve: returns the bytes that stay free on a GPU, given its usable bytes.
        host_reserve: returns the bytes that stay free on a host, given its usable bytes.
        offload_param: whether the training copy is kept in host memory (stage 3).
        live_parameters: in stage 3, returns the most parameters that are gathered at a time, given
            those of each layer in order of use; None: three layers of the model.
        activations: policies to choose from.
        memory_fraction: share of each GPU's memory that may be used.
        allow_idle: whether a rank may compute nothing.
        interconnect: bytes/s of collectives, used instead of measurements; None: they must have
            been measured.
        clipped_share: share of steps whose gradient is clipped; see
            :class:`~hytrain.tools.planner.problem.PlanProblem`.
        sequence_ranks: ranks that share each sequence.
        exchanged_bytes: bytes of a sample's queries, keys, values and attention output in a layer.
        reduced: bytes of a gradient while ranks reduce it, over those that are kept.
        master: how master weights are kept ("hytrain.master").
    """

    batch: int
    gpu_reserve: Callable[[int], int]
    host_reserve: Callable[[int], int]
    stage: Literal[1, 2, 3] = 2
    offload_param: bool = False
    live_parameters: Callable[[Sequence[int]], int] | None = None
    activations: tuple[Activations, ...] = ("store", "recompute")
    memory_fraction: float = 1.0
    allow_idle: bool = True
    interconnect: float | None = None
    clipped_share: float = 1.0
    sequence_ranks: int = 1
    exchanged_bytes: float = 0.0
    reduced: float = 1.0
    master: MasterName = FP32


def problem_from(profile: ProfileFile, options: PlanOptions) -> PlanProblem:
    """Returns the problem of training the profiled model on all ranks of the profile.

    Raises:
        PlanError: an option is out of range, a GPU's reserve leaves nothing, or collectives of
            these ranks follow neither from the profile nor from ``interconnect``.
    """
    degree, exchange = options.sequence_ranks, _exchange_ms(profile, options)
    if degree > 1:
        profile = _shared(profile, degree, exchange)
    model = profile.model
    if not 0.0 < options.memory_fraction <= 1.0:
        raise PlanError(
            f"memory_fraction (--device-memory-fraction) must be in (0, 1], got "
            f"{options.memory_fraction}"
        )
    itemsize = ITEMSIZE[model.dtype]
    state = state_bytes_each(model.moments, options.master)
    return PlanProblem(
        cluster=_cluster(profile, options),
        model=Model(
            name=model.name,
            num_layers=model.num_layers,
            parameters=model.parameters,
            boundary_bytes=model.boundary_bytes,
            itemsize=itemsize,
            dtype=model.dtype,
            seq_len=model.seq_len,
            frozen=model.frozen,
            moments=model.moments,
            outside=model.outside_parameters,
        ),
        batch=degree * options.batch,
        stage=options.stage,
        activations=options.activations,
        gpu_state_bytes=state,
        host_state_bytes=state + itemsize,
        # commit_then_preview reads and writes the state, reads two gradients and writes the copy;
        # a gradient comes from the GPU and a copy goes there.
        update_bytes=2 * state_bytes_each(model.moments, FP32) + 5 * itemsize,
        gradient_bytes=itemsize,
        allow_idle=options.allow_idle,
        clipped_share=options.clipped_share,
        offload_param=options.offload_param,
        sequence_ranks=degree,
        exchange_ms=exchange,
        splits_master=options.master == SPLIT,
    )


def _exchange_ms(profile: ProfileFile, options: PlanOptions) -> Table:
    """Returns ms of a layer's four all-to-alls one way; each moves as much as an all-gather."""
    names = [host.host for host in profile.hosts for _ in host.ranks]
    degree = options.sequence_ranks
    groups = (names[first : first + degree] for first in range(0, len(names), degree))
    gather, *_ = _collectives(profile, max(groups, key=_spans), options)
    each = options.exchanged_bytes / degree / 4
    return gather.scaled(1.0 / each, 4.0) if each else FREE


def _shared(profile: ProfileFile, degree: int, exchange_ms: Table) -> ProfileFile:
    """Returns the profile against samples of ``degree`` ranks, each of which has a part of each.

    A rank has its part of the tokens, and in attention all tokens for its part of the heads:
    ``degree`` samples take as long as a measured one, plus the exchanges.
    """
    devices: list[DeviceProfile] = []
    for device in profile.devices:
        outside = _shared_rows(device.outside, degree, FREE)
        layer = _shared_rows(device.layer, degree, exchange_ms)
        devices.append(device.model_copy(update={"layer": layer, "outside": outside}))
    boundary = {"boundary_bytes": -(-profile.model.boundary_bytes // degree)}
    model = profile.model.model_copy(update=boundary)
    return profile.model_copy(update={"devices": tuple(devices), "model": model})


def _cluster(profile: ProfileFile, options: PlanOptions) -> Cluster:
    names = [host.host for host in profile.hosts for _ in host.ranks]
    gathered = _gathered_bytes(profile.model, options, len(names))
    known: dict[tuple[str, str], GpuProfile] = {}
    hosts: list[Host] = []
    for host in profile.hosts:
        for label in host.ranks:
            if (host.host, label) not in known:
                device = profile.device(host.host, label)
                known[host.host, label] = gpu_profile(device, profile.model, options, gathered)
        hosts.append(_host(host, [known[host.host, label] for label in host.ranks], options))
    found = Cluster(tuple(hosts), *_collectives(profile, names, options))
    scatter_ms = found.reduce_scatter_ms.scaled(1.0 / options.reduced)
    return replace(found, reduce_scatter_ms=scatter_ms)


def gpu_profile(
    device: DeviceProfile, model: ProfiledModel, options: PlanOptions, gathered: int = 0
) -> GpuProfile:
    """Returns a device as the planner sees it.

    Args:
        device: its measurements.
        model: the model they were made with.
        options: of the plan.
        gathered: bytes of the layers that are gathered at once.

    Raises:
        PlanError: the reserve leaves no memory.
    """
    limit = int(device.limit_bytes * options.memory_fraction)
    memory = min(device.memory_bytes, limit)
    reserve = options.gpu_reserve(memory)
    if reserve >= memory:
        raise PlanError(
            f"{device.label}: of {memory} bytes that can be used {reserve} are to stay free: "
            "choose a smaller reserve"
        )
    idle = device.idle_bytes + gathered
    return GpuProfile(
        name=device.device,
        memory_bytes=memory - reserve,
        forward_ms=times(device.layer, lambda row: row.forward_ms),
        backward_ms=times(device.layer, lambda row: row.backward_ms),
        peak_bytes=_peak_table(device, model, idle, _outside_bytes(device)),
        layer_peak_bytes=_peak_table(device, model, idle, None),
        idle_bytes=idle,
        update_rate=device.update_rate,
        copy_rate=min(device.copies.to_host_both, device.copies.from_host_both),
        outside_ms=times(device.outside, lambda row: row.forward_ms + row.backward_ms)
        if device.outside
        else FREE,
        recompute_ms=times(
            device.layer, lambda row: max(0.0, row.recompute_backward_ms - row.backward_ms)
        ),
        stored_bytes=_stored_table(device, model, idle),
        multiprocessors=device.multiprocessors,
        limit_bytes=limit,
        # Fewer samples than measured take as long as the fewest measured. Whether more than the
        # most measured fit is not known, and there is little to gain.
        sizes=(*range(1, device.layer[0].samples), *(row.samples for row in device.layer)),
        accumulation_ms=_accumulation(device, model),
        fetch_rate=device.copies.from_host,
        launches=_launches(device, shares=model.moments == FP32 and not options.offload_param),
    )


def _launches(device: DeviceProfile, *, shares: bool) -> LaunchTimes | None:
    rows = [row for row in device.layer if row.launch_ms is not None]
    if not rows or device.update_launches is None:
        return None
    outside = [row for row in device.outside if row.launch_ms is not None]
    is_known = any(row.device_ms is not None for row in rows)
    return LaunchTimes(
        layer_ms=times(rows, lambda row: row.launch_ms or 0.0),
        outside_ms=times(outside, lambda row: row.launch_ms or 0.0) if outside else FREE,
        slowdown=device.launch_slowdown or 1.0,
        updates=UpdateLaunchTimes(device.update_launches, shares=shares),
        layer_device_ms=times(rows, _device_ms) if is_known else None,
        outside_device_ms=times(outside, _device_ms) if is_known and outside else None,
        spread=device.launch_spread or 0.0,
    )


def _device_ms(row: LayerSample | OutsideSample) -> float:
    """Returns the device's own time: that of the passes, unless it waits for the host in them."""
    return row.forward_ms + row.backward_ms if row.device_ms is None else row.device_ms


_Row = TypeVar("_Row", LayerSample, OutsideSample)


def _shared_rows(rows: Sequence[_Row], degree: int, exchange_ms: Table) -> tuple[_Row, ...]:
    """Returns the rows against samples that ``degree`` ranks share, with the exchanges added.

    Below the smallest measured size values are on the line through the two smallest, but not less
    than in proportion to the smallest. Launches stay as measured: they bound a simulated step.
    """
    least = rows[0].samples if rows else 0
    smaller = [(number, rows[0]) for number in range(1, degree * least)]
    found: list[_Row] = []
    for number, row in (*smaller, *((degree * row.samples, row) for row in rows)):
        values = row.model_dump(exclude={"samples"}, exclude_none=True)
        for name, value in values.items():
            more = _EXCHANGES.get(name, 0) * exchange_ms.at(number)
            if number < degree * least and name != "launch_ms":
                second, part = rows[min(1, len(rows) - 1)], number / degree
                rise = ((getattr(second, name) or value) - value) / max(1, second.samples - least)
                more += max(rise * (part - least), value * (part / least - 1.0))
            values[name] = type(value)(value + more)
        found.append(row.model_copy(update={"samples": number, **values}))
    return tuple(found)


def times(rows: Sequence[_Row], value: Callable[[_Row], float]) -> Table:
    """Returns times against every number of samples from the smallest to the largest measured.

    They do not fall, which the planner relies on: a shorter time for more samples is noise, from
    kernels that the host could not launch fast enough, and neighbours share their mean.

    Between two measured sizes times are above the straight line: kernels work in tiles, and an odd
    size fills its last tiles less. Such a size takes :data:`UNMEASURED` times as long as by the
    line, but no longer than the next larger measured one.
    """
    measured = [
        (row.samples, level)
        for row, level in zip(rows, isotonic([value(row) for row in rows]), strict=True)
    ]
    points = [measured[0]]
    for (low, less), (high, most) in itertools.pairwise(measured):
        for size in range(low + 1, high):
            line = less + (most - less) * (size - low) / (high - low)
            points.append((size, min(most, UNMEASURED * line)))
        points.append((high, most))
    return Table(tuple((float(size), level) for size, level in points))


def isotonic(values: Sequence[float]) -> list[float]:
    """Returns the nearest values that do not fall (pooled adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pool = (value, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, count = pools.pop()
            together = count + pool[1]
            pool = ((mean * count + pool[0] * pool[1]) / together, together)
        pools.append(pool)
    return [mean for mean, count in pools for _ in range(count)]


def _accumulation(device: DeviceProfile, model: ProfiledModel) -> Table:
    """Returns the time to add a layer's gradient, with its part of those outside of the layers.

    Sizes that take no longer than the smallest wait for the host: there the GPU has time for it.
    """
    itemsize = ITEMSIZE[model.dtype]
    layer_ms = device.accumulation_ms
    if layer_ms is None:
        # Copying reads and writes, adding reads once more, as fast as the update reads.
        moved = itemsize * model.layer_parameters
        swept = 2 * state_bytes_each(model.moments) + 2 * itemsize
        layer_ms = 1e3 * moved / (swept * device.update_rate)
    each = layer_ms * model.parameters / model.num_layers / model.layer_parameters
    passes = isotonic([row.forward_ms + row.backward_ms for row in device.layer])
    waits = 0
    for row, ms in zip(device.layer, passes, strict=True):
        if ms <= _HOST_BOUND * passes[0] and row.samples >= 2 * device.layer[0].samples:
            waits = row.samples
    return Table(
        tuple(
            (float(size), 0.0 if size <= waits else each)
            for size in range(1, device.layer[-1].samples + 2)
        )
    )


def _bytes(rows: Sequence[_Row], value: Callable[[_Row], float]) -> Table:
    """Returns bytes against samples as a running maximum: memory has no noise to average."""
    rising = itertools.accumulate((value(row) for row in rows), max)
    return Table(tuple((float(row.samples), most) for row, most in zip(rows, rising, strict=True)))


def _outside_bytes(device: DeviceProfile) -> Table | None:
    return _bytes(device.outside, lambda row: row.peak_bytes) if device.outside else None


def _peak_table(
    device: DeviceProfile, model: ProfiledModel, idle: int, outside: Table | None
) -> Table:
    """Returns C if layers are recomputed: the larger of one layer's peak and that outside."""

    def peak(row: LayerSample) -> float:
        most = max(row.recompute_peak_bytes, outside.at(row.samples) if outside else 0.0)
        # The layer's input and the next one's, on their way from or to the host.
        return idle + most + 2 * row.samples * model.boundary_bytes

    return _bytes(device.layer, peak)


def _stored_table(device: DeviceProfile, model: ProfiledModel, idle: int) -> Table:
    """Returns C with all activations stored: at the loss, or in the last layer's backward."""
    outside = _outside_bytes(device)

    def stored(row: LayerSample) -> float:
        others = (model.num_layers - 1) * row.kept_bytes
        at_loss = row.kept_bytes + (outside.at(row.samples) if outside else 0.0)
        return idle + others + max(row.peak_bytes, at_loss)

    return _bytes(device.layer, stored)


def _gathered_bytes(model: ProfiledModel, options: PlanOptions, num_ranks: int) -> int:
    """Returns the bytes of training copy that stage 3 has gathered at once.

    What is before the blocks is gathered as one layer, and so is what is after them. A single rank
    has all of the training copy anyway, unless it is in host memory.
    """
    if options.stage != 3 or (num_ranks == 1 and not options.offload_param):
        return 0
    pairs = zip(model.outside_parameters, model.frozen_outside_parameters, strict=True)
    before, after = (trained + frozen for trained, frozen in pairs)
    layer = model.layer_parameters + model.frozen_layer_parameters
    layers = [before, *[layer] * model.num_layers, after]
    if options.live_parameters is None:
        largest = max(_GATHERED_LAYERS * layer, before, after)
    else:
        largest = options.live_parameters([size for size in layers if size])
    return ITEMSIZE[model.dtype] * largest


def _host(host: HostProfile, gpus: Sequence[GpuProfile], options: PlanOptions) -> Host:
    rates = [row.in_training or _BESIDE_TRAINING * row.rate for row in host.updates]
    # Training uses the best number of threads, which may leave some cores unused.
    best = itertools.accumulate(rates, max)
    table = Table(
        tuple((float(row.threads), rate) for row, rate in zip(host.updates, best, strict=True))
    )
    taken = options.host_reserve(host.memory_bytes) + _STAGING_BYTES * len(gpus)
    memory = max(0, host.memory_bytes - taken)
    return Host(host.host, tuple(gpus), host.cores, memory, host.bandwidth, table)


# -- collectives -------------------------------------------------------------------------------


def _collectives(
    profile: ProfileFile, hosts: Sequence[str], options: PlanOptions
) -> tuple[Table, Table, tuple[float, float], float]:
    """Returns all-gather, reduce-scatter (against bytes), factors of unequal shards, contention."""
    if len(hosts) == 1:
        return FREE, FREE, (1.0, 1.0), 0.0
    if options.interconnect is not None:
        ms = 1e3 * (len(hosts) - 1) / len(hosts) / options.interconnect
        line = Table(((1.0, ms),))
        # A given bandwidth is taken for a network's: a few multiprocessors keep that busy.
        return line, line, (UNEVEN_FACTOR, UNEVEN_FACTOR), 0.0
    for measured in profile.collectives:
        if measured.hosts == tuple(hosts):
            return _measured_collectives(measured, profile.model, 1.0)
    similar = [one for one in profile.collectives if _spans(one.hosts) == _spans(hosts)]
    if not similar:
        spans = "of several hosts" if _spans(hosts) else "within a host"
        raise PlanError(
            f"no profile has the collectives of these {len(hosts)} ranks, nor of any others "
            f"{spans}: measure them together with `hytrain profile` under the launcher, or give "
            "the bandwidth with --interconnect"
        )
    # A ring moves (n - 1) / n of the bytes through each rank.
    nearest = min(similar, key=lambda one: abs(len(one.hosts) - len(hosts)))
    count = len(nearest.hosts)
    return _measured_collectives(
        nearest, profile.model, (len(hosts) - 1) / len(hosts) * count / (count - 1)
    )


def _spans(hosts: Sequence[str]) -> bool:
    return len(set(hosts)) > 1


def _measured_collectives(
    measured: CollectiveProfile, model: ProfiledModel, factor: float
) -> tuple[Table, Table, tuple[float, float], float]:
    def column(value: Callable[[CollectiveSample], float]) -> Table:
        points = tuple((float(row.num_bytes), factor * value(row)) for row in measured.samples)
        return Table(points)

    gather, scatter = (
        column(lambda row: row.all_gather_ms),
        column(lambda row: row.reduce_scatter_ms),
    )
    uneven_gather = column(lambda row: row.uneven_all_gather_ms)
    uneven_scatter = column(lambda row: row.uneven_reduce_scatter_ms)
    size = ITEMSIZE[model.dtype] * (model.layer_parameters + model.frozen_layer_parameters)
    factors = [
        max(1.0, uneven.at(size) / even.at(size)) if even.at(size) > 0.0 else 1.0
        for even, uneven in ((gather, uneven_gather), (scatter, uneven_scatter))
    ]
    contention = 0.0 if _spans(measured.hosts) else _CONTENTION
    return gather, scatter, (factors[0], factors[1]), contention
