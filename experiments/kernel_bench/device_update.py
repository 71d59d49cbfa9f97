"""The update of GPU-placed layers, together and one by one, in turns: host time and GPU time.

    python -m experiments.kernel_bench.device_update --out result.json

Needs a GPU. "together" is what training does; "by layer" is the same kernel with a launch for each
layer; "single" is a launch for each parameter group of each layer (``device_adam``).
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn

from experiments.common.records import write_json
from experiments.common.report import markdown, short
from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.model.discovery import LayerParameters
from hytrain.model.layer_state import LayerState
from hytrain.model.layout import lay_out
from hytrain.model.storage import ResidentStorage
from hytrain.offload import device_update
from hytrain.offload.device_update import DeviceUpdate
from hytrain.offload.mover import LayerMover
from hytrain.offload.streams import Streams
from hytrain.offload.update_groups import LIMITS

MODELS = {"26 x 13 M": (26, 13_000_000), "18 x 52 M": (18, 52_000_000)}
HYPER = (AdamHyper(lr=1e-3, step=3), AdamHyper(lr=1e-3, weight_decay=0.0, step=3))
NORMS = 4096
"""Elements of a layer that are in a parameter group of their own."""
SLEEP_CYCLES = 20_000_000  # some 10 ms
KINDS = {
    "together": LIMITS,
    "by layer": replace(LIMITS, most_layers=1),
    "single": replace(LIMITS, most_layers=1),
}


def make_layers(count: int, size: int, groups: int, device: torch.device) -> list[LayerState]:
    """Layers of zeros, all on the device."""
    layers: list[LayerParameters] = []
    group_of: dict[int, int] = {}
    for index in range(count):
        layer = LayerParameters(f"layers.{index}")
        for name, numel in (("matrices", size - NORMS), ("norms", NORMS)):
            parameter = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16, device=device))
            layer.parameters.append((f"layers.{index}.{name}", parameter))
            group_of[id(parameter)] = int(groups == 2 and name == "norms")
        layers.append(layer)
    states: list[LayerState] = []
    for layout in lay_out(layers, group_of, 1):
        storage = ResidentStorage(layout, device)
        state = LayerState(layout, storage, 0, layout.size, [layout.size], "gpu", torch.bfloat16)
        state.set_state(torch.zeros(state.state_bytes, dtype=torch.uint8, device=device))
        state.update.weights_ready = torch.cuda.Event()
        states.append(state)
    return states


def measure(
    states: list[LayerState], groups: int, rounds: int, deadline: float
) -> dict[str, list[tuple[float, float]]]:
    """Measures (host seconds, GPU seconds) of each kind's updates, with the kinds in turns."""
    device = states[0].master.device
    streams = Streams(device)
    # Nothing moves here: the mover is asked whether a layer has arrived, and it has.
    mover = LayerMover(cast("Any", None), streams)
    updates = {kind: DeviceUpdate(states, streams, mover, limits) for kind, limits in KINDS.items()}
    gradients = [torch.ones(state.shard_size, device=device).bfloat16() for state in states]
    outcome = torch.tensor([1.0, 0.0], device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 2):
        for kind in KINDS:
            for state, gradient in zip(states, gradients, strict=True):
                state.update.send(gradient, is_measured=True)
            torch.cuda.synchronize()
            # The device starts when all is queued, so that its time contains no gaps of the host.
            with torch.cuda.stream(streams.update):
                torch.cuda._sleep(SLEEP_CYCLES)  # pyright: ignore[reportPrivateUsage]
            begin.record(streams.update)
            with (
                patch.object(device_update, "is_groupable", lambda _layer: False)
                if kind == "single"
                else nullcontext()
            ):
                at = time.perf_counter()
                updates[kind].run(HYPER[:groups], outcome, ())
                seconds = time.perf_counter() - at
            end.record(streams.update)
            torch.cuda.synchronize()
            if number >= 2:  # the first ones compile
                found[kind].append((seconds, begin.elapsed_time(end) / 1e3))
        if time.perf_counter() > deadline and number >= 4:
            break
    return found


def rows_of(
    name: str, groups: int, elements: int, found: dict[str, list[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """The rows that are written and printed for a model."""
    rows: list[dict[str, Any]] = []
    for kind, times in found.items():
        host, gpu = zip(*times, strict=True)
        medians = statistics.median(host), statistics.median(gpu)
        rows.append(
            {
                **{"layers": name, "groups": groups, "update": kind, "rounds": len(times)},
                **{"host_us": short(1e6 * medians[0]), "least_host_us": short(1e6 * min(host))},
                **{"gpu_ms": short(1e3 * medians[1]), "least_gpu_ms": short(1e3 * min(gpu))},
                "g_elements_per_s": short(elements / medians[1] / 1e9),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--seconds", type=float, default=14.0, help="for all of it; default 14")
    parser.add_argument("--rounds", type=int, default=60, help="at most, of each model")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    cases = [(name, groups) for name in MODELS for groups in (1, 2)]
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for number, (name, groups) in enumerate(cases, 1):
        states = make_layers(*MODELS[name], groups, device)
        deadline = began + options.seconds * number / len(cases)
        found = measure(states, groups, options.rounds, deadline)
        rows += rows_of(name, groups, sum(state.shard_size for state in states), found)
        del states
    write_json(options.out, {"rows": rows})
    print(markdown(rows))


if __name__ == "__main__":
    main()
