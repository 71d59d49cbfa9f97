"""`hytrain explain` of a DeepSpeed configuration: what it means, and whether a model fits.

It needs torch and DeepSpeed: imported only for this.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

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
from hytrain.tools.explain.config import (
    ModelSizes,
    config_words,
    first_decision,
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
    """A configuration, as training would read it, and the rank that it is explained for."""

    section: HyTrainConfig
    form: TrainingForm
    warnings: list[str]
    ranks: int
    rank: int
    check_model: Callable[[ModelSizes], None] | None

    @property
    def words(self) -> str:
        return config_words(self.section, self.form)


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
        words = [*asked.warnings, *asked.words.splitlines()]
        print(json.dumps({"verdict": accepted, "words": words}, indent=2))
    else:
        example = f"  hytrain explain {arguments.file} --model {_EXAMPLE}"
        words = "\n".join([*asked.warnings, "", asked.words])
        print(fold(accepted), example, fold(words), sep="\n")
    return 0


def _read_config(arguments: argparse.Namespace) -> _Asked:
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
    if form.is_muon:
        refuse_beside_streamed(section, form.optimizer)
    if ranks is not None:
        mesh_of(config, mpu=None, mesh=None, ranks=ranks)
    if (shares := section.batch_shares()) is not None:
        ranks = ranks or len(shares.sizes)
        shares.check_ranks(ranks)
    if ranks is None and section.shard_fractions is not None:
        ranks = len(section.shard_fractions)
    if ranks is None and len(arguments.gpu_memory or ()) > 1:
        ranks = len(arguments.gpu_memory)
    check_model = None
    if section.plan is not None:
        section, check_model = with_plan(config, section, arguments.file, ranks, rank)
        ranks = len(section.shard_fractions or ())
    if section.batch_sizes is not None and "auto" in config.values():
        warnings.append(_NO_TRAINER)
    if len(arguments.gpu_memory or ()) not in (0, 1, ranks):
        given = ",".join(f"{gib:g}" for gib in arguments.gpu_memory)
        raise ConfigError(f"--gpu-memory {given}: give one number, or one a rank: {ranks or 1}")
    if rank >= (ranks or 1):
        raise ConfigError(f"--rank {rank}: ranks count from 0, and --ranks is {ranks or 1}")
    return _Asked(section, form, warnings, ranks or 1, rank, check_model)


def _explain_model(arguments: argparse.Namespace, asked: _Asked) -> int:
    section, form, rank = asked.section, asked.form, asked.rank
    gpus, host, shares_host = _memory(arguments, asked.ranks)
    tokens, samples, inputs = _block_inputs(arguments, asked, rank)
    if tokens:
        try:
            check_length(
                read_config(arguments.model), arguments.model, arguments.seq, option="--seq"
            )
        except ConfigError as error:
            asked.warnings.append(f"Warning: {error}")
    is_offloaded = section.solver.host_activation_bytes > 0 or section.activations == "offload"

    def begins_on(rank: int) -> Begins:
        on_gpu = 0 if is_offloaded else _block_inputs(arguments, asked, rank)[2]

        def begins(
            section: HyTrainConfig, form: TrainingForm, ranks: int, has_inputs: bool
        ) -> Decision:
            sizes = read_model_sizes(arguments.model, section, form, num_ranks=ranks, rank=rank)
            kept, base = _kept_gradients(section, form, sizes), on_gpu if has_inputs else 0
            each, gpu = host // ranks, gpus[rank]
            return first_decision(
                section, sizes, gpu, each, base, kept_gradients=kept, shares_host=shares_host
            )

        return begins

    is_fixed = section.gpu_fraction != "solve"

    def has_room(decision: Decision) -> bool:
        number, found = decision.gpu_layers_target, decision.bounds
        return found.allow(number) if is_fixed else found.fits

    differ = gpus, section.shard_fractions or (), (tokens and section.micro_batch_sizes) or ()
    is_alike = all(len({*each}) <= 1 for each in differ)
    numbers = [rank] if is_alike else range(asked.ranks)
    begun = {each: begins_on(each)(section, form, asked.ranks, True) for each in numbers}
    short = [each for each, found in begun.items() if not has_room(found)]
    if short and rank not in short and arguments.rank is None:
        arguments.rank = short[0]  # whose reason is what is asked for
        with stdout_to(2):
            again = _read_config(arguments)
        return _explain_model(arguments, again)
    sizes = read_model_sizes(arguments.model, section, form, num_ranks=asked.ranks, rank=rank)
    if asked.check_model is not None:
        asked.check_model(sizes)
    decision, advice = begun[rank], []
    if not decision.bounds.fits:
        advice = remedies(begins_on(rank), section, form, asked.ranks)
    verdict = verdict_of(sizes, decision, advice, is_fixed=is_fixed, is_muon=form.is_muon)
    if not is_alike:
        verdict = _of_ranks(verdict, short, asked)
    if arguments.json:
        result = {"verdict": verdict, "words": [*asked.warnings, *asked.words.splitlines()]}
        result |= {"advice": advice}
        result |= {"parameters": sum(sizes.parameters)}
        result |= decision_json(decision, lambda _: None)
        result |= {"tokens": tokens, "block_input_bytes": inputs} if tokens else {}
        print(json.dumps(result, indent=2))
    else:
        heads = [verdict, *asked.warnings, *_assumed(arguments, gpus[rank], host // asked.ranks)]
        ends = [asked.words] if arguments.verbose else []
        if tokens:
            on_gpu = 0 if is_offloaded else inputs
            ends.append(_inputs_words(inputs, tokens, samples, on_gpu, section))
        sized = model_text(section, sizes, decision, advice, is_muon=form.is_muon)
        text = [*heads, sized, *(["", *ends] if ends else [])]
        print(fold("\n".join(text)))
    return 1 if short else 0


def _of_ranks(verdict: str, short: list[int], asked: _Asked) -> str:
    """A rank's verdict, where ranks differ: with whether each fits, and which is explained."""
    misfit = f"Does not fit: rank {', '.join(map(str, short))} of {asked.ranks}"
    which = f"What follows is of rank {asked.rank}."
    if asked.rank in short:
        own = f"; rank {asked.rank}" * (len(short) > 1)
        return f"{misfit}{own}: {verdict.removeprefix('Does not fit: ')} {which}"
    fit = f"{misfit} (--rank {short[0]} says why)" if short else f"All {asked.ranks} ranks fit"
    return f"{fit}. {which}\n{verdict}"


