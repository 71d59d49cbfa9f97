"""Command line of the training script: arguments, the demo's values, and their checks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import models


class OptionError(ValueError):
    """An option of the command line, or two together, cannot be used."""


DEMO_CPU: dict[str, Any] = {
    **{"model": "llama-3m", "steps": 200, "seq_len": 256, "micro_batch": 4, "global_batch": 4},
    **{"lr": 2e-3, "warmup": 10, "eval_sequences": 32},
}
DEMO_GPU: dict[str, Any] = {
    **{"model": "llama-1b", "steps": 200, "seq_len": 1024, "micro_batch": 8, "global_batch": 8},
    **{"lr": 3e-4, "warmup": 20, "eval_sequences": 64},
}
_LEAST = {
    **{"steps": 1, "seq_len": 2, "micro_batch": 1, "global_batch": 1, "warmup": 1},
    **{"vocab_size": 1, "save_every": 0, "reference_steps": 0, "eval_every": 0},
    "eval_sequences": 0,
}


def _gpu_fraction(text: str) -> float | Literal["solve"]:
    try:
        return "solve" if text == "solve" else float(text)
    except ValueError:
        message = f'{text} is neither a number in [0, 1] nor "solve"'
        raise argparse.ArgumentTypeError(message) from None


def build_parser() -> argparse.ArgumentParser:
    """Makes the parser, without the two options that deepspeed.add_config_arguments adds."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a language model with its Adam state in host memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # fmt: off
    add = parser.add_argument
    add("--engine", choices=("hytrain", "deepspeed", "torch"), default="hytrain",
        help="for comparison plain DeepSpeed; or torch: one process, fp32 master weights and AdamW "
        "on its device")
    add("--local_rank", "--local-rank", type=int, default=-1, help="set by the launcher")
    add("--demo", action="store_true", help="a short run with values for this machine")
    add = parser.add_argument_group("model").add_argument
    add("--model", default="llama-100m",
        help=f"{', '.join(models.PRESETS)}, or a transformers config.json or its folder")
    add("--vocab-size", type=int, help="vocabulary of the model, instead of its config's")
    add("--attention", choices=("sdpa", "eager"), default="sdpa", help="kernel of attention")
    add("--activation-checkpointing", action="store_true", help="recompute blocks in backward")
    add = parser.add_argument_group("data").add_argument
    add("--data", type=Path, nargs="+", default=[],
        help="text files, .jsonl, .jsonl.gz, .json.gz, or folders of them; without it the source "
        "files of Python's standard library")
    add("--text-field", default="text", help="field of a JSON line that holds the text")
    add("--tokenizer", type=Path, help="folder of a tokenizer; without it one token a byte")
    add("--cache-dir", type=Path, help="where tokenised data is kept")
    add("--seq-len", type=int, default=1024, help="tokens a sequence")
    add = parser.add_argument_group("run").add_argument
    add("--steps", type=int, default=1000, help="optimizer steps of the whole run")
    add("--micro-batch", type=int, help="sequences a rank computes at once")
    add("--global-batch", type=int, help="sequences a step")
    add("--plan", type=Path, metavar="FILE",
        help="of `hytrain plan`: who computes and keeps how much; instead of the JSON's batches")
    add("--lr", type=float, help="peak learning rate, instead of the JSON's")
    add("--warmup", type=int, help="warm-up steps, instead of the JSON's")
    add("--gpu-fraction", type=_gpu_fraction, metavar="K",
        help='share of layers updated on the GPU, or "solve"; instead of the JSON\'s')
    add("--seed", type=int, default=0, help="of weights, order of data and dropout")
    add("--eval-sequences", type=int, default=64, help="held-out sequences, about; 0 is none")
    add("--eval-every", type=int, default=0, metavar="N", help="steps; 0: at start and end alone")
    add("--save-every", type=int, default=0, metavar="N", help="steps; 0 saves nothing")
    add("--reference-steps", type=int, default=0, metavar="N",
        help="time N passes without updates before training, into reference.json")
    add("--resume", nargs="?", const="latest", metavar="TAG",
        help="go on from the latest checkpoint in --out, or from TAG (step100)")
    add("--overwrite", action="store_true", help="replace the run that --out holds")
    add("--out", type=Path, default=Path("out/train_lm"), help="folder of all results")
    # fmt: on
    return parser


def parse_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, *, on_gpu: bool
) -> argparse.Namespace:
    """Parses and checks the command line; with ``--demo`` the machine's demo is the default.

    Args:
        parser: from ``build_parser``, after deepspeed.add_config_arguments.
        argv: arguments; None is the process's own.
        on_gpu: whether the run will use a GPU.

    Raises:
        OptionError: a value out of range, or options that exclude each other.
    """
    if parser.parse_known_args(argv)[0].demo:
        parser.set_defaults(**(DEMO_GPU if on_gpu else DEMO_CPU), overwrite=True)
        parser.set_defaults(out=Path("out/demo"))
    options = parser.parse_args(argv)
    if options.deepspeed_config is not None:
        options.deepspeed_config = Path(options.deepspeed_config)
    if options.demo and options.resume is not None:
        # The demo replaces its folder by default; a resumed one goes on in it.
        options.overwrite = False
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    for name, limit in _LEAST.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            raise OptionError(f"--{name.replace('_', '-')} is {value}; {limit} is the least")
    if options.lr is not None and not 0 < options.lr < math.inf:
        raise OptionError(f"--lr is {options.lr}; give a finite number above 0")
    for name in ("plan", "gpu_fraction"):
        if getattr(options, name) is not None and options.engine != "hytrain":
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is hytrain's; leave it out with --engine {options.engine}")
    if options.engine == "torch" and (options.save_every or options.resume is not None):
        raise OptionError("--engine torch is for comparison: it neither saves nor resumes")
    fraction = options.gpu_fraction
    if fraction not in (None, "solve") and not 0 <= fraction <= 1:
        raise OptionError(f'--gpu-fraction is {fraction}; give one in [0, 1], or "solve"')
    if options.resume is not None and options.overwrite:
        raise OptionError(
            "--resume goes on with the run in --out, --overwrite deletes it: give one of them"
        )
    if options.warmup is not None and options.warmup >= options.steps:
        raise OptionError(
            f"--warmup {options.warmup} leaves nothing of --steps {options.steps}: "
            "give a smaller one"
        )
