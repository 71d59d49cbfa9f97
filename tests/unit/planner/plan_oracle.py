"""Whether a plan may be as fast as some step: one mixed-integer program in which steps are bounded.

It shares the cost of a workload with the planner (cost_model.workload) and nothing of its search:
equal ranks are not merged, and workloads are not interpolated. A rank has

    y     for each policy and micro-batch size, whether it takes it           (0 or 1)
    b, n  samples with it, micro-batches             (whole numbers: n; of small batches b, too)
    v     seconds, memory: above the lines through workloads of 2, 3, 4, 5, 8, 9, 16, ... full
          micro-batches, which no workload is below, since they are convex
    g, c  parameters that are updated on its GPU, and by the CPU; of a whole number of layers only
          where that is needed to deny a step

and the limits are those of cost_model.py, word for word. So the program allows a little more than a
plan may do: what it denies is impossible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_array

from hytrain.formats.policies import LAYER_MAJOR, Activations
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import Collectives, Workload, workload
from hytrain.tools.planner.problem import PlanProblem


def may_be_as_fast(problem: PlanProblem, step: float) -> bool:
    """Whether there may be a plan with a step of so many seconds; False is certain.

    Args:
        problem: without weights in host memory.
        step: seconds.
    """
    assert not problem.offload_param
    # With layers in parts first: that is decided faster, and denies nearly as much.
    return all(_may_be_as_fast(problem, step, whole_layers=whole) for whole in (False, True))


def _may_be_as_fast(problem: PlanProblem, step: float, *, whole_layers: bool) -> bool:
    for part, rounds in _parts(problem):
        for even in (True, False):

            def allows(numbers: range | None, part: PlanProblem = part, even: bool = even) -> bool:
                oracle = _Oracle(part, step, even=even, rounds=numbers, whole_layers=whole_layers)
                return oracle.allows()

            if _may_be_in_rounds(rounds, allows) if rounds else allows(None):
                return True
    return False


def _parts(problem: PlanProblem) -> list[tuple[PlanProblem, range | None]]:
    """Stage 3: all ranks layer by layer, or all in as many rounds with one policy."""
    if not problem.needs_rounds:
        return [(problem, None)]
    together = tuple(policy for policy in problem.activations if policy in LAYER_MAJOR)
    parts: list[tuple[PlanProblem, range | None]] = []
    if together:
        parts.append((replace(problem, activations=together), None))
    alone = [policy for policy in problem.activations if policy not in LAYER_MAJOR]
    all_ = range(1, problem.batch + 1)
    return parts + [(replace(problem, activations=(policy,)), all_) for policy in alone]


def _may_be_in_rounds(rounds: range, allows: Callable[[range], bool]) -> bool:
    """Ranges of numbers of rounds are halved until each is denied, or one number is not."""
    if not allows(rounds):
        return False
    if len(rounds) == 1:
        return True
    middle = math.isqrt(rounds[0] * rounds[-1])
    halves = range(rounds[0], middle + 1), range(middle + 1, rounds[-1] + 1)
    return any(_may_be_in_rounds(half, allows) for half in halves)


_MOST_NODES = 20_000
# Of batches up to this samples are whole and each number of micro-batches is an item of its own.
_MOST_APART = 256
_NAMES = ("compute", "startup", "room", "end_room")
_Line = dict[str, tuple[float, float, float]]
"""By name: with no samples, for each micro-batch, and for each sample."""
_Item = tuple[int, int, int, list[_Line]]
"""A micro-batch's size, the fewest and the most samples, the lines of the workloads."""


@dataclass
class _Row:
    values: dict[int, float]
    lower: float
    upper: float


