"""Cases of ZeRO-3: what ZeRO-2 computes, with whole layers there only while they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_batches import Shares, train_and_compare
from rank_training import Choosing, RankShadow, assert_equal_on_all_ranks, backward, config_for
from support.comparisons import assert_same_bits
from support.engines import built, environment, make_config
from support.frozen import FROZEN
from support.models import Mlp, Recomputed, loss_of, make_batch, make_model
from support.short_memory import short_of_memory
from torch import nn
from torch.utils.checkpoint import checkpoint

from hytrain.errors import GradientOrderError, UnsupportedError


@dataclass(frozen=True)
class Run:
    """What a run leaves on rank 0, and how many layers were whole at once."""

    losses: list[float]
    state: dict[str, dict[str, torch.Tensor]] = field(repr=False)
    most_live: int


@dataclass(frozen=True)
class Setup:
    """A run: a model and what differs between its twins."""

    model: str = "mlp"
    fractions: tuple[float, ...] = (0.5, 0.5)
    gpu_fractions: tuple[float, ...] = (0.0, 0.0, 0.0)
    clipping: float = 0.5
    accumulation: int = 1
    bf16: bool = True
    keys: tuple[tuple[str, int], ...] = ()
    delays: int = 0
    evaluates: bool = False
    on_host: bool = False
    steps: int = 4

    def __str__(self) -> str:
        parts = [self.model, *self.fractions, "k", *self.gpu_fractions[: len(self.fractions)]]
        parts += [f"c{self.clipping}", f"acc{self.accumulation}", "bf16" if self.bf16 else "fp32"]
        parts += ["host"] if self.on_host else []
        return "-".join(map(str, parts)) + "".join(f"-{k[7:12]}{v}" for k, v in self.keys)


class Nested(Mlp):
    """Blocks in checkpointed segments of two, or one by one; reentrant or not."""

    def __init__(self, *, reentrant: bool, together: int) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.together = together

    def _segment(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for block in self.blocks[first : first + self.together]:
            x = block(x)
        return x

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for first in range(0, len(self.blocks), self.together):
            x = checkpoint(self._segment, x, first, use_reentrant=self.reentrant)
        return self.head(x).float().pow(2).mean()


class RootOwned(Mlp):
    """The model itself owns a weight, which no module's hook can know of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype)) * self.scale
        for block in self.blocks:
            x = block(x)
        return (self.head(x) * self.scale).float().pow(2).mean()


class ReadElsewhere(Mlp):
    """Weights of the embedding and of a block are read again behind the last block."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = block(x)
        x = nn.functional.linear(self.head(x), self.embed.weight)
        bias: Any = self.blocks.get_parameter("1.down.bias")
        return torch.stack([x, x + bias]).float().pow(2).mean()


class PartlyFrozen(Mlp):
    """One block and a bias are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks.get_parameter("2.up.bias").requires_grad_(False)


class OneBlockAgain(Mlp):
    """The second block is used once more behind the last one."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.head(x).float().pow(2).mean()


class OneUnused(Mlp):
    """A parameter of the third block gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_parameter("unused", nn.Parameter(torch.ones(32)))


def twice() -> Recomputed:
    model = Recomputed()
    model.times = 2
    return model


MODELS = {
    "reentrant-1": lambda: Nested(reentrant=True, together=1),
    "reentrant-2": lambda: Nested(reentrant=True, together=2),
    "recomputed-1": lambda: Nested(reentrant=False, together=1),
    "recomputed-2": lambda: Nested(reentrant=False, together=2),
    "twice": twice,
    "root": RootOwned,
    "elsewhere": ReadElsewhere,
    "frozen": PartlyFrozen,
    "again": OneBlockAgain,
    "unused": OneUnused,
}
PLAIN = ("mlp", *MODELS)


