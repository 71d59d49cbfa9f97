"""What `hytrain bench kernel` compares, all on the same arrays.

A subject is one way to sweep an Adam step's memory: our passes, DeepSpeed's optimizer and the path
around it, torch's fused optimizer, and a loop that only reads and writes.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hytrain import _C
from hytrain.formats.moment_kinds import FP32, MOMENTS, moment_bytes, state_bytes_each
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit, commit_then_preview, preview
from hytrain.kernels.moments import Rounding, native_moments
from hytrain.model.state_format import StateArrays, StateFormat
from hytrain.tools.stdout import stdout_to

logger = logging.getLogger(__name__)

ARRAY_BYTES = 4 + 4 + 3 * 2 + sum(state_bytes_each(kind) - 4 for kind in MOMENTS)
"""Bytes per parameter that :class:`Arrays` takes."""

# Small enough that a thousand steps leave the values ordinary.
_LR = 1e-6
_WEIGHT_DECAY = 0.01
_DRAWN = 2**20
"""Random numbers drawn for each array, then repeated: torch's generator has one thread."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One way to sweep an Adam step's memory.

    Attributes:
        num_bytes: bytes that it moves per parameter. Each fp32 array read and written is 8, bf16
            read or written is 2; a write that first fetches its cache line is not counted twice.
        run: runs one pass with the given number of threads; None if not available.
        baseline: name of the loop that only reads and writes the same state.
        in_fp32: for moments in fewer bytes, name of the same pass on fp32 moments.
    """

    num_bytes: float
    run: Callable[[int], object] | None
    baseline: str = "read_write"
    in_fp32: str | None = None


class Arrays:
    """n elements, a multiple of 64, of everything that a subject may read or write.

    Moments begin as zeros; the untimed round makes ordinary ones of them.
    """

    def __init__(self, n: int) -> None:
        def filled(dtype: torch.dtype, scale: float) -> torch.Tensor:
            drawn = (scale * torch.randn(min(n, _DRAWN))).to(dtype)
            return drawn.repeat(-(-n // len(drawn)))[:n]

        p = filled(torch.float32, 1.0)
        self.states = {
            kind: StateFormat(kind).arrays(
                p.view(torch.uint8), torch.zeros(moment_bytes(kind, n), dtype=torch.uint8)
            )
            for kind in MOMENTS
        }
        self.gradient = filled(torch.float32, 1e-2)
        self.previous, self.current = (filled(torch.bfloat16, 1e-2) for _ in range(2))
        self.out = torch.zeros(n, dtype=torch.bfloat16)


def all_subjects(arrays: Arrays, *, with_others: bool) -> dict[str, Subject]:
    """Every subject by the name that it has in the result, in the order of the table;
    ``with_others``: DeepSpeed's and torch's optimizers, too."""
    subjects: dict[str, Subject] = {}
    for kind, state in arrays.states.items():
        subjects |= _our_subjects(arrays, state, kind)
    others = _other_subjects(arrays) if with_others else {}
    fp32 = 2 * state_bytes_each(FP32) + 4  # an fp32 gradient, and no outgoing copy
    # The path scales the gradient in place, reads the weights and writes them as bf16 besides.
    traffic = {"deepspeed_adam": fp32, "deepspeed_path": fp32 + 8 + 6, "torch_fused": fp32}
    return subjects | {
        name: Subject(num_bytes, others.get(name)) for name, num_bytes in traffic.items()
    }


def _our_subjects(arrays: Arrays, state: StateArrays, kind: str) -> dict[str, Subject]:
    """The kernel's passes, and the loop that only reads and writes, on one kind of moments."""
    hyper = AdamHyper(lr=_LR, weight_decay=_WEIGHT_DECAY, step=10)
    previous, current = (Gradient(g, 0.5, hyper) for g in (arrays.previous, arrays.current))
    rounding = Rounding(1, 2)

    def run_commit(threads: int) -> None:
        commit(
            *state, previous, rounding=rounding, out=arrays.out, num_threads=threads,
            non_temporal=True,
        )  # fmt: skip

    def run_commit_then_preview(threads: int) -> None:
        commit_then_preview(
            *state, previous, current, rounding=rounding, out=arrays.out, num_threads=threads,
            non_temporal=True,
        )  # fmt: skip

    def run_preview(threads: int) -> None:
        preview(*state, current, out=arrays.out, num_threads=threads, non_temporal=True)

    def run_read_write(threads: int) -> None:
        moments = native_moments(*state[1:], rounding)
        _C.read_write(state.master.data_ptr(), moments, state.master.numel(), threads)

    each = state_bytes_each(kind)
    runs = {
        "commit": (2 * each + 2 + 2, run_commit),  # a bf16 gradient; bf16 out
        "commit_then_preview": (2 * each + 4 + 2, run_commit_then_preview),  # one more gradient
        "preview": (each + 2 + 2, run_preview),
        "read_write": (2 * each, run_read_write),
    }
    suffix = "" if kind == FP32 else f"_{kind}"
    return {
        f"{name}{suffix}": Subject(
            num_bytes, run, f"read_write{suffix}", None if kind == FP32 else name
        )
        for name, (num_bytes, run) in runs.items()
    }


def _other_subjects(arrays: Arrays) -> dict[str, Callable[[int], object]]:
    """torch's fused AdamW; DeepSpeedCPUAdam alone, and with what ZeRO-Offload does around it.

    The first call on a machine compiles DeepSpeed's extension, which takes about a minute.
    """
    p, m, v = arrays.states[FP32]
    weight = torch.nn.Parameter(p)
    weight.grad = arrays.gradient
    fused = torch.optim.AdamW([weight], lr=_LR, weight_decay=_WEIGHT_DECAY, fused=True)
    fused.state[weight] = {"step": torch.tensor(10.0), "exp_avg": m, "exp_avg_sq": v}
    runs: dict[str, Callable[[], object]] = {"torch_fused": fused.step}
    try:
        adam = build_deepspeed_adam(weight)
    except (ImportError, RuntimeError, OSError) as error:
        logger.warning("DeepSpeedCPUAdam is left out: %s", error)
    else:
        adam.state[weight] = {"step": 10, "exp_avg": m, "exp_avg_sq": v}

        def path() -> None:
            arrays.gradient.mul_(1.0)  # clip and unscale; by 1, so that repeats see equal values
            adam.step()
            arrays.out.copy_(p)

        runs |= {"deepspeed_adam": adam.step, "deepspeed_path": path}
    return {name: partial(_run_with_threads, run) for name, run in runs.items()}


def _run_with_threads(run: Callable[[], object], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    run()


def build_deepspeed_adam(weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam for one parameter; raises ImportError or RuntimeError if not available."""
    # Compilers and DeepSpeed write to the standard output.
    with stdout_to(2):
        adam = importlib.import_module("deepspeed.ops.adam")
        return adam.DeepSpeedCPUAdam([weight], lr=_LR, weight_decay=_WEIGHT_DECAY, adamw_mode=True)
