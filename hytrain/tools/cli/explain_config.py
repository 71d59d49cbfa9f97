"""`hytrain explain` of a DeepSpeed configuration: what it means, and whether a model fits.

It needs torch and DeepSpeed, so it is imported only for this.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hytrain.config import SECTION, HyTrainConfig
from hytrain.engine.deepspeed_internals import load_config
from hytrain.engine.sequence_groups import mesh_of, refuse_dealt_batches
from hytrain.engine.unsupported import refuse_beside_streamed
from hytrain.errors import ConfigError, size_text
from hytrain.formats.text_table import fold
from hytrain.hardware.gpu_memory import shares_host_memory, usable_gpu_bytes
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.placement.records import Decision
from hytrain.tools.explain.advice import Begins, remedies
from hytrain.tools.explain.checks import NO_BATCH, read_as_training, with_plan
from hytrain.tools.explain.config_words import config_words
from hytrain.tools.explain.model_report import (
    ModelSizes,
    first_decision,
    has_room,
    model_text,
    verdict_of,
)
from hytrain.tools.explain.report import decision_json
from hytrain.tools.explain.training_form import TrainingForm, read_form
from hytrain.tools.profiler.language_model import check_length, read_config
from hytrain.tools.profiler.model_sizes import block_input_bytes, read_model_sizes
from hytrain.tools.stdout import stdout_to

_ACCEPTED = (
    "Accepted by training{once}. Memory was not checked: give the model (its transformers "
    "config.json; weights are not read) and the memory of the machine that is to train, in GiB:"
)
_EXAMPLE = "model/config.json --gpu-memory 78 --host-memory 256"
_NO_TRAINER = (
    'Warning: "hytrain.batch_sizes" and "hytrain.plan" need a loop with engine.train_batch, where '
    'nobody fills "auto" in.'
)
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class _Asked:
    """A configuration, as training would read it."""

    sections: list[HyTrainConfig]
    """Each rank's section: a plan may give ranks different ones."""
    form: TrainingForm
    warnings: list[str]
    check_model: Callable[[ModelSizes], None] | None

    def words(self, rank: int = 0) -> str:
        return config_words(self.sections[rank], self.form)


def explain_config(arguments: argparse.Namespace) -> int:
    """Prints what the arguments of `hytrain explain CONFIG` ask for; returns the exit status.

    Raises:
        ConfigError, UnsupportedError: training would refuse the configuration.
    """
    with stdout_to(2):  # where DeepSpeed writes warnings
        asked = _read_config(arguments)
    if arguments.model is not None:
        return _explain_model(arguments, asked)
    once = ", once a batch size is set" if NO_BATCH in asked.warnings else ""
    accepted = _ACCEPTED.format(once=once)
    if arguments.json:
        words = [*asked.warnings, *asked.words().splitlines()]
        print(json.dumps({"verdict": accepted, "words": words}, indent=2))
    else:
        example = f"  hytrain explain {arguments.file} --model {_EXAMPLE}"
        head = "\n".join([*asked.warnings, accepted])
        print(fold(head), example, "", fold(asked.words()), sep="\n")
    return 0


def _read_config(arguments: argparse.Namespace) -> _Asked:
    ranks, memory = arguments.ranks, arguments.gpu_memory or ()
    config, warnings = _load(arguments.file)
    section, others = read_as_training(config)
    warnings += others
    if section is None:
        raise ConfigError(
            f'{arguments.file} has no section "{SECTION}": it makes DeepSpeed\'s own engine, '
            f'with nothing to explain; add "{SECTION}": {{}}, or give a metrics file'
        )
    form = read_form(config)
    refuse_dealt_batches(section, form.sequence_ranks)
    if form.is_muon:
        refuse_beside_streamed(section, form.optimizer)
    if ranks is not None:
        mesh_of(config, mpu=None, mesh=None, ranks=ranks)
    if (shares := section.batch_shares()) is not None:
        ranks = ranks or len(shares.sizes)
        shares.check_ranks(ranks)
    ranks = ranks or len(section.shard_fractions or memory) or 1
    check_model, sections = None, [section] * ranks
    if section.plan is not None:
        sections, check_model = with_plan(config, section, arguments.file, arguments.ranks)
        ranks = len(sections)
    if section.batch_sizes is not None and "auto" in config.values():
        warnings.append(_NO_TRAINER)
    if len(memory) not in (0, 1, ranks):
        given = ",".join(f"{gib:g}" for gib in memory)
        raise ConfigError(f"--gpu-memory {given}: give one number, or one a rank: {ranks}")
    if (arguments.rank or 0) >= ranks:
        raise ConfigError(f"--rank {arguments.rank}: ranks count from 0, and --ranks is {ranks}")
    return _Asked(sections, form, warnings, check_model)


