"""The host's memory is used up, wherever it is asked for: a clear error, and nothing half-built."""

from __future__ import annotations

import gc
import mmap
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import make_model
from support.processes import num_threads
from support.shadow import Shadow
from training import backward, make_steps

from hytrain import _C
from hytrain.errors import CheckpointError, HostMemoryError
from hytrain.kernels import host_memory
from hytrain.kernels.host_memory import is_out_of_host_memory, taking_host_memory
from hytrain.offload import arena as arena_module
from hytrain.offload import mover as mover_module
from hytrain.offload import threads as threads_module
from hytrain.placement import build as build_placement
from hytrain.placement import memory_probe

pytestmark = pytest.mark.timeout(120)

TESTS = Path(__file__).parents[2]
REFUSED = OSError(12, "Cannot allocate memory")


def raised_by(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


# -- what says so ------------------------------------------------------------------------------


def test_who_says_that_there_is_no_memory() -> None:
    """As the versions at hand say it, not as somebody remembers it."""
    assert is_out_of_host_memory(raised_by(lambda: torch.empty(1 << 60, dtype=torch.uint8)))
    assert is_out_of_host_memory(raised_by(lambda: mmap.mmap(-1, 1 << 60)))
    assert is_out_of_host_memory(raised_by(lambda: bytearray(1 << 60)))
    # std::bad_alloc out of C++; nothing is read before it.
    sums = raised_by(lambda: _C.sum_of_squares(0, _C.DType.float32, 1 << 60, 1))
    assert is_out_of_host_memory(sums)
    assert not is_out_of_host_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_host_memory(raised_by(lambda: torch.zeros(2) @ torch.zeros(3)))
    assert not is_out_of_host_memory(FileNotFoundError(2, "No such file"))


def test_the_message_has_what_a_person_needs() -> None:
    with (
        pytest.raises(HostMemoryError, match=r"the optimizer state of layer 'x'") as caught,
        taking_host_memory("building"),
        taking_host_memory("the optimizer state of layer 'x'", 3 << 30),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    text = str(caught.value)
    assert re.search(r"no memory of 3\.00 GiB for .*the machine has \d+\.\d\d GiB left", text)
    assert '"hytrain.gpu_fraction"' in text
    assert "building" not in text  # whoever is nearest knows most
    assert "\n" not in text


# -- a build -----------------------------------------------------------------------------------


class Mappings:
    """Counts the mappings that are made, and refuses one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, refused: int | None = None) -> None:
        self.made = 0
        self.alive: list[weakref.ref[mmap.mmap]] = []
        original = host_memory.map_anonymous

        def map_anonymous(num_bytes: int, **named: bool) -> mmap.mmap:
            self.made += 1
            if self.made - 1 == refused:
                raise REFUSED
            mapping = original(num_bytes, **named)
            self.alive.append(weakref.ref(mapping))
            return mapping

        patch.setattr(host_memory, "map_anonymous", map_anonymous)
        patch.setattr(arena_module, "map_anonymous", map_anonymous)

    @property
    def left(self) -> int:
        gc.collect()
        mappings = [reference() for reference in self.alive]
        return sum(mapping is not None and not mapping.closed for mapping in mappings)


CONFIGS: dict[str, dict[str, Any]] = {
    "2": make_config(),
    "3, weights on the host": make_config(
        stage=3,
        zero_optimization={
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
        },
    ),
}


@pytest.mark.parametrize(
    "stage", [pytest.param("2", marks=pytest.mark.parity_full), "3, weights on the host"]
)
def test_a_build_that_finds_no_room_at_any_place(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    config = CONFIGS[stage]
    with built(make_model("mlp"), config):
        pass  # a process measures once how many threads are best, in memory of its own
    with monkeypatch.context() as patch:
        mappings = Mappings(patch)
        with built(make_model("mlp"), config) as engine:
            num_layers = len(engine.optimizer.pipeline.layers)
            backward(engine, 0)
            engine.step()
        del engine
        assert mappings.left == 0
    # Each layer's state, the norms, pinned slots for gradients and for what goes back; the weights
    # where they are on the host.
    assert mappings.made == num_layers + 3 + (stage != "2")
    threads, texts = num_threads(), list[str]()
    for refused in range(mappings.made):
        with monkeypatch.context() as patch:
            scarce = Mappings(patch, refused)
            error = raised_by(lambda: built(make_model("mlp"), config).__enter__())
            assert isinstance(error, HostMemoryError)
            texts.append(str(error))
            assert scarce.left == 0  # although the error keeps all frames of the build
        assert num_threads() == threads
    assert sum("for the optimizer state of layer '" in text for text in texts) == num_layers
    assert sum("for pinned gradients" in text for text in texts) == 2
    weights = [text for text in texts if "for this rank's shards of the weights" in text]
    assert len(weights) == (stage != "2")
    assert all('remove "zero_optimization.offload_param"' in text for text in weights)


def test_what_torch_raises_in_a_build_is_said_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threads_module, "_LEAST_ELEMENTS", 1 << 58)
        with pytest.raises(HostMemoryError, match="measuring the CPU's update"):
            threads_module.measure_threads(2, 2)
    # Also where nobody has thought of it.
    monkeypatch.setattr(
        build_placement, "build_placement", lambda *_: torch.empty(1 << 60, dtype=torch.uint8)
    )
    monkeypatch.setattr(
        "hytrain.engine.build_optimizer.build_placement", build_placement.build_placement
    )
    with (
        pytest.raises(HostMemoryError, match="for the engine"),
        built(make_model("mlp"), make_config()),
    ):
        pass


def test_a_given_fraction_that_the_host_seems_not_to_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the user's; but a process that is ended for it has no word any more."""
    free = SimpleNamespace(free=0)
    monkeypatch.setattr(build_placement.psutil, "swap_memory", lambda: free)

    def warnings(gpu_fraction: float) -> list[str]:
        caplog.clear()
        with built(make_model("mlp"), make_config(gpu_fraction=gpu_fraction)) as engine:
            needed.append(engine.optimizer.placement.host_bytes)
        return [text for text in caplog.messages if "the system may end this process" in text]

    needed: list[int] = []
    assert warnings(0.0) == []
    room = {"machine": needed[0] // 2}
    monkeypatch.setattr(memory_probe, "host_memory_pools", lambda: room)
    (text,) = warnings(0.0)
    assert text.startswith('"hytrain.gpu_fraction" is 0.0: the state of 6 of 6 layers')
    found = re.search(r"At least (\d\.\d\d) fits", text)
    assert found is not None
    fraction = float(found.group(1))
    assert 0.0 < fraction < 1.0
    assert warnings(fraction) == []
    free.free = needed[0]  # in swap it is slow, but it works
    assert warnings(0.0) == []


# -- while training ----------------------------------------------------------------------------


def test_a_move_that_does_not_fit_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is the CPU its memory is the host's: torch has another error there."""
    with built(make_model("mlp"), make_config()) as engine:
        shadow = Shadow(engine)
        backward(engine, 0)
        shadow.step()
        refusal = raised_by(lambda: torch.empty(1 << 60, dtype=torch.uint8))

        def empty(*_: Any, **__: Any) -> torch.Tensor:
            raise refusal

        with monkeypatch.context() as patch:
            scarce = SimpleNamespace(**{**vars(torch), "empty": empty})
            patch.setattr(mover_module, "torch", scarce)
            engine.set_gpu_fraction(1.0)
        assert engine.optimizer.pipeline.num_gpu_layers == 0
        assert "no memory for the state of layer" in engine.placement_decisions()[-1].reason
        make_steps(shadow, range(3))
        engine.set_gpu_fraction(1.0)
        backward(engine, 9)
        shadow.step()
        shadow.check()


def test_activations_that_find_no_room_end_their_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"accumulation": "layer_major", "activations": "offload"}
    config = make_config(accumulation=2, hytrain=section)

    def batches(size: int) -> Any:
        torch.manual_seed(size)
        return iter([{"inputs": torch.randn(size, 32)} for _ in range(2)])

    def steps(engine: Any) -> Any:
        engine.train_batch(batches(2), num_valid=lambda _: 1)
        yield
        engine.train_batch(batches(3), num_valid=lambda _: 1)
        yield engine.fp32_state_dict()

    with built(make_model("mlp"), config) as engine:
        *_, expected = steps(engine)
    with built(make_model("mlp"), config) as engine:
        made = steps(engine)
        next(made)
        with monkeypatch.context() as patch:
            Mappings(patch, 0)
            # More than a page a tensor: no slot of the first step will do.
            with pytest.raises(
                HostMemoryError, match=r'activations.*"hytrain.activations" to "keep'
            ):
                engine.train_batch(batches(256), num_valid=lambda _: 1)
        state = next(made)
    assert_same_states(state, expected)


# -- checkpoints -------------------------------------------------------------------------------


def test_a_checkpoint_that_there_is_no_room_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusal = OSError(12, "Cannot allocate memory")
    mapping = RuntimeError("unable to mmap 64 bytes from file <x>: Cannot allocate memory (12)")

    def refuse_with(error: BaseException) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise error

        return refuse

    with built(make_model("mlp"), make_config()) as engine:
        backward(engine, 0)
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "map_anonymous", refuse_with(refusal))
            with pytest.raises(HostMemoryError, match="for one state of parameter '"):
                engine.fp32_state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "load", refuse_with(mapping))
            with pytest.raises(CheckpointError, match="the host has no memory for it") as caught:
                engine.load_checkpoint(str(tmp_path))
            assert "damaged" not in str(caught.value)
        engine.load_checkpoint(str(tmp_path))
        shadow = Shadow(engine)
        backward(engine, 1)
        shadow.step()
        shadow.check()


