"""offload_states() and reload_states(): the device's memory is free between, training goes on."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from support.comparisons import assert_same_states
from support.engines import GATHERS, built, make_config
from support.models import make_batch, make_model
from support.resume import Everything, Snapshot, assert_same, micro_batch, snapshot, train

from experiments.common.copies import copy_rates
from hytrain.errors import (
    ConfigError,
    HostMemoryError,
    StatesOffloadedError,
    UnsupportedError,
)
from hytrain.offload import arena
from hytrain.optimizer.offloaded_states import StateKind, kinds_to_offload

MICRO_BATCHES = 8
PLACES = [
    pytest.param(stage, k, param, id=f"zero{stage}-k{k:g}{'-offload_param' if param else ''}")
    for stage in (1, 2, 3)
    for k in (0.0, 0.5, 1.0)
    for param in ((False, True) if stage == 3 else (False,))
]


@contextmanager
def _engine(stage: int = 2, k: float = 0.5, param: bool = False, **sections: Any) -> Generator[Any]:
    torch.manual_seed(0)
    config = make_config(stage=stage, gpu_fraction=k, train_micro_batch_size_per_gpu=4, **sections)
    if stage == 3:
        # One rank shards nothing unless its weights are kept on the host.
        config["zero_optimization"].update(GATHERS["each"])
    if param:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with built(Everything(), config) as engine:
        yield engine


def _on_device(engine: Any) -> list[weakref.ref[torch.Tensor]]:
    """Whatever an engine keeps on its device, as long as nobody else keeps it alive."""
    optimizer = engine.optimizer
    found: list[torch.Tensor] = []
    for layer in optimizer.weights.layers:
        for part in (*layer.trained, layer.frozen):
            if part is not None and not part.storage.on_host:
                found += part.storage.kept
    for state in optimizer.layer_states:
        if state.placement == "gpu":
            found.append(state.memory)
    for gradient in optimizer.collector.layers:
        found += [t for t in (gradient.unreduced_grad, gradient.reduced_shard) if t is not None]
    return [weakref.ref(tensor) for tensor in found]


def _cycle(engine: Any, **arguments: Any) -> None:
    before = _on_device(engine)
    engine.offload_states(**arguments)
    alive = [tensor() for tensor in before]
    assert [tensor for tensor in alive if tensor is not None] == []
    assert engine.optimizer.offloaded_states == {kind.value for kind in OffloadStateTypeEnum}
    engine.reload_states()
    assert engine.optimizer.offloaded_states == set()


@pytest.fixture(scope="module")
def straight_run(process_group: None) -> tuple[list[float], Snapshot]:
    """Without any of it; the same bits wherever state and weights are kept."""
    with _engine(accumulation=2) as engine:
        return train(engine, 0, MICRO_BATCHES), snapshot(engine)


@pytest.mark.parametrize(("stage", "k", "param"), PLACES)
def test_training_goes_on_bit_for_bit(
    stage: int, k: float, param: bool, straight_run: tuple[list[float], Snapshot]
) -> None:
    """Also in the middle of a step's micro-batches, whose gradients leave as well."""
    straight, expected = straight_run
    with _engine(stage, k, param, accumulation=2) as engine:
        losses: list[float] = []
        for number in range(MICRO_BATCHES):
            _cycle(engine, pin_memory=number % 2 == 0, non_blocking=number % 3 == 0)
            losses += train(engine, number, number + 1)
        _cycle(engine)
        assert losses == straight
        assert_same(snapshot(engine), expected)


SETS: list[list[Any]] = [
    ["lp_params"],
    ["hp_params"],
    ["optim_states"],
    ["hp_params", "lp_grads"],
    [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.lp_params],
    ["contiguous_grad_buffer"],
    [],
]


def test_a_part_of_it(straight_run: tuple[list[float], Snapshot]) -> None:
    """What is not named stays where it is; more can be named before all of it comes back."""
    straight, expected = straight_run
    with _engine(accumulation=2) as engine:
        losses: list[float] = []
        for number in range(MICRO_BATCHES):
            include = SETS[number % len(SETS)]
            losses += train(engine, number, number + 1)
            layer = engine.optimizer.layer_states[0]
            training, master = layer.storage.kept[0], layer.master
            engine.offload_states(include=include, device=OffloadDeviceEnum.cpu)
            names = {getattr(kind, "value", kind) for kind in include}
            assert engine.optimizer.offloaded_states == names
            assert (layer.storage.kept[0] is training) == ("lp_params" not in names)
            if not names & {"hp_params", "optim_states"}:
                assert layer.master is master
            engine.offload_states(include=include)  # again: nothing more
            if include and number % 2:
                engine.offload_states()
            engine.reload_states()
            assert layer.is_one_block
        assert losses == straight
        assert_same(snapshot(engine), expected)


