"""Runs random cases: ``python tests/fuzz/run.py --minutes 10``, ``--seed 17``, ``--cases 300``.

A case is drawn from its seed, so that a seed in the log is all that is needed to see it again.
Ends with 1 if a case fails. On a machine with a GPU: ``--gpu``, with ``--ranks`` as many as GPUs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import logging
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS.parent, TESTS / "dist", TESTS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

CASE_SECONDS = 110.0
"""Time limit of a case; a hang ends with the stacks of all ranks."""


def play(case: Any, folder: str, *, on_gpu: bool = False) -> str:
    """Plays a case on this rank; rank 0 compares. Returns how it ended: "same" or "refused"."""
    import torch
    import torch.distributed as dist

    from fuzz.judge import Judge
    from fuzz.player import Player
    from hytrain.offload import threads

    logging.disable(logging.WARNING)
    # The kernel's speed is measured on very few elements.
    threads.measured_elements = lambda *_, **__: 1 << 12
    _use_linear_of(case)
    disturb = None
    if on_gpu:  # every stream is delayed, and every hand-off
        from support.streams import stream_delays

        disturb = stream_delays(case.seed)
        case = replace(case, delays=case.delays or f"{case.seed % 997 + 1}:300")
    trace = Player(case, Path(folder), disturb).play()
    traces: list[Any] = [None] * case.ranks
    dist.all_gather_object(traces, trace)
    if dist.get_rank() == 0:
        kept = Path(folder) / "kept.pt"
        judge = Judge(case, traces, torch.load(kept) if case.follows else None)
        judge.check()
        if case.then is not None:
            torch.save(judge.kept, kept)
    return "same" if case.refusal is None else "refused"


def _use_linear_of(case: Any) -> None:
    """Uses one F.linear in all of a case: the judge's model must round as the trained one does.

    deepspeed.zero.Init replaces torch's for the rest of the process by its own, which rounds
    between product and bias.
    """
    import torch
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    builds = [case.build, *(event.build for step in case.steps for event in step.after)]
    has_init = any(build is not None and build.zero_init for build in builds)
    plain = _torch_linear()  # before the first zero.Init of this process
    partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk = plain
    torch.nn.functional.linear = zero3_linear_wrap if has_init else plain


@functools.cache
def _torch_linear() -> Any:
    import torch

    return torch.nn.functional.linear


FIXED = 80
"""Number of cases in `make test`, from the first seeds."""
REPAIRED = ((286, 2), (7518, 3))
"""Seeds and ranks of further cases, which once failed: ranks that use different layers come to a
weight that is read outside of its module, or to a layer that their plan gathers anew."""


def fixed_cases() -> list[Any]:
    """The cases of `make test`."""
    from fuzz.drawing import draw

    return [*(draw(seed) for seed in range(FIXED)), *(draw(*each) for each in REPAIRED)]


@dataclass
class Summary:
    """How cases have ended."""

    ended: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: dict[int, str] = field(default_factory=dict)
    slowest: tuple[float, int] = (0.0, 0)

    def __str__(self) -> str:
        parts = [f"{count} {how}" for how, count in sorted(self.ended.items())]
        seconds, seed = self.slowest
        text = f"{sum(self.ended.values())} cases: {', '.join(parts)}"
        text += f"; the slowest took {seconds:.1f} s ({seed})"
        return text + (f"\nfailed: {' '.join(map(str, self.failed))}" if self.failed else "")


def run_cases(
    pools: Any,
    cases: Iterable[Any],
    *,
    on_gpu: bool = False,
    log: Any = None,
    native_stacks: Callable[[], str] = lambda: "",
) -> Summary:
    """Runs cases until there are no more.

    ``native_stacks``: returns the stacks of ranks that a signal has ended since its last call.
    """
    from harness import RankError

    summary = Summary()
    for case in cases:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
            try:
                function = _play_on_gpu if on_gpu else play
                how = pools(case.ranks).run(function, case, folder, timeout=CASE_SECONDS)[0]
                if case.then is not None and not (on_gpu and case.then.ranks > _num_gpus()):
                    pools(case.then.ranks).run(function, case.then, folder, timeout=CASE_SECONDS)
            except RankError as error:
                how = "failed"
                text = f"{case}\n{case!r}\n{error}{native_stacks()}"
                summary.failed[case.seed] = text
                if log is not None:
                    print(f"FAILED {text}\n{command(case, on_gpu)}", file=log, flush=True)
        summary.ended[how] += 1
        summary.slowest = max(summary.slowest, (time.monotonic() - begin, case.seed))
    return summary


def command(case: Any, on_gpu: bool = False) -> str:
    """The command to run a case again; ``--case FILE`` takes the case itself, as printed."""
    more = " --gpu" if on_gpu else ""
    return f"python tests/fuzz/run.py --seed {case.seed} --ranks {case.ranks}{more}"


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _play_on_gpu(case: Any, folder: str) -> str:
    return play(case, folder, on_gpu=True)


def read_case(path: str) -> Any:
    """Reads a case as a failure prints it: its second line."""
    from fuzz import cases

    return eval(Path(path).read_text(), {**vars(cases), "inf": math.inf, "nan": math.nan})


def _shrunk(pools: Any, case: Any, *, on_gpu: bool) -> str:
    """Returns the report of a smaller case that ends in an error of the same kind."""
    from fuzz.shrink import shrink

    def error_of(case: Any) -> str:
        failed = run_cases(pools, [case], on_gpu=on_gpu).failed
        lines = [line for text in failed.values() for line in text.splitlines()[2:]]
        found = [line for line in lines if re.match(r"[\w.]*Error\b", line)]
        return re.sub(r"[^a-z ]+", "", (found or lines or [""])[0])[:40]

    kind = error_of(case)
    if not kind:
        return "it does not fail"
    case = shrink(case, lambda less: error_of(less) == kind)
    return "\n".join(run_cases(pools, [case], on_gpu=on_gpu).failed.values())


def _cases(arguments: argparse.Namespace) -> Iterator[Any]:
    from fuzz.drawing import draw

    if arguments.case is not None:
        yield from [read_case(arguments.case)] * (arguments.cases or 1)
    else:
        for seed in _seeds(arguments):
            yield draw(seed, arguments.ranks)


def _seeds(arguments: argparse.Namespace) -> Iterator[int]:
    if arguments.seed is not None and arguments.cases is None and arguments.minutes is None:
        yield arguments.seed
        return
    first = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(3), "big")
    print(f"seeds from {first}", flush=True)
    end = time.monotonic() + 60 * (arguments.minutes or 10**6)
    number = 0
    while time.monotonic() < end and (arguments.cases is None or number < arguments.cases):
        yield first + number
        number += 1
        if number % 100 == 0:
            print(f"{number} cases begun", flush=True)


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed, or the only one")
    parser.add_argument("--cases", type=int, help="as many")
    parser.add_argument("--minutes", type=float, help="for so long")
    parser.add_argument("--ranks", type=int, help="instead of what a case draws")
    parser.add_argument("--gpu", action="store_true", help="one GPU a rank, with delayed streams")
    parser.add_argument("--case", help="a file with a case as it was printed, instead of seeds")
    parser.add_argument("--shrink", action="store_true", help="makes a failing case smaller")
    parser.add_argument("--show", action="store_true", help="only prints the case")
    arguments = parser.parse_args()
    if not arguments.gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from harness import RankPools

    from fuzz.native_stack import keeping_cores

    if arguments.show:
        for case in _cases(arguments):
            print(f"{case}\n{case!r}")
        return 0
    if arguments.case is not None:
        arguments.case = os.path.abspath(arguments.case)
    begin = time.monotonic()
    with (
        keeping_cores() as native_stacks,
        contextlib.closing(RankPools(on_gpu=arguments.gpu)) as pools,
    ):
        if arguments.shrink:
            for case in _cases(arguments):
                print(_shrunk(pools, case, on_gpu=arguments.gpu))
            return 0
        summary = run_cases(
            pools,
            _cases(arguments),
            on_gpu=arguments.gpu,
            log=sys.stdout,
            native_stacks=native_stacks,
        )
    print(f"{summary}\n{time.monotonic() - begin:.0f} s")
    return 1 if summary.failed else 0


if __name__ == "__main__":
    # Ranks find the functions by the name of the package.
    from fuzz import run

    sys.exit(run.main())
