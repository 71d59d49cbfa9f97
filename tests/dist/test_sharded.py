"""ZeRO-3 on one to three ranks: ZeRO-2's numbers, bit for bit, with layers gathered for use."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_shadow import RankShadow, backward, config_for, followed, take_steps
from stage_models import batch_of, build
from stage_twins import (
    LITTLE_ROOM,
    LOOKS_FAR,
    SMALL_STAY,
    UNEVEN,
    Setup,
    built_under_zero_init,
    equals_stage_2,
)
from support.comparisons import assert_same_bits
from support.engines import built
from support.models import loss_of, make_batch, make_model
from support.short_memory import short_of_memory

from hytrain.errors import GradientOrderError, UnsupportedError
from hytrain.optimizer.layer_gradient import Progress

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full

EVEN, THREE = (0.5, 0.5), (0.2, 0.5, 0.3)

SETUPS = [
    Setup("mlp", EVEN, (0.0, 1.0), evaluates=True),
    Setup("mlp", UNEVEN, (0.5, 0.0), keys=LOOKS_FAR, accumulation=3),
    Setup("mlp", EVEN, (0.0, 0.5), keys=LITTLE_ROOM, delays=3, steps=8),
    Setup("gpt2-hf", EVEN, (0.0, 0.5), 0.0),
    Setup("t5", UNEVEN, (0.5, 0.5), evaluates=True, keys=LOOKS_FAR),
    Setup("reentrant-2", EVEN, accumulation=2),
    Setup("recomputed-2", UNEVEN, keys=LOOKS_FAR, accumulation=2),
    Setup("mlp", UNEVEN, (0.0, 1.0), on_host=True, evaluates=True, keys=SMALL_STAY),
    Setup("llama", THREE, (0.0, 0.5, 1.0), accumulation=2, keys=LOOKS_FAR),
    Setup("mlp", (1.0,), on_host=True, evaluates=True, delays=3, steps=8),
    Setup("gpt2-hf", (1.0,), (1.0,), bf16=False, on_host=True, keys=SMALL_STAY),
]
MORE_SETUPS = [
    Setup("mlp", UNEVEN, (1.0, 1.0), 0.0, bf16=False, keys=SMALL_STAY, evaluates=True),
    Setup("llama", UNEVEN, (0.5, 1.0), evaluates=True),
    Setup("gpt2", UNEVEN, (0.3, 0.0), bf16=False, accumulation=2, keys=LOOKS_FAR),
    Setup("vit", UNEVEN, keys=SMALL_STAY),
    Setup("reentrant-1", UNEVEN, evaluates=True),
    Setup("recomputed-1", UNEVEN, (0.5, 0.5)),
    Setup("twice", EVEN),
    Setup("root", UNEVEN, evaluates=True),
    Setup("frozen", UNEVEN, (0.5, 0.5), accumulation=2),
    Setup("again", UNEVEN, (0.5, 0.0)),
    Setup("unused", EVEN, (0.0, 0.5)),
    Setup("gpt2-hf", UNEVEN, (0.5, 0.5), bf16=False, on_host=True, keys=LOOKS_FAR),
    Setup("llama", (1.0,), (0.5,), on_host=True, accumulation=2, keys=LOOKS_FAR),
    Setup("recomputed-2", (1.0,), (0.5,), 0.0, on_host=True),
    Setup("mlp", UNEVEN, keys=LOOKS_FAR, delays=5, accumulation=2, steps=8, evaluates=True),
    Setup("llama-hf", EVEN, keys=LOOKS_FAR),
    Setup("llama", EVEN, (0.5, 0.0), 0.0, on_host=True, accumulation=2, delays=7),
]


@pytest.mark.parametrize(
    "setup", [*SETUPS, *(pytest.param(x, marks=full) for x in MORE_SETUPS)], ids=str
)
@on_ranks(lambda setup: len(setup.fractions))
def test_as_stage_2(setup: Setup) -> None:
    equals_stage_2(setup)


# A model of each way to use weights, most of them not above; test-parity has the others.
SHORT = {"llama", "reentrant-1", "recomputed-1", "twice", "root", "again", "unused"}
EVERY_SHORT = [x for x in (*SETUPS, *MORE_SETUPS) if x.accumulation == 1 and x.fractions[1:]]
SOME_SHORT = list({x.model: x for x in EVERY_SHORT if x.model in SHORT}.values())


@pytest.mark.parametrize(
    "setup",
    [x if x in SOME_SHORT else pytest.param(x, marks=full) for x in EVERY_SHORT],
    ids=str,
)
@on_ranks(lambda setup: len(setup.fractions))
def test_as_stage_2_where_the_first_backwards_gradients_do_not_fit(setup: Setup) -> None:
    with short_of_memory():
        equals_stage_2(setup)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("mlp", [5, 4, 3, 2, 1]),
        ("again", [5, 4, 3, 1]),
        ("elsewhere", [5, 4, 3, 1]),
        ("unused", [5, 4, 2, 1]),
        ("recomputed-2", [5, 4, 3, 2, 1]),
        ("llama", [5, 4, 3, 2]),
    ],
)
@on_ranks(2)
def test_the_first_backward_begins_updates_where_gradients_do_not_fit(
    kind: str, layers: list[int]
) -> None:
    """Of those that are complete for certain: not used twice, nor read past their modules, nor
    with a parameter that has got no gradient. The last one ends the backward."""
    with short_of_memory() as early, built(build(kind), config_for(UNEVEN, stage=3)) as engine:
        engine.backward(loss_of(engine(**batch_of(kind, dist.get_rank(), True))))
        assert early == layers
        engine.step()


@on_ranks(2)
def test_a_gradient_after_its_layers_update_has_begun() -> None:
    """What comes behind a layer's back is refused, and the error says what may help."""
    with short_of_memory(), built(make_model("mlp"), config_for(UNEVEN, stage=3)) as engine:
        collector = engine.optimizer.collector
        last, first = collector.layers[-1], collector.layers[0]
        slot = last.layout.slots[0]

        def again(gradient: torch.Tensor) -> None:
            assert last.progress is Progress.REDUCED
            slot.parameter.grad = torch.ones(slot.parameter.shape, dtype=last.dtype)
            collector._hook(last, 0)(None, None)

        first.layout.slots[0].parameter.register_hook(again)
        with pytest.raises(
            GradientOrderError, match="each of its parameters had got one in this first backward"
        ):
            engine.backward(loss_of(engine(**batch_of("mlp", dist.get_rank(), True))))


