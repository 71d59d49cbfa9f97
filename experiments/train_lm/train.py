"""Train a language model whose optimizer state lives in host memory.

Under the launcher: deepspeed experiments/train_lm/train.py --model llama-1b --steps 1000
Alone, one process: python experiments/train_lm/train.py --demo

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import socket
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# DeepSpeed picks its accelerator when it is first imported; on a machine without a GPU it
# would otherwise guess from the packages that are installed.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import corpus
import data
import ds_config
import metrics
import models
from loop import Trainer, forward_backward_seconds
from options import OptionError, build_parser, parse_options

from hytrain.checkpoint.commit import saved_tags
from hytrain.errors import HyTrainError

# What --overwrite removes besides the checkpoints.
_WRITTEN = ("metrics.jsonl", "loss.png", "summary.json")
_USER_ERRORS = (OptionError, corpus.DataError, models.ModelError, HyTrainError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script; returns its exit status, 2 if the user's input cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run(argv)
    except ValueError as error:
        # For what the user can mend, the message says all; a traceback would only hide it.
        if not isinstance(error, _USER_ERRORS):
            raise
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


def run(argv: Sequence[str] | None = None) -> None:
    """Trains as the command line says.

    Raises:
        OptionError, corpus.DataError, models.ModelError: the user's input cannot be used.
        HyTrainError: hytrain refuses the model or the DeepSpeed JSON.
    """
    import deepspeed

    on_gpu = torch.cuda.is_available()
    options = parse_options(deepspeed.add_config_arguments(build_parser()), argv, on_gpu=on_gpu)
    if options.demo:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    _check_output(options)
    rank, world_size, device = _start_distributed(options, on_gpu)
    if rank != 0:
        logging.getLogger().setLevel(logging.WARNING)
    _prepare_output(options, rank)
    trainer, engine = _make_trainer(options, rank, world_size, device)
    trainer.run()
    engine.destroy()
    if rank == 0:
        summary = metrics.summarize(metrics.read_metrics(trainer.metrics_path))
        (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"\n{metrics.format_table(summary)}\n\nmetrics and loss curve: {options.out}")
        if summary["k"] is not None:
            print(f"why that k: hytrain explain {trainer.metrics_path}")
    torch.distributed.destroy_process_group()


def _start_distributed(options: argparse.Namespace, on_gpu: bool) -> tuple[int, int, torch.device]:
    """Joins the launcher's process group, or makes one of this process alone.

    Returns:
        Rank, number of ranks, this rank's device.
    """
    import deepspeed

    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    local_rank = options.local_rank
    if local_rank < 0:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        # DeepSpeed would compile its shared-memory collectives, which are not needed here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), device


def _check_output(options: argparse.Namespace) -> None:
    """Refuses to overwrite a run, or to resume one that does not exist, before any work is done."""
    if options.resume is not None:
        folder = options.out / "checkpoints"
        tags = saved_tags(folder)
        if not tags:
            raise OptionError(
                f"--resume {options.resume}: no checkpoint in {folder}; give the --out of the "
                "run to go on with, which must have saved with --save-every"
            )
        if options.resume != "latest" and options.resume not in tags:
            raise OptionError(
                f"--resume {options.resume}: no such checkpoint in {folder}; there are "
                f"{', '.join(tags)}"
            )
    elif not options.overwrite and (options.out / "metrics.jsonl").exists():
        raise OptionError(
            f"--out {options.out} already holds a run: --resume goes on with it, --overwrite "
            "replaces it, another --out leaves it alone"
        )


def _prepare_output(options: argparse.Namespace, rank: int) -> None:
    # Every rank has looked for an old run before rank 0 writes a new one.
    torch.distributed.barrier()
    if rank != 0:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.overwrite:
        for name in _WRITTEN:
            (options.out / name).unlink(missing_ok=True)
        shutil.rmtree(options.out / "checkpoints", ignore_errors=True)


def _make_trainer(
    options: argparse.Namespace, rank: int, world_size: int, device: torch.device
) -> tuple[Trainer, Any]:
    """Makes the trainer and its engine."""
    tokenizer = corpus.make_tokenizer(options.tokenizer)
    model_config = models.model_config(
        options.model,
        seq_len=options.seq_len,
        min_vocab=tokenizer.vocab_size,
        vocab_size=options.vocab_size,
    )
    config_path = options.deepspeed_config or ds_config.choose_config(on_gpu=device.type == "cuda")
    config = ds_config.read_config(config_path)
    plan_path = ds_config.find_plan(config, config_path, options)
    if plan_path is None:
        plan = ds_config.plan_batches(config, options, world_size)
    else:
        plan = ds_config.planned_batches(plan_path, options)
    config, changes = ds_config.apply_options(config, options, plan, plan_path)
    if options.engine != "hytrain" and config.pop("hytrain", None) is not None:
        changes.append(
            f'section "hytrain": left out, as --engine {options.engine} has no use for it'
        )
    sequences = _load_data(options, tokenizer)
    model = models.build_model(
        model_config,
        device=device,
        dtype=_training_dtype(config),
        seed=options.seed,
        activation_checkpointing=options.activation_checkpointing,
        attention=options.attention,
    )
    num_parameters = models.count_parameters(model)
    if rank == 0:
        _write_run(options, config)
        about = f"model     {options.model}, {num_parameters / 1e6:,.1f} M parameters"
        _describe(options, config_path, changes, about, plan, sequences)
    if options.reference_steps:
        batch = data.to_device(sequences.train_batch(0, plan.micro_batch), device)
        seconds = forward_backward_seconds(model, batch, options.reference_steps)
        if rank == 0:
            _write_reference(options.out, seconds)
    engine = _make_engine(options, model, config)
    flops_per_token = models.flops_per_token(num_parameters)
    trainer = Trainer(
        options, engine, sequences, plan,
        flops_per_token=flops_per_token, device=device, rank=rank,
    )  # fmt: skip
    return trainer, engine


def _training_dtype(config: dict[str, Any]) -> torch.dtype:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(name, {}).get("enabled"):
            return dtype
    return torch.float32


def _load_data(
    options: argparse.Namespace, tokenizer: corpus.ByteTokenizer
) -> data.PackedSequences:
    """Loads the same text on all ranks; one process a host tokenises, the others find its cache.

    Raises:
        corpus.DataError: this rank cannot load it, or the ranks' texts differ.
    """
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if not is_first:
        torch.distributed.barrier()
    found = corpus.load_corpus(
        corpus.find_sources(options.data),
        tokenizer,
        options.cache_dir,
        text_field=options.text_field,
    )
    if is_first:
        torch.distributed.barrier()
    digests: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, found.digest)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise corpus.DataError(
                f"ranks 0 and {rank} have different texts or tokenizers, although --data is the "
                "same: hosts must have the same files (the default, Python's library, differs "
                "between versions); give --data on a folder that they share"
            )
    return data.PackedSequences(found, seq_len=options.seq_len, seed=options.seed)


def _make_engine(
    options: argparse.Namespace, model: torch.nn.Module, config: dict[str, Any]
) -> Any:
    arguments: dict[str, Any] = {
        "model": model,
        "model_parameters": models.parameter_groups(model),
        "config": config,
    }
    if options.engine == "torch":
        from torch_engine import TorchEngine

        return TorchEngine(**arguments)
    if options.engine == "deepspeed":
        import deepspeed

        return deepspeed.initialize(**arguments)[0]
    import hytrain

    return hytrain.initialize(**arguments)[0]


def _write_run(options: argparse.Namespace, config: dict[str, Any]) -> None:
    (options.out / "ds_config.json").write_text(json.dumps(config, indent=2) + "\n")
    plain = json.dumps(vars(options), indent=2, default=str)
    (options.out / "options.json").write_text(plain + "\n")


def _write_reference(out: Path, seconds: Sequence[float]) -> None:
    """Writes the times of passes without an update."""
    reference = {"seconds": list(seconds), "median": statistics.median(seconds)}
    (out / "reference.json").write_text(json.dumps(reference) + "\n")
    print(f"reference {reference['median']:.3f} s: forward and backward without an update")


def _describe(
    options: argparse.Namespace,
    config_path: Path,
    changes: list[str],
    about: str,
    plan: data.BatchPlan,
    sequences: data.PackedSequences,
) -> None:
    print(f"engine    {options.engine}, {config_path}")
    for change in changes:
        print(f"          {change}")
    print(about)
    print(
        f"data      {len(sequences.train):,} sequences of {options.seq_len} tokens, "
        f"{len(sequences.held_out):,} held out"
    )
    words = f"{plan.world_size} ranks x {plan.accumulation} micro-batches x {plan.micro_batch}"
    if plan.sizes is not None:
        shares = zip(plan.sizes, plan.micro_sizes, strict=True)
        words = "ranks with " + ", ".join(f"{size} by {micro}" for size, micro in shares)
    print(f"step      {plan.global_batch} sequences: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