def _load(file: Path) -> tuple[dict[str, Any], list[str]]:
    """A configuration as DeepSpeed reads it, and a warning if Trainer and accelerate cannot."""
    problem = None
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        problem = error
    except (RecursionError, ValueError):
        pass  # load_config says what is wrong: too deep, too many digits, no UTF-8
    try:
        config = load_config(str(file))
    except ConfigError:
        if problem is None or not problem.doc.strip():
            raise
        where = f"line {problem.lineno}, column {problem.colno}: {problem.msg}"
        raise ConfigError(f"{file} is not JSON ({where})") from None
    if problem is None:
        return config, []
    where = f"{file} line {problem.lineno}, column {problem.colno}"
    words = f"{where}: DeepSpeed reads this, Trainer and accelerate do not: {problem.msg}."
    return config, [f"Warning: {words}"]


def _explain_model(arguments: argparse.Namespace, asked: _Asked) -> int:
    form, ranks = asked.form, len(asked.sections)
    memory = _memory(arguments, ranks)
    if arguments.seq is not None:
        try:
            check_length(
                read_config(arguments.model), arguments.model, arguments.seq, option="--seq"
            )
        except ConfigError as error:
            asked.warnings.append(f"Warning: {error}")

    begins_on = partial(_begins, arguments, asked, memory)
    is_alike = _are_alike(arguments, asked, memory.gpus)
    numbers = [arguments.rank or 0] if is_alike else range(ranks)
    begun = {each: begins_on(each)(asked.sections[each], form, ranks, True) for each in numbers}
    short = [each for each, found in begun.items() if not has_room(asked.sections[0], found)]
    rank = arguments.rank
    if rank is None:
        rank = short[0] if short else 0  # the one whose reason is asked for
    section, decision = asked.sections[rank], begun[rank]
    sizes = read_model_sizes(arguments.model, section, form, num_ranks=ranks, rank=rank)
    if asked.check_model is not None:
        asked.check_model(sizes)
    advice = [] if decision.bounds.fits else remedies(begins_on(rank), section, form, ranks)
    told = section, sizes, decision, advice
    verdict = verdict_of(*told)
    if not is_alike:
        verdict = _of_ranks(verdict, short, rank, ranks)
    inputs = _block_inputs(arguments, asked, rank)
    if arguments.json:
        words = [*asked.warnings, *asked.words(rank).splitlines()]
        result = {"verdict": verdict, "words": words, "advice": advice}
        result |= {"parameters": sum(sizes.parameters)} | decision_json(decision, lambda _: None)
        if inputs.tokens:
            result |= {"tokens": inputs.tokens, "block_input_bytes": inputs.size}
        print(json.dumps(result, indent=2))
    else:
        assumed = _assumed(arguments, memory.gpus[rank], memory.host // ranks)
        text = [verdict, *asked.warnings, *assumed, model_text(*told, is_muon=form.is_muon)]
        ends = [asked.words(rank)] if arguments.verbose else []
        ends += [_inputs_words(inputs, section)] if inputs.tokens else []
        print(fold("\n".join([*text, *(["", *ends] if ends else [])])))
    return 1 if short else 0


def _begins(arguments: argparse.Namespace, asked: _Asked, memory: _Memory, rank: int) -> Begins:
    """A function that decides how a rank would begin, also with another section or form."""
    inputs = _block_inputs(arguments, asked, rank)

    def begins(
        section: HyTrainConfig, form: TrainingForm, ranks: int, has_inputs: bool
    ) -> Decision:
        sizes = read_model_sizes(arguments.model, section, form, num_ranks=ranks, rank=rank)
        counted = inputs if has_inputs else _Inputs()
        solver = section.solver
        if counted.on_host > solver.host_activation_bytes:
            update = {"host_activation_bytes": counted.on_host}
            section = section.model_copy(update={"solver": solver.model_copy(update=update)})
        return first_decision(
            section,
            sizes,
            memory.gpus[rank],
            memory.host // ranks,
            counted.on_gpu,
            shares_host=memory.shares_host,
        )

    return begins


def _are_alike(arguments: argparse.Namespace, asked: _Asked, gpus: list[int | None]) -> bool:
    """Whether what is said of one rank holds for all."""
    ranks = len(asked.sections)
    samples = [
        _samples_at_once(section, asked.form, rank, ranks) if arguments.seq else 0
        for rank, section in enumerate(asked.sections)
    ]
    shares = asked.sections[0].shard_fractions or ()
    differ = gpus, shares, samples, [section.activations for section in asked.sections]
    return all(len({*each}) <= 1 for each in differ)


def _of_ranks(verdict: str, short: list[int], rank: int, ranks: int) -> str:
    """A rank's verdict if ranks differ, with which of them fit and which one is explained."""
    misfit = f"Does not fit: rank {', '.join(map(str, short))} of {ranks}"
    which = f"What follows is of rank {rank}."
    if rank in short:
        own = f"; rank {rank}" * (len(short) > 1)
        return f"{misfit}{own}: {verdict.removeprefix('Does not fit: ')} {which}"
    fit = f"{misfit} (--rank {short[0]} says why)" if short else f"All {ranks} ranks fit"
    return f"{fit}. {which}\n{verdict}"


class _Inputs(NamedTuple):
    """Inputs of all blocks that are in memory at once; zero if --seq was not given."""

    tokens: int = 0
    """Tokens of a sample on one rank."""
    samples: int | None = None
    """Samples of a micro-batch or, layer-major, of a step; None if a trainer fills them in: then
    ``size`` is of one sample."""
    size: int = 0
    on_gpu: int = 0
    """Bytes of ``size`` that are not offloaded."""
    on_host: int = 0
    """Bytes that are offloaded, or "hytrain.solver.host_activation_bytes" if more."""


def _block_inputs(arguments: argparse.Namespace, asked: _Asked, rank: int) -> _Inputs:
    if arguments.seq is None:
        return _Inputs()
    form, section = asked.form, asked.sections[rank]
    tokens = -(-arguments.seq // form.sequence_ranks)
    samples = _samples_at_once(section, form, rank, len(asked.sections))
    one = 1 if samples is None else samples
    size = one * block_input_bytes(arguments.model, form, tokens)
    on_host = section.solver.host_activation_bytes
    if section.activations == "offload":
        on_host = max(on_host, size)
    return _Inputs(tokens, samples, size, 0 if on_host else size, on_host)


def _samples_at_once(
    section: HyTrainConfig, form: TrainingForm, rank: int, ranks: int
) -> int | None:
    """Samples whose inputs wait for backward together: a micro-batch's or, layer-major, all of a
    step's; None if a trainer fills them in."""
    is_layer_major = section.accumulation == "layer_major"
    if (shares := section.batch_shares()) is not None:
        size = shares.sizes[rank]
        return size if is_layer_major else min(size, shares.micro_sizes[rank])
    of_step = form.accumulation if is_layer_major else 1
    if (micro := form.batch.get("train_micro_batch_size_per_gpu")) is not None:
        return micro * of_step
    if (batch := form.batch.get("train_batch_size")) is None:
        return None
    readers = max(1, ranks // form.sequence_ranks)
    return max(1, batch // (readers * form.accumulation)) * of_step


def _inputs_words(inputs: _Inputs, section: HyTrainConfig) -> str:
    batch = f"for a micro-batch of {inputs.samples}"
    if section.accumulation == "layer_major":
        batch = f"for the {inputs.samples} samples of a step, which pass layer by layer"
    if inputs.samples is None:
        batch = "for 1 sample (the trainer fills the micro-batch in: multiply by its samples)"
    return (
        "Activations: where all blocks are computed again in backward, their inputs take "
        f"{size_text(inputs.size)} {batch}, {inputs.tokens:,} tokens of each sample on this rank. "
        f"The tables count {size_text(inputs.on_gpu)} of it on the GPU and "
        f"{size_text(inputs.on_host)} on the host (hytrain.activations, "
        "hytrain.solver.host_activation_bytes). What one block and the loss take while they are "
        "computed comes on top, on the GPU."
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


class _Memory(NamedTuple):
    """Memory of GPUs and host, in bytes."""

    gpus: list[int | None]
    """That of each rank's GPU; None: no limit."""
    host: int
    """That of the host, for all ranks together."""
    shares_host: bool
    """Whether GPU and host share their memory."""


def _memory(arguments: argparse.Namespace, ranks: int) -> _Memory:
    shares_host = False
    if arguments.gpu_memory is not None:
        gpus: list[int | None] = [int(gib * _GIB) for gib in arguments.gpu_memory]
    else:
        device = torch.device("cpu")
        if torch.cuda.is_available():  # torch's limit of a process is asked of a numbered device
            device = torch.device("cuda", torch.cuda.current_device())
        gpus, shares_host = [usable_gpu_bytes(device)], shares_host_memory(device)
    gpus *= ranks if len(gpus) == 1 else 1
    host = available_host_bytes()
    if arguments.host_memory is not None:
        host = int(arguments.host_memory * _GIB)
    return _Memory(gpus, host, shares_host)
