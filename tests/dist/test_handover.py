"""iterate_weights(): the module's state dict, tensor by tensor, on one and two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from harness import RankPools, on_ranks
from support.engines import GATHERS, built, make_config
from support.frozen import lora
from support.models import make_batch, make_model
from support.resume import Everything, micro_batch, train
from test_rank_failures import impatient, told
from torch.multiprocessing.reductions import StorageWeakRef

from hytrain.engine.weight_handover import WeightHandover
from hytrain.errors import ConfigError, OutOfStepError
from hytrain.zero3.gatherer import LayerGatherer

pytestmark = pytest.mark.timeout(240)

PLACES = {
    "zero1": (1, {}),
    "zero2": (2, {}),
    "zero3": (3, GATHERS["each"]),
    "zero3-some-stay": (3, {"stage3_param_persistence_threshold": 100}),
    "zero3-offload_param": (3, {**GATHERS["each"], "offload_param": {"device": "cpu"}}),
}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"bucket_bytes": 1},
    {"bucket_bytes": 6000},
    {"bucket_bytes": 6000, "on_host": True},
    {"bucket_bytes": 6000, "dtype": torch.float16},
    {"bucket_bytes": 6000, "dtype": torch.float32, "on_host": True},
    {"exclude_frozen_parameters": True},
)


@contextmanager
def _engine(place: str, model: torch.nn.Module | None = None, **more: Any) -> Iterator[Any]:
    stage, keys = PLACES[place]
    torch.manual_seed(0)
    config = make_config(stage=stage, gpu_fraction=0.5, train_micro_batch_size_per_gpu=2, **more)
    config["zero_optimization"].update(keys)
    with built(model or Everything(), config) as engine:
        yield engine


def _whole(engine: Any) -> dict[str, torch.Tensor]:
    with engine.gathered_parameters():
        return {name: t.detach().clone() for name, t in engine.module.state_dict().items()}


def _assert_handed_over(engine: Any, whole: dict[str, torch.Tensor], **how: Any) -> None:
    """Each name once; each tensor is looked at before the next is asked for, as a user does."""
    dtype, seen = how.get("dtype"), set[str]()
    for name, tensor in engine.iterate_weights(**how):
        expected = whole[name]
        assert name not in seen
        assert torch.equal(
            tensor, expected.to(dtype) if dtype and expected.is_floating_point() else expected
        )
        assert tensor.dtype == (dtype if dtype and expected.is_floating_point() else expected.dtype)
        assert not tensor.requires_grad
        seen.add(name)
    frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
    assert seen == whole.keys() - (frozen if how.get("exclude_frozen_parameters") else set())


def _hands_over(place: str, fractions: list[float] | None) -> list[float]:
    with _engine(place, hytrain={"shard_fractions": fractions}) as engine:
        losses: list[float] = []
        for step, how in enumerate(WAYS):
            losses += train(engine, step, step + 1)
            _assert_handed_over(engine, _whole(engine), **how)
        engine.offload_states(include=["optim_states", "lp_params"] if step % 2 else None)
        away = {name: tensor.clone() for name, tensor in engine.iterate_weights()}
        engine.reload_states()
        whole = _whole(engine)
        assert away.keys() == whole.keys()
        assert all(torch.equal(away[name], tensor) for name, tensor in whole.items())
        return losses + train(engine, len(WAYS), len(WAYS) + 2)


def _without(place: str, fractions: list[float] | None) -> list[float]:
    with _engine(place, hytrain={"shard_fractions": fractions}) as engine:
        return train(engine, 0, len(WAYS) + 2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fractions", [[1.0], [0.5, 0.5], [0.7, 0.3]], ids=str)
def test_tensors_are_those_of_the_state_dict(
    place: str, fractions: list[float], ranks: RankPools
) -> None:
    """Also while states are off the device; and training goes on as if nothing had been read."""
    pool = ranks(len(fractions))
    given = None if len(set(fractions)) == 1 else fractions
    assert pool.run(_hands_over, place, given) == pool.run(_without, place, given)


@pytest.mark.parametrize("place", ["zero2", "zero3"])
@on_ranks(2)
def test_adapters(place: str) -> None:
    """Merged by the user in a block that gathers, or alone."""
    model = make_model("mlp")
    lora(model)
    with _engine(place, model) as engine:
        engine.backward(engine(**make_batch("mlp", 0)))
        engine.step()
        whole = _whole(engine)
        _assert_handed_over(engine, whole, bucket_bytes=3000)
        _assert_handed_over(engine, whole, exclude_frozen_parameters=True)
        module = engine.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            adapter = next(m for m in module.modules() if type(m).__name__ == "Lora")
            with torch.no_grad():
                adapter.base.weight.add_(adapter.up.weight @ adapter.down.weight)
            merged = {name: t.detach().clone() for name, t in module.state_dict().items()}
            _assert_handed_over(engine, merged)
        assert any(not torch.equal(merged[name], whole[name]) for name in whole)


CHANGES: dict[str, Callable[[Any, Path], object]] = {
    "step": lambda engine, _: train(engine, 1, 2),
    "backward": lambda engine, _: engine.backward(engine(micro_batch(1))),
    "load": lambda engine, folder: engine.load_checkpoint(folder),
    "another": lambda engine, _: next(engine.iterate_weights()),
}


@pytest.mark.parametrize("place", ["zero2", "zero3"])
@on_ranks(2)
def test_weights_that_change_meanwhile(place: str, tmp_path: Path) -> None:
    with _engine(place) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(str(tmp_path))
        for change in CHANGES.values():
            handed = engine.iterate_weights(bucket_bytes=6000)
            next(handed)
            change(engine, tmp_path)
            with pytest.raises(ConfigError, match="take all of them before"):
                next(handed)
        _assert_handed_over(engine, _whole(engine))


@on_ranks(2, alone=True)
def test_a_rank_that_stops_early() -> None:
    """It goes on with a step while the other one waits for its part of a tensor."""
    impatient()
    with _engine("zero3") as engine:
        train(engine, 0, 1)
        with told(OutOfStepError, "all-gather"):
            for number, _named in enumerate(engine.iterate_weights(bucket_bytes=1)):
                if number == 2 and dist.get_rank() == 1:
                    break
            train(engine, 1, 2)


class _Meter:
    """Bytes of buckets that are alive when one more has been made: the most, and of all.

    Gloo's thread lets go of a finished collective's tensors a moment later than its waiters go on:
    what is more than ``limit`` has a second to go.
    """

    def __init__(self, patch: pytest.MonkeyPatch, limit: int) -> None:
        self.peak = self.taken = 0
        self._known: list[tuple[StorageWeakRef, int]] = []
        bring = LayerGatherer.bring

        def counted(gatherer: LayerGatherer, *arguments: Any) -> Any:
            flat, arrived = bring(gatherer, *arguments)
            self._known.append((StorageWeakRef(flat.untyped_storage()), flat.nbytes))
            end = time.monotonic() + 1.0
            while self._alive() > limit and time.monotonic() < end:
                time.sleep(0.001)
            self.taken += flat.nbytes
            self.peak = max(self.peak, self._alive())
            return flat, arrived

        patch.setattr(LayerGatherer, "bring", counted)

    def _alive(self) -> int:
        self._known = [(ref, size) for ref, size in self._known if not ref.expired()]
        return sum(size for _ref, size in self._known)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_of_two_buckets(num_ranks: int, on_host: bool, ranks: RankPools) -> None:
    ranks(num_ranks).run(_takes_two_buckets, on_host)


def _takes_two_buckets(on_host: bool) -> None:
    limit = 8_000
    with pytest.MonkeyPatch.context() as patch, _engine("zero3-offload_param") as engine:
        meter = _Meter(patch, 2 * limit)
        blocks: list[int] = []
        block = WeightHandover._block

        def counted(handover: WeightHandover, *arguments: Any) -> Any:
            found = block(handover, *arguments)
            blocks.append(sum(each.num_bytes for each in handover._blocks))
            return found

        patch.setattr(WeightHandover, "_block", counted)
        for name, tensor in engine.iterate_weights(bucket_bytes=limit, on_host=on_host):
            assert tensor.numel() > 0, name
        assert meter.taken > 3 * limit
        assert limit < meter.peak <= 2 * limit
        page = 4096
        assert (max(blocks) <= 2 * (limit + page)) if on_host else not blocks
