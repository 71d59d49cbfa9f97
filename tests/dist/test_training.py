"""Two ranks: bitwise the serial update of each rank's shards, equal weights everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_shadow import (
    LEFT_OUT,
    Choosing,
    RankShadow,
    assert_equal_on_all_ranks,
    backward,
    config_for,
    followed,
)
from support.comparisons import assert_same_bits
from support.engines import built
from support.models import Recomputed, make_batch, make_model

from hytrain.errors import GradientOrderError
from hytrain.model.layer_state import LayerState

pytestmark = pytest.mark.timeout(240)


EVEN, UNEVEN = (0.5, 0.5), (0.7, 0.3)


@pytest.mark.parametrize(("fractions", "stage"), [(EVEN, 1), (UNEVEN, 2), (UNEVEN, 3)], ids=str)
@on_ranks(2)
def test_reduced_gradients(fractions: Sequence[float], stage: int) -> None:
    """What the ranks' hooks saw, summed as the collective does, is what each shard gets."""
    model = make_model("mlp")
    local: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: local.__setitem__(name, g.clone()))
    config = config_for(fractions, stage=stage, gpu_fraction=0.5)
    with built(model, config) as engine:
        shadow = RankShadow(engine)
        for number in range(4):
            local.clear()
            backward(engine, number)
            shadow.step()
            for state in shadow.states:
                _assert_is_sum(state, local, shadow.last[state.index])
            engine.synchronize()
            assert_equal_on_all_ranks(shadow.states)
        shadow.check()
        sizes = [state.shard_size for state in shadow.states]
        share = sum(sizes) / sum(state.layout.size for state in shadow.states)
        assert abs(share - fractions[dist.get_rank()]) < 0.02


def _assert_is_sum(state: LayerState, local: dict[str, torch.Tensor], got: torch.Tensor) -> None:
    flat = torch.zeros(state.layout.size, dtype=got.dtype)
    for slot in state.layout.slots:
        flat[slot.offset : slot.offset + slot.numel] = local[slot.name].flatten()
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    # Of two numbers the sum does not depend on the order; the mean is taken in the update's scale.
    assert_same_bits(
        f"gradient of {state.name}",
        got,
        sum(everywhere[1:], everywhere[0])[state.begin : state.end],
    )


@pytest.mark.parametrize(("gpu_fraction", "poisoned"), [(0.0, 0), (0.5, 1), (1.0, 0)])
@on_ranks(2)
def test_overflow_on_one_rank_skips_on_both(gpu_fraction: float, poisoned: int) -> None:
    model = make_model("mlp")
    armed = [False]

    def strike(gradient: torch.Tensor) -> torch.Tensor:
        if not armed[0]:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("inf")
        return gradient

    next(model.parameters()).register_hook(strike)
    config = config_for(UNEVEN, gpu_fraction=gpu_fraction, clipping=0.1)
    with built(model, config) as engine:
        shadow = RankShadow(engine)
        for number, strikes in enumerate([False, True, False, True, True, False]):
            armed[0] = strikes and dist.get_rank() == poisoned
            backward(engine, number)
            assert shadow.step() is strikes
        shadow.check()
        assert engine.skipped_steps == 3
        assert_equal_on_all_ranks(shadow.states)


@pytest.mark.parametrize(
    ("who", "stage"),
    [*((who, 3) for who in LEFT_OUT), ("at first", 2), ("in turns", 1), ("by all at first", 2)],
)
@on_ranks(2)
def test_a_layer_that_is_left_out(who: str, stage: int) -> None:
    config = config_for(EVEN if stage == 1 else UNEVEN, stage=stage, gpu_fraction=0.3)
    with followed(Choosing(), config) as shadow:
        for step in range(6):
            backward(shadow.engine, step, leave_out=LEFT_OUT[who](dist.get_rank(), step))
            shadow.step()


@pytest.mark.parametrize(("fractions", "stage"), [(EVEN, 1), (UNEVEN, 2)])
@pytest.mark.parametrize("idle_steps", [[0, 1], [2, 3, 5]], ids=["first", "later"])
@on_ranks(2)
def test_a_rank_without_a_backward(
    fractions: Sequence[float], stage: int, idle_steps: list[int]
) -> None:
    """The rank without a batch takes part with zeros, with or without a forward."""
    with followed(make_model("mlp"), config_for(fractions, stage=stage)) as shadow:
        engine = shadow.engine
        for number in range(7):
            if dist.get_rank() == 0 or number not in idle_steps:
                backward(engine, number)
            elif number % 2:
                engine(**make_batch("mlp", number))
            shadow.step()


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
@on_ranks(2)
def test_an_evaluation_on_one_rank_only(gpu_fraction: float) -> None:
    """One rank evaluates between backward and step, the other does not."""
    with followed(make_model("mlp"), config_for(UNEVEN, gpu_fraction=gpu_fraction)) as shadow:
        engine = shadow.engine
        for number in range(5):
            backward(engine, number)
            if dist.get_rank() == number % 2:
                with torch.no_grad():
                    engine(**make_batch("mlp", 99))
                shadow.assert_copy_is_current()
            shadow.step()


@on_ranks(2)
def test_a_late_gradient_ends_the_job() -> None:
    """The counts are not learned anew: a rank that did not fail would not join in."""
    model = Recomputed()
    with followed(model, config_for(UNEVEN)) as shadow:
        engine = shadow.engine
        shadow.take_steps(range(2))
        collector = engine.optimizer.collector
        learned = collector.record
        assert learned is not None
        model.times = 2
        with pytest.raises(GradientOrderError, match="start the job again from a checkpoint"):
            backward(engine, 2)
        assert collector.record is learned


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 3), (2, 1), (3, 1), (3, 3)])
@on_ranks(2)
def test_two_backward_passes_in_a_step(stage: int, accumulation: int) -> None:
    config = config_for(UNEVEN, stage=stage, accumulation=accumulation, gpu_fraction=0.5)
    with followed(make_model("mlp"), config) as shadow:
        engine = shadow.engine
        for step in range(4):
            for micro in range(accumulation - 1):
                backward(engine, 10 * step + micro)
                engine.step()
            backward(engine, 10 * step + 8)
            backward(engine, 10 * step + 9)
            shadow.step()


@on_ranks(2)
def test_no_sync() -> None:
    with followed(make_model("mlp"), config_for(UNEVEN, stage=1, gpu_fraction=0.3)) as shadow:
        engine = shadow.engine
        for step in range(4):
            with engine.no_sync():
                backward(engine, 10 * step)
                backward(engine, 10 * step + 1)
            backward(engine, 10 * step + 2)
            shadow.step()


@pytest.mark.parametrize("clipping", [1e-3, 100.0])
@on_ranks(2)
def test_gradients_summed_instead_of_averaged(clipping: float) -> None:
    config = config_for(UNEVEN, clipping=clipping, gpu_fraction=0.5)
    config["gradient_allreduce_op"] = "sum"
    with followed(make_model("mlp"), config) as shadow:
        engine = shadow.engine
        for number in range(4):
            backward(engine, number)
            shadow.step()
            outcome = engine.optimizer.pipeline.norm.read_decision()
            expected = min(1.0, clipping / (outcome.norm + 1e-6))
            assert outcome.scale == float(torch.tensor(expected, dtype=torch.float32))
