"""Layers that are updated together on the device: who with whom, and bitwise as one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from support.comparisons import assert_same_bits
from support.covering import covering, every
from support.engines import built, make_config
from support.models import HIDDEN, loss_of, make_model
from torch import nn

from hytrain.kernels.grouped_adam import GroupedAdam
from hytrain.offload import device_update
from hytrain.offload.device_update import batches
from hytrain.offload.update_groups import LIMITS, GroupLimits, group_begins
from hytrain.optimizer.offloaded_states import StateKind
from hytrain.placement.measure import CostEstimator

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(60)]

MEBI = 1 << 20
STEPS = 8


# -- who with whom ---------------------------------------------------------------------------------


def layer(size: int, *, is_rounded: bool = False, on_host: bool = False) -> Any:
    return SimpleNamespace(
        shard_size=size,
        form=SimpleNamespace(is_rounded=is_rounded, is_split=False),
        storage=SimpleNamespace(on_host=on_host),
    )


def counts(layers: Sequence[Any]) -> list[int]:
    """How many layers each launch has."""
    found = batches(layers)
    assert [each for batch in found for each in batch] == list(layers)
    for batch in found[1:]:
        assert len(batch) == 1 or sum(each.shard_size for each in batch) <= LIMITS.most_elements
    assert len(found[0]) == 1 or sum(each.shard_size for each in found[0]) <= LIMITS.first_elements
    return [len(batch) for batch in found]


def test_launches_grow_from_a_small_one() -> None:
    assert counts([layer(13_000_000)] * 26) == [1, 2, 5, 5, 5, 5, 3]
    assert counts([layer(MEBI)] * 26) == [8, 8, 8, 2]
    assert LIMITS.most_layers == 8


def test_large_layers_are_updated_alone() -> None:
    assert counts([layer(52_000_000)] * 18) == [1] * 18
    small, large = layer(MEBI), layer(33 * MEBI)
    assert counts([small, small, large, small, small]) == [2, 1, 2]


def test_groups_that_leave_room_have_at_most_half_of_what_is_before_them_or_64_mebi() -> None:
    room = LIMITS.leaving_room()
    large = [65_000_000, *([52_000_000] * 16), 65_000_000]
    begins = group_begins(large, [True] * len(large), room)
    assert begins == [0, 1, 2, 3, 4, 6, 9, 13]  # 18 where each is updated alone
    for begin, end in pairwise([*begins, len(large)]):
        assert end == begin + 1 or sum(large[begin:end]) <= max(64 * MEBI, sum(large[:begin]) // 2)
    assert group_begins([13_000_000] * 26, [True] * 26, room) == [0, 1, 3, 8, 13, 19]
    assert max(b - a for a, b in pairwise(group_begins([MEBI] * 90, [True] * 90, room))) == 8


def test_what_a_table_of_addresses_cannot_do_is_done_alone() -> None:
    plain = layer(MEBI)
    for other in (layer(MEBI, is_rounded=True), layer(MEBI, on_host=True)):
        assert counts([plain, other, other, plain, plain]) == [1, 1, 1, 2]


def test_none() -> None:
    assert batches([]) == []


def test_groups_of_the_first_layers_are_those_of_all_cut() -> None:
    sizes = [9, 1, 20, 40, 2, 2, 2, 2, 2, 2, 2, 2, 2, 70, 3]
    mebi = [size * MEBI for size in sizes]
    for groupable in ([True] * len(sizes), [number % 5 > 0 for number in range(len(sizes))]):
        for limits in (LIMITS, LIMITS.leaving_room()):
            begins = group_begins(mebi, groupable, limits)
            for number in range(len(sizes) + 1):
                cut = [begin for begin in begins if begin < number]
                assert group_begins(mebi[:number], groupable[:number], limits) == cut


# -- bitwise as one by one -------------------------------------------------------------------------


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and vectors with other hyper-parameters."""
    trained = list(model.parameters())
    return [
        {"params": [p for p in trained if p.dim() > 1]},
        {
            "params": [p for p in trained if p.dim() < 2],
            "lr": 3e-3,
            "betas": (0.8, 0.99),
            "weight_decay": 0.0,
        },
    ]


_LEAVING_ROOM = 3
"""Layers of a group where steps are launch-bound."""


