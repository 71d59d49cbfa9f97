"""`hytrain explain` of a DeepSpeed configuration: what it means, and whether a model fits.

It needs torch and DeepSpeed: imported only for this.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hytrain.config import SECTION, HyTrainConfig
from hytrain.engine.deepspeed_internals import load_config
from hytrain.engine.sequence_groups import mesh_of, refuse_dealt_batches
from hytrain.engine.unsupported import refuse_beside_streamed
from hytrain.errors import ConfigError, size_text
from hytrain.formats.text_table import fold
from hytrain.hardware.gpu_memory import shares_host_memory, usable_gpu_bytes
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.placement.memory import STREAMED
from hytrain.placement.records import Decision
from hytrain.tools.cli.arguments import given_flags
from hytrain.tools.explain.checks import read_as_training, with_plan
from hytrain.tools.explain.config import (
    ModelSizes,
    config_words,
    first_decision,
    model_text,
    verdict_of,
)
from hytrain.tools.explain.report import decision_json
from hytrain.tools.explain.training_form import TrainingForm, read_form
from hytrain.tools.profiler.model_sizes import block_input_bytes, read_model_sizes
from hytrain.tools.stdout import stdout_to

_NO_MODEL = (
    "Accepted by training. Memory was not checked: give the model (its transformers config.json; "
    "weights are not read) and the memory of the machine that is to train, in GiB:"
)
_EXAMPLE = "model/config.json --gpu-memory 78 --host-memory 256"
_GIB = 1024**3
_FOR_MODEL = ("rank", "ranks", "seq", "gpu_memory", "host_memory")
"""Destinations of the options that only a model takes."""


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
    given = given_flags(arguments, _FOR_MODEL)
    if given:
        raise ConfigError(f"{', '.join(given)}: needs --model, whose layers it is about")
    if arguments.json:
        words = [*asked.warnings, *asked.words.splitlines()]
        print(json.dumps({"verdict": _NO_MODEL, "words": words}, indent=2))
    else:
        example = f"  hytrain explain {arguments.file} --model {_EXAMPLE}"
        words = "\n".join([*asked.warnings, "", asked.words])
        print(fold(_NO_MODEL), example, fold(words), sep="\n")
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
    check_model = None
    if section.plan is not None:
        section, check_model = with_plan(config, section, arguments.file, ranks, rank)
        ranks = len(section.shard_fractions or ())
    if rank >= (ranks or 1):
        raise ConfigError(f"--rank {rank}: ranks count from 0, and --ranks is {ranks or 1}")
    return _Asked(section, form, warnings, ranks or 1, rank, check_model)


def _explain_model(arguments: argparse.Namespace, asked: _Asked) -> int:
    section, form = asked.section, asked.form
    gpu, host, shares_host = _memory(arguments, asked.ranks)
    tokens, inputs = _block_inputs(arguments, asked)
    is_offloaded = section.solver.host_activation_bytes > 0 or section.activations == "offload"
    on_gpu = 0 if is_offloaded else inputs

    def begins(form: TrainingForm) -> tuple[ModelSizes, Decision]:
        sizes = read_model_sizes(
            arguments.model, section, form, num_ranks=asked.ranks, rank=asked.rank
        )
        kept = _kept_gradients(asked, form, sizes)
        found = first_decision(
            section, sizes, gpu, host, on_gpu, kept_gradients=kept, shares_host=shares_host
        )
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
        print(json.dumps(result, indent=2))
    else:
        heads = [verdict, *asked.warnings, *_assumed(arguments, gpu, host)]
        if tokens:
            words += f"\n{_inputs_words(inputs, tokens, on_gpu, section)}"
        text = "\n".join([*heads, model_text(section, sizes, decision), "", words])
        print(fold(text))
    number, found = decision.gpu_layers_target, decision.bounds
    return 0 if (found.allow(number) if is_fixed else found.fits) else 1


def _block_inputs(arguments: argparse.Namespace, asked: _Asked) -> tuple[int, int]:
    """Tokens of a sample on this rank, and bytes of all blocks' inputs; 0 where not asked for."""
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


def _kept_gradients(asked: _Asked, form: TrainingForm, sizes: ModelSizes) -> int:
    """Bytes on the GPU between micro-batches that are not in what the first backward keeps."""
    is_counted = asked.ranks > 1 and not form.shards_weights
    if form.accumulation == 1 or asked.section.accumulation == "layer_major" or is_counted:
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


def _memory(arguments: argparse.Namespace, ranks: int) -> tuple[int | None, int, bool]:
    """The rank's GPU and its part of the host, in bytes; whether the GPU's are the host's."""
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
