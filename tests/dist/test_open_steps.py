"""What ranks do between backward and step(): nothing hangs, and no step differs by it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from harness import on_ranks
from rank_shadow import Choosing, config_for, followed
from support.comparisons import assert_same_states
from support.engines import built
from support.models import loss_of, make_batch, make_model

from hytrain.errors import AbortedBackwardError

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full

FRACTIONS = (0.7, 0.3)


def _save(engine: Any) -> None:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(Path(folder[0]), tag="x")


def _evaluate(engine: Any) -> None:
    with torch.no_grad():
        engine(**make_batch("mlp", 77))


def _all_reduce(_engine: Any) -> None:
    found = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(found)
    assert float(found) == sum(range(dist.get_world_size()))


def _last(engine: Any) -> torch.nn.Parameter:
    return engine.module.inner.head.weight


BETWEEN: dict[str, Callable[[Any], object]] = {
    "all_reduce": _all_reduce,
    "barrier": lambda _engine: dist.barrier(),
    "synchronize": lambda engine: engine.synchronize(),
    "fp32_state_dict": lambda engine: engine.fp32_state_dict(),
    "save_checkpoint": _save,
    "evaluation": _evaluate,
    "weight": lambda engine: safe_get_full_fp32_param(_last(engine)),
    "gradient": lambda engine: safe_get_full_grad(_last(engine)),
    "gradients": lambda engine: [safe_get_full_grad(p) for p in engine.module.parameters()],
    "zero_grad": lambda engine: engine.zero_grad(),
    "state_dict": lambda engine: engine.optimizer.state_dict(),
}
ALIKE = ("barrier", "fp32_state_dict", "state_dict")
"""Collectives that others of them make as well."""


@pytest.mark.parametrize(
    ("what", "stage", "accumulation"),
    [
        *((what, 3, 1) for what in BETWEEN if what not in ALIKE),
        *(pytest.param(what, 3, 1, marks=full) for what in ALIKE),
        *((what, 2, 1) for what in ("all_reduce", "evaluation")),
        *(pytest.param(what, 2, 1, marks=full) for what in ("save_checkpoint", "gradient")),
        *(("all_reduce", stage, 2) for stage in (1, 3)),
        ("gradients", 2, 2),
        ("zero_grad", 3, 2),
    ],
)
@on_ranks(2)
def test_one_rank_leaves_a_layer_out(what: str, stage: int, accumulation: int) -> None:
    """One rank leaves a block out, so that its gradient is complete there in the end only."""
    config = config_for(
        FRACTIONS, stage=stage, gpu_fraction=0.3, accumulation=accumulation, bf16=False
    )
    rank = dist.get_rank()
    with followed(Choosing(), config) as shadow:
        engine = shadow.engine
        for number in range(4):
            for micro in range(accumulation):
                # All blocks in the first step: ZeRO-3 records it.
                leaves_out = 1 + micro if number and rank == (number + micro) % 2 else None
                batch = make_batch("mlp", 8 * number + 2 * micro + rank)
                loss = loss_of(engine(**batch, leave_out=leaves_out))
                if accumulation > 1:
                    loss.backward()
                else:
                    engine.backward(loss)
                BETWEEN[what](engine)
                if micro + 1 < accumulation:
                    engine.step()
            if what == "zero_grad":
                engine.step()
                assert engine.optimizer.overflow
                shadow.gradients.clear()
            else:
                shadow.step()


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_no_bit_of_a_step_differs_by_it(stage: int) -> None:
    """What is done before step() changes no bit of the steps that are made."""
    ends: list[dict[str, Any]] = []
    rank = dist.get_rank()
    for what in (None, "all_reduce", "weight", "gradient"):
        config = config_for(FRACTIONS, stage=stage, gpu_fraction=0.3, bf16=False)
        torch.manual_seed(0)
        with built(Choosing(), config) as engine:
            for number in range(4):
                leaves_out = 1 if number and rank == number % 2 else None
                batch = make_batch("mlp", 2 * number + rank)
                engine.backward(loss_of(engine(**batch, leave_out=leaves_out)))
                if what is not None:
                    BETWEEN[what](engine)
                engine.step()
            ends.append(engine.fp32_state_dict())
    for end in ends[1:]:
        assert_same_states(end, ends[0])


@on_ranks(2)
def test_a_backward_that_does_not_reduce_after_one_that_does() -> None:
    """It is reduced in step(), whatever has come between. Only ZeRO-1 has no_sync()."""
    ends: list[dict[str, Any]] = []
    rank = dist.get_rank()
    for is_looked_at in (False, True):
        with built(make_model("mlp"), config_for(FRACTIONS, stage=1, bf16=False)) as engine:
            for number in range(2):
                engine.backward(loss_of(engine(**make_batch("mlp", 4 * number + rank))))
                with engine.no_sync():
                    engine.backward(loss_of(engine(**make_batch("mlp", 4 * number + 2 + rank))))
                if is_looked_at:
                    batch = make_batch("mlp", 9)
                    batch["inputs"].requires_grad_()
                    torch.autograd.grad(loss_of(engine(**batch)), batch["inputs"])
                engine.step()
            ends.append(engine.fp32_state_dict())
    assert_same_states(ends[1], ends[0])


class _Strike(Exception):
    """Of the user's own hook."""


