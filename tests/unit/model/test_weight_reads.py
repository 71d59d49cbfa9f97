"""Parameters that tell of reads: what is told, when, and what they are meanwhile."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hytrain.model.weight_reads import SavedWeights, WatchedParameters, storage_handle


class Own(nn.Parameter):
    """A library's kind of parameter."""


def _watched(*parameters: nn.Parameter) -> tuple[WatchedParameters, list[str]]:
    told: list[str] = []

    def read(name: str, *, may_refuse: bool = True, was_read: bool = False) -> None:
        told.append(name + ("" if may_refuse else "?") + ("!" if was_read else ""))

    return WatchedParameters(parameters, read), told


@pytest.mark.parametrize("kind", [nn.Parameter, Own])
def test_reports_reads_while_there_is_no_reason_to_read(kind: type[nn.Parameter]) -> None:
    parameter = kind(torch.ones(2, 3))
    watched, told = _watched(parameter)
    parameter.norm()
    assert told == []
    watched.disallow_all()
    assert isinstance(parameter, kind)
    assert type(parameter) is not kind
    parameter.norm()
    parameter * 2
    torch.stack([parameter, parameter])
    assert told == ["norm", "mul", "stack", "stack"]
    watched.allow()
    watched.allow()
    assert type(parameter) is kind
    watched.disallow()
    assert watched.are_readable
    watched.disallow()
    assert not watched.are_readable
    watched.close()
    assert type(parameter) is kind


def test_what_reads_no_elements_is_not_reported() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    watched, told = _watched(parameter)
    watched.disallow_all()
    for _ in range(2):  # the second time it is known
        assert parameter.shape == (2, 3)
        assert parameter.grad is None
        parameter.grad = torch.zeros(2, 3)
        parameter.grad = None
        assert parameter.requires_grad
        assert parameter.numel() == 6
        torch.zeros_like(parameter)
    assert told == []
    parameter.data_ptr()
    repr(parameter)
    assert set(told) == {"data_ptr?", "__repr__?"}


@pytest.mark.parametrize("attribute", ["data", "T", "mT", "real"])
def test_attributes_with_the_same_elements_are_reads(attribute: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    watched, told = _watched(parameter)
    watched.disallow_all()
    for _ in range(2):
        getattr(parameter, attribute)
    assert told == [attribute] * 2


def test_copies_are_plain_parameters() -> None:
    parameter = nn.Parameter(torch.ones(2))
    watched, told = _watched(parameter)
    watched.disallow_all()
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    assert told == ["deepcopy"]
    assert type(parameter) is not nn.Parameter


def test_a_refused_read_reads_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2))

    def refuse(name: str, *, may_refuse: bool = True, was_read: bool = False) -> None:
        raise ValueError(name)

    watched = WatchedParameters([parameter], refuse)
    watched.disallow_all()
    with pytest.raises(ValueError, match=r"^add_$"):
        parameter.add_(1.0)
    watched.close()
    assert parameter.tolist() == [1.0, 1.0]


def test_reports_what_autograd_saves() -> None:
    """Where nothing else is: of the view that a transpose of a weight is."""
    flat = torch.ones(6)
    parameter = nn.Parameter(torch.empty(0))
    parameter.data = flat.view(2, 3)
    watched, told = _watched(parameter)
    watched.disallow_all()
    x = torch.ones(4, 2, requires_grad=True)
    with SavedWeights({storage_handle(flat): watched}), torch._C.DisableTorchFunctionSubclass():
        (x @ parameter).sum()
    assert told
    assert set(told) == {"saved for backward!"}
    told.clear()
    watched.allow()
    with SavedWeights({storage_handle(flat): watched}):
        (x @ parameter).sum()
    assert told == []
