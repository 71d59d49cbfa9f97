"""Cases of unequal batches: what ranks train together equals one process with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engines import built, make_config
from support.models import LENGTH, VOCABULARY, make_model
from torch import nn

from hytrain.config import BatchShares
from hytrain.errors import UnsupportedError
from hytrain.model.layer_state import LayerState
from hytrain.optimizer.unequal_batches import UnequalBatchSampler

STEPS = 6
LR, DECAY = 1e-2, 0.1


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


def batches(shares: BatchShares, rank: int, data: list[Any]) -> Iterator[dict[str, torch.Tensor]]:
    sampler = UnequalBatchSampler(len(data), shares, rank, seed=3)
    for indices in sampler:
        yield collate([data[index] for index in indices])


def train_together(case: Shares) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and on rank 0 the master weights."""
    rank = dist.get_rank()
    shares = BatchShares(case.sizes, case.micro_sizes)
    config = make_config(
        gpu_fraction=case.gpu_fractions[rank],
        clipping=case.clipping,
        bf16=False,
        stage=case.stage,
        gathers=case.gathers,
        hytrain=case.section(),
        train_batch_size=sum(case.sizes),
        train_micro_batch_size_per_gpu=None,
        gradient_accumulation_steps=None,
    )
    data = dataset(STEPS * shares.global_batch)
    with built(make_model("llama"), config) as engine:
        assert engine.train_batch_size() == sum(case.sizes)
        iterator = batches(shares, rank, data)
        losses = [float(engine.train_batch(iterator)) for _ in range(STEPS)]
        assert next(iterator, None) is None
        assert engine.global_steps == STEPS
        state = engine.fp32_state_dict()
    return losses, {name: tensors["fp32"] for name, tensors in state.items()}


def train_alone(case: Shares) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by plain torch in one process: the whole batch at once."""
    shares = BatchShares((sum(case.sizes),), (sum(case.sizes),))
    data = dataset(STEPS * shares.global_batch)
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    losses: list[float] = []
    for batch in batches(shares, 0, data):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        losses.append(float(loss))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def train_and_compare(case: Shares) -> None:
    losses, weights = train_together(case)
    if dist.get_rank() == 0:
        assert_as_alone(case, losses, weights)


def assert_as_alone(case: Shares, losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    """Losses and master weights are those of plain torch in one process."""
    expected_losses, expected = train_alone(case)
    assert losses == pytest.approx(expected_losses[: len(losses)], rel=2e-5)
    before = dict(make_model("llama").named_parameters())
    assert set(weights) <= set(expected)
    for name, value in weights.items():
        moved = float((expected[name] - before[name]).abs().max())
        assert moved > LR / 4, f"{name} has hardly moved: nothing is compared"
        # Gradients are sums in another order; Adam's first steps turn a rounding of a tiny
        # gradient into one of the step, for few elements.
        close = torch.isclose(value, expected[name], rtol=1e-4, atol=0.01 * moved)
        assert float(close.float().mean()) > 0.999, name
        assert float((value - expected[name]).abs().max()) < 0.3 * moved, name


def gradients_are_the_whole_batch(case: Shares) -> None:
    """One step's reduced gradient, elementwise: no optimizer blurs it."""
    rank = dist.get_rank()
    case = replace(case, clipping=0.0)
    shares = BatchShares(case.sizes, case.micro_sizes)
    config = make_config(
        gpu_fraction=case.gpu_fractions[rank], bf16=False, stage=case.stage, hytrain=case.section()
    )
    data = dataset(shares.global_batch)
    found: dict[int, torch.Tensor] = {}
    with built(make_model("llama"), config) as engine:
        states = engine.optimizer.layer_states
        engine.optimizer.passes.reducer.on_reduced_gradient = lambda state, shard: (
            found.__setitem__(state.index, shard.clone())
        )
        engine.train_batch(batches(shares, rank, data))
        whole = make_model("llama")
        whole(**collate(data)).loss.backward()
        _assert_gradients(states, found, whole)


def _assert_gradients(
    states: Sequence[LayerState], found: dict[int, torch.Tensor], whole: nn.Module
) -> None:
    """This rank's reduced shards are those of the plain model's gradients, elementwise."""
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for state in states:
        flat = torch.zeros(state.layout.size)
        for slot in state.layout.slots:
            gradient = gradients[slot.name]
            assert gradient is not None
            flat[slot.offset : slot.offset + slot.numel] = gradient.flatten()
        expected = flat[state.begin : state.end]
        size = float(flat.abs().max())
        torch.testing.assert_close(found[state.index], expected, rtol=1e-4, atol=2e-6 * size)


def refuses_what_it_cannot_weigh() -> None:
    config = make_config(hytrain={"batch_sizes": [1, 1]})
    with built(make_model("mlp"), config) as engine:
        batch = {"inputs": torch.zeros(1, 32)}
        with pytest.raises(UnsupportedError, match="num_valid"):
            engine.train_batch(iter([batch]))
        engine.train_batch(iter([batch]), num_valid=lambda _batch: 1)


def what_was_left_by_hand_is_averaged(stage: int, accumulation: str) -> None:
    """Each rank's micro-batch by hand has the weight that it has in any other step."""
    rank = dist.get_rank()
    config = make_config(
        bf16=False,
        stage=stage,
        clipping=0.0,
        accumulation=2,
        hytrain={"accumulation": accumulation},
    )
    data = [collate(dataset(12)[2 * number : 2 * number + 2]) for number in range(6)]
    found: dict[int, torch.Tensor] = {}
    with built(make_model("llama"), config) as engine:
        engine.optimizer.passes.reducer.on_reduced_gradient = lambda state, shard: (
            found.__setitem__(state.index, shard.clone())
        )
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(**data[rank]).loss)
        engine.set_gradient_accumulation_boundary(None)
        engine.train_batch(iter(data[2 + 2 * rank : 4 + 2 * rank]))
        whole = make_model("llama")
        for batch in data[:2]:
            (whole(**batch).loss / 4).backward()  # of two ranks and two micro-batches
        valid = [int((batch["labels"][:, 1:] != -100).sum()) for batch in data[2:]]
        for count, batch in zip(valid, data[2:], strict=True):
            (whole(**batch).loss * count / sum(valid)).backward()
        _assert_gradients(engine.optimizer.layer_states, found, whole)
