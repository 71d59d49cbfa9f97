"""Every combination of what ranks may differ in, against one process with the whole batch.

A case is written in words, which :meth:`Case.shares` turns into numbers for its ranks. Samples have
unequal lengths: the rest of each is padded, masked and left out of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_batches import Shares, built_quickly, collate, dataset, samples, trains_as_one_process
from support.covering import covering, every
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model
from support.short_memory import short_of_memory
from torch import nn

from hytrain.config import BatchShares
from hytrain.errors import UnsupportedError
from hytrain.model.layer_state import LayerState

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full

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
            accumulation="layer_major" if "by_layer" in self.accumulation else "micro_batch_major",
            activations="offload" if "offload" in self.accumulation else "keep",
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


# Ordered by ranks: with a GPU only one pool of them is alive at a time.
COVERING = sorted((Case(**v) for v in covering(VALUES)), key=lambda case: case.ranks)
EVERY = sorted((Case(**v) for v in every(VALUES)), key=lambda case: case.ranks)
# Layers that stay for the next pass: a rank with fewer micro-batches follows alone.
KEPT = [
    Case(2, batches, "unequal", 3, accumulation, "always", "differs", gathers)
    for batches, accumulation, gathers in (
        ("unequal", "pieces", "kept"),
        ("idle", "pieces", "defaults"),
        ("idle", "by_layer", "kept"),
        ("unequal", "by_layer", "defaults"),
        ("idle", "by_layer_offload", "each"),
    )
]


@pytest.mark.parametrize(
    "case",
    [*COVERING, *KEPT, *(pytest.param(case, marks=pytest.mark.parity_full) for case in EVERY)],
    ids=str,
)
@on_ranks(lambda case: case.ranks)
def test_training_is_that_of_one_process(case: Case) -> None:
    trains_as_one_process(case.shares())


SHORT = [
    pytest.param(Case(2, "unequal", "unequal", 3, "by_layer", "always", "differs"), marks=full),
    Case(2, "equal", "equal", 3, "by_layer_offload", "off", "differs"),
    Case(3, "idle", "unequal", 3, "by_layer", "always", "differs"),
    Case(2, "idle", "unequal", 3, "pieces", "always", "equal"),
]


@pytest.mark.parametrize("case", SHORT, ids=str)
@on_ranks(lambda case: case.ranks)
def test_where_the_first_backwards_gradients_do_not_fit(case: Case) -> None:
    """It begins updates before its end."""
    with short_of_memory() as early:
        trains_as_one_process(case.shares())
    # A rank without samples runs no graph.
    assert early or not case.shares().sizes[dist.get_rank()]


@pytest.mark.parametrize("idle", [0, 1])
@on_ranks(2)
def test_a_rank_without_samples_updates_on_its_gpu(idle: int) -> None:
    """k is solved on it."""
    rank, steps = dist.get_rank(), 16
    sizes = [3, 3]
    sizes[idle] = 0
    weights: list[dict[str, dict[str, torch.Tensor]]] = []
    for k in (0.0, "solve"):
        solve: Any = k if rank == idle else 0.0
        config = make_config(gpu_fraction=solve, bf16=False, hytrain={"batch_sizes": sizes})
        with pytest.MonkeyPatch.context() as patch, built_quickly(patch, config) as engine:
            shares = BatchShares(tuple(sizes), (3, 3))
            iterator = samples(shares, rank, steps)
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
    if rank != idle:
        assert not any(seen)
        return
    assert (seen[0], seen[-1]) == (0, 6)
    assert "computes no samples" in decision.reason


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_rank_without_samples_has_one_gradient_of_zeros(stage: int) -> None:
    """It gives that to all reductions of a step."""
    rank, idle = dist.get_rank(), 1
    sizes = [3, 3]
    sizes[idle] = 0
    config = make_config(bf16=False, stage=stage, hytrain={"batch_sizes": sizes})
    given: list[torch.Tensor] = []
    with built(make_model("llama"), config) as engine:
        iterator = samples(BatchShares(tuple(sizes), (3, 3)), rank)
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
    assert len(given) == layers
    assert len({flat.untyped_storage().data_ptr() for flat in given}) == (
        1 if rank == idle else layers
    )


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


@pytest.mark.parametrize(
    ("stage", "accumulation"),
    [(1, "micro_batch_major"), (2, "layer_major"), (3, "micro_batch_major"), (3, "layer_major")],
)
@on_ranks(2)
def test_gradients_left_by_hand(stage: int, accumulation: str) -> None:
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


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_gradients_left_by_hand_where_a_rank_has_no_samples(stage: int) -> None:
    """It takes part in the reductions of the batch, though its own gradients are reduced."""
    rank = dist.get_rank()
    section = {"batch_sizes": [2, 0], "micro_batch_sizes": [2, 1]}
    config = make_config(bf16=False, stage=stage, clipping=0.0, hytrain=section)
    data = [collate(dataset(6)[2 * number : 2 * number + 2]) for number in range(3)]
    found: dict[int, torch.Tensor] = {}
    with built(make_model("llama"), config) as engine:
        engine.optimizer.passes.reducer.on_reduced_gradient = lambda state, shard: (
            found.__setitem__(state.index, shard.clone())
        )
        engine.backward(engine(**data[rank]).loss)
        engine.train_batch(iter(data[2:] if rank == 0 else []))
        whole = make_model("llama")
        for batch in data[:2]:
            (whole(**batch).loss / 2).backward()
        whole(**data[2]).loss.backward()
        _assert_gradients(engine.optimizer.layer_states, found, whole)


@pytest.mark.parametrize("accumulation", [1, 2])
@on_ranks(2)
def test_gradients_left_by_hand_are_scaled_behind_their_reduction(accumulation: int) -> None:
    """They were reduced on a stream of their own: compute waits for it before it writes to them."""
    config = make_config(accumulation=accumulation)
    order: list[str] = []
    with built(make_model("mlp"), config) as engine:
        passes = engine.optimizer.passes
        streams, scale = passes.pipeline.streams, passes.collector.scale
        on_communication = streams.on_communication

        def reducing(after: Any = None) -> Any:
            order.append("reduce")
            return on_communication(after)

        def scaling(unreduced: float, reduced: float) -> None:
            order.append("scale")
            scale(unreduced, reduced)

        streams.on_communication = reducing
        streams.compute_waits_for_communication = lambda: order.append("wait")
        passes.collector.scale = scaling
        engine.backward(loss_of(engine(**make_batch("mlp", dist.get_rank()))))
        with passes.summing_over_ranks():
            pass
        assert "reduce" in order
        assert order[-2:] == ["wait", "scale"]


@pytest.mark.parametrize("accumulation", ["micro_batch_major", "layer_major"])
@on_ranks(2)
def test_a_rank_without_samples_has_no_unused_parameters(accumulation: str) -> None:
    section = {
        "batch_sizes": [2, 0],
        "micro_batch_sizes": [2, 1],
        "accumulation": accumulation,
    }
    config = make_config(hytrain=section)
    config["zero_optimization"]["ignore_unused_parameters"] = False
    batch = collate(dataset(2))
    with built(make_model("llama"), config) as engine:
        for _ in range(2):
            engine.train_batch(iter([batch] if dist.get_rank() == 0 else []))
        assert set(engine.optimizer.steps) == {2}


@on_ranks(2)
def test_a_mean_over_nobody_knows_what_is_refused() -> None:
    config = make_config(hytrain={"batch_sizes": [1, 1]})
    with built(make_model("mlp"), config) as engine:
        batch = {"inputs": torch.zeros(1, 32)}
        with pytest.raises(UnsupportedError, match="num_valid"):
            engine.train_batch(iter([batch]))
        engine.train_batch(iter([batch]), num_valid=lambda _batch: 1)