@on_ranks(2)
def test_memory_is_given_back() -> None:
    """Between passes a rank has its shards; in a pass a layer, and one ahead."""
    with built(make_model("mlp"), config_for(UNEVEN, stage=3)) as engine:
        states = engine.optimizer.layer_states
        most = 0

        def watch(*_arguments: Any) -> None:
            nonlocal most
            live = [s.index for s in states if s.storage.gathered_bytes]
            most = max(most, len(live))

        for module in engine.module.modules():
            module.register_forward_pre_hook(watch)
            module.register_full_backward_hook(watch)
        for parameter in engine.module.parameters():
            parameter.register_hook(watch)
        for number in range(3):
            backward(engine, number)
            assert not any(state.storage.gathered_bytes for state in states)
            engine.step()
        assert most == 2
        whole = sum(s.layout.size * 2 for s in states)
        mine = sum(part.nbytes for s in states for _, part in s.storage.parts)
        assert mine == pytest.approx(whole * UNEVEN[dist.get_rank()], rel=0.02)


@on_ranks(2)
def test_reading_the_weights() -> None:
    with built(make_model("gpt2"), config_for(UNEVEN, stage=3)) as engine:
        batch = make_batch("gpt2", dist.get_rank())
        shapes = {name: p.shape for name, p in engine.module.named_parameters()}
        for _ in range(2):
            engine.backward(engine(**batch).loss)
            engine.step()
        if dist.get_rank() == 0:
            with pytest.raises(UnsupportedError, match="gathered_parameters"):
                engine.module.state_dict()
        else:
            without_values = engine.module.state_dict()
            _assert_has_no_values(without_values)
            with pytest.raises(RuntimeError, match="Cannot copy out of meta tensor"):
                make_model("gpt2").load_state_dict(without_values)
        _assert_has_no_values(engine.module.transformer.h[0].state_dict())  # on rank 0, too
        for name, parameter in engine.module.named_parameters():
            assert parameter.shape == shapes[name]
            with pytest.raises(UnsupportedError, match="gathered_parameters"):
                parameter.norm()
            assert _is_nan(parameter), "a released weight looks like a weight"
        with engine.gathered_parameters():
            inside = {n: t.clone() for n, t in engine.module.state_dict().items()}
        masters = engine.fp32_state_dict()
        collected = engine.module_state_dict()
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        if dist.get_rank() != 0:
            assert collected == {}
            assert consolidated is None
            return
        assert collected.keys() == inside.keys() == consolidated.keys()
        for name, tensor in inside.items():
            assert_same_bits(name, collected[name], tensor)
            assert_same_bits(name, consolidated[name], tensor)
        for name, tensors in masters.items():
            assert_same_bits(name, inside[name], tensors["fp32"].to(inside[name].dtype))
        assert collected["lm_head.weight"] is collected["transformer.wte.weight"]


