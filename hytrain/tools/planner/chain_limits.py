"""Rows of the mixed-integer program for ranks that take loads between those of a chain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import Columns, HostBudget, Load
from hytrain.tools.planner.min_plus import Floats, Ints
from hytrain.tools.planner.mixed_integer import MixedIntegerProgram
from hytrain.tools.planner.problem import PlanProblem


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """The lines of cost_model.py for one kind of ranks; layers need not be whole.

    Attributes:
        problem: what is planned.
        host: the ranks'.
        gpu: the ranks'.
        step: seconds.
        program: that gets the rows.
        gains: whether as much state as can be is to be held.
    """

    problem: PlanProblem
    host: Host
    gpu: GpuProfile
    step: float
    program: MixedIntegerProgram
    gains: bool

    def add(self, loads: Sequence[Load], taken: Ints, number: Ints) -> Ints:
        """Adds the limits of a chain; the two new columns are its state on GPU and CPU, shares."""
        problem, gpu, program, step = self.problem, self.gpu, self.program, self.step
        whole, itemsize = float(problem.model.parameters), problem.model.itemsize
        held = program.columns(2, whole=False, gain=float(self.gains))
        columns = Columns.of(loads)

        def limit(of_loads: Floats, on_gpu: float, on_cpu: float, ranks: float) -> None:
            row = program.row(-math.inf, 0.0)
            program.entries(row, taken, of_loads)
            program.entries(row, held, np.array([on_gpu, on_cpu]))
            program.entries(row, number, -ranks)

        update = whole / gpu.update_rate / step
        seconds = max(1.0 / self.host.rank_update_rate, itemsize / gpu.copy_rate)
        limit(columns.compute / step, update, 0.0, 1.0)
        limit(columns.edge / step, 0.0, whole * seconds / step, 1.0)
        copied = step * gpu.copy_rate
        limit(columns.offloaded / copied, 0.0, itemsize * whole / copied, 1.0)
        memory, sharded = float(gpu.memory_bytes), problem.sharded_bytes * whole
        on_gpu = sharded + problem.gpu_state_bytes * whole
        limit(-columns.room / memory, on_gpu / memory, sharded / memory, 0.0)
        on_gpu += problem.waiting_bytes * whole
        limit(-columns.end_room / memory, on_gpu / memory, sharded / memory, 0.0)
        for line in range(columns.slope.shape[1]):
            slope = float(columns.slope[:, line].min()) * whole / step
            hidden = (columns.compute - columns.hidden[:, line]) / step
            limit(hidden, slope + update, slope, 1.0)
        return held

    def draw(self, budgets: Sequence[HostBudget], rows: Sequence[int], held: Ints) -> None:
        """What the state takes of the host."""
        for row, budget in zip(rows, budgets, strict=True):
            drawn = np.array([budget.shard, budget.shard + budget.state])
            drawn *= self.problem.model.parameters
            if budget.total > 0.0:
                self.program.entries(row, held, drawn / budget.total)
            else:
                self.program.entries(row, held, np.where(drawn > 0.0, 2.0**20, 0.0))

    def hold(self, state: int | None, number: Ints, held: Ints, each: float) -> None:
        """The state counts for all, or is an even part for each rank."""
        row = self.program.row(0.0, 0.0) if state is None else state
        self.program.entries(row, held, 1.0)
        if state is None:
            self.program.entries(row, number, -each)