def group_at_most(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def begins(sizes: Sequence[int], groupable: Sequence[bool], limits: GroupLimits) -> list[int]:
        most = _LEAVING_ROOM if limits.earlier_share else layers
        return group_begins(sizes, groupable, replace(limits, most_layers=most))

    monkeypatch.setattr(device_update, "group_begins", begins)


def step(engine: Any, number: int, *, overflows: bool = False) -> None:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(2, HIDDEN, generator=generator).to(engine.device)
    loss = loss_of(engine(inputs=inputs))
    engine.backward(loss * float("inf") if overflows else loss * (10.0 if number % 3 else 0.01))
    engine.step()


How = Literal["stays", "moves", "launch-bound"]


def trained(config: dict[str, Any], how: How) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Every layer's state and weights after each step, and how often groups were made anew.

    Args:
        config: of the engine.
        how: layers, and the memory of their states, move meanwhile; or steps are launch-bound now
            and then, so that updates leave room.
    """
    found: list[dict[str, torch.Tensor]] = []
    made: list[GroupedAdam] = []
    model = make_model("mlp")
    with (
        built(model, config, model_parameters=groups(model)) as engine,
        pytest.MonkeyPatch.context() as patch,
    ):
        original = device_update.GroupedAdam

        def making(*arguments: Any) -> GroupedAdam:
            made.append(original(*arguments))
            return made[-1]

        patch.setattr(device_update, "GroupedAdam", making)
        for number in range(STEPS):
            patch.setattr(CostEstimator, "launch_bound", how == "launch-bound" and number % 4 < 2)
            if how == "moves":
                engine.optimizer.placement.set_gpu_fraction((0.5, 1.0, 0.5, 0.0)[number // 2 % 4])
            step(engine, number, overflows=number == 3 and config["bf16"]["enabled"])
            if how == "moves" and number in (1, 4):
                engine.offload_states()
                engine.reload_states()
            engine.optimizer.pipeline.flush()
            state: dict[str, torch.Tensor] = {}
            for each in engine.optimizer.layer_states:
                for name, tensor in zip(("p", "m", "v"), each.state, strict=True):
                    state[f"{name} of {each.name}"] = tensor.cpu().clone()
                for begin, weights in each.storage.shard_slices(each.begin, each.end):
                    state[f"weights of {each.name} from {begin}"] = weights.cpu().clone()
            found.append(state)
    return found, len(made)


WAYS = {"how": get_args(How), "stage": (2, 3), "bf16": (True, False), "most_layers": (8, 2)}


@pytest.mark.parametrize(
    ("how", "stage", "bf16", "most_layers"),
    [
        *(tuple(row.values()) for row in covering(WAYS)),
        *(pytest.param(*row.values(), marks=pytest.mark.parity_full) for row in every(WAYS)),
    ],
)
def test_training_is_bitwise_that_of_single_launches(
    most_layers: int, bf16: bool, stage: int, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clipped steps, a skipped one, two parameter groups; layers and memory that move."""
    config = make_config(gpu_fraction=0.7, stage=stage, bf16=bf16, clipping=0.5)
    config["bf16"]["check_grad_overflow"] = bf16
    group_at_most(most_layers, monkeypatch)
    together, made = trained(config, how)
    if how == "stays":
        assert made == 1  # what stays is not made again
    assert (made > 1) == (how != "stays")
    monkeypatch.setattr(device_update, "is_groupable", lambda _layer: False)
    alone, _ = trained(config, how)
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert_same_bits(name, tensor, theirs[name])
    weights = {name: [each[name] for each in together] for name in together[0]}
    assert all(torch.equal(each[2], each[3]) for each in weights.values()) == bf16  # skipped
    assert all(not torch.equal(each[3], each[4]) for each in weights.values())


@pytest.mark.parametrize("launch_bound", [False, True])
def test_each_layer_waits_for_its_own_update_when_it_is_used(
    launch_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compute waited for all of them, a forward that waits for compute would, too."""
    monkeypatch.setattr(CostEstimator, "launch_bound", launch_bound)
    waits: list[int] = []
    with built(make_model("mlp"), make_config(gpu_fraction=0.5)) as engine:
        pipeline, states = engine.optimizer.pipeline, engine.optimizer.layer_states
        original = pipeline.wait

        def wait(layer: Any) -> None:
            waits.append(layer.index)
            original(layer)

        monkeypatch.setattr(pipeline, "wait", wait)
        for number in range(4):
            waits.clear()
            step(engine, number)
            assert [state.placement == "gpu" for state in states] == [True] * 3 + [False] * 3
            assert not any(state.update.waited for state in states)
            assert not any(state.update.reads.are_readable for state in states)
            assert number == 0 or waits == [0, 1, 2, 3, 4, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compute_does_not_wait_for_updates_that_it_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward that has the host wait for compute first, as many do, does not wait for them."""
    monkeypatch.setattr(CostEstimator, "launch_bound", True)
    with built(make_model("mlp"), make_config(gpu_fraction=1.0)) as engine:
        pipeline = engine.optimizer.pipeline
        for number in range(3):
            step(engine, number)
        torch.cuda.synchronize()
        with torch.cuda.stream(pipeline.streams.update):
            torch.cuda._sleep(2_000_000_000)  # clock cycles: 1 s or more, many steps
        step(engine, 3)  # its own forward uses what was updated before the sleep
        torch.cuda.current_stream().synchronize()
        assert not pipeline.layers[-1].update.updated.query()
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_forward_in_another_stream_comes_after_the_updates() -> None:
    def run(side: torch.cuda.Stream) -> list[torch.Tensor]:
        with built(make_model("mlp"), make_config(gpu_fraction=1.0)) as engine:
            pipeline = engine.optimizer.pipeline
            torch.cuda.synchronize()
            for number in range(6):
                generator = torch.Generator().manual_seed(number)
                inputs = torch.randn(2, HIDDEN, generator=generator).to(engine.device)
                inputs.record_stream(side)
                with torch.cuda.stream(side):
                    loss = loss_of(engine(inputs=inputs))
                engine.backward(loss)
                with torch.cuda.stream(pipeline.streams.update):
                    torch.cuda._sleep(20_000_000)
                engine.step()
            pipeline.flush()
            return [each.clone() for state in pipeline.layers for each in state.state]

    for ours, theirs in zip(
        run(torch.cuda.Stream()), run(torch.cuda.current_stream()), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_observers_see_every_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    group_at_most(2, monkeypatch)
    told: list[dict[int, int]] = []
    observer = SimpleNamespace(
        updates_begin=lambda: told.clear(), layers_updated=lambda sizes: told.append(dict(sizes))
    )
    with built(make_model("mlp"), make_config(gpu_fraction=1.0)) as engine:
        engine.optimizer.pipeline.observer = observer
        step(engine, 0)
        states = engine.optimizer.layer_states
        assert [list(sizes) for sizes in told] == [[0, 1], [2, 3], [4, 5]]
        sizes = {index: size for sizes in told for index, size in sizes.items()}
        assert sizes == {state.index: state.shard_size for state in states}


@pytest.mark.parametrize("kind", [StateKind.optim_states, StateKind.hp_params])
def test_state_that_has_moved_is_found(kind: StateKind) -> None:
    """No layer changed its side, and no weights their place: only the state lies elsewhere."""
    with built(make_model("mlp"), make_config(gpu_fraction=1.0)) as engine:
        step(engine, 0)
        states = engine.optimizer.layer_states
        old = [tensor for state in states for tensor in state.state]  # not given to others
        engine.offload_states(include=[OffloadStateTypeEnum(kind.value)])
        engine.reload_states()
        before = [tensor.clone() for state in states for tensor in state.state]
        assert all(o.data_ptr() != s.master.data_ptr() for o in old for s in states)
        step(engine, 1)
        engine.optimizer.pipeline.flush()
        after = [tensor for state in states for tensor in state.state]
        for one, other in zip(before, after, strict=True):
            assert not torch.equal(one, other)


def test_updates_leave_room_where_steps_are_launch_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before that is known, and no longer when they are not."""
    seen: list[bool] = []
    launch = GroupedAdam.launch

    def watched(
        self: GroupedAdam, number: int, outcome: torch.Tensor, *, leaves_room: bool = False
    ) -> None:
        seen.append(leaves_room)
        launch(self, number, outcome)

    monkeypatch.setattr(GroupedAdam, "launch", watched)
    monkeypatch.setattr(CostEstimator, "launch_bound", True)
    with built(make_model("mlp"), make_config(gpu_fraction=1.0)) as engine:
        step(engine, 0)
        assert seen
        assert not any(seen)
        for number in range(1, STEPS):
            seen.clear()
            step(engine, number)
        assert seen
        assert all(seen)
        monkeypatch.setattr(CostEstimator, "launch_bound", False)
        for number in range(STEPS, 2 * STEPS):
            seen.clear()
            step(engine, number)
        assert seen
        assert not any(seen)
