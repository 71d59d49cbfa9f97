"""`hytrain explain`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from hytrain.errors import ConfigError, HyTrainError
from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import (
    check_outputs,
    check_picture,
    flag,
    given_flags,
    one_line,
    positive_float,
    positive_int,
    rank_number,
)
from hytrain.tools.explain.rates import Rates

_EXPLAIN = (
    "With the metrics file of a run: its last decision about k, what was measured, and every "
    "number of GPU layers, predicted and measured. With a DeepSpeed configuration: what will "
    "happen; with --model also the memory, and an estimate of the step."
)
_GIB = 1024**3
# Destinations of the options that an estimate takes, and of all that only a configuration takes.
_RATES = tuple(rate.name for rate in fields(Rates))
_FOR_MODEL = ("gpu_memory", "host_memory", *_RATES)
_FOR_CONFIG = ("model", "ranks", *_FOR_MODEL)


def add(explain: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    explain.description = _EXPLAIN
    explain.add_argument(
        "file",
        type=Path,
        metavar="METRICS|CONFIG",
        help="JSON lines of a run with placement decisions, or a DeepSpeed JSON",
    )
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    explain.add_argument("--rank", type=rank_number, help="whose decisions, or sizes (0)")
    picture = explain.add_mutually_exclusive_group()
    picture.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="the picture (default: METRICS with the suffix .placement.png; of a CONFIG none)",
    )
    picture.add_argument("--no-png", action="store_true", help="no picture")
    model = explain.add_argument_group("with CONFIG")
    model.add_argument(
        "--model", type=Path, metavar="PATH", help="a transformers config.json or its folder"
    )
    model.add_argument("--ranks", type=positive_int, help="ranks that share the state (1)")
    model.add_argument(
        "--gpu-memory",
        type=positive_float,
        metavar="GIB",
        help="of each rank's GPU (default: this machine's; without a GPU no limit)",
    )
    model.add_argument(
        "--host-memory",
        type=positive_float,
        metavar="GIB",
        help="for all ranks together (default: what is free on this machine)",
    )
    rates = explain.add_argument_group(
        "rates of an estimate, with CONFIG and --model; defaults: one H200 with 16 cores"
    )
    for rate in fields(Rates):
        kind = positive_int if isinstance(rate.default, int) else positive_float
        words = f"{rate.metadata['words']} ({rate.default:g})"
        rates.add_argument(flag(rate.name), type=kind, help=words)
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    check_picture("--png", arguments.png)
    read = [("METRICS|CONFIG", arguments.file), ("--model", arguments.model)]
    check_outputs({"--png": arguments.png}, read)
    text = _read(arguments.file)
    config = _whole_config(arguments.file, text)
    if config is not None:
        return _explain_config(arguments, config)
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


def _whole_config(path: Path, text: str) -> Mapping[str, Any] | None:
    """The configuration that the file is; None for JSON lines."""
    from hytrain.formats.record import parse_json

    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        whole = parse_json(text, str(path), ConfigError)
    except ConfigError as error:
        with suppress(ConfigError):
            parse_json(first, "", ConfigError)
            return None
        raise ConfigError(
            f"{error}; nor is it a metrics file, which has a JSON object a line"
        ) from None
    if not isinstance(whole, dict):
        kind = type(whole).__name__
        raise ConfigError(f"{path} holds a JSON {kind}: give a metrics file or a DeepSpeed JSON")
    return None if "step" in whole else cast("dict[str, Any]", whole)


def _explain_metrics(arguments: argparse.Namespace, text: str) -> int:
    # Imported where they are used: `hytrain --help` should not wait for numpy.
    from hytrain.tools.explain.candidates import candidate_rows
    from hytrain.tools.explain.history import read_history
    from hytrain.tools.explain.run_report import explain_run, explained, run_json

    try:
        history = read_history(text, arguments.rank or 0)
    except HyTrainError as error:
        raise ConfigError(f"{arguments.file}: {error}") from error
    text = json.dumps(run_json(history), indent=2) if arguments.json else fold(explain_run(history))
    print(text)
    if not arguments.no_png:
        decision = explained(history)
        rows = candidate_rows(decision, history.measured_at)
        title = f"step time over k, after step {decision.step}"
        _draw(arguments, rows, decision.costs, title)
    return 0


def _draw(arguments: argparse.Namespace, rows: Any, costs: Any, title: str) -> None:
    """The picture; one that nobody asked for may fail with a word on stderr."""
    from hytrain.tools.explain.chart import draw_chart

    path = arguments.png or arguments.file.with_suffix(".placement.png")
    try:
        if costs is None:
            raise ConfigError("no picture: nothing has been measured yet (--no-png)")
        draw_chart(path, rows, costs, title=title)
    except ConfigError as error:
        if arguments.png is not None:
            raise
        print(f"hytrain: {one_line(error)}", file=sys.stderr)
        return
    print(f"picture: {path}", file=sys.stderr)


def _explain_config(arguments: argparse.Namespace, config: Mapping[str, Any]) -> int:
    from hytrain.config import SECTION, HyTrainConfig
    from hytrain.tools.explain import config_estimate as outlook
    from hytrain.tools.explain.candidates import candidate_rows
    from hytrain.tools.explain.config_words import config_words
    from hytrain.tools.explain.training_form import read_form

    section = HyTrainConfig.from_deepspeed(config)
    if section is None:
        raise ConfigError(
            f'{arguments.file} has no section "{SECTION}": it makes DeepSpeed\'s own engine, with '
            f'nothing to explain; add "{SECTION}": {{}}, or give a metrics file'
        )
    _check_ranks(arguments, section.shard_fractions)
    form = read_form(config)
    words = config_words(section, form, arguments.ranks)
    result: dict[str, Any] = {"kind": "config", "words": words.splitlines()}
    if arguments.model is None:
        given = given_flags(arguments, (*_FOR_MODEL, "rank", "png"))
        if given:
            raise ConfigError(f"{', '.join(given)}: needs --model, whose layers it is about")
        print(json.dumps(result, indent=2) if arguments.json else fold(words))
        return 0
    # Imported here: it needs torch.
    from hytrain.tools.profiler.model_sizes import read_model_sizes

    sizes = read_model_sizes(
        arguments.model, section, form, num_ranks=arguments.ranks or 1, rank=arguments.rank or 0
    )
    rates = _rates(arguments)
    costs = outlook.estimate_costs(
        sizes,
        rates,
        accumulation=form.accumulation,
        chunk_elements=section.offload.chunk_elements,
        alpha=section.solver.alpha,
    )
    limits = outlook.memory_limits(section, sizes, *_memory(arguments))
    decision = outlook.expected_decision(section, sizes, limits, costs)
    if arguments.json:
        result |= outlook.model_json(decision, sizes, rates)
        print(json.dumps(result, indent=2))
    else:
        print(fold(f"{words}\n\n{outlook.explain_model(decision, sizes, rates)}"))
    if arguments.png is not None:
        _draw(arguments, candidate_rows(decision), costs, "estimated step time over k")
    return 0


def _check_ranks(arguments: argparse.Namespace, fractions: Sequence[float] | None) -> None:
    """Unequal shards are for a number of ranks, which sizes of a model depend on.

    Raises:
        ConfigError: there are not as many ranks.
    """
    if fractions is None or (arguments.ranks is None and arguments.model is None):
        return
    if len(fractions) != (arguments.ranks or 1):
        given = "without --ranks" if arguments.ranks is None else f"--ranks {arguments.ranks}"
        raise ConfigError(
            f'{given}: "hytrain.shard_fractions" of {arguments.file} has {len(fractions)} numbers, '
            f"one a rank: give --ranks {len(fractions)}"
        )


def _rates(arguments: argparse.Namespace) -> Rates:
    values = vars(arguments)
    return Rates(**{name: values[name] for name in _RATES if values[name] is not None})


def _memory(arguments: argparse.Namespace) -> tuple[int | None, int]:
    """The rank's GPU and its part of the host, in bytes."""
    import torch

    from hytrain.hardware.gpu_memory import usable_gpu_bytes
    from hytrain.kernels.host_limits import available_host_bytes

    if arguments.gpu_memory is not None:
        gpu: int | None = int(arguments.gpu_memory * _GIB)
    else:
        gpu = usable_gpu_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    host = available_host_bytes()
    if arguments.host_memory is not None:
        host = int(arguments.host_memory * _GIB)
    return gpu, host // (arguments.ranks or 1)
