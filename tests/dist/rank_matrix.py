"""Every combination of what ranks may differ in, against one process with the whole batch.

A case is written in words, which :meth:`Case.shares` turns into numbers for its ranks. Samples have
unequal lengths: the rest of each is padded, masked and left out of the mean.

The bound. Ranks add the same products as one process, in another order: a reduced gradient differs
by at most ``_GRADIENT`` of the layer's largest. Adam turns a gradient g into a step of at most
lr * |g| / (sqrt(v) + eps); with an eps as large as the gradients are here, a difference d in g
makes at most lr * d * (2 / eps) in a step (m and v both move). So after n steps no weight differs
by more than n * lr * (2 / eps) * _GRADIENT * (largest gradient); and every element is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_batches import Shares, batches, dataset
from support.engines import built, make_config
from support.models import make_model

from hytrain.config import BatchShares
from hytrain.offload import threads

STEPS = 3
LR, DECAY, EPS = 1e-2, 0.1, 1e-2
_GRADIENT = 1e-6
"""Of the largest gradient; fp32 rounds by 6e-8, and some dozens of sums follow one another."""

_SIZES = {
    "equal": {2: (2, 2), 3: (2, 2, 2), 4: (2, 2, 2, 2)},
    "unequal": {2: (1, 4), 3: (4, 1, 2), 4: (1, 3, 2, 1)},
    "idle": {2: (0, 3), 3: (3, 0, 1), 4: (0, 3, 0, 2)},
}
_PIECES = (1, 2, 1, 3)
_SHARDS = {2: (0.7, 0.3), 3: (0.2, 0.5, 0.3), 4: (0.4, 0.3, 0.1, 0.2)}
_K = (1.0, 0.0, 0.5, 0.3)


@dataclass(frozen=True)
class Case:
    """A combination, in words."""

    ranks: int
    batches: str
    shards: str
    stage: int
    accumulation: str
    clipping: str
    k: str
    gathers: str = "each"
    """See :func:`support.engines.make_config`."""

    def __str__(self) -> str:
        return (
            f"{self.ranks}-{self.batches}-{self.shards}-z{self.stage}-{self.accumulation}-"
            f"{self.clipping}-k_{self.k}-{self.gathers}"
        )

    @property
    def section(self) -> dict[str, Any]:
        """The "hytrain" section's keys for the way of accumulation."""
        if not self.accumulation.startswith("by_layer"):
            return {}
        offloads = self.accumulation.endswith("offload")
        return {"accumulation": "layer_major", "activations": "offload" if offloads else "keep"}

    def shares(self) -> Shares:
        """As numbers."""
        n = self.ranks
        sizes = _SIZES[self.batches][n]
        whole = tuple(max(1, size) for size in sizes)
        return Shares(
            sizes=sizes,
            micro_sizes=whole if self.accumulation == "whole" else _PIECES[:n],
            fractions=_SHARDS[n] if self.shards == "unequal" else (1.0 / n,) * n,
            stage=self.stage,
            clipping={"off": 0.0, "never": 100.0, "always": 0.05}[self.clipping],
            gpu_fractions=_K[:n] if self.k == "differs" else (0.5,) * n,
            gathers=self.gathers,
        )


VALUES: dict[str, Sequence[Any]] = {
    "ranks": (2, 3, 4),
    "batches": ("unequal", "idle", "equal"),
    "shards": ("unequal", "equal"),
    "stage": (3, 2, 1),
    "accumulation": ("pieces", "by_layer", "whole", "by_layer_offload"),
    "clipping": ("always", "off", "never"),
    "k": ("differs", "equal"),
    "gathers": ("kept", "each", "defaults"),
}


def trains_as_one_process(case: Case) -> dict[str, float]:
    """Trains and compares on rank 0; how close it came, as shares of what is allowed."""
    shares = case.shares()
    losses, weights, collectives = _train_together(shares, case.section)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (losses, collectives))
    assert all(other == everywhere[0] for other in everywhere), "the ranks did different things"
    if dist.get_rank() != 0:
        return {}
    expected_losses, expected, largest = _train_alone(shares)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    allowed = STEPS * LR * (2.0 / EPS) * _GRADIENT * largest
    before = dict(make_model("llama").named_parameters())
    worst = 0.0
    assert weights
    for name, value in weights.items():
        moved = float((expected[name] - before[name]).abs().max())
        assert moved > 20 * allowed, f"{name} has hardly moved: nothing is compared"
        # An element can be no more exact than fp32 holds it.
        bound = allowed + 4 * torch.finfo(torch.float32).eps * expected[name].abs()
        worst = max(worst, float(((value - expected[name]).abs() / bound).max()))
    assert worst <= 1.0, f"an element differs by {worst:.2f} times what rounding allows"
    return {"worst": worst, "allowed": allowed}


