"""What a run will take, phase by phase, said before any of it is taken. Bytes in, bytes out.

All numbers are this rank's, beside what the process had before the engine was built and beside the
training copy that is there already. Activations are the model's own: they are not in it until they
have been measured (``MemoryProbe``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hytrain.errors import MemoryBudgetError
from hytrain.formats.moment_kinds import MASTER_BYTES
from hytrain.formats.text_table import align
from hytrain.placement.costs import LayerBytes
from hytrain.placement.memory import gradient_bytes, state_bytes

_MIB = 1024**2
_GIB = 1024**3
CALIBRATION_BYTES = 16 << 24
"""That measuring the CPU's update takes, for some milliseconds, before any state is there."""
_ROUNDED_BYTES = 2
"""Bytes an element of the largest parameter, beside the parameter: its rounded copy."""
_WRITERS_BYTES = 9 * 2 * _MIB
"""Stacks, heaps and buffers of the threads that write a checkpoint: a huge page each."""


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most that a phase takes at one time.

    Attributes:
        host: pageable host memory, in bytes.
        pinned: pinned host memory, in bytes.
        gpu: device memory; None where the device is the CPU, whose memory is the host's.
    """

    host: int
    pinned: int
    gpu: int | None

    @property
    def resident(self) -> int:
        """Host memory in all: how much RSS grows."""
        return self.host + self.pinned


@dataclass(frozen=True, slots=True)
class ContractTerms:
    """What the peaks follow from.

    Attributes:
        layers: this rank's shards, in forward order.
        gpu_layers: how many of the first layers' state is on the device.
        pinned_bytes: all pinned memory with the others on the host.
        home_bytes: pinned memory of weights that are kept on the host (``offload_param``).
        largest_parameter: elements of the largest parameter, whole.
        gradients: bytes of each layer's gradient as one rank computes it.
        gpu_base: device memory that is known to be needed beside state; None: the device is the
            CPU.
        num_ranks: ranks that share the state.
    """

    layers: Sequence[LayerBytes]
    gpu_layers: int
    pinned_bytes: int
    home_bytes: int
    largest_parameter: int
    gradients: Sequence[int]
    gpu_base: int | None
    num_ranks: int


_KEY = "hytrain.gpu_fraction"
PHASES = ("build", "step", "save", "load", "evaluation")


def predict_peaks(terms: ContractTerms) -> dict[str, PhasePeak]:
    """The peaks of :data:`PHASES`."""
    away, here = terms.layers[: terms.gpu_layers], terms.layers[terms.gpu_layers :]
    on_host, on_device = state_bytes(here), state_bytes(away)
    pinned = terms.pinned_bytes + terms.home_bytes
    if terms.gpu_base is None:
        # One memory: what would be the device's is the host's.
        on_host, on_device = on_host + on_device, 0
    base = terms.gpu_base or 0
    largest = MASTER_BYTES * terms.largest_parameter
    # Whole parameters come together from the ranks' pieces, which are there as well.
    gathered = largest * (2 if terms.num_ranks > 1 else 1)
    # A backward may be that far ahead of the update; autograd's own of one layer is copied.
    flying = sum(terms.gradients) + max(terms.gradients)
    host = {
        "build": max(on_host, CALIBRATION_BYTES),
        "step": on_host + (flying if terms.gpu_base is None else 0),
        "save": on_host + gathered + _ROUNDED_BYTES * terms.largest_parameter + _WRITERS_BYTES,
        "load": on_host + gathered,
        "evaluation": on_host,
    }
    gpu = {
        "build": base + on_device,
        "step": base + on_device + gradient_bytes(away),
        "save": base + on_device + gathered,
        "load": base + on_device + gathered,
        "evaluation": base + on_device,
    }
    return {
        phase: PhasePeak(host[phase], pinned, None if terms.gpu_base is None else gpu[phase])
        for phase in PHASES
    }


def hard_limit(pools: Mapping[str, int]) -> tuple[str, int] | None:
    """The scarcest of what ends or fails a process that takes more; None where there is none.

    Args:
        pools: this rank's share of what each has left; names as ``host_memory_pools`` has them.
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

    What the machine has left is no such limit: it drops caches and swaps. (That is warned of.)

    Args:
        peaks: see :func:`predict_peaks`.
        limit: see :func:`hard_limit`.
        gpu: device memory that this process may take in all; None: no device of its own.
        gpu_fraction: what the user has given; for the message.

    Raises:
        MemoryBudgetError: a phase takes more. The text has the table.
    """
    problems: list[str] = []
    worst = max(peaks, key=lambda phase: peaks[phase].resident)
    host, device = peaks[worst].resident, peaks["build"].gpu
    if limit is not None and host > limit[1]:
        problems.append(
            f"{worst} takes {_size(host)} of host memory, and the {limit[0]} leaves this rank "
            f'{_size(limit[1])}: raise that limit, use more ranks, or a larger "{_KEY}"'
        )
    if gpu is not None and device is not None and device > gpu:
        problems.append(
            f"the build takes {_size(device)} of the GPU's memory, and there is {_size(gpu)}: a "
            f'smaller "{_KEY}", or more ranks'
        )
    if problems:
        raise MemoryBudgetError(
            f'"{_KEY}" is {gpu_fraction:g}, with which the optimizer state does not fit (nothing '
            f'was allocated): {"; ".join(problems)}; or "solve", which finds what fits\n'
            f"{peaks_table(peaks)}"
        )


def peaks_table(peaks: Mapping[str, PhasePeak]) -> str:
    """The peaks for people."""
    rows = [["phase", "host, pageable", "host, pinned", "GPU"]]
    for phase, peak in peaks.items():
        gpu = "-" if peak.gpu is None else _size(peak.gpu)
        rows.append([phase, _size(peak.host), _size(peak.pinned), gpu])
    return "\n".join(align(rows))


def _size(value: int) -> str:
    return f"{value / _GIB:.2f} GiB" if value >= _GIB else f"{value / _MIB:.1f} MiB"
