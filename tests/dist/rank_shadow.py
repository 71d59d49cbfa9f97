"""What ranks are compared with: a serial update of each rank's shards, and each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from support.comparisons import assert_same_on_all_ranks
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model
from support.parity import copies_of
from support.shadow import Shadow
from torch import nn

from hytrain.model.layer_state import LayerState


class RankShadow(Shadow):
    """Follows an engine whose state is shared: the norm is that of all ranks."""

    def step(self) -> bool:
        groups = [dict(group) for group in self.engine.optimizer.param_groups]
        self.engine.step()
        self.last, self.gradients = self.gradients, {}
        sums = [float(self.last[i].double().pow(2).sum()) for i in range(len(self.states))]
        total = torch.tensor(sums, dtype=torch.float64).sum().reshape(1)
        dist.all_reduce(total)
        skip = not bool(torch.isfinite(total))
        assert self.engine.optimizer.overflow is skip
        if not skip:
            # The clip coefficient comes from the engine: its sum has another order than this one.
            outcome = self.engine.optimizer.pipeline.norm.read_decision()
            norm = float(total.sqrt()) * self.unscale
            assert abs(outcome.norm - norm) <= 1e-9 * norm
            self._scale = outcome.scale
            self._commit(groups, outcome.norm)
        return skip

    def take_steps(self, numbers: Iterable[int]) -> None:
        """With a micro-batch of each number."""
        for number in numbers:
            backward(self.engine, number)
            self.step()

    @property
    def unscale(self) -> float:
        return 1.0 / dist.get_world_size() if self.engine.gradient_average else 1.0

    def _gradient_scale(self) -> float:
        return self._scale


def assert_equal_on_all_ranks(states: Sequence[LayerState]) -> None:
    """Every rank has the same training copy, bit for bit."""
    assert_same_on_all_ranks("now", copies_of(list(states)))


@contextmanager
def followed(model: nn.Module, config: dict[str, Any]) -> Iterator[RankShadow]:
    """An engine's shadow; in the end all is the serial update's, and the same on all ranks."""
    with built(model, config) as engine:
        shadow = RankShadow(engine)
        yield shadow
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def config_for(fractions: Sequence[float], **values: Any) -> dict[str, Any]:
    return make_config(hytrain={"shard_fractions": list(fractions)}, **values)


def backward(engine: Any, number: int, **batch: Any) -> None:
    """This rank's forward and backward; the ranks have different batches."""
    data = make_batch("mlp", 2 * number + dist.get_rank())
    engine.backward(loss_of(engine(**data, **batch)))


def take_steps(engine: Any, numbers: Iterable[int]) -> None:
    """With a micro-batch of each number; nobody follows."""
    for number in numbers:
        backward(engine, number)
        engine.step()


class Choosing(nn.Module):
    """An MLP whose forward may leave a block out."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner: Any = make_model("mlp") if inner is None else inner

    def forward(self, inputs: torch.Tensor, leave_out: int | None = None) -> torch.Tensor:
        x = self.inner.embed(inputs.to(self.inner.embed.weight.dtype))
        for index, block in enumerate(self.inner.blocks):
            if index != leave_out:
                x = block(x)
        return self.inner.head(x).float().pow(2).mean()


LEFT_OUT: dict[str, Callable[[int, int], int | None]] = {
    "at first": lambda rank, step: 2 if rank and step % 2 == 0 else None,
    "later": lambda rank, step: 2 if rank and step % 2 else None,
    "in turns": lambda rank, step: step % 4 if step and rank == step % 2 else None,
    "another one": lambda rank, step: 2 if rank else 1 if step else None,
    "by all at first": lambda rank, step: None if step else 1,
}
"""The block that a rank leaves out in a step."""
