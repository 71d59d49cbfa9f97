"""ZeRO-3 with parameters that are not trained, on one to three ranks.

They are sharded as trained ones are; the numbers are those of ZeRO-2, bit for bit.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_shadow import backward, config_for
from stage_models import batch_of, build
from stage_twins import (
    LITTLE_ROOM,
    LOOKS_FAR,
    SMALL_STAY,
    UNEVEN,
    Setup,
    batches_as_stage_2,
    equals_stage_2,
)
from support.comparisons import assert_same_bits, assert_same_states
from support.engines import built, environment, make_config
from support.frozen import FROZEN
from support.models import loss_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hytrain.config import HyTrainConfig
from hytrain.engine.run_report import start_line
from hytrain.optimizer.model_cut import cut_model, live_bytes
from hytrain.zero3.plan import gather_settings

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full

EVEN, THREE = (0.5, 0.5), (0.98, 0.01, 0.01)
# Block 1 has 4096 parameters that are trained and stay; blocks 0 and 2 have 4192 that are frozen.
NEARLY_ALL_STAY = (("stage3_param_persistence_threshold", 4150),)

SETUPS = [
    Setup("mlp+lora", UNEVEN, (0.5, 0.0), evaluates=True, keys=SMALL_STAY),
    Setup("mlp+lora", EVEN, (0.0, 1.0), keys=LOOKS_FAR, delays=3, steps=6, accumulation=2),
    Setup("mlp+embeddings", UNEVEN, (1.0, 0.0), keys=LITTLE_ROOM, evaluates=True),
    Setup("mlp+only_embeddings", UNEVEN, (0.5, 0.5), keys=LOOKS_FAR, evaluates=True),
    Setup("mlp+some_lora", UNEVEN, on_host=True, keys=SMALL_STAY, evaluates=True, delays=5),
    Setup("llama-hf+lora", UNEVEN, (0.5, 0.0), evaluates=True),
    Setup("root+lora", UNEVEN, evaluates=True),
    Setup("elsewhere+embeddings", UNEVEN, evaluates=True, accumulation=2),
    Setup("llama+alternating", (1.0,), (1.0,), bf16=False, on_host=True, keys=LOOKS_FAR),
    *(
        Setup(kind, UNEVEN, (0.0, 0.5), 1.0, keys=keys, delays=1, steps=8, left_out=left_out)
        for kind, keys, left_out in (
            ("mlp+lora", SMALL_STAY, "in turns"),
            ("mlp+alternating", NEARLY_ALL_STAY, "by all at first"),
        )
    ),
    Setup("mlp+last", THREE, (0.0, 0.5, 1.0), keys=LOOKS_FAR),  # nearly all is on one rank
]
LONG = [
    Setup("mlp+alternating", EVEN, (0.0, 0.5), 0.0, bf16=False, accumulation=2),
    Setup("gpt2+lora", EVEN, (0.0, 0.5), bf16=False, on_host=True, keys=LOOKS_FAR),
    Setup("recomputed-2+last", UNEVEN, keys=LOOKS_FAR),
    Setup("mlp+lora", (1.0,), (0.5,), on_host=True, evaluates=True, delays=3, steps=6),
    Setup("mlp+lora", THREE, (0.0, 0.5, 1.0), keys=LOOKS_FAR),
    Setup("mlp+lora", UNEVEN, (0.0, 0.5), 1.0, keys=SMALL_STAY, left_out="by all at first"),
    Setup("mlp+alternating", UNEVEN, (0.0, 0.5), 1.0, keys=NEARLY_ALL_STAY, left_out="in turns"),
    *(
        Setup(f"{model}+{frozen}", fractions, (0.5, 0.0, 1.0), 0.5, 2, bf16, keys, 3, True, on_host)
        for fractions, bf16, keys, on_host in (
            (UNEVEN, True, SMALL_STAY, False),
            (THREE, False, LOOKS_FAR, True),
        )
        for model in ("mlp", "llama", "gpt2", "vit", "t5", "twice", "reentrant-1", "llama-hf")
        for frozen in FROZEN
        # A reentrant checkpoint gives no gradients where its inputs have none.
        if not (model in ("twice", "reentrant-1") and "lora" in frozen)
    ),
]


@pytest.mark.parametrize(
    "setup", [*SETUPS, *(pytest.param(setup, marks=full) for setup in LONG)], ids=str
)
@on_ranks(lambda setup: len(setup.fractions))
def test_as_stage_2(setup: Setup) -> None:
    equals_stage_2(setup)


def _frozen(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.requires_grad]


def _bytes_in_tensors() -> int:
    """Of all memory that tensors of this process share or own, once each."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # Other tests of this process may have left some of torch's fake ones.
        if isinstance(thing, FakeTensor):
            continue
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("ranks_used", "kind", "keys"),
    [
        (1, "mlp+lora", {}),
        (2, "mlp+lora", dict(LOOKS_FAR)),
        (2, "mlp+last", {}),
    ],
    ids=str,
)
@on_ranks(lambda ranks_used: ranks_used)
def test_memory(ranks_used: int, kind: str, keys: dict[str, int]) -> None:
    """Between steps a rank has its shard of the frozen weights, in a pass what the plan allows."""
    on_host = ranks_used == 1
    config = config_for((1.0,) if on_host else UNEVEN, stage=3)
    config["zero_optimization"].update(keys)
    if on_host:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    before = _bytes_in_tensors()
    model = build(kind)
    frozen = sum(p.numel() * 2 for p in _frozen(model))
    most = 0
    with built(model, config) as engine:
        share = config["hytrain"]["shard_fractions"][dist.get_rank()]
        layers = engine.optimizer.weights.layers
        parts = [part for layer in layers for part in layer.sharded]
        home = [part for layer in layers if layer.frozen for _, part in layer.frozen.storage.parts]

        def watch(*_arguments: Any) -> None:
            nonlocal most
            most = max(most, sum(part.storage.gathered_bytes for part in parts))

        for module in engine.module.modules():
            module.register_forward_pre_hook(watch)
            module.register_full_backward_hook(watch)
        state = sum(12 * s.shard_size + 2 * s.shard_size for s in engine.optimizer.layer_states)
        for number in range(3):
            backward(engine, number)
            assert not any(part.storage.gathered_bytes for part in parts)
            engine.step()
            engine.synchronize()
            # The parameters between steps: numbers that are none, in two bytes a dtype.
            stored = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in _frozen(model)}
            assert sum(storage.nbytes() for storage in stored.values()) < 100
        own = sum(part.nbytes for part in home)
        assert own == pytest.approx(frozen * share, rel=0.05)
        if not on_host:  # else an arena of one block has the shards
            extra = _bytes_in_tensors() - before - state - own
            assert extra < frozen / 4, f"{extra} bytes beside state and shards; {frozen} are frozen"
    model = build(kind).bfloat16()
    groups = {id(p): 0 for p in model.parameters() if p.requires_grad}
    section = HyTrainConfig.from_deepspeed(config)
    assert section is not None
    zero = {k: v for k, v in config["zero_optimization"].items() if k.startswith("stage3")}
    gathers = gather_settings(zero)
    cut = cut_model(model, groups, section, dist.get_world_size(), gathers)
    assert 0 < most <= live_bytes(cut, gathers)
    assert most < frozen, "all of the frozen weights were there at once"


