"""Every kind of change of a module is seen before what was kept of it is used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hytrain.engine.saved_structure import _see


def _model() -> Any:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.ReLU()))
    model.register_buffer("table", torch.zeros(2), persistent=False)
    model.register_buffer("none", None)
    model.register_parameter("absent", None)
    return model


def _reorder(model: Any) -> None:
    linear = model[0]
    linear._parameters["weight"] = linear._parameters.pop("weight")


def _rename_buffer(model: Any) -> None:
    buffers = model[1]._buffers
    for name in list(buffers):
        buffers[name + "2" if name == "running_mean" else name] = buffers.pop(name)


def _rename_module(model: Any) -> None:
    children = model._modules
    for name in list(children):
        children["x" + name] = children.pop(name)


def _wrap(model: Any) -> None:
    model[2][0] = nn.Sequential(model[2][0])


def _become(model: Any) -> None:
    model[1].__class__ = type("Other", (nn.BatchNorm1d,), {})


def _own_state_dict(model: Any) -> None:
    model[0].state_dict = lambda *_, **__: {}


def _set(*path: Any, value: Callable[[], Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name in path[:-1]:
            model = model[name]
        setattr(model, path[-1], value())

    return change


CHANGES: dict[str, Callable[[Any], object]] = {
    "parameter replaced": _set(0, "weight", value=lambda: nn.Parameter(torch.zeros(3, 3))),
    "parameter replaced in its dict": lambda m: m[0]._parameters.update(
        bias=nn.Parameter(torch.zeros(3))
    ),
    "parameter added": _set(2, 0, "more", value=lambda: nn.Parameter(torch.zeros(1))),
    "parameter in place of None": _set("absent", value=lambda: nn.Parameter(torch.zeros(1))),
    "parameter taken away": lambda m: m[0].__delattr__("bias"),
    "parameter None": _set(0, "bias", value=lambda: None),
    "parameters reordered": _reorder,
    "frozen": lambda m: m[0].weight.requires_grad_(False),
    "module replaced": lambda m: m.__setitem__(0, nn.Linear(3, 3)),
    "module added": lambda m: m[2].append(nn.ReLU()),
    "module taken away": lambda m: m[2].__delitem__(0),
    "module None": lambda m: m._modules.update({"2": None}),
    "module wrapped": _wrap,
    "modules renamed": _rename_module,
    "class": _become,
    "buffer added": lambda m: m[2][0].register_buffer("more", torch.zeros(1)),
    "buffer taken away": lambda m: m[1].__delattr__("running_mean"),
    "buffer None": _set(1, "running_mean", value=lambda: None),
    "buffer in place of None": _set("none", value=lambda: torch.zeros(1)),
    "buffer renamed": _rename_buffer,
    "buffer saved": lambda m: m.register_buffer("table", torch.zeros(2)),
    "buffer not saved": lambda m: m[1].register_buffer(
        "running_var", torch.zeros(3), persistent=False
    ),
    "other buffer not saved": lambda m: (
        m._non_persistent_buffers_set.clear(),
        m._non_persistent_buffers_set.add("none"),
    ),
    "hook of state_dict": lambda m: m[2][0].register_state_dict_post_hook(lambda *_: None),
    "private hook of state_dict": lambda m: m[0]._register_state_dict_hook(lambda *_: None),
    "state_dict of its own": _own_state_dict,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    model = _model()
    seen = _see(model)
    assert seen is not None
    assert seen.is_same()
    CHANGES[name](model)
    assert not seen.is_same()


def test_what_training_changes_is_no_change() -> None:
    model = _model()
    seen = _see(model)
    assert seen is not None
    model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
            parameter.data = parameter.data.clone()
    model[1].running_mean = torch.ones(3)  # buffers are looked up at each save
    model.eval()
    model[0].register_forward_hook(lambda *_: None)
    model[0].note = 5
    assert seen.is_same()
    model[0].weight.requires_grad_(False)
    assert not seen.is_same()
    model[0].weight.requires_grad_(True)
    assert seen.is_same()


def _with_method(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model[1].__class__ = type("Other", (nn.BatchNorm1d,), {name: lambda *_: None})

    return change


@pytest.mark.parametrize(
    "change",
    [
        CHANGES["hook of state_dict"],
        CHANGES["state_dict of its own"],
        _with_method("get_extra_state"),
        _with_method("_save_to_state_dict"),
    ],
    ids=["hook", "own", "extra state", "saves itself"],
)
def test_nothing_is_kept_of_a_state_dict_that_is_made_otherwise(
    change: Callable[[Any], None],
) -> None:
    model = _model()
    change(model)
    assert _see(model) is None
