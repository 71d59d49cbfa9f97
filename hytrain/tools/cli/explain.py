"""`hytrain explain`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hytrain.errors import ConfigError, HyTrainError, size_text
from hytrain.formats.file_kind import other_kind
from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import (
    gibibytes,
    given_flags,
    positive_int,
    rank_number,
)
from hytrain.tools.stdout import stdout_to

if TYPE_CHECKING:
    from hytrain.config import HyTrainConfig
    from hytrain.placement.records import Decision
    from hytrain.tools.explain.config import ModelSizes
    from hytrain.tools.explain.training_form import TrainingForm

_EXPLAIN = (
    "With the metrics file of a run: its last decision about k, what was measured, and every "
    "number of GPU layers, predicted and measured. With a DeepSpeed configuration: what it means; "
    "with --model also the memory that each number of GPU layers takes. Exit status 1: none fits; "
    "2: training would refuse the configuration."
)
_NO_MODEL = (
    "Accepted by training. Memory was not checked: give the model (its transformers config.json; "
    "weights are not read) and the memory of the machine that is to train, in GiB:"
)
_EXAMPLE = "model/config.json --gpu-memory 78 --host-memory 256"
_GIB = 1024**3
# Destinations of the options that only a model, and that only a configuration takes.
_FOR_MODEL = ("rank", "ranks", "seq", "gpu_memory", "host_memory")
_FOR_CONFIG = ("model", "ranks", "seq", "gpu_memory", "host_memory")


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
    explain.add_argument(
        "--rank", type=rank_number, help="the rank to report on (default: the first)"
    )
    model = explain.add_argument_group("with CONFIG")
    model.add_argument(
        "--model", type=Path, metavar="PATH", help="a transformers config.json or its folder"
    )
    model.add_argument("--ranks", type=positive_int, help="ranks that share the state (default: 1)")
    model.add_argument(
        "--gpu-memory",
        type=gibibytes,
        metavar="GIB",
        help="memory of each rank's GPU (default: this machine's; without a GPU no limit)",
    )
    model.add_argument(
        "--host-memory",
        type=gibibytes,
        metavar="GIB",
        help="memory for all ranks together (default: what is free on this machine)",
    )
    model.add_argument(
        "--seq",
        type=positive_int,
        metavar="TOKENS",
        help="of a sample: also what its blocks' inputs take",
    )
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    if other := other_kind(arguments.file, "metrics file", "DeepSpeed configuration"):
        raise ConfigError(f"{other}: give a metrics file or a DeepSpeed JSON")
    text = _read(arguments.file)
    if not _is_metrics(text):
        return _explain_config(arguments)
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
    """JSON lines; a configuration may have one line, too, and more than JSON in it."""
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
    _print(arguments, run_json(history) if arguments.json else run_text(history))
    return 0


def _print(arguments: argparse.Namespace, found: Any) -> None:
    print(json.dumps(found, indent=2) if arguments.json else fold(found))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A configuration, as training would read it, and the rank that it is explained for."""

    section: HyTrainConfig
    form: TrainingForm
    warnings: list[str]
    ranks: int
    rank: int
    check_model: Callable[[ModelSizes], None] | None

    @property
    def words(self) -> str:
        from hytrain.tools.explain.config import config_words

        return config_words(self.section, self.form)


def _explain_config(arguments: argparse.Namespace) -> int:
    with stdout_to(2):  # where DeepSpeed writes warnings
        asked = _read_config(arguments)
    if arguments.model is not None:
        return _explain_model(arguments, asked)
    given = given_flags(arguments, _FOR_MODEL)
    if given:
        raise ConfigError(f"{', '.join(given)}: needs --model, whose layers it is about")
    if arguments.json:
        words = [*asked.warnings, *asked.words.splitlines()]
        _print(arguments, {"verdict": _NO_MODEL, "words": words})
    else:
        example = f"  hytrain explain {arguments.file} --model {_EXAMPLE}"
        words = "\n".join([*asked.warnings, "", asked.words])
        print(fold(_NO_MODEL), example, fold(words), sep="\n")
    return 0


def _read_config(arguments: argparse.Namespace) -> _Asked:
    from hytrain.config import SECTION
    from hytrain.engine.deepspeed_internals import load_config
    from hytrain.engine.sequence_groups import mesh_of, refuse_dealt_batches
    from hytrain.tools.explain.checks import read_as_training, with_plan
    from hytrain.tools.explain.training_form import read_form

    ranks, rank = arguments.ranks, arguments.rank or 0
    config = load_config(str(arguments.file))
    section, warnings = read_as_training(config)
    if section is None:
        raise ConfigError(
            f'{arguments.file} has no section "{SECTION}": it makes DeepSpeed\'s own engine, '
            f'with nothing to explain; add "{SECTION}": {{}}, or give a metrics file'
        )
    form = read_form(config)
    refuse_dealt_batches(section, form.sequence_ranks)
    if ranks is not None:
        mesh_of(config, mpu=None, mesh=None, ranks=ranks)
    check_model = None
    if section.plan is not None:
        section, check_model = with_plan(config, section, arguments.file, ranks, rank)
        ranks = len(section.shard_fractions or ())
    if rank >= (ranks or 1):
        raise ConfigError(f"--rank {rank}: ranks count from 0, and --ranks is {ranks or 1}")
    return _Asked(section, form, warnings, ranks or 1, rank, check_model)


