"""The slow twin of solver.py: every batch and every micro-batch size of every GPU in turn."""

from __future__ import annotations

from hytrain.tools.uneven.problem import UnevenGpu, UnevenProblem, layer_time

_Point = tuple[float, float]


def solve_slowly(problem: UnevenProblem) -> _Point | None:
    """(least time, least memory at that time); None where nothing fits.

    For each number of samples that the GPUs so far may compute it keeps all pairs (time, memory)
    of which neither is worse than another's.
    """
    reached: dict[int, list[_Point]] = {0: [(0.0, 0.0)]}
    for gpu in problem.gpus:
        longer: dict[int, list[_Point]] = {}
        choices = _choices(problem, gpu)
        for done, points in reached.items():
            for batch, time, memory in choices:
                if done + batch <= problem.batch:
                    sums = [(max(time, so_far), memory + used) for so_far, used in points]
                    longer.setdefault(done + batch, []).extend(sums)
        reached = {done: _undominated(points) for done, points in longer.items()}
    fitting = [point for point in reached.get(problem.batch, []) if point[1] < problem.budget]
    return min(fitting, default=None)


def _choices(problem: UnevenProblem, gpu: UnevenGpu) -> list[tuple[int, float, float]]:
    """(samples, time, memory) of all that one GPU can do."""
    limit = problem.usable * gpu.capacity
    choices: list[tuple[int, float, float]] = []
    for batch in range(1, problem.batch + 1):
        for size in range(1, problem.batch + 1):
            memory = gpu.memory[size - 1]
            if memory <= limit:
                time = float(layer_time(problem, gpu, size, -(-batch // size)))
                choices.append((batch, time, memory))
    return choices


def _undominated(points: list[_Point]) -> list[_Point]:
    kept: list[_Point] = []
    for point in sorted(set(points)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
