"""What one rank measures of its device and its host, one thing after another, all ranks at once.

The order: layers, the GPU's update, copies, the CPU's update, launches of training. A host's
launches are faster or slower for tens of seconds at a time, so passes over layers are launched
again in the pauses between.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hytrain.formats.profile_file import DeviceProfile, ProfiledModel, UpdateLaunches
from hytrain.hardware.device_facts import DeviceFacts
from hytrain.offload.update_arrays import UpdateArrays
from hytrain.placement.calibration import (
    accumulation_seconds_per_parameter,
    gpu_seconds_per_parameter,
)
from hytrain.tools.profiler import rates
from hytrain.tools.profiler.copies import TrainingLoad, copy_rates, measure_slowdown
from hytrain.tools.profiler.layer_profile import LayerProfile, LayerProfiling
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions, Progress
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.update_launches import UpdatedKind, update_launches

_PAUSES = 3
"""Pauses in which passes are launched again, besides those between the CPU's rates."""


def measure_rank(
    subject: MeasuredModel,
    device: torch.device,
    options: ProfileOptions,
    ranks: Ranks,
    progress: Progress,
    *,
    model: ProfiledModel,
    host: str,
    facts: DeviceFacts,
    cores: Sequence[int],
    ranks_on_host: int,
) -> tuple[DeviceProfile, rates.CpuRates, int]:
    """Measures all that a rank measures by itself; leaves nothing on the device.

    ``options``: the same on all ranks, except ``multiprocessors`` and ``settings``; ``cores``: each
    rank's number of cores of its host.

    Returns:
        The rank's device; rates of its CPU; and bytes of activations between two blocks per sample.
    """
    mine = cores[ranks.rank]
    rounds = max(len(rates.thread_counts(each)) for each in cores)
    beside_updates = partial(
        _slowdown, device=device, options=options, threads=mine, ranks_on_host=ranks_on_host
    )

    with ranks.together(lambda: LayerProfiling(subject, device, options)) as layers:

        def pause() -> None:
            ranks.together(lambda: layers.launch_again(_PAUSES + rounds))

        def on_size(size: int, share: float) -> None:
            progress.show(0.6 * share, f"layer, micro-batch of {size}")

        ranks.together(lambda: layers.measure(on_size))
        pause()
        ranks.together(lambda: layers.launch_beside(beside_updates))
        pause()
        progress.show(0.6, "update on the GPU" if device.type == "cuda" else "update")
        adding = ranks.together(lambda: accumulation_seconds_per_parameter(device, subject.dtype))
        update = ranks.together(lambda: _update_seconds(device, subject, options))
        pause()
        progress.show(0.65, "copies")
        copies = copy_rates(
            device, ranks, seconds=options.rate_seconds, num_bytes=options.copy_bytes
        )
        progress.show(0.7, "update on the CPU")
        cpu = rates.cpu_rates(
            device,
            rates.thread_counts(mine),
            rounds,
            ranks,
            ranks_on_host=ranks_on_host,
            seconds=options.rate_seconds,
            elements=options.cpu_elements,
            moments=options.moments,
            parameters=model.parameters // ranks.world_size,
            between=pause,
        )
        progress.show(0.85, "launches of training")
        layer = layers.result()
        launches = ranks.together(lambda: _update_launches(device, subject, options, layer))
    profile = DeviceProfile(
        host=host,
        label=facts.label,
        device=facts.name,
        multiprocessors=facts.multiprocessors,
        limit_bytes=facts.limit_bytes,
        memory_bytes=min(facts.limit_bytes, facts.memory_bytes),
        idle_bytes=layer.idle_bytes,
        layer=layer.layer,
        outside=layer.outside,
        update_rate=1.0 / update,
        copies=copies,
        accumulation_ms=1e3 * model.layer_parameters * adding,
        launch_slowdown=layer.launch_slowdown,
        launch_spread=layer.launch_spread,
        update_launches=launches,
        measured=datetime.datetime.now(datetime.timezone.utc),
        settings=options.settings,
    )
    return profile, cpu, layer.boundary_bytes


def _slowdown(
    launch: Callable[[], float],
    *,
    device: torch.device,
    options: ProfileOptions,
    threads: int,
    ranks_on_host: int,
) -> float:
    """Slowdown of launches beside the CPU's update and its copies."""
    elements = options.cpu_elements or rates.update_elements(ranks_on_host)
    arrays = UpdateArrays(elements, options.moments, threads=threads)
    load = TrainingLoad(device, arrays.out.nbytes)
    # The launching thread is the real one here: the load consists of the copies only.
    update = partial(arrays.update, max(1, threads - 1))
    return measure_slowdown(launch, lambda: load.beside(update))


def _update_launches(
    device: torch.device, subject: MeasuredModel, options: ProfileOptions, layer: LayerProfile
) -> UpdateLaunches | None:
    """Host time of training's launches; None on a CPU, where nothing is launched."""
    if device.type != "cuda":
        return None
    kind = UpdatedKind(
        subject.dtype,
        options.moments,
        sums_squares=layer.sums_squares,
        parameters=layer.block_tensors,
    )
    return update_launches(device, kind)


def _update_seconds(device: torch.device, subject: MeasuredModel, options: ProfileOptions) -> float:
    """Seconds per parameter of the update, on its own stream as in training.

    The current stream may be limited to a part of the GPU.
    """
    if device.type != "cuda":
        return gpu_seconds_per_parameter(device, subject.dtype, options.moments)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return gpu_seconds_per_parameter(device, subject.dtype, options.moments)
