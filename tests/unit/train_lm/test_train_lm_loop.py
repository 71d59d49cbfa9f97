"""The loop around an engine, with a small one in place of DeepSpeed's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import metrics
import numpy as np
import pytest
import torch
from corpus import Corpus
from data import BatchPlan, DataError, PackedSequences
from loop import Job, Trainer
from options import OptionError, build_parser, parse_options

VOCAB, SEQ_LEN = 11, 6


@dataclass(frozen=True)
class Output:
    loss: torch.Tensor


class SmallEngine:
    """What the loop uses of an engine: a table of logits, SGD with momentum, dropout."""

    def __init__(self, accumulation: int) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Embedding(VOCAB, VOCAB)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5, momentum=0.9)
        self.accumulation = accumulation
        self.micro_steps = 0
        self.training = True
        self.batches: list[torch.Tensor] = []

    def __call__(self, *, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.module(input_ids)
        if self.training:
            self.batches.append(input_ids)
            logits = torch.nn.functional.dropout(logits, 0.1)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        return Output(loss)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9

    def get_lr(self) -> list[float]:
        return [self.optimizer.param_groups[0]["lr"]]

    def get_global_grad_norm(self) -> None:
        return None

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any]) -> None:
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "client": client_state,
        }
        Path(folder).mkdir(exist_ok=True)
        torch.save(state, Path(folder) / tag)

    def load_checkpoint(self, folder: str, tag: str | None) -> tuple[str | None, dict[str, Any]]:
        path = Path(folder) / (tag or "latest")
        if not path.exists():
            return None, {}
        state = torch.load(path)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        return str(path), state["client"]


@dataclass(frozen=True)
class Statistics:
    step: int
    gpu_fraction: float = 0.25
    update_seconds: float = 0.4
    exposed_seconds: float = 0.1
    hidden_share: float = 0.75
    grad_norm: float | None = 2.0
    clip_coefficient: float | None = 0.5
    skipped: bool = False


def _trainer(
    out: Path,
    *argv: str,
    seed: int = 0,
    statistics: bool = False,
    decide_after: tuple[int, ...] = (),
) -> Trainer:
    parser = deepspeed.add_config_arguments(build_parser())
    arguments = ["--out", str(out), "--seed", str(seed), "--eval-sequences", "4", *argv]
    out.mkdir(exist_ok=True)
    tokens = np.random.RandomState(0).randint(0, VOCAB, 40 * SEQ_LEN).astype(np.uint16)
    plan = BatchPlan(micro_batch=2, accumulation=2, world_size=1)
    engine = SmallEngine(plan.accumulation)

    def read() -> Statistics | None:
        return Statistics(engine.micro_steps // plan.accumulation) if statistics else None

    def decisions(since: int) -> list[Decision]:
        backwards = engine.micro_steps // plan.accumulation
        return [Decision(step) for step in decide_after if step < backwards][since:]

    job = Job(
        options=parse_options(parser, arguments, on_gpu=False),
        engine=engine,
        read_statistics=read,
        sequences=PackedSequences(Corpus(tokens, "d"), seq_len=SEQ_LEN, seed=seed),
        plan=plan,
        flops_per_token=6,
        device=torch.device("cpu"),
        rank=0,
        read_decisions=decisions,
    )
    return Trainer(job)


def _losses(trainer: Trainer) -> dict[int, float]:
    records = metrics.read_metrics(trainer.metrics_path)
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def test_every_step_is_recorded_once_and_in_order(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "--steps", "7", "--save-every", "3")
    trainer.run()
    records = metrics.read_metrics(trainer.metrics_path)
    steps = [r for r in records if "step_s" in r]
    assert [r["step"] for r in steps] == list(range(1, 8))
    assert steps[0]["lr"] == pytest.approx(0.5), "the rate that the step used, not the next one"
    assert steps[1]["lr"] == pytest.approx(0.45)
    assert [r["step"] for r in records if "eval_loss" in r] == [0, 7]
    assert "k" not in steps[0]
    assert sorted(p.name for p in trainer.checkpoint_dir.iterdir()) == ["step3", "step6"]
    assert (tmp_path / "loss.png").exists()


def test_statistics_reach_the_metrics(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "--steps", "2", statistics=True)
    trainer.run()
    steps = [r for r in metrics.read_metrics(trainer.metrics_path) if "step_s" in r]
    assert [(r["k"], r["hidden_share"], r["grad_norm"]) for r in steps] == [(0.25, 0.75, 2.0)] * 2


@pytest.mark.parametrize("tag", ["step3", "step6", "step9"])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, tag: str) -> None:
    # 12 steps of 4 sequences are more than an epoch of 39: the order goes on across its end.
    first = _trainer(tmp_path, "--steps", "12", "--save-every", "3")
    first.run()
    expected = metrics.read_metrics(first.metrics_path)
    second = _trainer(tmp_path, "--steps", "12", "--resume", tag)
    second.run()
    resumed = metrics.read_metrics(second.metrics_path)
    timed = {"step_s", "tokens_per_s", "tflops", "host_memory_gib"}
    assert [{k: v for k, v in r.items() if k not in timed} for r in resumed] == [
        {k: v for k, v in r.items() if k not in timed} for r in expected
    ]


def test_evaluation_trains_on_nothing(tmp_path: Path) -> None:
    with_evaluation = _trainer(tmp_path / "a", "--steps", "3")
    without = _trainer(tmp_path / "b", "--steps", "3", "--eval-sequences", "0")
    with_evaluation.run()
    without.run()
    assert _losses(with_evaluation) == _losses(without)


@dataclass(frozen=True)
class Decision:
    step: int
    measured_seconds: float | None = None

    def metrics_record(self) -> dict[str, Any]:
        return {"step": self.step, "placement": {"reason": f"{self.step}", "costs": {}}}


def test_decisions_stand_between_the_steps_they_are_made_in(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "--steps", "5", "--save-every", "2", decide_after=(0, 2, 3))
    trainer.run()
    records = metrics.read_metrics(trainer.metrics_path)
    lines = [f"d{r['step']}" if "placement" in r else r["step"] for r in records if r["step"]]
    # The one after step n is made in step n + 1, whose own line waits for the next launch.
    assert lines == [1, 2, "d2", 3, "d3", 4, 5, 5]
    assert metrics.summarize(records).k_reason == "3"


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no whole checkpoint"):
        _trainer(tmp_path, "--resume", "step3").run()


def test_resumed_past_the_end(tmp_path: Path) -> None:
    _trainer(tmp_path, "--steps", "4", "--save-every", "4").run()
    with pytest.raises(OptionError, match="already at step 4 of --steps 4"):
        _trainer(tmp_path, "--steps", "4", "--resume", "step4").run()


def test_resumed_with_another_seed_is_refused_before_metrics_are_touched(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, "--steps", "4", "--save-every", "2")
    trainer.run()
    before = trainer.metrics_path.read_bytes()
    with pytest.raises(DataError, match="--seed"):
        _trainer(tmp_path, "--steps", "4", "--resume", "step2", seed=1).run()
    assert trainer.metrics_path.read_bytes() == before
