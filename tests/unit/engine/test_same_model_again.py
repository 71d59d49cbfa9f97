"""One model, several engines: a refused build and a destroyed engine leave nothing on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import make_batch, make_model
from support.processes import num_threads
from support.shadow import Shadow
from torch import nn
from training import make_steps

import hytrain
from hytrain.engine import build_optimizer as build
from hytrain.engine import engine as engine_module
from hytrain.engine.deepspeed_internals import HookSnapshot
from hytrain.errors import MemoryBudgetError
from hytrain.placement import memory_probe

SOLVE: Any = "solve"


def hooks_of(model: nn.Module) -> dict[tuple[str, str], list[Any]]:
    """Everything that is hooked to a model's modules and parameters."""
    found = {
        (where, name): list(table)
        for where, module in model.named_modules()
        for name, table in vars(module).items()
        if "hooks" in name and hasattr(table, "keys")
    }
    for where, parameter in model.named_parameters():
        found[where, "gradients"] = list(parameter._post_accumulate_grad_hooks or ())
    return found


def fail(*_arguments: Any, **_keywords: Any) -> Any:
    raise MemoryError("injected")


def no_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(memory_probe, "host_memory_pools", lambda: {"machine": 0})


def no_pipeline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(build, "build_placement", fail)


def no_scheduler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module.HyTrainEngine, "_scheduler_from_config", fail)


def no_guards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "LayerGuards", fail)


def train(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    with built(model, make_config(gpu_fraction=0.5, clipping=0.1)) as engine:
        shadow = Shadow(engine)
        make_steps(shadow, range(4))
        shadow.check()
        return engine.fp32_state_dict()


@pytest.mark.parametrize("refuse", [no_memory, no_pipeline, no_scheduler, no_guards])
def test_a_refused_build_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch], None]
) -> None:
    model = make_model("mlp")
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))  # the user's own stays
    before = hooks_of(model)
    with monkeypatch.context() as patch:
        refuse(patch)
        for attempt in range(2):
            threads = num_threads()
            with pytest.raises((MemoryBudgetError, MemoryError)):
                hytrain.initialize(
                    model=model,
                    model_parameters=model.parameters(),
                    config=make_config(gpu_fraction=SOLVE if refuse is no_memory else 0.5),
                )
            assert hooks_of(model) == before
            if attempt:  # the first may have started the process group's
                assert num_threads() <= threads
    state = train(model)
    assert len(calls) == 4
    assert_same_states(state, train(make_model("mlp")))


def test_a_destroyed_engine_leaves_the_model() -> None:
    model = make_model("mlp")
    before = hooks_of(model)
    first, *_ = hytrain.initialize(
        model=model, model_parameters=model.parameters(), config=make_config()
    )
    assert hooks_of(model) != before
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))  # put on later: the user's
    first.destroy()
    assert {key: len(table) for key, table in hooks_of(model).items()} == {
        key: len(table) + (key == ("", "_forward_hooks")) for key, table in before.items()
    }
    loss = model(**make_batch("mlp", 0))
    assert calls == [1]
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    train(model)


def test_only_what_came_in_between_is_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("before"))
    added = HookSnapshot(model)
    model[0].register_forward_pre_hook(
        lambda *_, **__: calls.append("between"), with_kwargs=True, prepend=True
    )
    model.register_forward_hook(lambda *_: calls.append("between"), always_call=True)
    model.register_state_dict_pre_hook(lambda *_: calls.append("between"))
    added.note()
    model[1].register_forward_hook(lambda *_: calls.append("after"))
    added.remove()
    added.remove()
    model(torch.zeros(1, 2))
    model.state_dict()
    assert calls == ["after", "before"]
    assert not model[0]._forward_pre_hooks_with_kwargs
    assert not model._forward_hooks_always_called