def build(kind: str) -> nn.Module:
    """A model by name; behind a "+" what of it is frozen."""
    kind, _, frozen = kind.partition("+")
    if frozen:
        model = build(kind)
        torch.manual_seed(1)
        FROZEN[frozen](model)
        return model
    if kind.endswith("-hf"):  # transformers' own checkpointing, not reentrant
        model: Any = make_model(kind[:-3])
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model
    torch.manual_seed(0)  # the same on all ranks
    return MODELS[kind]() if kind in MODELS else make_model(kind)


def batch_of(kind: str, number: int, bf16: bool) -> dict[str, Any]:
    kind = kind.partition("+")[0]
    plain = kind.removesuffix("-hf")
    batch = make_batch("mlp" if kind in PLAIN else plain, number)
    if "pixel_values" in batch and bf16:
        batch["pixel_values"] = batch["pixel_values"].bfloat16()
    return batch


def train(setup: Setup, stage: int) -> Run:
    rank = dist.get_rank()
    config = make_config(
        gpu_fraction=setup.gpu_fractions[rank],
        clipping=setup.clipping,
        accumulation=setup.accumulation,
        bf16=setup.bf16,
        stage=stage,
        hytrain={"shard_fractions": list(setup.fractions)},
    )
    if stage == 3:
        config["zero_optimization"].update(dict(setup.keys))
        if setup.on_host:
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    delays = environment("HYTRAIN_DELAYS", f"{setup.delays + rank}:{300 * (setup.delays > 0)}")
    losses: list[float] = []
    with delays, built(build(setup.model), config) as engine:
        number = 0
        for step in range(setup.steps):
            for _ in range(setup.accumulation):
                number += 1
                batch = batch_of(setup.model, number * len(setup.fractions) + rank, setup.bf16)
                loss = loss_of(engine(**batch))
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
            if setup.evaluates and step % 2:
                engine.eval()
                with torch.no_grad():
                    losses.append(float(loss_of(engine(**batch_of(setup.model, 7, setup.bf16)))))
                engine.train()
        gatherer = engine.optimizer.weights.gatherer
        assert (gatherer.most_live > 0) is (stage == 3)
        assert not gatherer.live, "layers are left gathered"
        return Run(losses, engine.fp32_state_dict(), gatherer.most_live)


def equals_stage_2(setup: Setup) -> int:
    """Bit for bit: the reductions and updates are the same. Returns the most layers at once."""
    ours, theirs = train(setup, 3), train(setup, 2)
    assert ours.losses == theirs.losses
    assert ours.state.keys() == theirs.state.keys()
    for name, tensors in theirs.state.items():
        for kind, expected in tensors.items():
            assert_same_bits(f"{kind} of {name}", ours.state[name][kind], expected)
    return ours.most_live


def equals_stage_2_short_of_memory(setup: Setup) -> None:
    """Bit for bit, where the first backward begins the updates of all layers that it can."""
    with short_of_memory():
        equals_stage_2(setup)


def batches_short_of_memory(case: Shares) -> None:
    """The numbers of one process, where the first backward begins updates before its end."""
    with short_of_memory() as early:
        train_and_compare(case)
    # A rank without samples runs no graph.
    assert early or not case.sizes[dist.get_rank()]


def begun_in_the_first_backward(kind: str) -> list[int]:
    """Layers whose update has begun before its end, where memory is short; on all ranks."""
    with (
        short_of_memory() as early,
        built(build(kind), config_for((0.7, 0.3), stage=3)) as engine,
    ):
        engine.backward(loss_of(engine(**batch_of(kind, dist.get_rank(), True))))
        found = list(early)
        engine.step()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert everyone.count(found) == len(everyone)
    return found


