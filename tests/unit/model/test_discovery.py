"""Models as ordered lists of layers."""

from __future__ import annotations

import pytest
import torch
from support.models import Block, Mlp, make_model
from torch import nn

from hytrain.errors import ConfigError
from hytrain.model.discovery import find_layers

NAMES = {
    "llama": [
        "before model.layers.0",
        *(f"model.layers.{i}" for i in range(4)),
        "after model.layers.3",
    ],
    "gpt2": [
        "before transformer.h.0",
        *(f"transformer.h.{i}" for i in range(3)),
        "after transformer.h.2",
    ],
    "t5": [
        "before encoder.block.0",
        "encoder.block.0",
        "encoder.block.1",
        "before decoder.block.0",
        "decoder.block.0",
        "decoder.block.1",
        "after decoder.block.1",
    ],
    "mlp": ["before blocks.0", *(f"blocks.{i}" for i in range(4)), "after blocks.3"],
}


def names(model: nn.Module, block_class: str | None = None) -> list[str]:
    return [layer.name for layer in find_layers(model, model.parameters(), block_class)]


@pytest.mark.parametrize("kind", NAMES)
def test_names_and_order(kind: str) -> None:
    assert names(make_model(kind)) == NAMES[kind]


def test_vit_has_its_blocks_between_embeddings_and_head() -> None:
    found = names(make_model("vit"))
    blocks = [name for name in found if not name.startswith(("before", "after"))]
    assert len(blocks) == 3
    assert found == [f"before {blocks[0]}", *blocks, f"after {blocks[-1]}"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "vit", "t5", "mlp"])
def test_every_parameter_is_in_exactly_one_layer(kind: str) -> None:
    model = make_model(kind)
    layers = find_layers(model, model.parameters())
    found = [id(p) for layer in layers for _, p in layer.parameters]
    assert sorted(found) == sorted(id(p) for p in model.parameters())
    assert len(set(found)) == len(found)
    by_name = dict(model.named_parameters())
    assert all(by_name[name] is p for layer in layers for name, p in layer.parameters)


def test_tied_weights_belong_to_the_layer_that_needs_them_first() -> None:
    layers = find_layers(model := make_model("gpt2"), model.parameters())
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is table
    assert any(p is table for _, p in layers[0].parameters)
    assert not any(p is table for _, p in layers[-1].parameters)


def test_frozen_parameters_have_places_where_they_are_asked_for() -> None:
    model = Mlp()
    trained = [model.blocks[1].up.weight, model.head.bias]
    asked = [model.embed.bias, model.blocks[1].up.bias, model.blocks[2].down.weight]
    layers = find_layers(model, trained, frozen=asked)
    assert [(x.name, [n for n, _ in x.parameters], [n for n, _ in x.frozen]) for x in layers] == [
        ("before blocks.0", [], ["embed.bias"]),
        ("blocks.1", ["blocks.1.up.weight"], ["blocks.1.up.bias"]),
        ("blocks.2", [], ["blocks.2.down.weight"]),
        ("after blocks.3", ["head.bias"], []),
    ]
    assert [layer.block for layer in layers] == [None, model.blocks[1], model.blocks[2], None]


def test_parameters_that_are_not_trained_are_left_out() -> None:
    model = Mlp()
    trained = [model.blocks[1].up.weight, model.head.bias]
    layers = find_layers(model, trained)
    assert [(layer.name, [n for n, _ in layer.parameters]) for layer in layers] == [
        ("blocks.1", ["blocks.1.up.weight"]),
        ("after blocks.3", ["head.bias"]),
    ]


def test_a_sequential_of_equal_modules() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    assert names(model) == ["0", "1", "2", "3"]


def test_a_sequential_with_activations_between() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)
    )
    assert names(model) == ["0", "2", "3", "4"]


def test_a_model_without_a_stack() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.first = nn.Linear(2, 3)
            self.second = nn.Linear(3, 4)

    model = Plain()
    layers = find_layers(model, model.parameters())
    assert sum(len(layer.parameters) for layer in layers) == 5
    assert [layer.block for layer in layers if layer.block is not None] == [
        model.first,
        model.second,
    ]


def test_one_module() -> None:
    assert len(names(nn.Linear(2, 2))) == 1
    assert len(names(nn.Sequential(nn.Linear(2, 2)))) == 1


def test_inner_stacks_are_their_blocks_affair() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    model = nn.ModuleDict({"stack": nn.ModuleList(Outer() for _ in range(2))})
    assert names(model) == ["stack.0", "stack.1"]


def test_a_class_given_by_name() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Block(4)

    model = nn.Sequential(Wrapper(), Wrapper())
    assert names(model) == ["0", "1"]
    assert names(model, "Block") == ["0.body", "1.body"]


def test_a_class_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r'class" is "Layer".*use one of .*Block'):
        find_layers(model := Mlp(), model.parameters(), "Layer")


def test_a_block_registered_twice_is_one_layer() -> None:
    shared = Block(4)
    model = nn.ModuleDict({"stack": nn.ModuleList([shared, Block(4), shared])})
    assert names(model) == ["stack.0", "stack.1"]