def test_weights_can_be_read_on_the_host_meanwhile() -> None:
    with _engine() as engine:
        train(engine, 0, 2)
        engine.synchronize()
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        engine.offload_states()
        for name, parameter in engine.module.named_parameters():
            assert parameter.device.type == "cpu"
            assert torch.equal(parameter, before[name])
        kept = engine.module.embed.weight.data  # somebody's own reference, past everything
        engine.reload_states()
    assert torch.equal(kept, before["embed.weight"])


def test_destroyed_while_it_is_away() -> None:
    """The model keeps its weights, in memory that stays."""
    with _engine() as engine:
        train(engine, 0, 2)
        engine.synchronize()
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        module = engine.module
        engine.offload_states()
    gc.collect()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


USES: list[Callable[[Any], object]] = [
    lambda engine: engine(micro_batch(0)),
    lambda engine: engine.module(micro_batch(0)),
    lambda engine: engine.step(),
    lambda engine: engine.synchronize(),
    lambda engine: engine.eval(),
    lambda engine: engine.fp32_state_dict(),
    lambda engine: engine.module_state_dict(),
    lambda engine: engine.set_gpu_fraction(1.0),
    lambda engine: engine.save_checkpoint("unused"),
    lambda engine: engine.load_checkpoint("unused"),
    lambda engine: engine.optimizer.state_dict(),
    lambda engine: engine.gathered_parameters().__enter__(),
    lambda engine: next(iter(engine.optimizer.state.values()))["exp_avg"],
]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_use_while_it_is_away_is_refused(
    stage: int, straight_run: tuple[list[float], Snapshot]
) -> None:
    with _engine(stage, param=stage == 3, accumulation=2) as engine:
        losses = train(engine, 0, 1)
        engine.offload_states()
        for use in USES:
            with pytest.raises(StatesOffloadedError, match=r"engine\.reload_states\(\) before"):
                use(engine)
        engine.reload_states()
        losses += train(engine, 1, 3)
        assert losses == straight_run[0][:3]


def test_a_backward_while_it_is_away_is_refused() -> None:
    with _engine() as engine:
        train(engine, 0, 1)
        loss = engine(micro_batch(1))
        engine.offload_states()
        with pytest.raises(StatesOffloadedError, match="used while its states are off the device"):
            engine.backward(loss)


class _OnlyMoments:
    """What DeepSpeed's type asks for, and no more."""

    def __contains__(self, value: object) -> bool:
        return value == OffloadStateTypeEnum.optim_states


def test_bad_arguments_are_refused_before_anything_moves() -> None:
    with _engine() as engine:
        with pytest.raises(ConfigError, match=r'has \'lp_param\': did you mean "lp_params"\?'):
            engine.offload_states(include=["hp_params", "lp_param"])
        with pytest.raises(ConfigError, match=r"give a list, as in \['lp_params'\]"):
            engine.offload_states(include="lp_params")
        for device in ("nvme", OffloadDeviceEnum.nvme, "cuda"):
            with pytest.raises(UnsupportedError, match='give "cpu"'):
                engine.offload_states(device=device)
        assert engine.offload_states(device=OffloadDeviceEnum.none) is None
        assert kinds_to_offload(_OnlyMoments(), "cpu") == {StateKind.optim_states}
        assert engine.optimizer.offloaded_states == set()
        engine.reload_states()
        train(engine, 0, 1)


def test_gathered_weights_are_not_taken_away() -> None:
    with _engine(3, param=True) as engine, engine.gathered_parameters():
        with pytest.raises(ConfigError, match="call it behind the block"):
            engine.offload_states()
        assert engine.optimizer.offloaded_states == set()


def test_a_host_without_memory_is_said_and_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> Any:
        raise MemoryError(f"no {num_bytes}")

    with _engine() as engine:
        straight = train(engine, 0, 2)
    with _engine() as engine:
        losses = train(engine, 0, 1)
        monkeypatch.setattr(arena, "map_anonymous", refuse)
        with pytest.raises(HostMemoryError, match="states that leave the device"):
            engine.offload_states()
        assert engine.optimizer.offloaded_states == set()
        assert losses + train(engine, 1, 2) == straight