def _assert_has_no_values(state: dict[str, torch.Tensor]) -> None:
    """It has shapes; who saves it, or reads a value, is told."""
    assert all(tensor.is_meta and tensor.numel() for tensor in state.values())
    with pytest.raises(UnsupportedError, match="gathered_parameters"):
        torch.save(state, io.BytesIO())
    with pytest.raises(NotImplementedError, match="no data"):
        next(iter(state.values())).cpu()


def _is_nan(parameter: torch.Tensor) -> bool:
    """What an extension would read of it, of which nobody is told."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(parameter.isnan().all())


@on_ranks(2)
def test_gathered_parameters_of_deepspeed() -> None:
    """What ``deepspeed.zero.GatheredParameters`` gives to read; steps go on as without."""
    with built(make_model("mlp"), config_for(UNEVEN, stage=3, gpu_fraction=0.5)) as engine:
        named = dict(engine.module.named_parameters())
        take_steps(engine, range(2))
        with engine.gathered_parameters():
            whole = {name: p.detach().clone() for name, p in named.items()}
        some = [named["blocks.1.up.weight"], named["head.bias"]]
        with deepspeed.zero.GatheredParameters(some):
            assert_same_bits("read", some[0].detach(), whole["blocks.1.up.weight"])
            assert_same_bits("read", some[1].detach(), whole["head.bias"])
            assert _is_nan(named["embed.weight"])
            kept = some[0].detach().cpu()  # on a CPU its own memory
        assert _is_nan(some[0])
        assert_same_bits("kept", kept, whole["blocks.1.up.weight"])
        shadow = RankShadow(engine)
        shadow.take_steps(range(2))
        shadow.check()
        assert_same_bits("kept", kept, whole["blocks.1.up.weight"])
    assert not any(hasattr(p, "ds_id") for p in named.values())


@pytest.mark.parametrize(("threshold", "frozen"), [(0, False), (2000, True), (100_000, False)])
@on_ranks(2)
def test_weights_that_are_written_where_gathered(threshold: int, frozen: bool) -> None:
    """What one rank writes is on all of them and in the master weights, which else stay."""
    model = make_model("mlp")
    model.get_parameter("blocks.2.up.bias").requires_grad_(not frozen)
    model.get_parameter("blocks.2.up.weight").requires_grad_(not frozen)
    config = config_for(UNEVEN, stage=3, gpu_fraction=0.5)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    with built(model, config) as engine:
        take_steps(engine, range(2))
        before = engine.fp32_state_dict()
        some = [model.get_parameter(f"blocks.{i}.up.bias") for i in (1, 2)]
        with deepspeed.zero.GatheredParameters(some, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                for parameter in some:
                    parameter.fill_(0.25)
        with engine.gathered_parameters():
            for parameter in some:
                assert_same_bits("copy", parameter, torch.full_like(parameter, 0.25))
        for name, tensors in engine.fp32_state_dict().items():
            is_written = name in ("blocks.1.up.bias", "blocks.2.up.bias")
            old = before[name]["fp32"]
            expected = torch.full_like(old, 0.25) if is_written else old
            assert_same_bits(name, tensors["fp32"], expected)
        shadow = RankShadow(engine)
        shadow.take_steps(range(2))
        shadow.check()
        # Whole again, where somebody asks DeepSpeed for it.
        assert (deepspeed.utils.safe_get_full_fp32_param(some[1]) is None) is frozen


@pytest.mark.parametrize("kind", ["llama", "gpt2-hf"])  # the latter's weights are tied
@pytest.mark.parametrize("threshold", [0, 2000])
@on_ranks(2)
def test_saving_where_all_ranks_run_what_rank_0_saves(kind: str, threshold: int) -> None:
    """As accelerate's documents say; accelerate.save_model takes shared memory for ties."""
    from safetensors.torch import load_file

    config = config_for(UNEVEN, stage=3, gpu_fraction=0.5)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    model: Any = build(kind)
    with built(model, config) as engine, tempfile.TemporaryDirectory() as folder:
        engine.backward(loss_of(engine(**batch_of(kind, dist.get_rank(), bf16=True))))
        engine.step()
        state = engine._zero3_consolidated_16bit_state_dict()
        is_first = dist.get_rank() == 0
        assert (state is not None) is is_first
        memory = {t.untyped_storage().data_ptr() for t in (state or {}).values()}
        model.save_pretrained(folder, is_main_process=is_first, state_dict=state)
        with engine.gathered_parameters():
            whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        if state is None:
            assert not list(Path(folder).glob("*.safetensors"))
            names = model.state_dict()
            assert names.keys() >= whole.keys()
            assert all(names[name].shape == tensor.shape for name, tensor in whole.items())
        else:
            saved = load_file(Path(folder) / "model.safetensors")
            assert saved.keys() == whole.keys()
            assert len(memory) == len(whole)
            for name, tensor in whole.items():
                assert_same_bits(name, saved[name], tensor.cpu())
            with pytest.raises(UnsupportedError, match="has its shards of the weights only"):
                model.state_dict()
        if not is_first:
            with pytest.raises(UnsupportedError, match="read"):
                model.get_parameter(next(iter(whole))).sum()  # reads are refused as before


