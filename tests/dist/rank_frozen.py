"""Cases of ZeRO-3 with parameters that are not trained."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_sharded import batch_of, build
from rank_training import Choosing, backward, config_for
from support.comparisons import assert_same_bits
from support.engines import built, environment, make_config
from support.models import loss_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hytrain.config import HyTrainConfig
from hytrain.optimizer.model_cut import cut_model, live_bytes
from hytrain.zero3.plan import gather_settings

FRACTIONS = (0.7, 0.3)


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


def memory_is_shared(kind: str, on_host: bool, keys: dict[str, int]) -> None:
    """Between steps a rank has its shard of the frozen weights, in a pass what the plan allows."""
    config = config_for(FRACTIONS if dist.get_world_size() == 2 else (1.0,), stage=3)
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
    config = config_for(FRACTIONS, stage=stage, bf16=False, gpu_fraction=0.5)
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


def checkpoint_of_another_stage(kind: str, stages: tuple[int, int], folder: str) -> None:
    """What one stage has saved another one loads, frozen weights included, and goes on as it."""
    saving, loading = stages
    with built(build(kind), _engine_config(saving)) as engine:
        _steps(engine, kind, 0, 2)
        engine.save_checkpoint(folder)
        engine.save_checkpoint(
            folder, tag="trained", save_latest=False, exclude_frozen_parameters=True
        )
        expected = _steps(engine, kind, 2, 2)
        state = engine.fp32_state_dict()
    with built(_scrambled(kind), _engine_config(loading)) as engine:
        engine.load_checkpoint(folder)
        assert _steps(engine, kind, 2, 2) == expected
        _assert_same_state(engine.fp32_state_dict(), state)
    # Without the frozen weights: those of the model stay.
    with built(build(kind), _engine_config(loading)) as engine:
        engine.load_checkpoint(folder, tag="trained", load_module_strict=False)
        assert _steps(engine, kind, 2, 2) == expected
    if dist.get_rank() == 0:
        whole, trained = (_model_states(Path(folder), tag) for tag in (None, "trained"))
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


def _assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensors in theirs.items():
        for kind, expected in tensors.items():
            assert_same_bits(f"{kind} of {name}", ours[name][kind], expected)


def reading_and_writing(kind: str) -> None:
    """Frozen weights come together where they are asked for, and take what is written."""
    import deepspeed

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


def a_frozen_module_is_called_alone(kind: str) -> None:
    with built(build(kind), _engine_config(3)) as engine:
        x = torch.ones(2, 32)
        expected = build(kind).blocks[0](x).detach()
        for number in range(3):
            _steps(engine, kind, number, 1)
            with torch.no_grad():
                assert_same_bits("block", engine.module.blocks[0](x), expected)
            assert not engine.optimizer.weights.gatherer.live


def adapters_are_waited_for() -> None:
    """A block called by itself at once after a step computes with the adapters of that step."""
    config = _engine_config(3, stage3_param_persistence_threshold=2000)
    config["hytrain"]["gpu_fraction"] = 0.0
    with environment("HYTRAIN_DELAYS", "1:3000"), built(build("mlp+lora"), config) as engine:
        x = torch.ones(2, 32)
        for number in range(3):
            _steps(engine, "mlp+lora", number, 1)
            with torch.no_grad():
                found = [block(x) for block in engine.module.blocks]
            with engine.gathered_parameters(), torch.no_grad():
                for block, outside in zip(engine.module.blocks, found, strict=True):
                    assert_same_bits("block", outside, block(x))


def a_block_is_left_out(kind: str, keys: dict[str, int], at_first: bool) -> None:
    """ZeRO-3 is ZeRO-2, bit by bit.

    Args:
        kind: the model.
        keys: of ZeRO-3.
        at_first: whether all ranks leave the same block out in the first step, and use it later;
            else one rank and another do in later steps.
    """
    rank = dist.get_rank()
    outcomes: list[Any] = []
    for stage in (3, 2):
        model = Choosing()
        model.inner = build(kind)
        config = config_for(FRACTIONS, stage=stage, gpu_fraction=(0.0, 0.5)[rank])
        if stage == 3:
            config["zero_optimization"].update(keys)
        with environment("HYTRAIN_DELAYS", f"{rank}:2000"), built(model, config) as engine:
            losses: list[float] = []
            for number in range(8):
                is_out = number == 0 if at_first else number > 0 and rank == number % 2
                block = 1 if at_first else number % 4
                batch = batch_of(kind, 2 * number + rank, True)
                loss = engine(**batch, leave_out=block if is_out else None)
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
            outcomes.append((losses, engine.fp32_state_dict()))
    assert outcomes[0][0] == outcomes[1][0]
    _assert_same_state(outcomes[0][1], outcomes[1][1])


def train_batches(kind: str, sizes: tuple[int, ...], mode: str, on_host: bool) -> None:
    """ZeRO-3 is ZeRO-2 one micro-batch after another, bit by bit.

    But one micro-batch after another ZeRO-3 reduces in every backward, which rounds otherwise where
    several ranks compute: with an eps like the gradients, by lr * 1e-7 * 2 / eps a step at most.

    Args:
        kind: the model.
        sizes: samples of each rank, one a micro-batch.
        mode: ZeRO-3's accumulation; "persistent": as ZeRO-2's, with all weights on every rank.
        on_host: whether ZeRO-3's shards are.
    """
    rank, rate, eps = dist.get_rank(), 1e-2, 1e-2
    is_persistent = mode == "persistent"
    outcomes: list[Any] = []
    for stage in (3, 2):
        accumulation = mode if stage == 3 and not is_persistent else "micro_batch_major"
        section = {
            "accumulation": accumulation,
            "batch_sizes": list(sizes),
            "micro_batch_sizes": [1] * len(sizes),
            "shard_fractions": [0.3, 0.7] if len(sizes) == 2 else [1.0],
        }
        config = make_config(gpu_fraction=0.5, bf16=False, stage=stage, hytrain=section)
        if stage == 3:
            largest = 10**9 if is_persistent else 2000
            config["zero_optimization"]["stage3_param_persistence_threshold"] = largest
            if on_host:
                config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": rate, "eps": eps}}
        delays = environment("HYTRAIN_DELAYS", f"{rank}:{300 * (stage == 3)}")
        with delays, built(build(kind), config) as engine:
            losses: list[float] = []
            for step in range(4):
                numbers = [10 * step + 5 * rank + n for n in range(sizes[rank])]
                batches = iter([batch_of(kind, number, False) for number in numbers])
                losses.append(float(engine.train_batch(batches, num_valid=lambda _: 1)))
            if accumulation == "layer_major":
                assert vars(engine.batch_training.accumulation)["refusal"] is None
                # One in use and one ahead: nothing had to be held behind the last block.
                assert engine.optimizer.weights.gatherer.most_live == 2
            assert engine.optimizer.weights.is_sharded is (stage == 3 and not is_persistent)
            outcomes.append((losses, engine.fp32_state_dict()))
    (losses, ours), (expected_losses, theirs) = outcomes
    if mode != "micro_batch_major" or min(sizes) == 0:
        assert losses == expected_losses
        _assert_same_state(ours, theirs)
        return
    assert losses == pytest.approx(expected_losses, rel=1e-6, abs=0.0)
    allowed = 4 * rate * 1e-7 * 2 / eps
    before = dict(build(kind).named_parameters())
    moved = [float((s["fp32"] - before[name]).abs().max()) for name, s in theirs.items()]
    assert not moved or sorted(moved)[len(moved) // 2] > 20 * allowed, "hardly anything is compared"
    for name, states in theirs.items():
        torch.testing.assert_close(ours[name]["fp32"], states["fp32"], atol=allowed, rtol=1e-6)