def a_gradient_after_its_layer() -> None:
    """What comes behind a layer's back is refused, and the error says what may help."""
    with short_of_memory(), built(make_model("mlp"), config_for((0.7, 0.3), stage=3)) as engine:
        collector = engine.optimizer.collector
        last, first = collector.layers[-1], collector.layers[0]
        slot = last.layout.slots[0]

        def again(gradient: torch.Tensor) -> None:
            assert last.grad_reduced
            slot.parameter.grad = torch.ones(slot.parameter.shape, dtype=last.dtype)
            collector._hook(last, 0)(None, None)

        first.layout.slots[0].parameter.register_hook(again)
        with pytest.raises(
            GradientOrderError, match="each of its parameters had got one in this first backward"
        ):
            engine.backward(loss_of(engine(**batch_of("mlp", dist.get_rank(), True))))


def whole_gradients(kind: str) -> int:
    """Most layers whose own whole gradient was there at once, the first backward included."""
    most = 0
    with built(build(kind), config_for((0.7, 0.3), stage=3)) as engine:
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
    return most


def memory_is_given_back() -> None:
    """Between passes a rank has its shards; in a pass a layer, and one ahead."""
    with built(make_model("mlp"), config_for((0.7, 0.3), stage=3)) as engine:
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
        assert mine == pytest.approx(whole * (0.7, 0.3)[dist.get_rank()], rel=0.02)


def weights_can_be_read() -> None:
    with built(make_model("gpt2"), config_for((0.7, 0.3), stage=3)) as engine:
        batch = make_batch("gpt2", dist.get_rank())
        shapes = {name: p.shape for name, p in engine.module.named_parameters()}
        for _ in range(2):
            engine.backward(engine(**batch).loss)
            engine.step()
        with pytest.raises(UnsupportedError, match="gathered_parameters"):
            engine.module.state_dict()
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


