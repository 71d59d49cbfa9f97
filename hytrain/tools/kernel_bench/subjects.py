"""What `hytrain bench kernel` compares, all on the same arrays.

A subject is one way to sweep an Adam step's memory: our passes, DeepSpeed's optimizer and the path
around it, torch's fused optimizer, and a loop that only reads and writes.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import torch

from hytrain import _C
from hytrain.kernels.moments import MOMENT_BLOCK, EightBit, Moment, Rounding, native_moments

logger = logging.getLogger(__name__)

# Bytes of memory traffic a parameter: each fp32 array read and written is 8, bf16 read or written
# is 2. A write that first fetches its cache line is not counted twice.
BYTES_PER_PARAM = {
    "commit": 28,  # p, m, v read and written; bf16 gradient; bf16 out
    "commit_then_preview": 30,  # one more bf16 gradient
    "commit_bf16": 20,  # m and v in bf16
    "commit_then_preview_bf16": 22,
    "commit_8bit": 16 + 4 / MOMENT_BLOCK,  # m and v in codes, and their exponents
    "commit_then_preview_8bit": 18 + 4 / MOMENT_BLOCK,
    "preview": 16,  # p, m, v and a bf16 gradient read; bf16 out
    "deepspeed_adam": 28,  # p, m, v read and written; fp32 gradient; no out
    "deepspeed_path": 28 + 8 + 6,  # and the gradient scaled in place; p read, bf16 written
    "torch_fused": 28,
    "read_write": 24,  # p, m, v read and written
    "read_write_bf16": 16,
    "read_write_8bit": 12,
}
OURS = ("commit", "commit_then_preview", "preview", "read_write")

# The loop that only reads and writes the same state, for each pass on moments in fewer bytes.
BASELINES = {
    "commit_bf16": "read_write_bf16",
    "commit_then_preview_bf16": "read_write_bf16",
    "commit_8bit": "read_write_8bit",
    "commit_then_preview_8bit": "read_write_8bit",
}

# What `Arrays` takes: p, m, v, an fp32 gradient; two bf16 gradients and the outgoing copy;
# the moments in bf16 and in codes.
ARRAY_BYTES_PER_PARAM = 4 * 4 + 3 * 2 + 2 * 2 + 2 + 2 / MOMENT_BLOCK

# Small enough that a thousand steps leave the values ordinary.
_LR = 1e-6
_WEIGHT_DECAY = 0.01

_DRAWN = 2**20
"""Random numbers of each array."""

Run = Callable[[int], None]  # makes one pass with that many threads


@dataclass(frozen=True, slots=True)
class Arrays:
    """n elements of everything that a subject may read or write."""

    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    gradient: torch.Tensor  # fp32
    previous: torch.Tensor  # bf16
    current: torch.Tensor  # bf16
    out: torch.Tensor  # bf16
    bf16: tuple[Moment, Moment]
    eight_bit: tuple[Moment, Moment]

    @classmethod
    def random(cls, n: int) -> Arrays:
        """Ordinary values, the same ones again and again: torch's generator has one thread."""
        few = min(n, _DRAWN)
        ordinary = torch.randn(few) * 1e-2

        def filled(values: torch.Tensor, length: int = n) -> torch.Tensor:
            copies = torch.empty(length, dtype=values.dtype)
            for begin in range(0, length, few):
                copies[begin : begin + few] = values[: min(few, length - begin)]
            return copies

        bf16 = ordinary.to(torch.bfloat16)
        return cls(
            p=filled(torch.randn(few)),
            m=filled(ordinary),
            v=filled(ordinary.square()),
            gradient=filled(ordinary.flip(0)),
            previous=filled(bf16.roll(1)),
            current=filled(bf16.roll(2)),
            out=torch.zeros(n, dtype=torch.bfloat16),
            bf16=(filled(bf16), filled(ordinary.square().to(torch.bfloat16))),
            eight_bit=(_ordinary_codes(n, filled), _ordinary_codes(n, filled)),
        )