@pytest.mark.parametrize(("stage", "aborted"), [(1, 0), (2, 2), (3, 0), (3, 2)])
@on_ranks(2)
def test_an_aborted_window_begins_anew(stage: int, aborted: int) -> None:
    """All ranks fail in one micro-batch of three, and begin the window anew."""
    model = make_model("mlp")
    armed = [False]

    def strike(gradient: torch.Tensor) -> torch.Tensor:
        if armed[0]:
            raise _Strike
        return gradient

    model.get_parameter("blocks.1.up.weight").register_hook(strike)
    config = config_for(FRACTIONS, stage=stage, gpu_fraction=0.3, accumulation=3, bf16=False)
    with followed(model, config) as shadow:
        engine = shadow.engine

        def micro(number: int) -> None:
            engine.backward(loss_of(engine(**make_batch("mlp", 2 * number + dist.get_rank()))))

        for window in range(3):
            for number in range(aborted if window else 0):
                micro(50 + number)
                engine.step()
            if window:  # ZeRO-3 records the first pass
                armed[0] = True
                with pytest.raises(_Strike):
                    micro(60)
                armed[0] = False
            if window == 2:
                with pytest.raises(AbortedBackwardError):
                    engine.step()
            numbers = [10 * window + number for number in range(3)]
            expected = _gradients(engine, numbers)
            for number in numbers:
                assert engine.global_steps == window
                micro(number)
                if number != numbers[-1]:
                    engine.step()
            shadow.step()
            assert engine.global_steps == window + 1
            for state in shadow.states:
                whole = torch.zeros(state.layout.size)
                for slot in state.layout.slots:
                    part = slice(slot.offset, slot.offset + slot.numel)
                    whole[part] = expected[slot.name].flatten()
                torch.testing.assert_close(
                    shadow.last[state.index], whole[state.begin : state.end], rtol=1e-4, atol=1e-7
                )


def _gradients(engine: Any, numbers: list[int]) -> dict[str, torch.Tensor]:
    """Of all ranks' micro-batches of these numbers, summed as they are before they are averaged."""
    plain = make_model("mlp")
    with engine.gathered_parameters():
        plain.load_state_dict({k: v.clone() for k, v in engine.module.state_dict().items()})
    for number in numbers:
        for rank in range(dist.get_world_size()):
            batch = make_batch("mlp", dist.get_world_size() * number + rank)
            (loss_of(plain(**batch)) / len(numbers)).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