def _block_inputs(
    arguments: argparse.Namespace, asked: _Asked, rank: int
) -> tuple[int, int | None, int]:
    """Tokens of a sample on a rank; samples of a micro-batch, None where a trainer fills them
    in; bytes of all blocks' inputs, then of one sample. 0 where not asked for."""
    if arguments.seq is None:
        return 0, None, 0
    tokens = -(-arguments.seq // asked.form.sequence_ranks)
    own, told = asked.section.micro_batch_sizes, asked.form.batch
    samples = own[rank] if own else told.get("train_micro_batch_size_per_gpu")
    if samples is None and "train_batch_size" in told:
        readers = max(1, asked.ranks // asked.form.sequence_ranks)
        samples = max(1, told["train_batch_size"] // (readers * asked.form.accumulation))
    each = block_input_bytes(arguments.model, asked.form, tokens)
    return tokens, samples, (samples or 1) * each


def _inputs_words(
    inputs: int, tokens: int, samples: int | None, on_gpu: int, section: HyTrainConfig
) -> str:
    batch = f"for a micro-batch of {samples}"
    if samples is None:
        batch = "for 1 sample (the trainer fills the micro-batch in: multiply by its samples)"
    return (
        "Activations: where all blocks are computed again in backward, their inputs take "
        f"{size_text(inputs)} {batch}, {tokens:,} tokens of each sample on this rank. "
        f"The tables count {size_text(on_gpu)} of it on the GPU and, by "
        "hytrain.solver.host_activation_bytes, "
        f"{size_text(section.solver.host_activation_bytes)} on the host. What one block and "
        "the loss take while they are computed comes on top, on the GPU."
    )


def _kept_gradients(section: HyTrainConfig, form: TrainingForm, sizes: ModelSizes) -> int:
    """Bytes on the GPU between micro-batches that are not in what the first backward keeps."""
    is_counted = sizes.num_ranks > 1 and not form.shards_weights
    is_layer_major = section.accumulation == "layer_major"
    if form.accumulation == 1 or is_counted or (is_layer_major and not form.is_direct):
        return 0
    return sum(layer.parameters * layer.gradient_itemsize for layer in sizes.layers)


def _assumed(arguments: argparse.Namespace, gpu: int | None, host: int) -> list[str]:
    """A line about memory that was not given."""
    assumed: list[str] = []
    if arguments.gpu_memory is None:
        there = "unlimited, since this machine has no GPU"
        assumed.append(f"--gpu-memory: {there if gpu is None else size_text(gpu)}")
    if arguments.host_memory is None:
        assumed.append(f"--host-memory: {size_text(host)} a rank, free on this machine now")
    return [f"Assumed, since not given: {'; '.join(assumed)}."] if assumed else []


def _memory(arguments: argparse.Namespace, ranks: int) -> tuple[list[int | None], int, bool]:
    """Each rank's GPU and the host, in bytes; whether the GPU's are the host's."""
    shares_host = False
    if arguments.gpu_memory is not None:
        gpus: list[int | None] = [int(gib * _GIB) for gib in arguments.gpu_memory]
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        gpus, shares_host = [usable_gpu_bytes(device)], shares_host_memory(device)
    gpus *= ranks if len(gpus) == 1 else 1
    host = available_host_bytes()
    if arguments.host_memory is not None:
        host = int(arguments.host_memory * _GIB)
    return gpus, host, shares_host
