"""Predicts the memory of a run, phase by phase, before any is taken. Bytes in, bytes out.

All numbers are this rank's, beside what the process had before the engine was built and beside the
training copy that is there already. Activations are the model's own: they are not included until
they have been measured (``MemoryProbe``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hytrain.errors import MemoryBudgetError, size_text
from hytrain.formats.moment_kinds import FP32, MASTER_BYTES, SPLIT
from hytrain.formats.text_table import align
from hytrain.placement.costs import LayerBytes
from hytrain.placement.memory import (
    gradient_bytes,
    host_state_bytes,
    placed_bytes,
    updated_on_cpu,
    waiting_bytes,
)

_MIB = 1024**2
_GIB = 1024**3
_ROUNDED_BYTES = 2
"""Bytes per element of a moment kept in fewer bytes, between the device and its fp32 values."""
_THREADS_BYTES = 9 * 2 * _MIB
"""Stacks, heaps and buffers of the threads that write or check checkpoints: a huge page each."""


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most memory that a phase takes at one time.

    Attributes:
        host: pageable host memory, in bytes.
        pinned: pinned host memory, in bytes.
        gpu: device memory; None if the device is the CPU, whose memory is the host's.
        in_flight: device memory of gradients that wait for the CPU's update and go as the phase's
            activations come, or come as those go: beside ``gpu`` the phase takes the larger of the
            two. 0 if there are none, or if ``gpu`` (``host`` on a CPU) includes them.
    """

    host: int
    pinned: int
    gpu: int | None
    in_flight: int = 0

    @property
    def resident(self) -> int:
        """Host memory in all: how much RSS grows."""
        return self.host + self.pinned


@dataclass(frozen=True, slots=True)
class PeakMemoryInputs:
    """What the peaks are predicted from.

    Attributes:
        layers: this rank's shards, in forward order.
        gpu_layers: how many layers, from the first, have their state on the device.
        pinned_bytes: all pinned memory with the others on the host.
        home_bytes: pinned memory of weights that are kept on the host (``offload_param``).
        largest_parameter: elements of the largest parameter, whole.
        gradients: bytes of each layer's gradient as one rank computes it.
        gpu_base: device memory that is known to be needed beside state; None: the device is the
            CPU.
        num_ranks: ranks that share the state.
        measuring_bytes: host memory in which the CPU's update is measured, before state exists.
        kept_gradients: bytes of gradients that are kept from one micro-batch to the next.
        largest_frozen: bytes of the largest frozen parameter that is whole on each rank.
    """

    layers: Sequence[LayerBytes]
    gpu_layers: int
    pinned_bytes: int
    home_bytes: int
    largest_parameter: int
    gradients: Sequence[int]
    gpu_base: int | None
    num_ranks: int
    measuring_bytes: int
    kept_gradients: int = 0
    largest_frozen: int = 0


_KEY = "hytrain.gpu_fraction"
PHASES = ("build", "step", "save", "load", "evaluation")


def predict_peaks(inputs: PeakMemoryInputs) -> dict[str, PhasePeak]:
    """Predicts the peaks of :data:`PHASES`, each of which may begin once a step has returned."""
    if inputs.gpu_base is None:
        return _of_one_memory(inputs)
    away, here = inputs.layers[: inputs.gpu_layers], inputs.layers[inputs.gpu_layers :]
    layers, k = inputs.layers, inputs.gpu_layers
    base = inputs.gpu_base + placed_bytes(layers, k)
    on_cpu = updated_on_cpu(here)
    on_host = host_state_bytes(on_cpu)
    gathered, left = _gathered(inputs), gradient_bytes(on_cpu)
    rounded = any(layer.moments != FP32 for layer in away)
    copied = gathered + _ROUNDED_BYTES * inputs.largest_parameter * rounded
    ahead = left + max(inputs.gradients) if on_cpu else 0
    kept = inputs.kept_gradients
    # State that is streamed is pinned.
    pinned = inputs.pinned_bytes + inputs.home_bytes + host_state_bytes(here) - on_host
    return {
        "build": PhasePeak(max(on_host, inputs.measuring_bytes), pinned, base),
        # If gradients are kept from one micro-batch to the next, those in flight are among them.
        "step": PhasePeak(
            on_host, pinned, base + max(waiting_bytes(layers, k), kept), 0 if kept else ahead
        ),
        # Frozen weights are written after all else.
        "save": PhasePeak(
            on_host + max(copied, inputs.largest_frozen) + _THREADS_BYTES,
            pinned,
            base + max(gathered, left),
        ),
        "load": PhasePeak(on_host + copied, pinned, base + max(gathered, left)),
        "evaluation": PhasePeak(on_host, pinned, base, left),
    }