def _is_nan(parameter: torch.Tensor) -> bool:
    """What an extension would read of it, of which nobody is told."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(parameter.isnan().all())


def deepspeed_gathers_parameters() -> None:
    """``deepspeed.zero.GatheredParameters``: reads, and writes that stay."""
    import deepspeed

    with built(make_model("mlp"), config_for((0.7, 0.3), stage=3, gpu_fraction=0.5)) as engine:
        named = dict(engine.module.named_parameters())
        for number in range(2):
            backward(engine, number)
            engine.step()
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
        with deepspeed.zero.GatheredParameters(some, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                for parameter in some:
                    parameter.fill_(0.25)
        with engine.gathered_parameters():
            for name, parameter in named.items():
                is_written = any(parameter is p for p in some)
                expected = torch.full_like(parameter, 0.25) if is_written else whole[name]
                assert_same_bits(name, parameter.detach(), expected)
        masters = engine.fp32_state_dict()
        if dist.get_rank() == 0:
            assert bool((masters["head.bias"]["fp32"] == 0.25).all())
        shadow = RankShadow(engine)
        for number in range(2):
            backward(engine, number)
            shadow.step()
        shadow.check()
        assert_same_bits("kept", kept, whole["blocks.1.up.weight"])
    assert not any(hasattr(p, "ds_id") for p in named.values())


def written_where_gathered(threshold: int, frozen: bool) -> None:
    """What one rank writes is on all of them and in the master weights, which else stay."""
    import deepspeed

    model = make_model("mlp")
    model.get_parameter("blocks.2.up.bias").requires_grad_(not frozen)
    model.get_parameter("blocks.2.up.weight").requires_grad_(not frozen)
    config = config_for((0.7, 0.3), stage=3, gpu_fraction=0.5)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    with built(model, config) as engine:
        for number in range(2):
            backward(engine, number)
            engine.step()
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
        for number in range(2):
            backward(engine, number)
            shadow.step()
        shadow.check()
        # Whole again, where somebody asks DeepSpeed for it.
        assert (deepspeed.utils.safe_get_full_fp32_param(some[1]) is None) is frozen


def layer_left_out_later(fractions: Sequence[float]) -> None:
    """A layer that one rank leaves out: it joins its gathers, and reduces nothing for it."""
    with built(Choosing(), config_for(fractions, stage=3, gpu_fraction=0.3)) as engine:
        shadow = RankShadow(engine)
        for number in range(6):
            leaves_out = dist.get_rank() == number % 2 and number > 0
            backward(engine, number, leave_out=number % 4 if leaves_out else None)
            shadow.step()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def evaluation_before_step(gpu_fraction: float) -> None:
    """Between backward and step the weights are those of the last step, gathered ahead or not."""
    config = config_for((0.7, 0.3), stage=3, gpu_fraction=gpu_fraction, clipping=100.0)
    with built(make_model("mlp"), config) as engine:
        shadow = RankShadow(engine)
        batch = make_batch("mlp", 99)
        for number in range(5):
            with torch.no_grad():
                before = engine(**batch)
            backward(engine, number)
            engine.optimizer.pipeline.cpu.wait_all()  # previews have been written
            with torch.no_grad():
                assert_same_bits("loss", engine(**batch), before)
            shadow.step()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def first_pass_differs() -> None:
    """One rank leaves a block out in it, another one each later."""
    with built(Choosing(), config_for((0.5, 0.5), stage=3)) as engine:
        shadow = RankShadow(engine)
        for number in range(4):
            left_out = 2 if dist.get_rank() else None if number == 0 else 1
            backward(engine, number, leave_out=left_out)
            shadow.step()
        shadow.check()


def used_more_often_later() -> None:
    """All ranks use a layer that the first pass did not: it is gathered when it comes."""
    with built(Choosing(), config_for((0.7, 0.3), stage=3)) as engine:
        shadow = RankShadow(engine)
        for number in range(4):
            backward(engine, number, leave_out=2 if number == 0 else None)
            shadow.step()
        shadow.check()


def a_module_is_called_alone() -> None:
    with built(make_model("mlp"), config_for((0.7, 0.3), stage=3)) as engine:
        shadow = RankShadow(engine)
        x = torch.ones(2, 32, dtype=torch.bfloat16)
        for number in range(3):
            backward(engine, number)
            shadow.step()
            with torch.no_grad():
                outside = engine.module.blocks[2](x)
            assert not engine.optimizer.weights.gatherer.live
            with engine.gathered_parameters(), torch.no_grad():
                assert_same_bits("block", engine.module.blocks[2](x), outside)
        shadow.check()


def built_under_zero_init(kind: str, on_host: bool) -> None:
    """A model whose parameters arrive empty trains as one that was built whole."""
    import deepspeed

    keys = {"stage3_max_reuse_distance": 0} if on_host else {}
    config = config_for((0.7, 0.3), stage=3, bf16=False, gpu_fraction=0.5)
    config["zero_optimization"].update(keys)
    if on_host:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(kind)
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    assert all(p.numel() == 0 for p in model.parameters())
    whole = build(kind)  # with those weights: transformers initializes an empty model otherwise
    with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
        for ours, theirs in zip(whole.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    found: list[dict[str, Any]] = []
    for each, stage in ((model, 3), (whole, 2)):
        config = {**config, "zero_optimization": {**config["zero_optimization"], "stage": stage}}
        if stage == 2:
            config["zero_optimization"].pop("offload_param", None)
        with built(each, config) as engine:
            assert {n: p.shape for n, p in engine.module.named_parameters()} == shapes
            known = set().union(*(vars(p) for p in engine.module.parameters()))
            assert "convert_to_zero_parameters" not in known
            for number in range(3):
                engine.backward(loss_of(engine(**batch_of(kind, number, False))))
                engine.step()
            found.append(engine.fp32_state_dict())
    assert found[0].keys() == found[1].keys()
    for name, tensors in found[1].items():
        for state, expected in tensors.items():
            assert_same_bits(f"{state} of {name}", found[0][name][state], expected)


def zero_init_below_stage_3() -> None:
    import deepspeed

    with deepspeed.zero.Init():
        model = build("mlp")
    with (
        pytest.raises(UnsupportedError, match=r"zero\.Init"),
        built(model, config_for((0.5, 0.5))),
    ):
        pass
