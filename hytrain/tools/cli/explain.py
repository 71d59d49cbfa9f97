"""`hytrain explain`."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path

from hytrain.errors import ConfigError, HyTrainError
from hytrain.formats.file_kind import other_kind
from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import (
    gibibytes,
    given_flags,
    positive_int,
    rank_count,
    rank_number,
)
from hytrain.tools.model_path import read_model_file
from hytrain.tools.stdout import importing_deepspeed

_EXPLAIN = (
    "With the metrics file of a run: its last decision about k, what was measured, and every "
    "number of GPU layers, predicted and measured. With a DeepSpeed configuration: what it means; "
    "with --model also the memory that each number of GPU layers takes. Exit status 1: none fits; "
    "2: training would refuse the configuration."
)
# ``dest`` of the options that need a model, and of those that need a configuration.
FOR_MODEL = ("ranks", "seq", "gpu_memory", "host_memory")
_FOR_CONFIG = ("model", *FOR_MODEL)


def add(explain: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    explain.description = _EXPLAIN
    explain.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the metrics file of a run, or a DeepSpeed JSON",
    )
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    explain.add_argument(
        "--rank",
        type=rank_number,
        metavar="N",
        help="the rank to report on (default: the first that does not fit, else 0)",
    )
    model = explain.add_argument_group("with a DeepSpeed JSON")
    model.add_argument(
        "--model", type=Path, metavar="PATH", help="a transformers config.json or its folder"
    )
    model.add_argument(
        "--ranks",
        type=rank_count,
        metavar="N",
        help="ranks that share the state (default: as many as batch_sizes, shard_fractions, a plan "
        "or --gpu-memory have numbers, else 1)",
    )
    model.add_argument(
        "--gpu-memory",
        type=lambda text: [gibibytes(part) for part in text.split(",")],
        metavar="GIB[,GIB...]",
        help="memory of each rank's GPU, or one number for all (default: this machine's)",
    )
    model.add_argument(
        "--host-memory",
        type=gibibytes,
        metavar="GIB",
        help="host memory for all ranks together (default: what is free on this machine)",
    )
    model.add_argument(
        "--seq",
        type=positive_int,
        metavar="TOKENS",
        help="tokens of a sample; then the inputs of all blocks are counted, too, which activation "
        "checkpointing keeps (default: not counted)",
    )
    model.add_argument(
        "--verbose",
        action="store_true",
        help="with --model: also what the configuration means, as without it",
    )
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    if other := other_kind(arguments.file, "metrics file", "DeepSpeed configuration"):
        raise ConfigError(f"{other}: give a metrics file or a DeepSpeed JSON")
    text = _read(arguments.file)
    if not _is_metrics(text):
        given = given_flags(arguments, ("rank", *FOR_MODEL))
        if given and arguments.model is None:
            raise ConfigError(f"{', '.join(given)}: needs --model, whose layers it is about")
        if arguments.model is not None:
            read_model_file(arguments.model)  # a wrong path is refused before torch is imported
        with importing_deepspeed():
            from hytrain.tools.cli.explain_config import explain_config
        return explain_config(arguments)
    given = given_flags(arguments, _FOR_CONFIG)
    if given:
        raise ConfigError(
            f"{', '.join(given)}: for a DeepSpeed configuration, but {arguments.file} is a metrics "
            "file, which has all that a run measured: leave it out"
        )
    return _explain_metrics(arguments, text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        reason = "it is not text"
    except OSError as error:
        reason = str(error.strerror)
    raise ConfigError(
        f"cannot read {path} ({reason}): give the metrics file of a run or a DeepSpeed JSON"
    )


def _is_metrics(text: str) -> bool:
    """Whether the text is JSON lines; a configuration may be one line, too, and not strict JSON."""
    from hytrain.formats.record import parse_json

    lines = [line for line in text.splitlines() if line.strip()]
    with suppress(ConfigError):
        first = parse_json(lines[0] if lines else "", "", ConfigError)
        return isinstance(first, dict) and (len(lines) > 1 or "step" in first)
    return False


def _explain_metrics(arguments: argparse.Namespace, text: str) -> int:
    # Imported where they are used: `hytrain --help` should not wait for numpy.
    from hytrain.tools.explain.history import read_history
    from hytrain.tools.explain.report import run_json, run_text

    try:
        history = read_history(text, arguments.rank)
    except HyTrainError as error:
        file: Path = arguments.file
        own = file.with_name(f"{file.stem}.rank{arguments.rank}{file.suffix}")
        there = f"; give {own}" if arguments.rank is not None and own.is_file() else ""
        raise ConfigError(f"{file}: {error}{there}") from error
    print(json.dumps(run_json(history), indent=2) if arguments.json else fold(run_text(history)))
    return 0
