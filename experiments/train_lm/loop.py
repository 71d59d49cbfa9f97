"""The training loop: steps, evaluation, checkpoints, resuming, and what is recorded of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import metrics
import torch
from decisions import DecisionLog, DecisionsReader, gather_records, no_decisions
from energy import StepEnergy, energy_fields
from options import OptionError, Options
from tqdm.contrib.logging import logging_redirect_tqdm

# Returns the engine's statistics of the step it has just made; None without any.
# A plan is compared with the steps after the first three.
_LEAST_STEPS = 4
StatisticsReader = Callable[[], metrics.UpdateStatistics | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a run is made of."""

    options: Options
    engine: Any
    """deepspeed.DeepSpeedEngine, or hytrain's subclass of it."""
    read_statistics: StatisticsReader
    sequences: data.PackedSequences
    plan: data.BatchPlan
    flops_per_token: int
    device: torch.device
    rank: int
    read_decisions: DecisionsReader = no_decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A step whose loss has not been read from the device yet."""

    step: int
    loss: torch.Tensor
    """Mean loss, float32, shape []."""
    lr: float
    grad_norm: float | torch.Tensor | None
    step_s: float
    joules: torch.Tensor
    """(GPUs, processors) of all ranks, float64 [2]."""
    updates: dict[str, Any]


def forward_backward_seconds(
    model: torch.nn.Module, ids: torch.Tensor, steps: int, warmup: int = 2
) -> list[float]:
    """Time a micro-batch's forward and backward passes, whose gradients are dropped.

    Args:
        model: the bare model, which is left as it was.
        ids: int64 [B, T], on its device.
        steps: how many are timed.
        warmup: how many are made before.

    Returns:
        Seconds of each.
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

    def __init__(self, job: Job) -> None:
        self._job = job
        self._step = 0
        self._steps_made = 0
        self._consumed = 0
        self._pending: _Pending | None = None
        self._is_main = job.rank == 0
        self._decisions = DecisionLog(job.read_decisions)
        self._energy = StepEnergy(job.device, job.plan.world_size)

    @property
    def metrics_path(self) -> Path:
        """The metrics file."""
        return self._job.options.out / "metrics.jsonl"

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of checkpoints."""
        return self._job.options.out / "checkpoints"

    def run(self) -> None:
        """Train to the last step; rank 0 writes metrics and the loss curve.

        Raises:
            OptionError: nothing to resume, or a checkpoint already at the last step.
            data.DataError: the checkpoint belongs to other data.
        """
        options = self._job.options
        if options.resume is not None:
            self._resume(options.resume)
        if not self._is_main:
            self._train(None, None)
            return
        with metrics.MetricsFile(self.metrics_path, keep_steps=self._step) as file:
            bar = metrics.progress_bar(first=self._step, steps=options.steps, disable=False)
            try:
                with logging_redirect_tqdm():  # a decision is a line above the bar, not in it
                    self._train(file, bar)
            finally:
                bar.close()
        metrics.plot_loss(self.metrics_path, options.out / "loss.png")

    def _train(self, file: metrics.MetricsFile | None, bar: Any) -> None:
        options = self._job.options
        if self._step == 0:
            self._evaluate(file)
        while self._step < options.steps:
            started = time.perf_counter()
            loss, lr = self._train_step()
            previous, self._pending = self._pending, None
            # Reading a loss waits for its forward pass. The previous step's is read only now
            # that this step is launched, so that the device never idles for it.
            self._record(previous, file, bar)
            self._record_decisions(file)
            self._pending = self._measure(loss, lr, time.perf_counter() - started)
            if (
                options.eval_every
                and self._step % options.eval_every == 0 < options.steps - self._step
            ):
                self._drain(file, bar)
                self._evaluate(file)
            if options.save_every and self._step % options.save_every == 0:
                self._drain(file, bar)
                self._gather_decisions(file)
                self._save()
        self._drain(file, bar)
        self._gather_decisions(file)
        self._compare_with_plan(file)
        self._evaluate(file)

    def _compare_with_plan(self, file: metrics.MetricsFile | None) -> None:
        """Record what a plan predicted beside what the last steps took; a collective."""
        if self._job.plan.sizes is None or self._steps_made < _LEAST_STEPS:
            return
        report = self._job.engine.plan_report()
        if file is not None:
            file.plan(self._step, report.to_json())
            print(f"\n{report.table()}", flush=True)

    def _train_step(self) -> tuple[torch.Tensor, float]:
        """Make one optimizer step; return the mean loss, shape [], and the rate used.

        The mean is this rank's, or, by a plan, that of the global batch.
        """
        job, plan = self._job, self._job.plan
        # Dropout depends on seed, step and rank alone: a resumed run draws the same numbers.
        step_seed = (job.options.seed * 1_000_003 + self._step) * 65_537 + job.rank
        torch.manual_seed(step_seed % (1 << 63))
        total = torch.zeros((), dtype=torch.float32, device=job.device)
        lr = 0.0
        pieces = plan.pieces(self._consumed, job.rank)
        if plan.sizes is not None:
            lr = float(job.engine.get_lr()[0])  # before the step, which sets the next one's
            total = job.engine.train_batch(
                {"input_ids": ids, "labels": ids} for ids in self._ids(pieces)
            )
        else:
            for ids in self._ids(pieces):
                loss = job.engine(input_ids=ids, labels=ids).loss
                job.engine.backward(loss)
                lr = float(job.engine.get_lr()[0])
                job.engine.step()
                total += loss.detach().float()
            total /= plan.accumulation
        self._step += 1
        self._steps_made += 1
        self._consumed += plan.global_batch
        return total, lr

    def _ids(self, pieces: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """Give training sequences [B, T] on the device, a micro-batch at a time."""
        for first, count in pieces:
            yield data.to_device(self._job.sequences.train_batch(first, count), self._job.device)

    def _measure(self, loss: torch.Tensor, lr: float, step_s: float) -> _Pending:
        statistics = self._job.read_statistics()
        if statistics is None:
            grad_norm = self._job.engine.get_global_grad_norm()
        else:
            # None where the step did not wait for its norm: what the engine would return then
            # is a buffer that the next step overwrites before it is read here.
            grad_norm = statistics.grad_norm
        return _Pending(
            step=self._step,
            loss=self._mean_over_ranks(loss),
            lr=lr,
            grad_norm=grad_norm,
            step_s=step_s,
            joules=self._energy.of_step(),
            updates=metrics.update_fields(statistics),
        )

    def _record(self, pending: _Pending | None, file: metrics.MetricsFile | None, bar: Any) -> None:
        if pending is None:
            return
        loss = float(pending.loss)  # on every rank: the wait keeps them at the same step
        if file is None:
            return
        job = self._job
        tokens_per_s = job.plan.global_batch * job.sequences.seq_len / pending.step_s
        on_gpu = job.device.type == "cuda"
        record = metrics.StepRecord(
            step=pending.step,
            loss=loss,
            lr=pending.lr,
            grad_norm=None if pending.grad_norm is None else float(pending.grad_norm),
            step_s=pending.step_s,
            tokens_per_s=tokens_per_s,
            tflops=tokens_per_s * job.flops_per_token / job.plan.world_size / 1e12,
            host_memory_gib=metrics.host_memory_gib(),
            gpu_memory_gib=torch.cuda.max_memory_allocated() / (1 << 30) if on_gpu else None,
            **energy_fields(pending.joules, job.plan.global_batch * job.sequences.seq_len),
            **pending.updates,
        )
        file.step(record)
        bar.set_postfix(metrics.bar_fields(record), refresh=False)
        bar.update()

    def _drain(self, file: metrics.MetricsFile | None, bar: Any) -> None:
        """Record the last step, so that a pause after it is not counted as the next one's."""
        pending, self._pending = self._pending, None
        self._record(pending, file, bar)

    def _record_decisions(self, file: metrics.MetricsFile | None) -> None:
        if file is not None:
            file.decisions(self._decisions.take())

    def _gather_decisions(self, file: metrics.MetricsFile | None) -> None:
        """Record those of all ranks; a collective, for moments when the ranks meet anyway."""
        self._record_decisions(file)
        if self._job.plan.world_size == 1:
            return
        records = gather_records([] if self._is_main else self._decisions.take(), self._job.rank)
        if file is not None:
            file.decisions(records)

    def _evaluate(self, file: metrics.MetricsFile | None) -> None:
        job, plan = self._job, self._job.plan
        if job.options.eval_sequences == 0:
            return
        rounds = data.evaluation_rounds(job.options.eval_sequences, plan)
        job.engine.eval()
        total = torch.zeros((), dtype=torch.float32, device=job.device)
        with torch.no_grad():
            for index in range(rounds):
                first = (index * plan.world_size + job.rank) * plan.micro_batch
                batch = job.sequences.held_out_batch(first, plan.micro_batch)  # [B, T]
                ids = data.to_device(batch, job.device)
                total += job.engine(input_ids=ids, labels=ids).loss.float()
        job.engine.train()
        loss = float(self._mean_over_ranks(total / rounds))
        if file is not None:
            file.evaluation(self._step, loss)

    def _mean_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Average a scalar over the ranks, in place where there are several."""
        world_size = self._job.plan.world_size
        if world_size > 1:
            torch.distributed.all_reduce(value)
            value /= world_size
        return value

    def _save(self) -> None:
        state = {"step": self._step, "data": self._job.sequences.position(self._consumed).state()}
        self._job.engine.save_checkpoint(
            str(self.checkpoint_dir), tag=f"step{self._step}", client_state={"train_lm": state}
        )

    def _resume(self, tag: str) -> None:
        options = self._job.options
        path, client_state = self._job.engine.load_checkpoint(
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
        if state["step"] >= options.steps:
            raise OptionError(
                f"--resume {tag} is already at step {state['step']} of --steps {options.steps}: "
                "give more --steps, or the tag of an earlier checkpoint"
            )
        self._step = state["step"]
        self._consumed = self._job.sequences.consumed_at(state["data"])
        self._decisions.skip_history()
