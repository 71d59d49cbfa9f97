"""Command line of the training script: arguments, the demo's values, and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import models


class OptionError(ValueError):
    """An option of the command line, or two together, cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line. None: the DeepSpeed JSON's value, or what the machine suggests."""

    engine: str
    """"hytrain"; for comparison "deepspeed", plain DeepSpeed, or "torch", all on one GPU."""
    deepspeed_config: Path | None
    """DeepSpeed JSON; None picks one of ds_configs/."""
    local_rank: int
    """This process's device on its machine; set by the launcher."""
    demo: bool
    """A short run with values for this machine."""
    model: str
    """Preset, or path of a transformers config."""
    vocab_size: int | None
    """The model's vocabulary; None keeps its config's."""
    attention: str
    """transformers' attn_implementation: "sdpa" or "eager"."""
    activation_checkpointing: bool
    """Recompute each block's activations in backward."""
    data: list[Path]
    """Text files, JSON lines, folders; empty is the standard library's sources."""
    text_field: str
    """Field of a JSON line that holds the text."""
    tokenizer: Path | None
    """Folder of a tokenizer; None is one token a byte."""
    cache_dir: Path | None
    """Where tokenised corpora are kept; None is the user's cache folder."""
    steps: int
    """Optimizer steps of the whole run, resumed ones included."""
    seq_len: int
    """Tokens a sequence."""
    micro_batch: int | None
    """Sequences a rank computes at once."""
    global_batch: int | None
    """Sequences a step, all ranks and micro-batches together."""
    plan: Path | None
    """File of `hytrain plan` to train by; None: the JSON's, if it has one."""
    lr: float | None
    """Peak learning rate."""
    warmup: int | None
    """Steps of learning rate warm-up."""
    gpu_fraction: float | Literal["solve"] | None
    """Share of layers updated on the GPU, or "solve": hytrain.gpu_fraction of the JSON."""
    seed: int
    """Seed of weights, order of data and dropout."""
    eval_sequences: int
    """Held-out sequences of an evaluation, about."""
    eval_every: int
    """Steps between evaluations; 0 evaluates at the start and the end alone."""
    save_every: int
    """Steps between checkpoints; 0 is none."""
    reference_steps: int
    """Passes without an update that are timed before the engine is made; 0 is none."""
    resume: str | None
    """Checkpoint to go on from: a tag, or "latest"; None starts anew."""
    overwrite: bool
    """Replace the run that the output folder holds."""
    out: Path
    """Folder of metrics, loss curve, checkpoints."""


DEMO_CPU: dict[str, Any] = {
    "model": "llama-3m",
    "steps": 200,
    "seq_len": 256,
    "micro_batch": 4,
    "global_batch": 4,
    "lr": 2e-3,
    "warmup": 10,
    "eval_sequences": 32,
}
DEMO_GPU: dict[str, Any] = {
    "model": "llama-1b",
    "steps": 200,
    "seq_len": 1024,
    "micro_batch": 8,
    "global_batch": 8,
    "lr": 3e-4,
    "warmup": 20,
    "eval_sequences": 64,
}