# -- weights that stay on the host -------------------------------------------------------------


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@pytest.mark.cpu  # on a GPU the model is no second copy on the host
def test_a_model_gives_its_memory_back_while_shards_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frozen weights with ``offload_param``: there are never two copies of them on the host."""
    most = 0
    take = arena_module.Arena.take_tensor

    def taken(arena: arena_module.Arena, num_bytes: int) -> torch.Tensor:
        nonlocal most
        memory = take(arena, num_bytes)
        most = max(most, _anonymous_bytes())
        return memory

    config = make_config(stage=3, bf16=False)
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    block = 4 * 3072**2  # each is a mapping of its own, which goes back to the system
    before = _anonymous_bytes()
    model = torch.nn.Sequential(*(torch.nn.Linear(3072, 3072, bias=False) for _ in range(8)))
    model.requires_grad_(False).append(torch.nn.Linear(3072, 4))
    monkeypatch.setattr(arena_module.Arena, "take_tensor", taken)
    with built(model, config) as engine:
        assert engine.optimizer.weights.host_bytes > 8 * block
        assert 8 * block < most - before < 11 * block


# -- pinning -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_is_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's error is not left for the next kernel to find."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    mapping = host_memory.map_anonymous(1 << 20)
    monkeypatch.setattr(arena_module, "map_anonymous", lambda _: mapping)
    first = arena_module.Arena(1 << 20, cuda)
    assert first.is_pinned
    second = arena_module.Arena(1 << 20, cuda)
    assert not second.is_pinned
    assert "copies will be slower" in caplog.text
    assert (torch.ones(4, device=cuda) + 1).sum().item() == 8.0
    first.close()
