"""Tensors inside nested arguments."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from hytrain.layer_major.tensor_tree import leaves, map_leaves, snapshot, was_changed

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "a"


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    more: list[torch.Tensor] = field(default_factory=list)


def one() -> torch.Tensor:
    return torch.ones(1)


@pytest.mark.parametrize(
    "tree",
    [
        one(),
        (one(), 3, None),
        [one(), [one()], "text"],
        Pair(one(), {"a": one()}),
        OrderedDict(b=one(), a=(one(),)),
        Frozen(one()),
        Slotted(one(), [one(), one()]),
        BaseModelOutput(last_hidden_state=one(), hidden_states=(one(), one())),
        {"deep": [{"deeper": (Frozen(one()), [])}]},
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_every_tensor_is_replaced_and_the_structure_stays(tree: Any) -> None:
    found = leaves(tree, torch.Tensor)
    changed = map_leaves(tree, torch.Tensor, lambda tensor: tensor + 1)
    assert type(changed) is type(tree)
    assert [float(t) for t in leaves(changed, torch.Tensor)] == [2.0] * len(found)
    assert [float(t) for t in leaves(tree, torch.Tensor)] == [1.0] * len(found), "not in place"
    again = map_leaves(changed, torch.Tensor, lambda tensor: tensor - 1)
    assert len(leaves(again, torch.Tensor)) == len(found)


def test_what_has_no_leaf_is_passed_on_as_it_is() -> None:
    class Opaque:
        x = one()

    for tree in (Opaque(), [1, 2], {"a": None}, (3, "b"), Frozen, torch.Size([1, 2]), "text", None):
        assert map_leaves(tree, torch.Tensor, lambda tensor: tensor + 1) is tree


def test_changes_of_containers_are_seen() -> None:
    inner: list[Any] = [one()]
    tree = ({"a": inner, "b": 1}, Frozen(one()), Slotted(one(), []))
    taken = snapshot(tree)
    assert not was_changed(taken)
    inner[0] = one()
    assert was_changed(taken)
    taken = snapshot(tree)
    tree[2].more.append(one())
    assert was_changed(taken)
    taken = snapshot(tree)
    tree[0]["b"] = 2
    assert was_changed(taken)