def test_a_device_without_memory_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with _engine() as engine:
        straight = train(engine, 0, 2)
    with _engine() as engine:
        losses = train(engine, 0, 1)
        engine.offload_states()
        really, calls = torch.empty_like, [0]

        def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 3:
                raise torch.OutOfMemoryError("none left")
            return really(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", scarce)
            with pytest.raises(torch.OutOfMemoryError):
                engine.reload_states()
        with pytest.raises(StatesOffloadedError):
            engine(micro_batch(0))
        engine.reload_states()
        assert losses + train(engine, 1, 2) == straight


def test_200_cycles_take_no_more_memory() -> None:
    with _engine(k=1.0) as engine:
        train(engine, 0, 2)
        blocks = engine.optimizer.offloaded

        def cycles(count: int) -> tuple[int, int, int]:
            for number in range(count):
                include = [None, ["optim_states"], ["lp_params", "hp_params"]][number % 3]
                engine.offload_states(include=include)
                engine.reload_states()
            gc.collect()
            tensors = sum(isinstance(found, torch.Tensor) for found in gc.get_objects())
            # Anonymous memory: pages of code come and go as the machine needs its memory.
            lines = Path("/proc/self/status").read_text().splitlines()
            memory = next(line.split()[1] for line in lines if line.startswith("RssAnon"))
            return 1024 * int(memory), tensors, blocks.host_bytes

        first, then = cycles(20), cycles(200)
        assert then[1] <= first[1]  # less where an earlier test's garbage was collected
        assert then[2] == first[2]
        assert then[0] - first[0] < 4 << 20
        train(engine, 2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
def test_a_gpu_is_free_and_copies_are_fast(stage: int, k: float) -> None:
    """Nothing but some MiB stays; 80 % of what one copy of as many bytes reaches, but for .5 ms.

    So long the host takes for 14 layers, however large they are. What the driver takes to give
    their memory back is measured and left out.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    config = make_config(stage=stage, gpu_fraction=k, offload={"chunk_elements": 2**20})
    with built(make_model("llama-100m"), config) as engine:
        batch = make_batch("llama", 0, device)
        for _ in range(3):
            engine.backward(engine(**batch).loss)
            engine.step()
        engine.synchronize()
        gc.collect()
        expected = engine.fp32_state_dict()
        # 32 MiB of cuBLAS's for each thread that multiplies: no part of the engine.
        torch._C._cuda_clearCublasWorkspaces()
        full, asked = torch.cuda.memory_allocated(device), _requested(device)
        engine.offload_states()  # pins
        engine.reload_states()
        seconds: dict[str, list[float]] = {"offload": [], "reload": []}
        left: list[int] = []
        for _ in range(20):
            for name, call in (
                ("offload", engine.offload_states),
                ("reload", engine.reload_states),
            ):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                call()
                torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - begin)
                if name == "offload":
                    left.append(torch.cuda.memory_allocated(device))
        moved = full - left[-1]
        rates = copy_rates(moved, device)
        freeing = {"offload": _seconds_to_free(len(engine.optimizer.layer_states), moved, device)}
        print(f"zero{stage} k{k:g}: {full / 2**20:.0f} MiB, left {left[-1] / 2**20:.1f} MiB")
        for name, times in seconds.items():
            took = sorted(times)[len(times) // 2]
            print(f"  {name}: {moved / took / 1e9:.1f} GB/s, one copy {rates[name] / 1e9:.1f}")
            assert took - 5e-4 - freeing.get(name, 0.0) <= moved / (0.8 * rates[name])
        assert len(set(left)) == 1  # nothing grows
        assert left[-1] < 0.02 * full + (8 << 20)
        assert _requested(device) <= asked
        assert_same_states(engine.fp32_state_dict(), expected)


def _seconds_to_free(number: int, num_bytes: int, device: torch.device) -> float:
    """Of so many blocks of together so many bytes, by the driver; the median."""
    seconds: list[float] = []
    for _ in range(7):
        size = num_bytes // number
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(number)]
        torch.cuda.synchronize()
        del blocks
        begin = time.perf_counter()
        torch.cuda.empty_cache()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def _requested(device: torch.device) -> int:
    """Bytes that the tensors there asked for.

    What is allocated for them depends on what was freed before: the allocator's segments are
    multiples of 2 MiB, and a remainder of up to 1 MiB is not split off. Here that was 0.5 MiB for
    each layer's weights and 1 MiB for its state once they had come back, a few MiB more than built.
    """
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]
