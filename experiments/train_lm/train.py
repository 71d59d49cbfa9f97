"""Train a language model whose optimizer state lives in host memory.

Under the launcher: deepspeed experiments/train_lm/train.py --model llama-1b --steps 1000
Alone, one process: python experiments/train_lm/train.py --demo

See README.md beside this file.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
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
from decisions import DecisionsReader, no_decisions
from loop import Job, StatisticsReader, Trainer, forward_backward_seconds
from options import OptionError, Options, build_parser, parse_options

# What --overwrite takes away beside the checkpoints; the last is `hytrain explain`'s picture.
_WRITTEN = ("metrics.jsonl", "loss.png", "summary.json", "metrics.placement.png")
_USER_ERRORS = (OptionError, corpus.DataError, models.ModelError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status, 2 where the user's input cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run(argv)
    except ValueError as error:
        if not _is_user_error(error):
            raise
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


def _is_user_error(error: ValueError) -> bool:
    """Whether the message alone says what to change; a traceback would only hide it."""
    # Not imported, because hytrain need not be installed for --engine deepspeed; what it raises
    # is a ValueError where the user can mend it, whichever of its modules the class is from.
    errors = sys.modules.get("hytrain.errors")
    return isinstance(error, _USER_ERRORS) or (
        errors is not None and isinstance(error, errors.HyTrainError)
    )


def run(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says.

    Raises:
        OptionError, corpus.DataError, models.ModelError: the user's input cannot be used.
        hytrain.errors.HyTrainError: hytrain refuses the model or the DeepSpeed JSON.
    """
    import deepspeed

    on_gpu = torch.cuda.is_available()
    parser = deepspeed.add_config_arguments(build_parser())
    options = parse_options(parser, argv, on_gpu=on_gpu)
    if options.demo:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    _check_output(options)
    rank, world_size, device = _start_distributed(options, on_gpu)
    if rank != 0:
        logging.getLogger().setLevel(logging.WARNING)
    _prepare_output(options, rank)
    job = _make_job(options, rank=rank, world_size=world_size, device=device)
    trainer = Trainer(job)
    trainer.run()
    job.engine.destroy()
    if rank == 0:
        summary = metrics.summarize(metrics.read_metrics(trainer.metrics_path))
        (options.out / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
        print(f"\n{metrics.format_table(summary)}\n\nmetrics and loss curve: {options.out}")
        if summary.k is not None:
            print(f"why that k: hytrain explain {trainer.metrics_path}")
    torch.distributed.destroy_process_group()


def _start_distributed(options: Options, on_gpu: bool) -> tuple[int, int, torch.device]:
    """Join the launcher's process group, or make one of this process alone.

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


def _saved_tags(folder: Path) -> list[str]:
    """As ``hytrain.checkpoint.commit.saved_tags``, for hytrain need not be installed."""
    folders = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    whole = [name for name in folders if not name.startswith("hytrain-saving-")]
    return sorted(name.removeprefix("hytrain-replaced-") for name in whole)


def _check_output(options: Options) -> None:
    """Refuse to write over a run, or to resume what is not there, before any work is done."""
    if options.resume is not None:
        folder = options.out / "checkpoints"
        tags = _saved_tags(folder)
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


def _prepare_output(options: Options, rank: int) -> None:
    # Every rank has looked for an old run before rank 0 writes a new one.
    torch.distributed.barrier()
    if rank != 0:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.overwrite:
        for name in _WRITTEN:
            (options.out / name).unlink(missing_ok=True)
        shutil.rmtree(options.out / "checkpoints", ignore_errors=True)


def _make_job(options: Options, *, rank: int, world_size: int, device: torch.device) -> Job:
    tokenizer = corpus.make_tokenizer(options.tokenizer)
    model_config = models.model_config(
        options.model,
        seq_len=options.seq_len,
        min_vocab=tokenizer.vocab_size,
        vocab_size=options.vocab_size,
    )
    config_path = options.deepspeed_config
    if config_path is None:
        config_path = ds_config.choose_config(on_gpu=device.type == "cuda")
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
        _describe(options, config_path, changes, plan, sequences, num_parameters)
    if options.reference_steps:
        batch = data.to_device(sequences.train_batch(0, plan.micro_batch), device)
        seconds = forward_backward_seconds(model, batch, options.reference_steps)
        if rank == 0:
            metrics.write_reference(options.out, seconds)
    engine, read_statistics, read_decisions = _initialize(options, model, config)
    return Job(
        options=options,
        engine=engine,
        read_statistics=read_statistics,
        sequences=sequences,
        plan=plan,
        flops_per_token=models.flops_per_token(num_parameters),
        device=device,
        rank=rank,
        read_decisions=read_decisions,
    )


def _training_dtype(config: dict[str, Any]) -> torch.dtype:
    if config.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    if config.get("fp16", {}).get("enabled"):
        return torch.float16
    return torch.float32


def _load_data(options: Options, tokenizer: corpus.Tokenizer) -> data.PackedSequences:
    cache_dir = options.cache_dir or corpus.default_cache_dir()

    def load() -> corpus.Corpus:
        sources = corpus.find_sources(options.data)
        return corpus.load_corpus(sources, tokenizer, cache_dir, text_field=options.text_field)

    def ask_all(mine: corpus.LoadReport) -> list[corpus.LoadReport]:
        reports = [mine] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reports, mine)
        return reports

    # One process of each launcher tokenises, the others then find its cache.
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    tokens = corpus.load_together(load, ask_all, is_first=is_first)
    return data.PackedSequences(tokens, seq_len=options.seq_len, seed=options.seed)


def _initialize(
    options: Options, model: torch.nn.Module, config: dict[str, Any]
) -> tuple[Any, StatisticsReader, DecisionsReader]:
    """Make the engine, and the functions that read its update statistics and decisions."""
    arguments: dict[str, Any] = {
        "model": model,
        "model_parameters": models.parameter_groups(model),
        "config": config,
    }
    if options.engine == "torch":
        from torch_engine import TorchEngine

        return TorchEngine(**arguments), lambda: None, no_decisions
    if options.engine == "deepspeed":
        import deepspeed

        return deepspeed.initialize(**arguments)[0], lambda: None, no_decisions
    import hytrain

    engine = hytrain.initialize(**arguments)[0]
    if not isinstance(engine, hytrain.HyTrainEngine):
        # A JSON without the section is plain DeepSpeed, which measures no updates.
        return engine, lambda: None, no_decisions
    read: Callable[[], metrics.UpdateStatistics | None] = engine.step_statistics
    return engine, read, engine.placement_decisions


def _write_run(options: Options, config: dict[str, Any]) -> None:
    (options.out / "ds_config.json").write_text(json.dumps(config, indent=2) + "\n")
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    plain["data"] = [str(path) for path in options.data]
    (options.out / "options.json").write_text(json.dumps(plain, indent=2) + "\n")


def _describe(
    options: Options,
    config_path: Path,
    changes: list[str],
    plan: data.BatchPlan,
    sequences: data.PackedSequences,
    num_parameters: int,
) -> None:
    print(f"engine    {options.engine}, {config_path}")
    for change in changes:
        print(f"          {change}")
    print(f"model     {options.model}, {num_parameters / 1e6:,.1f} M parameters")
    print(
        f"data      {sequences.num_train:,} sequences of {options.seq_len} tokens, "
        f"{sequences.num_held_out:,} held out"
    )
    words = f"{plan.world_size} ranks x {plan.accumulation} micro-batches x {plan.micro_batch}"
    if plan.sizes is not None and plan.micro_sizes is not None:
        shares = zip(plan.sizes, plan.micro_sizes, strict=True)
        words = "ranks with " + ", ".join(f"{size} by {micro}" for size, micro in shares)
    print(f"step      {plan.global_batch} sequences: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