def _of_one_memory(inputs: PeakMemoryInputs) -> dict[str, PhasePeak]:
    """Predicts the peaks on a CPU: what would be on the device is on the host."""
    here = inputs.layers[inputs.gpu_layers :]
    state = placed_bytes(inputs.layers, inputs.gpu_layers) + host_state_bytes(here)
    left = gradient_bytes(updated_on_cpu(here))
    gathered = _gathered(inputs)
    # A backward may be that far ahead of the update; autograd's own gradient of a layer is copied.
    ahead = sum(inputs.gradients) + max(inputs.gradients)
    host = {
        "build": max(state, inputs.measuring_bytes),
        "step": state + ahead,
        "save": state + max(gathered, left) + _THREADS_BYTES,
        # Files are checked before gradients are forgotten.
        "load": state + max(gathered, left + _THREADS_BYTES),
        "evaluation": state + left,
    }
    pinned = inputs.pinned_bytes + inputs.home_bytes
    return {phase: PhasePeak(host[phase], pinned, None) for phase in PHASES}


def _gathered(inputs: PeakMemoryInputs) -> int:
    """Bytes of the parameter that a save or load gathers at a time.

    It is gathered when the update has fetched all gradients and these have been released: only one
    of the two is there.
    """
    # A whole parameter is joined from the ranks' pieces, which are there as well: with one rank,
    # only if they are not views of the state.
    is_joined = any(layer.master == SPLIT for layer in inputs.layers)
    return MASTER_BYTES * inputs.largest_parameter * (2 if inputs.num_ranks > 1 or is_joined else 1)


def hard_limit(pools: Mapping[str, int]) -> tuple[str, int] | None:
    """The scarcest limit beyond which a process is ended or fails; None if there is none.

    ``pools``: this rank's share of what each has left; names as ``host_memory_pools`` has them.
    """
    hard = {name: left for name, left in pools.items() if name != "machine"}
    if not hard:
        return None
    name = min(hard, key=lambda name: hard[name])
    return name, hard[name]


def refuse_what_cannot_fit(
    peaks: Mapping[str, PhasePeak],
    limit: tuple[str, int] | None,
    gpu: int | None,
    gpu_fraction: float,
) -> None:
    """Refuses a placement that is certain to fail, before any state is allocated.

    What the machine has left is no such limit, as it drops caches and swaps: that gives a warning.

    Args:
        peaks: see :func:`predict_peaks`.
        limit: see :func:`hard_limit`.
        gpu: device memory that this process may take in all; None: no device of its own.
        gpu_fraction: the user's value, for the message.

    Raises:
        MemoryBudgetError: a phase takes more. The text has the table.
    """
    problems: list[str] = []
    worst = max(peaks, key=lambda phase: peaks[phase].resident)
    host, device = peaks[worst].resident, peaks["build"].gpu
    if limit is not None and host > limit[1]:
        problems.append(
            f"{worst} takes {size_text(host)} of host memory, and the {limit[0]} leaves this rank "
            f'{size_text(limit[1])}: raise that limit, use more ranks, or a larger "{_KEY}"'
        )
    if gpu is not None and device is not None and device > gpu:
        problems.append(
            f"the build takes {size_text(device)} of the GPU's memory, and there is "
            f'{size_text(gpu)}: a smaller "{_KEY}", or more ranks'
        )
    if problems:
        raise MemoryBudgetError(
            f'"{_KEY}" is {gpu_fraction:g}, with which the optimizer state does not fit (nothing '
            f'was allocated): {"; ".join(problems)}; or "solve", which finds what fits\n'
            f"{peaks_table(peaks)}"
        )


def peaks_table(peaks: Mapping[str, PhasePeak]) -> str:
    """The peaks as a table for people."""
    rows = [["phase", "host, pageable", "host, pinned", "GPU"]]
    for phase, peak in peaks.items():
        gpu = "-" if peak.gpu is None else size_text(peak.gpu)
        rows.append([phase, size_text(peak.host), size_text(peak.pinned), gpu])
    return "\n".join(align(rows))