@pytest.mark.parametrize("threshold", [0, 2000])
@on_ranks(2)
def test_weights_gathered_together_with_those_of_another_engine(threshold: int) -> None:
    """As TRL moves a reference model, which DeepSpeed has sharded, towards the trained one."""
    reference = make_model("mlp", seed=1)
    theirs = [p.detach().clone() for p in reference.parameters()]
    deepspeed.zero.Init(module=reference, dtype=torch.float32, mem_efficient_linear=False)
    config = config_for(UNEVEN, stage=3, gpu_fraction=0.5)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    with built(make_model("mlp"), config) as engine:
        for number in range(3):
            take_steps(engine, [number])
            with engine.gathered_parameters():
                ours = [p.detach().clone() for p in engine.module.parameters()]
            both = [*engine.module.parameters(), *reference.parameters()]
            with deepspeed.zero.GatheredParameters(both, modifier_rank=0):
                if dist.get_rank() == 0:
                    for there, here in zip(reference.parameters(), ours, strict=True):
                        there.data.mul_(0.5).add_(here, alpha=0.5)
                    for seen, here in zip(engine.module.parameters(), ours, strict=True):
                        assert_same_bits("ours", seen.detach(), here)
            theirs = [
                one.mul(0.5).add(two, alpha=0.5) for one, two in zip(theirs, ours, strict=True)
            ]
            with deepspeed.zero.GatheredParameters([*reference.parameters()]):
                for there, expected in zip(reference.parameters(), theirs, strict=True):
                    assert_same_bits("theirs", there.detach(), expected)
        shadow = RankShadow(engine)
        shadow.take_steps(range(2))
        shadow.check()


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
@on_ranks(2)
def test_an_evaluation_between_backward_and_step(gpu_fraction: float) -> None:
    """Between backward and step the weights are those of the last step, gathered ahead or not."""
    config = config_for(UNEVEN, stage=3, gpu_fraction=gpu_fraction, clipping=100.0)
    with followed(make_model("mlp"), config) as shadow:
        engine = shadow.engine
        batch = make_batch("mlp", 99)
        for number in range(5):
            with torch.no_grad():
                before = engine(**batch)
            backward(engine, number)
            engine.optimizer.pipeline.cpu.wait_all()  # previews have been written
            with torch.no_grad():
                assert_same_bits("loss", engine(**batch), before)
            shadow.step()


@pytest.mark.parametrize("kind", ["llama", "reentrant-1"])
@on_ranks(2)
def test_whole_gradients_that_are_there_at_once(kind: str) -> None:
    """One layer's, or two; in the first backward too."""
    most = 0
    with built(build(kind), config_for(UNEVEN, stage=3)) as engine:
        layers = engine.optimizer.collector.layers

        def watch(*_arguments: Any) -> None:
            nonlocal most
            most = max(most, sum(layer.unreduced_grad is not None for layer in layers))

        for hooks in engine.optimizer.collector._hooks:
            for node in hooks.accumulators:
                node.register_hook(watch)  # after the collector's own
        for number in range(3):
            batch = batch_of(kind, 2 * number + dist.get_rank(), True)
            engine.backward(loss_of(engine(**batch)))
            engine.step()
    assert most in (1, 2)


@pytest.mark.parametrize(("prefetch", "most"), [(1, 2), (0, 1)])
@on_ranks(2)
def test_layers_that_are_whole_at_once(prefetch: int, most: int) -> None:
    keys = (("stage3_prefetch_bucket_size", prefetch),)
    assert equals_stage_2(Setup(keys=keys, accumulation=2)) == most


@pytest.mark.parametrize(
    ("kind", "on_host"),
    [("gpt2", False), ("mlp+last", True)],
)
@on_ranks(2)
def test_a_model_built_under_zero_init(kind: str, on_host: bool) -> None:
    built_under_zero_init(kind, on_host)
