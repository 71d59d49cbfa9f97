"""How a model is cut into layers with trained and frozen weights, and what of them is sharded."""

from __future__ import annotations

from unittest.mock import patch

import torch
from support.frozen import FROZEN
from support.models import make_model
from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.optimizer import model_cut
from hytrain.optimizer.model_cut import CutLayer, cut_model, live_bytes
from hytrain.zero3.plan import GatherSettings

EVERYTHING = GatherSettings(1, 10**9, 0, 0, 10**9)
BLOCK = 4192  # elements of a block of the MLP
ADAPTERS = 2 * 4 * (32 + 64)


def cut(
    model: nn.Module, gathers: GatherSettings | None, shares: tuple[float, ...] = (0.7, 0.3)
) -> list[CutLayer]:
    groups = {id(p): 0 for p in model.parameters() if p.requires_grad}
    config = HyTrainConfig(shard_fractions=shares)
    return cut_model(model, groups, config, len(shares), gathers)


def frozen(kind: str) -> nn.Module:
    model = make_model("mlp")
    FROZEN[kind](model)
    return model


def numbers(layers: list[CutLayer]) -> list[tuple[int | None, int | None]]:
    """Parameters of each layer's parts."""
    return [
        (
            sum(part.layout.numel for part in x.trained) or None,
            None if x.frozen is None else x.frozen.layout.numel,
        )
        for x in layers
    ]


def test_adapters_and_what_they_adapt_are_two_parts_of_a_layer() -> None:
    layers = cut(frozen("lora"), EVERYTHING)
    outside = 32 * 32 + 32
    assert numbers(layers) == [(None, outside), *[(ADAPTERS, BLOCK)] * 4, (None, outside)]
    for layer in layers:
        for part in layer.parts:
            assert part.is_sharded
            assert sum(part.sizes) == part.layout.size
            assert part.shard(1) == (part.sizes[0], part.layout.size)
            assert abs(part.sizes[0] / part.layout.size - 0.7) < 0.05


def test_forward_order_is_kept_where_nothing_is_trained() -> None:
    names = [x.parts[0].layout.name for x in cut(frozen("some_lora"), EVERYTHING)]
    blocks = [f"blocks.{i}" for i in range(4)]
    assert names == ["before blocks.0", *blocks, "after blocks.3"]


def test_below_the_threshold_weights_stay_where_they_are() -> None:
    keys = GatherSettings(1, 10**9, 0, 2000, 10**9)
    layers = cut(frozen("lora"), keys)
    assert numbers(layers) == [(ADAPTERS, BLOCK)] * 4  # outside of the blocks nothing is sharded
    for layer in layers:
        assert not layer.trained[0].is_sharded
        assert layer.sharded == [layer.frozen]


def test_without_gathers_only_trained_weights_are_layers() -> None:
    assert numbers(cut(frozen("lora"), None)) == [(ADAPTERS, None)] * 4
    assert numbers(cut(frozen("last"), None)) == [(BLOCK, None), (32 * 32 + 32, None)]


def test_what_is_no_plain_number_stays_whole() -> None:
    model = frozen("lora")
    model.blocks[1].up.base.weight = nn.Parameter(
        torch.zeros(64, 32, dtype=torch.int8), requires_grad=False
    )
    model.blocks[2].none = nn.Parameter(torch.empty(0), requires_grad=False)
    found = numbers(cut(model, EVERYTHING))
    assert found[2] == (ADAPTERS, BLOCK - 64 * 32)
    assert found[3] == (ADAPTERS, BLOCK)


def test_a_parameter_that_no_optimizer_has_is_not_taken_for_frozen() -> None:
    model = frozen("lora")
    model.blocks[0].down.base.weight.requires_grad_(True)
    groups = {id(p): 0 for n, p in model.named_parameters() if p.requires_grad and "base" not in n}
    layers = cut_model(model, groups, HyTrainConfig(), 2, EVERYTHING)
    assert numbers(layers)[1] == (ADAPTERS, BLOCK - 64 * 32)


def test_live_bytes_are_those_of_both_parts() -> None:
    model = frozen("lora").bfloat16()
    layers = cut(model, EVERYTHING)
    block = sum(part.layout.size for part in layers[1].parts)
    assert live_bytes(layers, EVERYTHING) == 2 * 2 * block  # one in use, one ahead
    alone = GatherSettings(0, 10**9, 0, 0, 10**9)
    assert live_bytes(cut(model, alone), alone) == 2 * block
    assert live_bytes(cut(model, None), None) == 0


def pieces(
    elements: int, gathers: GatherSettings | None = EVERYTHING, model: nn.Module | None = None
) -> list[CutLayer]:
    with patch.object(model_cut, "MOST_ELEMENTS", elements):
        return cut(make_model("mlp") if model is None else model, gathers)


def parameters(layer: CutLayer) -> list[list[str]]:
    return [[slot.name for slot in part.layout.slots] for part in layer.trained]


def test_large_parameters_of_a_large_block_are_pieces_and_the_others_another() -> None:
    layers = pieces(BLOCK - 1)
    assert [len(layer.trained) for layer in layers] == [1, 3, 3, 3, 3, 1]
    names = [["up.bias", "down.bias"], ["up.weight"], ["down.weight"]]
    assert parameters(layers[2]) == [[f"blocks.1.{name}" for name in each] for each in names]
    assert [part.layout.name for part in layers[2].trained] == [
        "blocks.1",
        "blocks.1, piece 2",
        "blocks.1, piece 3",
    ]
    states = [part.layout.index for layer in layers for part in layer.trained]
    assert states == list(range(len(states)))


def test_a_list_of_small_experts_is_cut_in_the_order_of_registration() -> None:
    experts = [nn.ModuleList(nn.Linear(9, 10) for _ in range(7)) for _ in range(2)]
    first, _ = pieces(400, model=nn.ModuleList(experts))
    assert parameters(first) == [
        [f"0.{n}.{kind}" for n in each for kind in ("weight", "bias")]
        for each in (range(4), range(4, 7))
    ]


def test_blocks_up_to_the_limit_are_whole() -> None:
    for gathers in (EVERYTHING, None):
        layers = pieces(BLOCK, gathers)
        assert numbers(layers) == numbers(cut(make_model("mlp"), gathers))
        assert [x.trained[0].layout.name for x in layers][1:5] == [f"blocks.{n}" for n in range(4)]
        assert [len(layer.trained) for layer in layers] == [1] * 6


def test_what_is_in_no_block_is_whole() -> None:
    assert [len(layer.trained) for layer in pieces(1)][::5] == [1, 1]


def test_of_a_gathered_block_no_piece_stays_whole() -> None:
    keys = GatherSettings(1, 10**9, 0, 2100, 10**9)
    for layer in pieces(BLOCK - 1, keys)[1:5]:
        assert [part.layout.numel for part in layer.trained] == [96, 2048, 2048]
        assert len(layer.sharded) == 3
