"""Unequal batches: what ranks train together equals one process with the whole batch.

The bound. Ranks add the same products as one process, in another order: a reduced gradient differs
by at most ``_GRADIENT`` of the layer's largest. Adam turns a gradient g into a step of at most
lr * |g| / (sqrt(v) + eps); with an eps as large as the gradients are here, a difference d in g
makes at most lr * d * (2 / eps) in a step (m and v both move). So after n steps no weight differs
by more than n * lr * (2 / eps) * _GRADIENT * (largest gradient); and every element is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engines import built, from_all_ranks, make_config
from support.models import LENGTH, VOCABULARY, make_model

from hytrain.config import BatchShares
from hytrain.offload import threads
from hytrain.optimizer.unequal_batches import UnequalBatchSampler

STEPS = 3
LR, DECAY, EPS = 1e-2, 0.1, 1e-2
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "eps": EPS}}
_GRADIENT = 1e-6
"""Of the largest gradient; fp32 rounds by 6e-8, and some dozens of sums follow one another."""


@dataclass(frozen=True)
class Shares:
    """Who computes and who owns how much."""

    sizes: tuple[int, ...]
    micro_sizes: tuple[int, ...]
    fractions: tuple[float, ...]
    stage: int
    clipping: float
    gpu_fractions: tuple[float, ...]
    accumulation: str = "micro_batch_major"
    activations: str = "keep"
    gathers: str = "each"

    def __str__(self) -> str:
        mode = f"-{self.accumulation}" if self.accumulation == "layer_major" else ""
        return (
            f"{self.sizes}-{self.micro_sizes}-{self.fractions}-z{self.stage}-c{self.clipping}"
            f"-{self.gathers}{mode}"
        )

    def section(self) -> dict[str, Any]:
        """The "hytrain" section beside the GPU fraction."""
        return {
            "batch_sizes": list(self.sizes),
            "micro_batch_sizes": list(self.micro_sizes),
            "shard_fractions": list(self.fractions),
            "accumulation": self.accumulation,
            "activations": self.activations,
        }

    @property
    def batches(self) -> BatchShares:
        """As the configuration has them."""
        return BatchShares(self.sizes, self.micro_sizes)


def dataset(samples: int) -> list[dict[str, torch.Tensor]]:
    """Samples of unequal length: the rest is masked and padded."""
    generator = torch.Generator().manual_seed(5)
    result: list[dict[str, torch.Tensor]] = []
    for index in range(samples):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        length = 2 + (index * 7) % (LENGTH - 2)
        mask = torch.arange(LENGTH) < length
        labels = torch.where(mask, tokens, -100)
        inputs = torch.where(mask, tokens, 0)
        sample = {"input_ids": inputs, "labels": labels, "attention_mask": mask.long()}
        result.append(sample)
    return result


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def samples(
    shares: BatchShares, rank: int, steps: int = STEPS
) -> Iterator[dict[str, torch.Tensor]]:
    """A rank's micro-batches of so many steps; the whole is the same for any ranks."""
    data = dataset(steps * shares.global_batch)
    for indices in UnequalBatchSampler(len(data), shares, rank, seed=3):
        yield collate([data[index] for index in indices])


def trains_as_one_process(case: Shares) -> None:
    """Trains and compares on rank 0."""
    losses, weights, collectives = _train_together(case)
    first, *others = from_all_ranks((losses, collectives))
    assert all(other == first for other in others), "the ranks did different things"
    if dist.get_rank() == 0:
        assert_as_alone(case, losses, weights)


def _train_together(case: Shares) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    """Losses, on rank 0 the master weights, and the collectives that this rank has issued."""
    rank = dist.get_rank()
    config = make_config(
        gpu_fraction=case.gpu_fractions[rank],
        clipping=case.clipping,
        bf16=False,
        stage=case.stage,
        gathers=case.gathers,
        hytrain=case.section(),
        optimizer=ADAMW,
        train_batch_size=sum(case.sizes),
        train_micro_batch_size_per_gpu=None,
        gradient_accumulation_steps=None,
    )
    with pytest.MonkeyPatch.context() as patch, built_quickly(patch, config) as engine:
        assert engine.train_batch_size() == sum(case.sizes)
        iterator = samples(case.batches, rank)
        losses = [float(engine.train_batch(iterator)) for _ in range(STEPS)]
        assert next(iterator, None) is None
        assert engine.global_steps == STEPS
        state = engine.fp32_state_dict()
        watch = engine.optimizer.collectives.watch
        issued = [what for _, what in watch._history._recent]
    return losses, {name: tensors["fp32"] for name, tensors in state.items()}, issued


def built_quickly(patch: pytest.MonkeyPatch, config: dict[str, Any]) -> Any:
    """An engine whose kernel's speed is measured on next to nothing."""
    patch.setattr(threads, "measured_elements", lambda *_, **__: 1 << 12)
    return built(make_model("llama"), config)


def assert_as_alone(case: Shares, losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    """Losses and master weights are those of plain torch in one process."""
    expected_losses, expected, largest = _train_alone(case)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    allowed = STEPS * LR * (2.0 / EPS) * _GRADIENT * largest
    before = dict(make_model("llama").named_parameters())
    assert weights
    for name, value in weights.items():
        moved = float((expected[name] - before[name]).abs().max())
        assert moved > 20 * allowed, f"{name} has hardly moved: nothing is compared"
        # An element can be no more exact than fp32 holds it.
        bound = allowed + 4 * torch.finfo(torch.float32).eps * expected[name].abs()
        worst = float(((value - expected[name]).abs() / bound).max())
        assert worst <= 1.0, f"{name} differs by {worst:.2f} times what rounding allows"


def _train_alone(case: Shares) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """The same by plain torch in one process, and the largest gradient that it has seen."""
    whole = BatchShares((sum(case.sizes),), (sum(case.sizes),))
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    losses: list[float] = []
    largest = 0.0
    for batch in samples(whole, 0):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        largest = max(largest, *(float(gradient.abs().max()) for gradient in gradients))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}, largest
