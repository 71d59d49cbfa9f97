"""How a model is cut into layers with trained and frozen weights, and what of them is sharded."""

from __future__ import annotations

import torch
from support.frozen import FROZEN
from support.models import make_model
from torch import nn

from hytrain.config import HyTrainConfig
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
            None if x.trained is None else x.trained.layout.numel,
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
        assert layer.trained is not None
        assert not layer.trained.is_sharded
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
