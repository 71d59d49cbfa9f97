"""Without clipping and overflow check a gradient is committed the moment it arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from support.covering import everyday
from support.engines import built, environment, make_config
from support.models import Recomputed, make_model
from support.shadow import Shadow
from support.short_memory import short_of_memory
from training import ALL_FRACTIONS, FRACTIONS, Faulty, backward, inputs, make_steps

from hytrain.errors import AbortedBackwardError, ConfigError, GradientOrderError
from hytrain.model.layer_state import LayerState
from hytrain.offload import device_update
from hytrain.offload.update_groups import GroupLimits, group_begins
from hytrain.offload.update_pipeline import UpdatePipeline

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("accumulation", "delays"), [(1, "3:400"), (3, "")])
@pytest.mark.parametrize("gpu_fraction", ALL_FRACTIONS)
def test_exact(gpu_fraction: float, accumulation: int, delays: str) -> None:
    config = make_config(gpu_fraction=gpu_fraction, accumulation=accumulation, direct=True)
    with environment("HYTRAIN_DELAYS", delays), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        assert engine.optimizer.pipeline.norm.settings.direct
        for number in range(6 * accumulation):
            backward(engine, number)
            if engine.is_gradient_accumulation_boundary():
                shadow.step()
            else:
                engine.step()
            if number == 3:
                shadow.check_weights()
        shadow.check()
        norm = torch.stack([g.double().pow(2).sum() for g in shadow.last.values()]).sum().sqrt()
        assert float(engine.get_global_grad_norm()) == pytest.approx(float(norm))


def test_each_step_has_a_norm_of_its_own() -> None:
    with built(make_model("mlp"), make_config(gpu_fraction=0.5, direct=True)) as engine:
        kept: list[Any] = []
        read: list[float] = []
        for number in range(3):
            backward(engine, number)
            engine.step()
            kept.append(engine.get_global_grad_norm())
            read.append(float(kept[-1]))
    assert [float(norm) for norm in kept] == read
    assert len(set(read)) == 3


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_a_first_backward_whose_gradients_do_not_fit_sends_them(gpu_fraction: float) -> None:
    """...and the numbers are the same."""
    with (
        short_of_memory() as early,
        built(make_model("mlp"), make_config(gpu_fraction=gpu_fraction, direct=True)) as engine,
    ):
        shadow = Shadow(engine)
        for number in range(4):
            early.clear()
            backward(engine, number)
            assert early[:4] == [5, 4, 3, 2]
            shadow.step()
        shadow.check()


def test_a_layer_that_proves_incomplete_in_such_a_first_backward_is_an_error() -> None:
    model = Recomputed()
    model.times = 2
    says = "with clipping or an overflow check one rank takes such an update back"
    with (
        short_of_memory(),
        built(model, make_config(direct=True)) as engine,
        pytest.raises(GradientOrderError, match=says),
    ):
        backward(engine, 0)


@everyday({"moments": ("fp32", "8bit"), "stage": (2, 3), "accumulation": (1, 2)})
def test_the_device_keeps_gradients_of_two_launches_at_most(
    monkeypatch: pytest.MonkeyPatch, moments: str, stage: int, accumulation: int
) -> None:
    """A layer is updated there as its gradient comes; small ones are with their neighbours."""
    monkeypatch.setattr(
        device_update,
        "group_begins",
        partial(limited_begins, most_layers=2 if moments == "fp32" else 1),
    )
    config = make_config(
        gpu_fraction=1.0, direct=True, stage=stage, accumulation=accumulation,
        hytrain={"moments": moments},
    )  # fmt: skip
    updated: list[list[int]] = []
    observer: Any = SimpleNamespace(
        updates_begin=lambda: None, layers_updated=lambda sizes: updated.append(list(sizes))
    )
    most: list[int] = []
    send = UpdatePipeline.send

    def sent(pipeline: UpdatePipeline, layer: LayerState, *arguments: Any) -> None:
        send(pipeline, layer, *arguments)
        at_once = 2 if moments == "fp32" else 1
        kept = [each.shard_size * each.gradient_dtype.itemsize for each in pipeline.layers]
        assert pipeline.waiting_on_device <= 2 * at_once * max(kept)
        most.append(sum(each.update.gradient is not None for each in pipeline.layers))

    monkeypatch.setattr(UpdatePipeline, "send", sent)
    with built(make_model("mlp"), config) as engine:
        engine.optimizer.pipeline.observer = observer
        shadow = Shadow(engine)
        for number in range(4 * accumulation):
            updated.clear()
            backward(engine, number)
            if not engine.is_gradient_accumulation_boundary():
                engine.step()
                assert not updated
                continue
            if number >= accumulation:  # the first backward learns the order
                pairs = [[4, 5], [2, 3], [0, 1]]
                assert updated == (pairs if moments == "fp32" else [[i] for i in range(5, -1, -1)])
            shadow.step()
        shadow.check()
    assert max(most) == (1 if moments == "fp32" else 0)


def limited_begins(
    sizes: Sequence[int], groupable: Sequence[bool], limits: GroupLimits, *, most_layers: int
) -> list[int]:
    return group_begins(sizes, groupable, replace(limits, most_layers=most_layers))


def test_nothing_stays_pending() -> None:
    with built(make_model("mlp"), make_config(direct=True)) as engine:
        cpu = engine.optimizer.pipeline.cpu
        make_steps(engine, range(3))
        engine.synchronize()
        assert not any(cpu.has_pending(layer) for layer in cpu.layers)


USES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "forward": lambda engine, _: engine(**inputs(3)),
    "backward": lambda engine, second: engine.backward(second),
    "synchronize": lambda engine, _: engine.synchronize(),
    "state_dict": lambda engine, _: engine.module.state_dict(),
    "zero_grad": lambda engine, _: engine.zero_grad(),
    "a weight": lambda engine, _: engine.module.head.weight.norm(),
    "a master weight": lambda engine, _: safe_get_full_fp32_param(engine.module.head.weight),
    "a gradient": lambda engine, _: safe_get_full_grad(engine.module.head.weight),
}


@pytest.mark.parametrize("what", USES)
def test_uses_between_backward_and_step_say_what_to_change(what: str) -> None:
    """The old weights are gone then, and the new ones are not whole; the step can be made."""
    with built(make_model("mlp"), make_config(gpu_fraction=0.5, direct=True)) as engine:
        shadow = Shadow(engine)
        make_steps(shadow, range(1))
        second = engine(**inputs(2)) if what == "backward" else torch.ones(())
        backward(engine, 1)
        with pytest.raises(ConfigError, match=r'set "gradient_clipping" or "check_grad_overflow"'):
            USES[what](engine, second)
        if what not in ("forward", "backward"):
            shadow.step()
            make_steps(shadow, range(2, 4))
            shadow.check()


def test_changing_hyper_parameters_before_step_says_what_to_change() -> None:
    with built(make_model("mlp"), make_config(direct=True)) as engine:
        for number in range(2):
            backward(engine, number)
            if number:
                engine.optimizer.param_groups[0]["lr"] = 0.5
                with pytest.raises(ConfigError, match="change them before backward"):
                    engine.step()
            else:
                engine.step()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_changing_hyper_parameters_before_backward_is_fine(gpu_fraction: float) -> None:
    with built(make_model("mlp"), make_config(gpu_fraction=gpu_fraction, direct=True)) as engine:
        shadow = Shadow(engine)
        for number in range(4):
            engine.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number)
            backward(engine, number)
            shadow.step()
        shadow.check()


@everyday({"what": ("forward", "step", "synchronize", "state_dict", "save"), "k": (0.5, 1.0)})
def test_an_exception_in_backward_leaves_a_part_of_a_step(
    what: str, k: float, tmp_path: Path
) -> None:
    """Every use says so, until a checkpoint is loaded; then training goes on as from there."""
    model = Faulty()
    with built(model, make_config(gpu_fraction=k, direct=True)) as engine:
        make_steps(engine, range(2))
        engine.save_checkpoint(tmp_path)
        with model.failing(block=0):
            backward(engine, 50)
        uses = {
            "forward": lambda: engine(**inputs(3)),
            "step": engine.step,
            "synchronize": engine.synchronize,
            "state_dict": engine.module.state_dict,
            "save": lambda: engine.save_checkpoint(tmp_path / "other"),
        }
        for _ in range(2):
            with pytest.raises(AbortedBackwardError, match=r"Load a checkpoint with engine\.load_"):
                uses[what]()
        engine.load_checkpoint(tmp_path)
        shadow = Shadow(engine)
        assert shadow.steps == 2
        make_steps(shadow, range(2, 5))
        shadow.check()


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_an_exception_before_anything_was_committed(gpu_fraction: float) -> None:
    """In the first backward no update has begun."""
    model = Faulty()
    with built(model, make_config(gpu_fraction=gpu_fraction, direct=True)) as engine:
        shadow = Shadow(engine)
        with model.failing(block=0):
            backward(engine, 50)
        shadow.gradients.clear()
        with pytest.raises(AbortedBackwardError, match="were discarded"):
            engine.step()
        make_steps(shadow, range(1, 4))
        shadow.check()


def test_a_late_gradient_says_that_layers_may_have_been_committed() -> None:
    model = Recomputed()
    with built(model, make_config(direct=True)) as engine:
        make_steps(engine, range(2))
        model.times = 2
        with pytest.raises(GradientOrderError, match="some layers may have been committed"):
            backward(engine, 2)
        with pytest.raises(AbortedBackwardError, match="some layers have made this step"):
            engine.step()
