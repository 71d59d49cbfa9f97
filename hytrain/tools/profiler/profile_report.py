"""A profile as a table for people."""

from __future__ import annotations

import textwrap

from hytrain.formats.moment_kinds import FP32
from hytrain.formats.profile_file import DeviceProfile, HostProfile, ProfileFile
from hytrain.formats.text_table import WIDTH, align

_GIB = 1024**3
_HEADING = (
    *("samples", "forward ms", "backward ms", "recomputing ms", "kept MiB", "peak MiB"),
    *("recomputing MiB", "outside ms", "peak MiB"),
)


def profile_table(profile: ProfileFile) -> str:
    """The whole profile except the collectives' smaller sizes."""
    model = profile.model
    frozen = f" and {model.frozen / 1e6:,.1f} M that are not trained" if model.frozen else ""
    moments = "" if model.moments == FP32 else f", moments in {model.moments}"
    lines = [
        f"{model.name}: {model.num_layers} layers of {model.layer_parameters / 1e6:.1f} M "
        f"parameters, {model.parameters / 1e6:,.1f} M in all{frozen}, {model.seq_len} tokens a "
        f"sample, {model.dtype}{moments}"
    ]
    for host in profile.hosts:
        lines += ["", *_host_lines(host)]
        for label in dict.fromkeys(host.ranks):
            lines += _device_lines(profile.device(host.host, label), host.ranks.count(label))
    for collective in profile.collectives:
        row = collective.samples[-1]
        size = row.num_bytes
        lines += [
            "",
            f"{len(collective.hosts)} ranks over {collective.backend}, {size / 2**20:.0f} MiB: "
            f"all-gather {_rate(size, row.all_gather_ms)}, "
            f"reduce-scatter {_rate(size, row.reduce_scatter_ms)}; unequal shards "
            f"{_rate(size, row.uneven_all_gather_ms)}, "
            f"{_rate(size, row.uneven_reduce_scatter_ms)}",
        ]
    return "\n".join(lines)


def _rate(num_bytes: int, ms: float) -> str:
    return f"{num_bytes / ms / 1e6:.1f} GB/s" if ms > 0.0 else "no time"


def _host_lines(host: HostProfile) -> list[str]:
    best = max(host.updates, key=lambda row: row.in_training or row.rate)
    beside = "" if best.in_training is None else f", {best.in_training / 1e9:.2f} beside a training"
    return [
        f"host {host.host}: {host.cores} cores of {host.cpu or 'a CPU'}, "
        f"{host.memory_bytes / _GIB:.1f} GiB, {host.bandwidth / 1e9:.0f} GB/s",
        f"  CPU update: {best.rate / 1e9:.2f} G parameters/s a rank with {best.threads} "
        f"thread{'s' * (best.threads > 1)}"
        f"{beside}, {len(host.ranks)} rank{'s' if len(host.ranks) > 1 else ''} at once",
    ]


def _device_lines(device: DeviceProfile, count: int) -> list[str]:
    copies = device.copies
    lines = [
        f"{count} x {device.label}: {device.memory_bytes / _GIB:.1f} GiB to use"
        + (f" ({device.settings})" if device.settings else ""),
        f"  update {device.update_rate / 1e9:.1f} G parameters/s; copies to the host "
        f"{copies.to_host / 1e9:.1f} GB/s, from it {copies.from_host / 1e9:.1f}, both at once "
        f"{copies.to_host_both / 1e9:.1f} and {copies.from_host_both / 1e9:.1f}",
    ]
    rows: list[tuple[str, ...]] = [_HEADING]
    outside = {row.samples: row for row in device.outside}
    for row in device.layer:
        around = outside.get(row.samples)
        time = around.forward_ms + around.backward_ms if around else 0.0
        peak = around.peak_bytes if around else 0
        times = (row.forward_ms, row.backward_ms, row.recompute_backward_ms)
        sizes = (row.kept_bytes, row.peak_bytes, row.recompute_peak_bytes)
        rows.append(
            (
                str(row.samples),
                *(f"{ms:.3f}" for ms in times),
                *(f"{size / 2**20:.0f}" for size in sizes),
                *(f"{time:.3f}", f"{peak / 2**20:.0f}"),
            )
        )
    table = "\n".join(align(rows, left=(), width=WIDTH - 2))
    return [*lines, textwrap.indent(table, "  "), *_launch_lines(device)]


def _launch_lines(device: DeviceProfile) -> list[str]:
    """Up to which size the device waits for the host, and what slows the host's launches."""
    bound = [row for row in device.layer if row.is_launch_bound]
    if not bound:
        return []
    last = bound[-1]
    lines = [
        f"  launch-bound up to a micro-batch of {last.samples}: the device waits for the host, "
        f"which needs {last.launch_ms:.3f} ms to launch a layer's passes"
    ]
    if last.device_ms is not None:
        lines.append(f"  and itself needs {last.device_ms:.3f} ms for them")
    if device.launch_slowdown is not None:
        lines.append(
            f"  beside updates on the CPU launching takes {device.launch_slowdown:.2f} times as "
            "long"
        )
    if device.launch_spread is not None:
        lines.append(
            f"  in some seconds it took {device.launch_spread:.0%} longer than in others, as steps "
            "may"
        )
    updates = device.update_launches
    if updates is not None:
        lines += [
            f"  training adds to the passes {updates.passes_ms:.3f} ms a step, "
            f"{updates.gpu_layer_passes_ms:.3f} a layer that the GPU updates, "
            f"{updates.cpu_layer_ms:.3f} one",
            f"  that the CPU does; launching updates on the GPU takes {updates.gpu_step_ms:.3f} ms "
            f"a step, {updates.launch_ms:.3f} a launch, {updates.gpu_layer_ms:.3f} a layer",
        ]
    return lines