def build_parser() -> argparse.ArgumentParser:
    """Make the parser, without the two options that deepspeed.add_config_arguments adds."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a language model with its Adam state in host memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=("hytrain", "deepspeed", "torch"),
        default="hytrain",
        help="torch: one process, fp32 master weights and AdamW on its device",
    )
    add("--local_rank", "--local-rank", type=int, default=-1, help="set by the launcher")
    add("--demo", action="store_true", help="a short run with values for this machine")
    _add_model_arguments(parser.add_argument_group("model").add_argument)
    _add_data_arguments(parser.add_argument_group("data").add_argument)
    _add_run_arguments(parser.add_argument_group("run").add_argument)
    return parser


def _add_model_arguments(add: Callable[..., argparse.Action]) -> None:
    add(
        "--model",
        default="llama-100m",
        help=f"{', '.join(models.PRESETS)}, or a transformers config.json or its folder",
    )
    add("--vocab-size", type=int, help="vocabulary of the model, instead of its config's")
    add("--attention", choices=("sdpa", "eager"), default="sdpa", help="kernel of attention")
    add("--activation-checkpointing", action="store_true", help="recompute blocks in backward")


def _add_data_arguments(add: Callable[..., argparse.Action]) -> None:
    add(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        help="text files, .jsonl, .jsonl.gz, .json.gz, or folders of them; without it the "
        "source files of Python's standard library",
    )
    add("--text-field", default="text", help="field of a JSON line that holds the text")
    add("--tokenizer", type=Path, help="folder of a tokenizer; without it one token a byte")
    add("--cache-dir", type=Path, help="where tokenised data is kept")
    add("--seq-len", type=int, default=1024, help="tokens a sequence")


def _add_run_arguments(add: Callable[..., argparse.Action]) -> None:
    add("--steps", type=int, default=1000, help="optimizer steps of the whole run")
    add("--micro-batch", type=int, help="sequences a rank computes at once")
    add("--global-batch", type=int, help="sequences a step")
    add(
        "--plan",
        type=Path,
        metavar="FILE",
        help="of `hytrain plan`: who computes and keeps how much; instead of the JSON's batches",
    )
    add("--lr", type=float, help="peak learning rate, instead of the JSON's")
    add("--warmup", type=int, help="warm-up steps, instead of the JSON's")
    add(
        "--gpu-fraction",
        type=_gpu_fraction,
        metavar="K",
        help='share of layers updated on the GPU, or "solve"; instead of the JSON\'s',
    )
    add("--seed", type=int, default=0, help="of weights, order of data and dropout")
    add("--eval-sequences", type=int, default=64, help="held-out sequences, about; 0 is none")
    add("--eval-every", type=int, default=0, metavar="N", help="steps; 0: at start and end alone")
    add("--save-every", type=int, default=0, metavar="N", help="steps; 0 saves nothing")
    add(
        "--reference-steps",
        type=int,
        default=0,
        metavar="N",
        help="time N passes without updates before training, into reference.json",
    )
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="TAG",
        help="go on from the latest checkpoint in --out, or from TAG (step100)",
    )
    add("--overwrite", action="store_true", help="replace the run that --out holds")
    add("--out", type=Path, default=Path("out/train_lm"), help="folder of all results")


def _gpu_fraction(text: str) -> float | Literal["solve"]:
    if text == "solve":
        return "solve"
    try:
        return float(text)
    except ValueError:
        message = f'{text} is neither a number in [0, 1] nor "solve"'
        raise argparse.ArgumentTypeError(message) from None


def parse_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, *, on_gpu: bool
) -> Options:
    """Parse and check the command line; with ``--demo`` the machine's demo is the default.

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
    values = vars(parser.parse_args(argv))
    if values["deepspeed_config"] is not None:
        values["deepspeed_config"] = Path(values["deepspeed_config"])
    if values["demo"] and values["resume"] is not None:
        # The demo replaces its folder by default; a resumed one goes on in it.
        values["overwrite"] = False
    options = Options(**{f.name: values[f.name] for f in fields(Options)})
    _check(options)
    return options


def _check(options: Options) -> None:
    least = {
        "steps": 1,
        "seq_len": 2,
        "micro_batch": 1,
        "global_batch": 1,
        "warmup": 1,
        "vocab_size": 1,
        "save_every": 0,
        "reference_steps": 0,
        "eval_every": 0,
        "eval_sequences": 0,
    }
    for name, limit in least.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            raise OptionError(f"--{name.replace('_', '-')} is {value}; {limit} is the least")
    if options.lr is not None and not 0 < options.lr < float("inf"):
        raise OptionError(f"--lr is {options.lr}; give a finite number above 0")
    if options.plan is not None and options.engine != "hytrain":
        raise OptionError(f"--plan is hytrain's; leave it out with --engine {options.engine}")
    if options.engine == "torch" and (options.save_every or options.resume is not None):
        raise OptionError("--engine torch is for comparison: it neither saves nor resumes")
    if options.gpu_fraction is not None:
        if options.engine != "hytrain":
            raise OptionError(
                f"--gpu-fraction is hytrain's; leave it out with --engine {options.engine}, which "
                "updates every layer in one place"
            )
        if options.gpu_fraction != "solve" and not 0 <= options.gpu_fraction <= 1:
            raise OptionError(
                f'--gpu-fraction is {options.gpu_fraction}; give one in [0, 1], or "solve"'
            )
    if options.resume is not None and options.overwrite:
        raise OptionError(
            "--resume goes on with the run in --out, --overwrite deletes it: give one of them"
        )
    if options.warmup is not None and options.warmup >= options.steps:
        raise OptionError(
            f"--warmup {options.warmup} leaves nothing of --steps {options.steps}: "
            "give a smaller one"
        )
