"""The problem of hytrain's own profile.json: pipelines of data-parallel stages.

`hytrain profile` measures no tensor parallelism, so tp is 1. Layers are the embedding, the blocks
and the head; what is measured outside of the blocks is counted with the head. Activations are
recomputed, since in a pipeline many micro-batches are in flight; memory is each GPU's own
(``per_gpu_memory``):

    weights and gradients 2 B each (4 in fp32), state 12 B per parameter
    + the input of every block for as many micro-batches as there are GPUs: no pipeline has more
    + once, what the largest profiled block or head needs beside that, taken off every GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hytrain.errors import PlanError
from hytrain.formats.dtypes import ITEMSIZE
from hytrain.formats.moment_kinds import state_bytes_each
from hytrain.formats.profile_file import DeviceProfile, ProfileFile
from hytrain.tools.hybrid.problem import (
    Constants,
    DeviceType,
    Node,
    Options,
    Problem,
    Samples,
)

_MB = 2**20


def problem_from(
    profile: ProfileFile, *, gbs: int, intra: float, inter: float, options: Options
) -> Problem:
    """Returns the problem of a profile's ranks.

    Args:
        gbs: samples of a step.
        intra: GB/s within a host.
        inter: GB/s between hosts.
        options: of the cost model; memory is each GPU's own in any case.

    Raises:
        PlanError: frozen parameters, or no micro-batch size that a type was measured with in both
            a block and what is outside.
    """
    model = profile.model
    if model.frozen:
        raise PlanError("the profile's model has frozen parameters: hybrid plans train all of them")
    labels = sorted({label for host in profile.hosts for label in host.ranks})
    of = {
        label: [profile.device(host.host, label) for host in profile.hosts if label in host.ranks]
        for label in labels
    }
    ranks = sum(len(host.ranks) for host in profile.hosts)
    samples = {
        (label, 1, size): one
        for label in labels
        for size, one in _samples(profile, of[label], ranks).items()
    }
    before, after = model.outside_parameters
    layers = (before, *[model.layer_parameters] * model.num_layers, after)
    itemsize, host = ITEMSIZE[model.dtype], options.host
    if host is not None:
        host = replace(host, parameter_size=itemsize, copy_bytes=itemsize, moments=model.moments)
    return Problem(
        nodes=tuple(
            Node(host.host, label, host.ranks.count(label), host.host)
            for host in profile.hosts
            for label in dict.fromkeys(host.ranks)
        ),
        devices=tuple(DeviceType(label, _room(of[label]), intra, inter) for label in labels),
        samples=samples,
        constants=Constants(
            optimizer_ms=1e3 * model.parameters / min(one.update_rate for one in profile.devices),
            batch_generator_ms=0.0,
            parameter_bytes=tuple(float(itemsize * count) for count in layers),
        ),
        gbs=gbs,
        hidden_size=max(1, model.boundary_bytes // model.seq_len),
        sequence_length=model.seq_len,
        vocab_size=max(1, model.boundary_bytes // model.seq_len),
        max_tp=1,
        max_batch=max(size for _, _, size in samples),
        variance=1.0,
        mem_coef=1.0,
        options=replace(options, per_gpu_memory=True, host=host),
    )


def _room(devices: Sequence[DeviceProfile]) -> float:
    """Returns the MB of a GPU for weights, state and blocks' inputs; the least of equal GPUs."""
    return (
        min(
            one.memory_bytes
            - one.idle_bytes
            - max(
                max(row.recompute_peak_bytes for row in one.layer),
                max((row.peak_bytes for row in one.outside), default=0),
            )
            for one in devices
        )
        / _MB
    )


def _samples(
    profile: ProfileFile, devices: Sequence[DeviceProfile], ranks: int
) -> dict[int, Samples]:
    """Returns samples by size; of equal GPUs on several hosts the slowest measurement counts."""
    model = profile.model
    before, after = model.outside_parameters
    kept = 2 * ITEMSIZE[model.dtype] + state_bytes_each(model.moments)
    found: dict[int, Samples] = {}
    sizes = set.intersection(*({row.samples for row in one.layer} for one in devices))
    for size in sorted(sizes):
        block = max(
            row.forward_ms + row.recompute_backward_ms
            for one in devices
            for row in one.layer
            if row.samples == size
        )
        outside = [[row for row in one.outside if row.samples == size] for one in devices]
        if any(one.outside and not rows for one, rows in zip(devices, outside, strict=True)):
            continue
        ends = max(
            (row.forward_ms + row.backward_ms for rows in outside for row in rows), default=0.0
        )
        inputs = ranks * size * model.boundary_bytes / _MB
        memory = (
            kept * before / _MB + inputs,
            *[kept * model.layer_parameters / _MB + inputs] * model.num_layers,
            kept * after / _MB + inputs,
        )
        found[size] = Samples((0.0, *[block] * model.num_layers, ends), memory, 0.0)
    if not found:
        raise PlanError(
            f"{devices[0].label}: no micro-batch size was measured both in `layer` and `outside`: "
            "measure again with `hytrain profile`"
        )
    return found