def _explain_model(arguments: argparse.Namespace, asked: _Asked) -> int:
    # Imported here: they need torch.
    from hytrain.placement.memory import STREAMED
    from hytrain.tools.explain.config import first_decision, model_text, verdict_of
    from hytrain.tools.explain.report import decision_json
    from hytrain.tools.profiler.model_sizes import read_model_sizes

    section, form = asked.section, asked.form
    gpu, host, shares_host = _memory(arguments, asked.ranks)
    tokens, inputs = _block_inputs(arguments, asked)
    is_offloaded = section.solver.host_activation_bytes > 0 or section.activations == "offload"
    on_gpu = 0 if is_offloaded else inputs

    def begins(form: TrainingForm) -> tuple[ModelSizes, Decision]:
        sizes = read_model_sizes(
            arguments.model, section, form, num_ranks=asked.ranks, rank=asked.rank
        )
        found = first_decision(section, sizes, gpu, host, on_gpu, shares_host=shares_host)
        return sizes, found

    ways = {"": begins(form)}
    sizes, decision = ways[""]
    if asked.check_model is not None:
        asked.check_model(sizes)
    if not decision.bounds.fits and not form.weights_on_host:
        ways[STREAMED] = begins(replace(form, stage=3, shards_weights=True, weights_on_host=True))
    is_fixed = section.gpu_fraction != "solve"
    verdict, words = verdict_of(ways, is_fixed=is_fixed), asked.words
    if arguments.json:
        result = {"verdict": verdict, "words": [*asked.warnings, *words.splitlines()]}
        result |= {"parameters": sum(sizes.parameters)}
        result |= decision_json(decision, lambda _: None)
        result |= {"tokens": tokens, "block_input_bytes": inputs} if tokens else {}
        _print(arguments, result)
    else:
        heads = [verdict, *asked.warnings, *_assumed(arguments, gpu, host)]
        if tokens:
            words += f"\n{_inputs_words(inputs, tokens, on_gpu, section)}"
        _print(arguments, "\n".join([*heads, model_text(section, sizes, decision), "", words]))
    number, found = decision.gpu_layers_target, decision.bounds
    return 0 if (found.allow(number) if is_fixed else found.fits) else 1


def _block_inputs(arguments: argparse.Namespace, asked: _Asked) -> tuple[int, int]:
    """Tokens of a sample on this rank, and bytes of all blocks' inputs; 0 where not asked for."""
    from hytrain.tools.profiler.model_sizes import block_input_bytes

    if arguments.seq is None:
        return 0, 0
    tokens = -(-arguments.seq // asked.form.sequence_ranks)
    own = asked.section.micro_batch_sizes
    of_all = asked.form.batch.get("train_micro_batch_size_per_gpu", 1)
    micro = own[asked.rank] if own else of_all
    return tokens, micro * block_input_bytes(arguments.model, asked.form, tokens)


def _inputs_words(inputs: int, tokens: int, on_gpu: int, section: HyTrainConfig) -> str:
    return (
        "Activations: where all blocks are computed again in backward, their inputs take "
        f"{size_text(inputs)} for a micro-batch, {tokens:,} tokens of each sample on this rank. "
        f"The tables count {size_text(on_gpu)} of it on the GPU and, by "
        "hytrain.solver.host_activation_bytes, "
        f"{size_text(section.solver.host_activation_bytes)} on the host. What one block and "
        "the loss take while they are computed comes on top, on the GPU."
    )


def _assumed(arguments: argparse.Namespace, gpu: int | None, host: int) -> list[str]:
    """A line about memory that was not given."""
    assumed: list[str] = []
    if arguments.gpu_memory is None:
        there = "unlimited, since this machine has no GPU"
        assumed.append(f"--gpu-memory: {there if gpu is None else size_text(gpu)}")
    if arguments.host_memory is None:
        assumed.append(f"--host-memory: {size_text(host)} a rank, free on this machine now")
    return [f"Assumed, since not given: {'; '.join(assumed)}."] if assumed else []


def _memory(arguments: argparse.Namespace, ranks: int) -> tuple[int | None, int, bool]:
    """The rank's GPU and its part of the host, in bytes; whether the GPU's are the host's."""
    import torch

    from hytrain.hardware.gpu_memory import shares_host_memory, usable_gpu_bytes
    from hytrain.kernels.host_limits import available_host_bytes

    shares_host = False
    if arguments.gpu_memory is not None:
        gpu: int | None = int(arguments.gpu_memory * _GIB)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        gpu, shares_host = usable_gpu_bytes(device), shares_host_memory(device)
    host = available_host_bytes()
    if arguments.host_memory is not None:
        host = int(arguments.host_memory * _GIB)
    return gpu, host // ranks, shares_host