def _train_together(
    case: Shares, accumulation: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    """Losses, on rank 0 the master weights, and the collectives that this rank has issued."""
    rank = dist.get_rank()
    shares = BatchShares(case.sizes, case.micro_sizes)
    section = {
        "batch_sizes": list(case.sizes),
        "micro_batch_sizes": list(case.micro_sizes),
        "shard_fractions": list(case.fractions),
        **accumulation,
    }
    config = make_config(
        gpu_fraction=case.gpu_fractions[rank],
        clipping=case.clipping,
        bf16=False,
        stage=case.stage,
        gathers=case.gathers,
        hytrain=section,
        optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "eps": EPS}},
        train_batch_size=shares.global_batch,
        train_micro_batch_size_per_gpu=None,
        gradient_accumulation_steps=None,
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        built_quickly(patch, config) as engine,
    ):
        iterator = batches(shares, rank, dataset(STEPS * shares.global_batch))
        losses = [float(engine.train_batch(iterator)) for _ in range(STEPS)]
        state = engine.fp32_state_dict()
        watch = engine.optimizer.collectives.watch
        issued = [what for _, what in watch._history._recent]
    return losses, {name: tensors["fp32"] for name, tensors in state.items()}, issued


def built_quickly(patch: pytest.MonkeyPatch, config: dict[str, Any]) -> Any:
    """An engine whose kernel's speed is measured on next to nothing."""
    patch.setattr(threads, "measured_elements", lambda *_, **__: 1 << 12)
    return built(make_model("llama"), config)


def _train_alone(case: Shares) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """The same by plain torch in one process, and the largest gradient that it has seen."""
    shares = BatchShares((sum(case.sizes),), (sum(case.sizes),))
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    losses: list[float] = []
    largest = 0.0
    for batch in batches(shares, 0, dataset(STEPS * shares.global_batch)):
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


def an_idle_rank_is_placed(idle: int) -> tuple[list[int], str]:
    """k is solved on a rank that computes nothing; GPU layers after each step, and why."""
    rank, steps = dist.get_rank(), 16
    sizes = [3, 3]
    sizes[idle] = 0
    weights: list[dict[str, dict[str, torch.Tensor]]] = []
    for k in (0.0, "solve"):
        solve: Any = k if rank == idle else 0.0
        config = make_config(gpu_fraction=solve, bf16=False, hytrain={"batch_sizes": sizes})
        with pytest.MonkeyPatch.context() as patch, built_quickly(patch, config) as engine:
            shares = BatchShares(tuple(sizes), (3, 3))
            iterator = batches(shares, rank, dataset(steps * 3))
            seen: list[int] = []
            for _ in range(steps):
                engine.train_batch(iterator)
                seen.append(engine.optimizer.pipeline.num_gpu_layers)
            weights.append(engine.fp32_state_dict())
            decision = engine.placement_decisions()[-1]
            assert decision == type(decision).from_json(decision.to_json())
    fixed, solved = weights
    for name, tensors in fixed.items():
        # The kernels of both sides may differ in the last bit.
        torch.testing.assert_close(solved[name]["fp32"], tensors["fp32"], rtol=1e-5, atol=1e-6)
    return seen, decision.reason


def gradients_that_are_zero(idle: int, stage: int) -> list[int]:
    """A step's layers, and tensors that this rank gives to their reductions; one has no samples."""
    rank = dist.get_rank()
    sizes = [3, 3]
    sizes[idle] = 0
    config = make_config(bf16=False, stage=stage, hytrain={"batch_sizes": sizes})
    given: list[torch.Tensor] = []
    with built(make_model("llama"), config) as engine:
        iterator = batches(BatchShares(tuple(sizes), (3, 3)), rank, dataset(9))
        engine.train_batch(iterator)
        reduce = engine.optimizer.pipeline.reduce

        def watch(layer: Any, flat: torch.Tensor) -> torch.Tensor:
            given.append(flat)  # it lives on: no memory is given out twice
            return reduce(layer, flat)

        engine.optimizer.pipeline.reduce = watch
        for _ in range(2):
            given.clear()
            engine.train_batch(iterator)
        layers = len(engine.optimizer.pipeline.layers)
    assert all(bool(flat.any()) == (rank != idle) for flat in given)
    return [layers, len(given), len({flat.untyped_storage().data_ptr() for flat in given})]