class _Oracle:
    def __init__(
        self,
        problem: PlanProblem,
        longest: float,
        *,
        even: bool,
        rounds: range | None,
        whole_layers: bool,
    ) -> None:
        self._problem = problem
        self._whole_layers = whole_layers
        self._longest = longest
        self._rounds = rounds
        self._collectives = Collectives.of(problem, even=even)
        self._rows: list[_Row] = []
        self._whole: list[int] = []
        self._upper: list[float] = []
        self._step = self._column(longest)
        self._sizes: dict[int, float] = {}
        self._fewest: dict[int, float] = {}
        self._menus: dict[int, list[_Item]] = {}
        whole = float(problem.model.parameters)
        samples: dict[int, float] = {}
        state: dict[int, float] = {}
        before: tuple[object, dict[int, float]] | None = None
        for host in problem.cluster.hosts:
            memory: dict[int, float] = {}
            traffic = {self._step: -host.bandwidth / 1e9}
            for gpu in host.gpus:
                own, drawn, on_gpu, on_cpu = self._rank(host.rank_update_rate, gpu)
                samples |= own
                state |= {on_gpu: 1.0, on_cpu: 1.0}
                if even:
                    each = 1.0 / problem.cluster.num_ranks
                    self._row({on_gpu: 1.0, on_cpu: 1.0}, each, each)
                memory |= {column: value / 1e9 for column, value in drawn.items()}
                memory[on_cpu] = problem.host_state_bytes * whole / 1e9
                traffic |= {column: 2.0 * value / 1e9 for column, value in drawn.items()}
                traffic[on_cpu] = problem.update_bytes * whole / 1e9
                key = host, id(gpu)
                if before is not None and before[0] == key:  # equal ranks: the first has more
                    self._row({**before[1], **{c: -v for c, v in own.items()}}, 0.0, math.inf)
                before = key, own
            before = None
            self._row(memory, -math.inf, host.memory_bytes / 1e9)
            self._row(traffic, -math.inf, 0.0)
        self._row(samples, float(problem.batch), float(problem.batch))
        if rounds is not None:  # (R - 1) m + 1 to R m samples of each rank
            self._row(self._sizes, -(-problem.batch // rounds[-1]), math.inf)
            self._row(self._fewest, -math.inf, float(problem.batch))
        self._row(state, 1.0, 1.0)

    def _column(self, upper: float = math.inf, *, whole: bool = False) -> int:
        self._whole.append(int(whole))
        self._upper.append(upper)
        return len(self._upper) - 1

    def _row(self, values: dict[int, float], lower: float, upper: float) -> None:
        self._rows.append(_Row(values, lower, upper))

    def _rank(
        self, update_rate: float, gpu: GpuProfile
    ) -> tuple[dict[int, float], dict[int, float], int, int]:
        """Its samples, its offloaded bytes, and its state on either side, of the model."""
        problem = self._problem
        on_gpu, on_cpu = self._column(1.0), self._column(1.0)
        if self._whole_layers:
            self._layers(on_gpu, on_cpu)
        sums: dict[str, dict[int, float]] = {name: {} for name in _NAMES}
        chosen: dict[int, float] = {}
        samples: dict[int, float] = {}
        offloaded: dict[int, float] = {}
        if problem.allow_idle:
            idle = workload(problem, gpu, self._collectives, 0, 0, problem.activations[0])
            if idle.room >= 0.0:
                column = self._column(1.0, whole=True)
                chosen[column] = 1.0
                for name in _NAMES:
                    sums[name][column] = getattr(idle, name)
        if id(gpu) not in self._menus:
            self._menus[id(gpu)] = self._menu(gpu)
        for size, least, most, lines in self._menus[id(gpu)]:
            taken = self._column(1.0, whole=True)
            own = self._column(whole=self._problem.batch <= _MOST_APART)
            number = self._column(whole=True)
            self._row({number: float(size), own: -1.0}, 0.0, math.inf)
            chosen[taken] = samples[own] = 1.0
            self._row({own: 1.0, taken: -float(most)}, -math.inf, 0.0)
            self._row({own: 1.0, taken: -float(least)}, 0.0, math.inf)
            each = lines[0]["offloaded"][2]
            if each:
                offloaded[own] = each
            for name in _NAMES:
                sign = -1.0 if "room" in name else 1.0
                value = self._column()
                unit = 1e9 if "room" in name else 1.0
                sums[name][value] = sign * unit
                if sign < 0.0:  # taken of the GPU; what it has is there whatever it takes
                    sums[name][taken] = float(gpu.memory_bytes)
                for line in lines:
                    at, each, slope = line[name]
                    extra = gpu.memory_bytes if sign < 0.0 else 0.0
                    values = {value: unit, taken: -(sign * at + extra), own: -sign * slope}
                    self._row({**values, number: -sign * each}, 0.0, math.inf)
            if self._rounds is not None:
                self._sizes[taken] = float(size)
                self._fewest[taken] = (self._rounds[0] - 1.0) * size + 1.0
        self._row(chosen, 1.0, 1.0)
        self._limits(gpu, update_rate, sums, offloaded, on_gpu, on_cpu)
        return samples, offloaded, on_gpu, on_cpu

    def _layers(self, on_gpu: int, on_cpu: int) -> None:
        """The parts are those of a shard with some whole number of GPU layers."""
        layers = self._problem.model.num_layers
        chosen: dict[int, float] = {}
        parts: tuple[dict[int, float], dict[int, float]] = {on_gpu: -1.0}, {on_cpu: -1.0}
        for number in range(layers + 1):
            taken, shard = self._column(1.0, whole=True), self._column(1.0)
            self._row({shard: 1.0, taken: -1.0}, -math.inf, 0.0)
            chosen[taken] = 1.0
            parts[0][shard], parts[1][shard] = number / layers, 1.0 - number / layers
        self._row(chosen, 1.0, 1.0)
        for part in parts:
            self._row(part, 0.0, 0.0)

    def _limits(
        self,
        gpu: GpuProfile,
        update_rate: float,
        sums: dict[str, dict[int, float]],
        offloaded: dict[int, float],
        on_gpu: int,
        on_cpu: int,
    ) -> None:
        problem = self._problem
        whole = float(problem.model.parameters)
        itemsize = float(problem.model.itemsize)
        step = {self._step: -1.0}
        self._row({**sums["compute"], **step, on_gpu: whole / gpu.update_rate}, -math.inf, 0.0)
        each = whole * max(1.0 / update_rate, itemsize / gpu.copy_rate)
        self._row({**sums["startup"], **step, on_cpu: each}, -math.inf, 0.0)
        copies = {column: value / gpu.copy_rate for column, value in offloaded.items()}
        self._row({**copies, **step, on_cpu: itemsize * whole / gpu.copy_rate}, -math.inf, 0.0)
        sharded = problem.sharded_bytes
        for name, waiting in (("room", 0), ("end_room", problem.waiting_bytes)):
            values = {column: value / 1e9 for column, value in sums[name].items()}
            values[on_gpu] = -(problem.gpu_state_bytes + sharded + waiting) * whole / 1e9
            values[on_cpu] = -sharded * whole / 1e9
            self._row(values, 0.0, math.inf)

    def _menu(self, gpu: GpuProfile) -> list[_Item]:
        batch = self._problem.batch
        largest = min(gpu.sizes[-1] if gpu.sizes else batch, batch)
        found: list[_Item] = []
        for policy in self._problem.activations:
            for size in range(1, largest + 1):
                is_measured = self._rounds is not None or gpu.sizes is None or size in gpu.sizes
                found += self._items(gpu, size, policy, several=is_measured)
        return found

    def _items(
        self, gpu: GpuProfile, size: int, policy: Activations, *, several: bool
    ) -> Iterator[_Item]:
        """A single micro-batch, and several, with lines through 2, 3, 4, 5, 8, 9, 16, ... full."""

        def made(samples: int) -> Workload:
            return workload(self._problem, gpu, self._collectives, samples, size, policy)

        def fits(work: Workload) -> bool:
            return work.room >= 0.0 and work.compute <= self._longest

        batch, rounds = self._problem.batch, self._rounds or range(1, self._problem.batch + 1)
        work = made(size)
        if fits(work) and rounds[0] == 1:
            line = {name: (getattr(work, name), 0.0, 0.0) for name in _NAMES}
            line["offloaded"] = (0.0, 0.0, work.offloaded / size)
            yield size, size, size, [line]
        low, high = size, min(batch, size * rounds[-1]) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(made(middle)) else (low, middle)
        least = size * max(1, rounds[0] - 1) + 1
        if not several:
            return
        # A second one that is not full leaves more room.
        full = -(-low // size) if batch <= _MOST_APART else 2
        for number in range(2, full + 1):
            end = number * size if batch <= _MOST_APART else 2 * size - 1
            samples = range(max(least, (number - 1) * size + 1), min(low, end) + 1)
            if samples:
                line = _line_of_partial(size, [made(one) for one in samples])
                yield size, samples[0], samples[-1], [line]
        if batch <= _MOST_APART:
            return
        least = max(least, 2 * size)
        if low >= least:
            numbers = {2, 3, low // size, low // size + 1}
            for power in range(1, int(math.log2(low / size)) + 1):
                numbers |= {2**power, 2**power + 1}
            works = [made(number * size) for number in sorted(numbers) if number > 1]
            nearby = [made(samples) for samples in range(2 * size, min(low, 4 * size) + 1)]
            yield size, least, low, _rooflines(size, works, nearby)

    def allows(self) -> bool:
        """Whether it has a solution."""
        rows = np.repeat(np.arange(len(self._rows)), [len(row.values) for row in self._rows])
        columns = [column for row in self._rows for column in row.values]
        values = [value for row in self._rows for value in row.values.values()]
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self._upper)))
        limited: Any = LinearConstraint  # whose stubs know numbers only
        found = milp(
            np.zeros(len(self._upper)),
            integrality=np.array(self._whole),
            bounds=(0.0, np.array(self._upper)),
            constraints=limited(
                matrix, [row.lower for row in self._rows], [row.upper for row in self._rows]
            ),
            options={"node_limit": _MOST_NODES},
        )
        return found.status != 2


def _line_of_partial(size: int, works: Sequence[Workload]) -> _Line:
    """A line that none of these workloads, with as many micro-batches, is below."""
    first, last = works[0], works[-1]
    line: _Line = {"offloaded": (0.0, 0.0, last.offloaded / last.batch)}
    for name in _NAMES:
        slope = (getattr(last, name) - getattr(first, name)) / max(1, last.batch - first.batch)
        line[name] = getattr(first, name) - slope * first.batch, 0.0, slope
    return _lowered(size, line, works)


def _rooflines(size: int, works: Sequence[Workload], nearby: Sequence[Workload]) -> list[_Line]:
    """Roofline through neighbours of full micro-batches; none of the nearby workloads is below one.

    Args:
        size: of a micro-batch.
        works: of full micro-batches.
        nearby: of two to four micro-batches. What a sample more or less of the last one
            takes is theirs.
    """
    lines: list[_Line] = []
    last_place = min(size, len(nearby) - 1)
    for one, other in itertools.pairwise(works):
        number = one.batch // size
        width = other.batch // size - number
        line: _Line = {}
        for name in (*_NAMES, "offloaded"):
            first, last = (
                getattr(nearby[place], name) for place in (min(1, last_place), last_place)
            )
            slope = (last - first) / max(1, last_place - 1)
            each = (getattr(other, name) - getattr(one, name)) / width - slope * size
            line[name] = getattr(one, name) - each * number - slope * one.batch, each, slope
        line["offloaded"] = (0.0, 0.0, works[0].offloaded / works[0].batch)
        lowered = _lowered(size, line, nearby)
        if not any(_is_close(lowered, known) for known in lines):
            lines.append(lowered)
    return lines


def _lowered(size: int, line: _Line, works: Sequence[Workload]) -> _Line:
    """The line so much lower (of room: higher) that none of the workloads is beyond it."""
    moved = dict(line)
    for name in _NAMES:
        at, each, slope = line[name]
        beyond = [
            getattr(work, name) - at - each * -(-work.batch // size) - slope * work.batch
            for work in works
        ]
        more = max([0.0, *beyond]) if "room" in name else min([0.0, *beyond])
        moved[name] = at + more, each, slope
    return moved


def _is_close(one: _Line, other: _Line) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
        for name in one
        for a, b in zip(one[name], other[name], strict=True)
    )