def _engine_config(stage: int, **zero: Any) -> dict[str, Any]:
    config = config_for(UNEVEN, stage=stage, bf16=False, gpu_fraction=0.5)
    config["zero_optimization"].update(zero)
    return config


def _steps(engine: Any, kind: str, first: int, count: int) -> list[float]:
    losses: list[float] = []
    for number in range(first, first + count):
        loss = loss_of(engine(**batch_of(kind, 2 * number + dist.get_rank(), False)))
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    return losses


def _scrambled(kind: str) -> nn.Module:
    """The model with other weights, the frozen ones too."""
    model = build(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


@pytest.mark.parametrize(
    ("kind", "stages"),
    [("mlp+last", (2, 3)), ("mlp+last", (3, 2)), ("gpt2+lora", (3, 3))],
    ids=str,
)
@on_ranks(2)
def test_checkpoints(kind: str, stages: tuple[int, int], tmp_path: Path) -> None:
    """What one stage has saved another one loads, frozen weights included, and goes on as it."""
    saving, loading = stages
    with built(build(kind), _engine_config(saving)) as engine:
        _steps(engine, kind, 0, 2)
        engine.save_checkpoint(tmp_path)
        engine.save_checkpoint(
            tmp_path, tag="trained", save_latest=False, exclude_frozen_parameters=True
        )
        expected = _steps(engine, kind, 2, 2)
        state = engine.fp32_state_dict()
    with built(_scrambled(kind), _engine_config(loading)) as engine:
        engine.load_checkpoint(tmp_path)
        assert _steps(engine, kind, 2, 2) == expected
        assert_same_states(engine.fp32_state_dict(), state)
    # Without the frozen weights: those of the model stay.
    with built(build(kind), _engine_config(loading)) as engine:
        engine.load_checkpoint(tmp_path, tag="trained", load_module_strict=False)
        assert _steps(engine, kind, 2, 2) == expected
    if dist.get_rank() == 0:
        whole, trained = (_model_states(tmp_path, tag) for tag in (None, "trained"))
        model = build(kind)
        names = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert names <= whole["module"].keys()
        assert not names & trained["module"].keys()
        assert trained["frozen_param_fragments"] is None
        assert whole["frozen_param_fragments"].keys() == names
        for name in names:
            for found in (whole["module"], whole["frozen_param_fragments"]):
                assert_same_bits(name, found[name], model.get_parameter(name).detach())


def _model_states(folder: Path, tag: str | None) -> dict[str, Any]:
    tag = (folder / "latest_universal").read_text() if tag is None else tag
    return torch.load(folder / tag / "mp_rank_00_model_states.pt", weights_only=False)


@on_ranks(2)
def test_reading_and_writing() -> None:
    """Frozen weights come together where they are asked for, and take what is written."""
    kind = "mlp+lora"
    original = dict(build(kind).named_parameters())
    with built(build(kind), _engine_config(3)) as engine:
        _steps(engine, kind, 0, 2)
        frozen = {n: p for n, p in engine.module.named_parameters() if not p.requires_grad}
        with torch._C.DisableTorchFunctionSubclass():  # or the read is refused
            assert all(bool(p.isnan().all()) for p in frozen.values())
        collected = engine.module_state_dict()
        assert bool(collected) is (dist.get_rank() == 0)
        trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        if collected:
            assert trained is not None
            assert collected.keys() - trained.keys() == frozen.keys()
        with engine.gathered_parameters():
            for name, parameter in frozen.items():
                assert_same_bits(name, parameter.detach(), original[name].detach())
                if collected:
                    assert_same_bits(name, collected[name], original[name].detach())
        some = next(iter(frozen)), list(frozen)[-1]
        for owner in range(2):
            with (
                deepspeed.zero.GatheredParameters([frozen[n] for n in some], modifier_rank=owner),
                torch.no_grad(),
            ):
                if dist.get_rank() == owner:
                    for name in some:
                        frozen[name].fill_(0.25 + owner)
            with deepspeed.zero.GatheredParameters([frozen[n] for n in some]):
                assert all(bool((frozen[name] == 0.25 + owner).all()) for name in some)
        _steps(engine, kind, 2, 1)
    assert not any(hasattr(p, "ds_id") for p in frozen.values())


@pytest.mark.parametrize("kind", ["mlp", "mlp+lora"])
@on_ranks(2)
def test_blocks_called_outside_of_forward(kind: str) -> None:
    """At once after a step, with the weights of that step; nothing is left gathered."""
    config = _engine_config(3, stage3_param_persistence_threshold=2000)
    config["hytrain"]["gpu_fraction"] = 0.0
    with environment("HYTRAIN_DELAYS", "1:3000"), built(build(kind), config) as engine:
        x = torch.ones(2, 32)
        for number in range(3):
            _steps(engine, kind, number, 1)
            with torch.no_grad():
                found = [block(x) for block in engine.module.blocks]
            assert not engine.optimizer.weights.gatherer.live
            with engine.gathered_parameters(), torch.no_grad():
                for block, outside in zip(engine.module.blocks, found, strict=True):
                    assert_same_bits("block", outside, block(x))


BATCHES = [
    ("mlp+last", (3, 0), "layer_major", True),
    ("llama+alternating", (1, 3), "layer_major", False),
    ("llama+lora", (3, 1), "micro_batch_major", True),
    ("mlp+lora", (3, 1), "persistent", False),
]


@pytest.mark.parametrize(("kind", "sizes", "mode", "on_host"), BATCHES, ids=str)
@on_ranks(2)
def test_global_batches(kind: str, sizes: tuple[int, ...], mode: str, on_host: bool) -> None:
    batches_as_stage_2(kind, sizes, mode, on_host=on_host)


@full
@pytest.mark.parametrize("mode", ["layer_major", "micro_batch_major"])
@pytest.mark.parametrize("sizes", [(4, 2), (3, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("kind", ["llama", "vit", "mlp"])
@on_ranks(2)
def test_global_batches_in_all_combinations(
    kind: str, frozen: str, sizes: tuple[int, ...], mode: str
) -> None:
    batches_as_stage_2(f"{kind}+{frozen}", sizes, mode, on_host=sizes == (4, 2))


@on_ranks(2)
def test_the_first_line_counts_what_is_trained() -> None:
    with built(build("mlp+lora"), make_config(stage=3)) as engine:
        trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
        line = start_line(engine, engine.optimizer)
    assert f": {trained:,} trained parameters" in line
