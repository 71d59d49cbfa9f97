"""The training loop: steps, evaluation, checkpoints, resuming, and what is recorded of them."""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import data
import metrics
import torch
from options import OptionError
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from hytrain.engine.metrics_file import DecisionLog, step_record
from hytrain.hardware.energy import EnergyMeter

# A plan is compared with the steps after the first three.
_LEAST_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A step whose loss has not been read from the device yet."""

    loss: torch.Tensor
    """Mean loss, float32, shape []."""
    joules: torch.Tensor
    """(GPUs, processors) of all ranks, float64 [2]; NaN if not known."""
    record: metrics.Record
    """Everything else."""


def forward_backward_seconds(
    model: torch.nn.Module, ids: torch.Tensor, steps: int, warmup: int = 2
) -> list[float]:
    """Times a micro-batch's forward and backward passes, whose gradients are dropped.

    Args:
        model: the bare model, which is left as it was.
        ids: int64 [B, T], on its device.
        steps: how many are timed.
        warmup: how many are made before those.

    Returns:
        Seconds of each timed one.
    """
    on_gpu = ids.device.type == "cuda"
    seconds: list[float] = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return seconds[warmup:]


class Trainer:
    """Runs a job from its first or resumed step to its last."""

    def __init__(
        self,
        options: argparse.Namespace,
        engine: Any,
        sequences: data.PackedSequences,
        plan: data.BatchPlan,
        *,
        flops_per_token: int,
        device: torch.device,
        rank: int,
    ) -> None:
        """
        Args:
            options: the command line's options.
            engine: DeepSpeed's, hytrain's, or torch_engine's.
            sequences: the data.
            plan: how the data is shared out.
            flops_per_token: useful operations of training on a token.
            device: this rank's device.
            rank: this rank's number.
        """
        self._options, self._engine = options, engine
        self._sequences, self._plan = sequences, plan
        self._flops_per_token = flops_per_token
        self._device, self._rank = device, rank
        self._step = self._steps_made = self._consumed = 0
        self._pending: _Pending | None = None
        self._file: metrics.MetricsFile | None = None
        self._bar: Any = None
        self._decisions = DecisionLog(getattr(engine, "placement_decisions", lambda since: []))
        self._energy = EnergyMeter(device)
        self._last_energy = self._energy.read()
        self.metrics_path = options.out / "metrics.jsonl"
        self.checkpoint_dir = options.out / "checkpoints"

    def run(self) -> None:
        """Trains to the last step; rank 0 writes metrics and the loss curve.

        Raises:
            OptionError: nothing to resume, or a checkpoint already at the last step.
            data.DataError: the checkpoint belongs to other data.
        """
        options = self._options
        if options.resume is not None:
            self._resume(options.resume)
        if self._rank != 0:
            self._train()
            return
        bar = {"total": options.steps, "initial": self._step, "unit": "step"}
        with (
            metrics.MetricsFile(self.metrics_path, keep_steps=self._step) as self._file,
            tqdm(**bar, dynamic_ncols=True, smoothing=0.1) as self._bar,
            logging_redirect_tqdm(),  # a decision is a line above the bar, not in it
        ):
            self._train()
        metrics.plot_loss(self.metrics_path, options.out / "loss.png")

    def _train(self) -> None:
        options = self._options
        if self._step == 0:
            self._evaluate()
        while self._step < options.steps:
            started = time.perf_counter()
            loss, lr = self._train_step()
            previous, self._pending = self._pending, None
            # Reading a loss waits for its forward pass. The previous step's is read only now
            # that this step is launched, so that the device never idles for it.
            self._record(previous)
            self._write(self._decisions.take() if self._rank == 0 else [])
            self._pending = self._measure(loss, lr, time.perf_counter() - started)
            is_last = self._step == options.steps
            if options.eval_every and self._step % options.eval_every == 0 and not is_last:
                self._drain()
                self._evaluate()
            if options.save_every and self._step % options.save_every == 0:
                self._drain()
                self._gather_decisions()
                self._save()
        self._drain()
        self._gather_decisions()
        self._compare_with_plan()
        self._evaluate()

    def _write(self, records: Sequence[metrics.Record]) -> None:
        if self._file is not None:
            self._file.write(records)

    def _train_step(self) -> tuple[torch.Tensor, float]:
        """Makes one optimizer step; returns the mean loss, shape [], and the learning rate used.

        The mean is this rank's, or, with a plan, that of the global batch.
        """
        plan, engine = self._plan, self._engine
        # Dropout depends on seed, step and rank alone: a resumed run draws the same numbers.
        step_seed = (self._options.seed * 1_000_003 + self._step) * 65_537 + self._rank
        torch.manual_seed(step_seed % (1 << 63))
        batches = self._batches(plan.pieces(self._consumed, self._rank))
        lr = float(engine.get_lr()[0])  # before the step, which sets the next one's
        if plan.sizes is not None:
            total = engine.train_batch({"input_ids": ids, "labels": ids} for ids in batches)
        else:
            total = torch.zeros((), dtype=torch.float32, device=self._device)
            for ids in batches:
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach().float()
            total /= plan.accumulation
        self._step += 1
        self._steps_made += 1
        self._consumed += plan.global_batch
        return total, lr

    def _batches(self, pieces: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """Yields training sequences [B, T] on the device, a micro-batch at a time."""
        for first, count in pieces:
            yield data.to_device(self._sequences.train_batch(first, count), self._device)

    def _measure(self, loss: torch.Tensor, lr: float, step_s: float) -> _Pending:
        record: metrics.Record = {"kind": "step", "step": self._step, "lr": lr, "step_s": step_s}
        if hasattr(self._engine, "step_statistics"):
            statistics = self._engine.step_statistics()
            record |= step_record(statistics)
        else:
            record["grad_norm"] = self._engine.get_global_grad_norm()
        return _Pending(loss=self._mean_over_ranks(loss), joules=self._joules(), record=record)

    def _joules(self) -> torch.Tensor:
        """Joules of all ranks (GPUs, processors) since the last call; a collective, not waited for.

        A host's processors are counted by its first rank.
        """
        now = self._energy.read()
        used, self._last_energy = now.since(self._last_energy), now
        cpu = used.cpu_joules if os.environ.get("LOCAL_RANK", "0") == "0" else 0.0
        known = [math.nan if joules is None else joules for joules in (used.gpu_joules, cpu)]
        totals = torch.tensor(known, dtype=torch.float64)
        if self._plan.world_size > 1:
            totals = totals.to(self._device)
            torch.distributed.all_reduce(totals)
        return totals

    def _record(self, pending: _Pending | None) -> None:
        if pending is None:
            return
        loss = float(pending.loss)  # on every rank: the wait keeps them at the same step
        if self._file is None:
            return
        norm = pending.record["grad_norm"]
        seconds = pending.record["step_s"]
        tokens = self._plan.global_batch * self._sequences.seq_len
        flops = tokens / seconds * self._flops_per_token / self._plan.world_size
        joules = [None if math.isnan(value) else value for value in pending.joules.tolist()]
        known = sum(value for value in joules if value is not None)
        on_gpu = self._device.type == "cuda"
        record = {
            **pending.record,
            "loss": loss,
            "grad_norm": None if norm is None else float(norm),
            "tokens_per_s": tokens / seconds,
            "tflops": flops / 1e12,
            "host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
            "gpu_memory_gib": torch.cuda.max_memory_allocated() / (1 << 30) if on_gpu else None,
            **dict(zip(("gpu_energy_j", "cpu_energy_j"), joules, strict=True)),
            "tokens_per_j": tokens / known if known > 0.0 else None,
        }
        self._write([record])
        shown = {"loss": f"{loss:.3f}", "tok/s": f"{tokens / seconds:,.0f}"}
        shown["TFLOP/s"] = f"{flops / 1e12:.3g}"
        if "k" in record:
            shown["k"] = f"{record['k']:.2f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def _drain(self) -> None:
        """Records the last step, so that a pause after it is not counted as the next one's."""
        pending, self._pending = self._pending, None
        self._record(pending)

    def _gather_decisions(self) -> None:
        """Records the decisions of all ranks; a collective, for when the ranks meet anyway."""
        own = self._decisions.take()
        if self._rank:
            own = [{"rank": self._rank, **record} for record in own]
        every: list[Any] = [own] * self._plan.world_size
        if self._plan.world_size > 1:
            torch.distributed.all_gather_object(every, own)
        self._write([record for records in every for record in records])

    def _compare_with_plan(self) -> None:
        """Records what a plan predicted beside what the last steps took; a collective."""
        if self._plan.sizes is None or self._steps_made < _LEAST_STEPS:
            return
        report = self._engine.plan_report()
        if self._file is not None:
            self._write([{"step": self._step, "plan": report.to_json()}])
            print(f"\n{report.table()}", flush=True)

    def _evaluate(self) -> None:
        """Records the mean loss of about --eval-sequences held-out sequences; at least a
        micro-batch, and the same number on each rank: a forward pass may contain collectives."""
        plan, sequences = self._plan, self._options.eval_sequences
        if sequences == 0:
            return
        rounds = max(1, sequences // (plan.micro_batch * plan.world_size))
        self._engine.eval()
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        with torch.no_grad():
            for index in range(rounds):
                first = (index * plan.world_size + self._rank) * plan.micro_batch
                batch = self._sequences.held_out_batch(first, plan.micro_batch)  # [B, T]
                ids = data.to_device(batch, self._device)
                total += self._engine(input_ids=ids, labels=ids).loss.float()
        self._engine.train()
        loss = float(self._mean_over_ranks(total / rounds))
        self._write([{"step": self._step, "eval_loss": loss}])

    def _mean_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Averages a scalar over the ranks, in place if there are several."""
        if self._plan.world_size > 1:
            torch.distributed.all_reduce(value)
            value /= self._plan.world_size
        return value

    def _save(self) -> None:
        state = {"step": self._step, "data": self._sequences.position(self._consumed)}
        self._engine.save_checkpoint(
            str(self.checkpoint_dir), tag=f"step{self._step}", client_state={"train_lm": state}
        )

    def _resume(self, tag: str) -> None:
        path, client_state = self._engine.load_checkpoint(
            str(self.checkpoint_dir), tag=None if tag == "latest" else tag
        )
        if path is None:
            raise OptionError(
                f"--resume {tag}: the engine found no whole checkpoint in "
                f"{self.checkpoint_dir}: give the tag of an earlier one"
            )
        state = client_state.get("train_lm")
        if state is None:
            raise OptionError(f"{path} was not saved by this script: its data has no position")
        if state["step"] >= self._options.steps:
            raise OptionError(
                f"--resume {tag} is already at step {state['step']} of --steps "
                f"{self._options.steps}: give more --steps, or the tag of an earlier checkpoint"
            )
        self._step = state["step"]
        self._consumed = self._sequences.consumed_at(state["data"])
        self._decisions.skip_history()