def _ordinary_codes(n: int, filled: Callable[[torch.Tensor, int], torch.Tensor]) -> EightBit:
    num_blocks = -(-n // MOMENT_BLOCK)
    codes = torch.randint(0, 256, (min(n, _DRAWN),), dtype=torch.uint8)
    exponents = torch.full((num_blocks,), 120, dtype=torch.uint8)
    return EightBit(filled(codes, num_blocks * MOMENT_BLOCK), exponents)


def our_subjects(arrays: Arrays, *, non_temporal: bool) -> dict[str, Run]:
    """The kernel's passes and the loops that only read and write, for each kind of moments."""
    hyper = _C.AdamHyper(_LR, 0.9, 0.999, 1e-8, _WEIGHT_DECAY, 10, True, True)
    bf16 = _C.DType.bfloat16
    previous = _C.GradientStep(arrays.previous.data_ptr(), bf16, 0.5, hyper)
    current = _C.GradientStep(arrays.current.data_ptr(), bf16, 0.5, hyper)
    out = _C.Outgoing(arrays.out.data_ptr(), bf16, non_temporal)
    n = arrays.p.numel()
    p = arrays.p.data_ptr()
    runs: dict[str, Run] = {}
    for suffix, (m, v) in (
        ("", (arrays.m, arrays.v)),
        ("_bf16", arrays.bf16),
        ("_8bit", arrays.eight_bit),
    ):
        moments = native_moments(m, v, Rounding(1, 2))
        runs |= {
            f"commit{suffix}": lambda threads, moments=moments: _C.commit(
                p, moments, n, current, out, threads
            ),
            f"commit_then_preview{suffix}": lambda threads, moments=moments: _C.commit_then_preview(
                p, moments, n, previous, current, out, threads
            ),
            f"preview{suffix}": lambda threads, moments=moments: _C.preview(
                p, moments, n, current, out, threads
            ),
            f"read_write{suffix}": lambda threads, moments=moments: _C.read_write(
                p, moments, n, threads
            ),
        }
    return {name: _holding(arrays, run) for name, run in runs.items() if name in BYTES_PER_PARAM}


def _holding(arrays: Arrays, run: Run) -> Run:
    """The same pass. Addresses keep no tensor alive; a closure does."""

    return partial(_run_held, arrays, run)


def _run_held(_arrays: Arrays, run: Run, num_threads: int) -> None:
    run(num_threads)


def torch_fused_subject(arrays: Arrays) -> Run:
    """torch.optim.AdamW(fused=True) on the CPU, fp32 gradient, fp32 weights only."""
    weight = torch.nn.Parameter(arrays.p)
    weight.grad = arrays.gradient
    optimizer = torch.optim.AdamW([weight], lr=_LR, weight_decay=_WEIGHT_DECAY, fused=True)
    optimizer.state[weight] = {
        "step": torch.tensor(10.0),
        "exp_avg": arrays.m,
        "exp_avg_sq": arrays.v,
    }

    def run(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        optimizer.step()

    return run


def deepspeed_subjects(arrays: Arrays) -> dict[str, Run | None]:
    """DeepSpeedCPUAdam alone, and with what ZeRO-Offload does around it; None if not to be had.

    The first call on a machine compiles DeepSpeed's extension, which takes about a minute.
    """
    try:
        weight = torch.nn.Parameter(arrays.p)
        weight.grad = arrays.gradient
        optimizer = build_deepspeed_adam(weight)
    except (ImportError, RuntimeError, OSError) as error:
        logger.warning("DeepSpeedCPUAdam is left out: %s", error)
        return {"deepspeed_adam": None, "deepspeed_path": None}
    optimizer.state[weight] = {"step": 10, "exp_avg": arrays.m, "exp_avg_sq": arrays.v}

    def run_adam(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        optimizer.step()

    def run_path(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        arrays.gradient.mul_(1.0)  # clip and unscale; by 1, so that repeats see equal values
        optimizer.step()
        arrays.out.copy_(arrays.p)

    return {"deepspeed_adam": run_adam, "deepspeed_path": run_path}


def build_deepspeed_adam(weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam for one parameter; raises ImportError or RuntimeError if not to be had."""
    with _stdout_to_stderr(), _ninja_on_path():
        adam = importlib.import_module("deepspeed.ops.adam")
        return adam.DeepSpeedCPUAdam([weight], lr=_LR, weight_decay=_WEIGHT_DECAY, adamw_mode=True)


def all_subjects(
    arrays: Arrays, *, non_temporal: bool, with_others: bool = True
) -> dict[str, Run | None]:
    """Every subject by the name it has in the result, in the order of the table.

    Args:
        arrays: of all of them.
        non_temporal: whether our passes write the outgoing copy past the cache.
        with_others: whether DeepSpeed's and torch's optimizers are measured, too.
    """
    subjects: dict[str, Run | None] = dict(our_subjects(arrays, non_temporal=non_temporal))
    if with_others:
        subjects |= {**deepspeed_subjects(arrays), "torch_fused": torch_fused_subject(arrays)}
    return {name: subjects.get(name) for name in BYTES_PER_PARAM}


@contextlib.contextmanager
def _stdout_to_stderr() -> Generator[None]:
    """Compilers and DeepSpeed write to file descriptor 1, which may be carrying our JSON."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextlib.contextmanager
def _ninja_on_path() -> Generator[None]:
    """DeepSpeed's build runs `ninja`, which a venv that is not activated hides from PATH."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = before
