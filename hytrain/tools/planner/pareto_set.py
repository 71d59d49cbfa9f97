"""What a rank can do in a given time, in the units of frontier.py, which has the two readings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hytrain.tools.planner.candidate_loads import CandidateLoads
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Columns,
    Load,
    cpu_capacity,
    gpu_capacity,
    host_budgets,
    largest_shards,
)
from hytrain.tools.planner.min_plus import Floats, Ints
from hytrain.tools.planner.problem import PlanProblem

# In stage 3 what the CPU updates takes room on the GPU, too: so many points on that line.
_CORNERS = 8
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ParetoSet:
    """What a rank offers in a time, without what another offer beats in all three numbers.

    Attributes:
        amounts: samples.
        keeps: a, in units; may be negative.
        holds: d, in units.
        labels: positions in the loads.
        loads: among them those that are offered.
    """

    amounts: Ints
    keeps: Ints
    holds: Ints
    labels: Ints
    loads: Sequence[Load]

    def of_at_least(self, samples: int) -> ParetoSet:
        """Those with so many samples, in their order."""
        kept = self.amounts >= samples
        return replace(
            self,
            amounts=self.amounts[kept],
            keeps=self.keeps[kept],
            holds=self.holds[kept],
            labels=self.labels[kept],
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """The units that state is counted in.

    Attributes:
        units: of the whole model.
        most: that one rank may own.
        outer: the reading of every number, see the module.
    """

    units: int
    most: int
    outer: bool

    def held(self, parameters: npt.NDArray[np.float64], whole: int) -> Ints:
        """Units of what is held, at most what a rank may own."""
        exact = np.minimum(parameters / whole * self.units, self.most)
        rounded = np.ceil(exact) if self.outer else np.floor(exact + _ROUNDING)
        return rounded.astype(np.intp)

    def limit(self, parameters: float, whole: int) -> int:
        """Units of what a host has."""
        units = min(parameters / whole * self.units, float(2**40))
        return math.ceil(units) if self.outer else math.floor(units + _ROUNDING)

    def drawn(self, parameters: npt.NDArray[np.float64], whole: int) -> Ints:
        """Units of what is taken away."""
        exact = parameters / whole * self.units
        rounded = np.floor(exact) if self.outer else np.ceil(exact - _ROUNDING)
        return rounded.astype(np.intp)


def offers(
    problem: PlanProblem, rank: CandidateLoads, step: float, grid: Grid, least: int = 0
) -> ParetoSet:
    """What a rank can do in a step of so many seconds.

    Args:
        problem: what is planned.
        rank: its loads.
        step: seconds.
        grid: the units.
        least: samples; offers with fewer are of no interest.
    """
    whole = problem.model.parameters
    host, gpu = rank.host, rank.gpu
    menu = rank.menu(step, least, outer=grid.outer)
    columns = menu.outer if grid.outer else menu.inner
    samples = menu.samples(step, outer=grid.outer)
    of_interest = np.flatnonzero((columns.compute <= step) & (samples >= least))
    samples = samples[of_interest]
    columns = columns.take(of_interest)
    on_cpu = cpu_capacity(problem, host, gpu, columns, step)
    memory, moves = host_budgets(problem, host, step)
    held, moved = memory.draw(columns.offloaded), moves.draw(columns.offloaded)
    reliefs = memory.relief, moves.relief
    relief = max(reliefs) if grid.outer else min(reliefs)
    largest = _largest(problem, host, gpu, columns, step)
    # All ranks together may not draw more than there is: by the inner reading each a part of it.
    sharers = 1 if grid.outer else len(host.gpus)
    possible = (held * sharers <= memory.capacity) & (moved * sharers <= moves.capacity)
    possible &= largest >= 0.0
    drawn = grid.drawn(np.minimum(held, moved) if grid.outer else np.maximum(held, moved), whole)
    corners = _CORNERS if problem.stage == 3 else 0
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    for corner in range(corners + 1):
        high = on_cpu * (corner / corners) if corners else on_cpu
        low = on_cpu * (max(0, corner - 1) / corners) if corners else on_cpu
        on_gpu = gpu_capacity(problem, gpu, columns, step, low if grid.outer else high)
        able = possible & (on_gpu >= 0.0)
        on_gpu = np.maximum(on_gpu, 0.0)
        keeps = grid.held(relief * on_gpu, whole) - drawn
        holds = grid.held(np.minimum(on_gpu + high, largest), whole)
        parts.append((samples[able], keeps[able], holds[able], of_interest[able]))
    amounts, keeps, holds, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    kept = _undominated(amounts, keeps, holds)
    return ParetoSet(amounts[kept], keeps[kept], holds[kept], labels[kept], menu.loads)


def _largest(
    problem: PlanProblem, host: Host, gpu: GpuProfile, columns: Columns, step: float
) -> Floats:
    """The largest shard of whole layers with each load, if the rank had its host for itself.

    g + c alone would count parts of layers. Negative where the load does not fit at all.
    """
    shards = largest_shards(problem, host, gpu, columns, step)
    num_layers = problem.model.num_layers
    cpu_part = 1.0 - np.arange(num_layers + 1) / num_layers
    for budget in host_budgets(problem, host, step):
        shards = np.minimum(shards, budget.shards(columns.offloaded, cpu_part))
    return shards.max(axis=1)


def _undominated(amounts: Ints, keeps: Ints, holds: Ints) -> list[int]:
    """Positions of those that no other reaches in all three numbers; of equals the first."""
    if not len(amounts):
        return []
    shifted = keeps - int(keeps.min())
    # best[a]: the most that those taken so far, which have as many samples, hold with that or more.
    best = np.full(int(shifted.max()) + 1, -1, dtype=np.intp)
    kept: list[int] = []
    for index in np.lexsort((-shifted, -holds, -amounts)).tolist():
        keep, hold = int(shifted[index]), int(holds[index])
        if best[keep] < hold:
            kept.append(index)
            np.maximum(best[: keep + 1], hold, out=best[: keep + 1])
    return kept
