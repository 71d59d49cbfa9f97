"""What the steps of all ranks take of energy: their GPUs', and their hosts' processors'."""

from __future__ import annotations

import math
import os

import torch

from hytrain.hardware.energy import EnergyMeter


class StepEnergy:
    """Joules of each step; of several ranks together."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        """
        Args:
            device: the rank's.
            world_size: ranks.
        """
        self._meter = EnergyMeter(device)
        self._device = device
        self._world_size = world_size
        # A host's processors are counted by its first rank.
        self._is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
        self._last = self._meter.read()

    def of_step(self) -> torch.Tensor:
        """(GPUs, processors) since the last call, float64 [2], NaN for what is not known.

        With several ranks a collective, which is not waited for: all call it at the same step.
        """
        now = self._meter.read()
        used, self._last = now.since(self._last), now
        cpu = used.cpu_joules if self._is_first_here else 0.0
        known = [math.nan if joules is None else joules for joules in (used.gpu_joules, cpu)]
        totals = torch.tensor(known, dtype=torch.float64)
        if self._world_size > 1:
            totals = totals.to(self._device)
            torch.distributed.all_reduce(totals)
        return totals


def energy_fields(joules: torch.Tensor, tokens: float) -> dict[str, float | None]:
    """As ``StepRecord`` names them; waits for a GPU's collective.

    Args:
        joules: of :meth:`StepEnergy.of_step`.
        tokens: of the step.
    """
    gpu, cpu = (None if math.isnan(value) else value for value in joules.tolist())
    total = sum(value for value in (gpu, cpu) if value is not None)
    return {
        "gpu_energy_j": gpu,
        "cpu_energy_j": cpu,
        "tokens_per_j": tokens / total if total > 0.0 else None,
    }
