"""What is refused with Muon, what is warned of, and what its engine shows of its state."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from support.comparisons import assert_same_states
from support.engines import built, device, make_config
from support.models import loss_of, make_batch, make_model

from hytrain.errors import CheckpointError, ConfigError, UnsupportedError
from hytrain.offload import streamed_update
from hytrain.placement.memory import buffer_bytes, waiting_bytes

pytestmark = pytest.mark.usefixtures("process_group")
MATRIX = "blocks.1.up.weight"


def muon_config(parameters: dict[str, Any] | None = None, **keywords: Any) -> dict[str, Any]:
    section = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, **(parameters or {})}}
    return make_config(**keywords) | {"optimizer": section}


def steps(engine: Any, first: int, last: int) -> None:
    for number in range(first, last):
        engine.backward(loss_of(engine(**make_batch("mlp", number, device()))))
        engine.step()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"ns_steps": 6}, "fixed at 5"),
        ({"nesterov": False}, "fixed at True"),
        ({"momentom": 0.9}, "momentum"),
        ({"momentum": 1.0}, r"\[0, 1\)"),
        ({"ns_method": "svd"}, "gram or standard"),
        ({"muon_lr": -1.0}, "at least 0"),
        ({"betas": [0.9]}, "two numbers"),
        ({"per_head_muon": 1}, "true or false"),
    ],
)
def test_parameters_that_deepspeed_would_drop(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words), built(make_model("mlp"), muon_config(parameters)):
        pass


@pytest.mark.parametrize(
    ("section", "words"),
    [({"master": "split"}, "fp32"), ({"accumulation": "layer_major"}, "micro_batch_major")],
)
def test_what_does_not_go_with_it(section: dict[str, Any], words: str) -> None:
    config = muon_config(hytrain=section, accumulation=2)
    with pytest.raises(UnsupportedError, match=words), built(make_model("mlp"), config):
        pass


class MuonWithAuxAdam(torch.optim.Optimizer):
    """An optimizer of a user's own, by its name."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0})


def own_groups(model: torch.nn.Module, vectors_too: bool = False) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1 or vectors_too], "use_muon": True},
        {"params": [p for p in parameters if p.dim() == 1 and not vectors_too], "use_muon": False},
    ]


def test_an_optimizer_of_the_users_own() -> None:
    model = make_model("mlp")
    config = make_config(optimizer=None, zero_allow_untested_optimizer=True)
    with built(model, config, optimizer=MuonWithAuxAdam(own_groups(model))) as engine:
        placements = {
            x.form.optimizer is not None: x.placement for x in engine.optimizer.layer_states
        }
        assert placements == {True: "streamed", False: "cpu"}
        steps(engine, 0, 2)


def test_vectors_are_no_matrices() -> None:
    model = make_model("mlp")
    optimizer = MuonWithAuxAdam(own_groups(model, vectors_too=True))
    config = make_config(optimizer=None, zero_allow_untested_optimizer=True)
    with (
        pytest.raises(ConfigError, match=r"shape \(32,\).*use_muon = False"),
        built(model, config, optimizer=optimizer),
    ):
        pass


def test_a_parameter_and_its_group_that_differ() -> None:
    model = make_model("mlp")
    model.head.weight.use_muon = False  # type: ignore[union-attr]
    config = make_config(optimizer=None, zero_allow_untested_optimizer=True)
    with (
        pytest.raises(ConfigError, match="make them alike"),
        built(model, config, optimizer=MuonWithAuxAdam(own_groups(model))),
    ):
        pass


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_clipping_is_warned_of(clipping: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), built(make_model("mlp"), muon_config(clipping=clipping)):
        pass
    assert ("before Muon's momentum" in caplog.text) == (clipping > 0)


def test_a_skipped_step_changes_no_bit() -> None:
    with built(make_model("mlp"), muon_config(gpu_fraction=0.3)) as engine:
        steps(engine, 0, 2)
        before = engine.fp32_state_dict()
        loss = loss_of(engine(**make_batch("mlp", 2, device())))
        engine.backward(loss * float("inf"))
        engine.step()
        assert engine.optimizer.overflow
        assert_same_states(engine.fp32_state_dict(), before)
        steps(engine, 3, 4)
        assert engine.fp32_state_dict()[MATRIX]["fp32"].ne(before[MATRIX]["fp32"]).any()


def test_fp16_is_trained() -> None:
    config = muon_config(bf16=False) | {"fp16": {"enabled": True, "initial_scale_power": 4}}
    try:
        with built(make_model("mlp").half(), config) as engine:
            steps(engine, 0, 3)
            assert not engine.optimizer.overflow
    except ValueError as error:
        pytest.skip(f"DeepSpeed has no fp16 here: {error}")


def test_state_is_read_and_written() -> None:
    with built(make_model("mlp"), muon_config()) as engine:
        steps(engine, 0, 2)
        parameters = dict(engine.module.named_parameters())
        matrix, vector = parameters[MATRIX], parameters["blocks.1.up.bias"]
        momentum = safe_get_full_optimizer_state(matrix, "momentum_buffer")
        assert momentum.shape == matrix.shape
        assert momentum.any()
        assert safe_get_full_optimizer_state(vector, "exp_avg_sq").any()
        with pytest.raises(ConfigError, match="momentum_buffer"):
            safe_get_full_optimizer_state(matrix, "exp_avg")
        safe_set_full_optimizer_state(matrix, torch.ones_like(momentum), "momentum_buffer")
        state = engine.optimizer.state[matrix]
        assert list(state) == ["step", "momentum_buffer"]
        assert state["momentum_buffer"].eq(1).all()
        assert set(engine.fp32_state_dict()[MATRIX]) == {"fp32", "momentum_buffer"}


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, moments: str) -> None:
    config = muon_config(hytrain={"moments": moments})
    with built(make_model("mlp"), config) as engine:
        steps(engine, 0, 3)
        engine.save_checkpoint(str(tmp_path), "three")
        saved = engine.fp32_state_dict()
        in_memory = engine.optimizer.state_dict()
        copy = {
            **in_memory,
            "layers": [
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in layer.items()}
                for layer in in_memory["layers"]
            ],
        }
        steps(engine, 3, 6)
        last = engine.fp32_state_dict()
    folder = tmp_path / "three" / "zero" / MATRIX
    assert sorted(path.name for path in folder.iterdir()) == [
        "fp32.pt",
        "momentum_buffer.pt",
        "step.pt",
    ]
    # Adam's kernel on a GPU differs from the CPU's in the last bit.
    k = 0.4 if device().type == "cpu" else 0.0
    other = muon_config(gpu_fraction=k, hytrain={"moments": moments})
    with built(make_model("mlp", seed=1), other) as engine:
        engine.load_checkpoint(str(tmp_path), "three")
        assert_same_states(engine.fp32_state_dict(), saved)
        steps(engine, 3, 6)
        assert_same_states(engine.fp32_state_dict(), last)
    with built(make_model("mlp", seed=1), config) as engine:
        engine.optimizer.load_state_dict(copy)
        assert_same_states(engine.fp32_state_dict(), saved)


def test_a_checkpoint_of_adam_is_refused(tmp_path: Path) -> None:
    with built(make_model("mlp"), make_config()) as engine:
        steps(engine, 0, 1)
        engine.save_checkpoint(str(tmp_path), "adam")
    with built(make_model("mlp"), muon_config()) as engine:
        with pytest.raises(CheckpointError, match="momentum_buffer"):
            engine.load_checkpoint(str(tmp_path), "adam")
        engine.load_checkpoint(str(tmp_path), "adam", load_optimizer_states=False)


def test_a_device_without_memory_for_pieces_of_state_tears_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their buffers are given back with the states, and asked for where these come back."""

    def refuse(*_rest: Any, **_more: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")

    ends: list[dict[str, Any]] = []
    for is_short in (False, True):
        with built(make_model("mlp"), muon_config(gpu_fraction=0.0, clipping=1.0)) as engine:
            steps(engine, 0, 2)
            engine.backward(loss_of(engine(**make_batch("mlp", 2, device()))))
            if is_short:
                engine.offload_states()
                short = SimpleNamespace(**vars(torch) | {"empty": refuse})
                with monkeypatch.context() as patch:
                    patch.setattr(streamed_update, "torch", short)
                    with pytest.raises(torch.OutOfMemoryError, match=r"1\.00 GiB"):
                        engine.reload_states()
                engine.reload_states()
            engine.step()
            steps(engine, 3, 5)
            ends.append(engine.fp32_state_dict())
    assert_same_states(*ends)


def test_all_that_fits_is_on_the_gpu() -> None:
    """On a CPU everything does; state comes to it layer by layer, and goes back when asked."""
    config = muon_config()
    config["hytrain"]["gpu_fraction"] = "solve"
    with built(make_model("mlp"), config) as engine:
        states = engine.optimizer.layer_states
        assert {state.placement for state in states} == {"streamed", "cpu"}
        steps(engine, 0, 24)
        assert {state.placement for state in states} == {"gpu"}
        assert "matrices" in engine.placement_decisions()[-1].reason
        assert engine.optimizer.pipeline.streamed.buffer_bytes == 0
        engine.set_gpu_fraction(0.0)
        assert {state.placement for state in states} == {"streamed", "cpu"}
        steps(engine, 24, 26)
        assert engine.optimizer.pipeline.streamed.buffer_bytes > 0


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5, 1.0])
def test_planned_memory_is_what_the_state_takes(gpu_fraction: float) -> None:
    with built(make_model("mlp"), muon_config(gpu_fraction=gpu_fraction)) as engine:
        states = engine.optimizer.layer_states
        planned = engine.optimizer.placement.decisions[0].layer_bytes
        assert [layer.state_bytes for layer in planned] == [x.memory.nbytes for x in states]
        matrices = [layer for layer in planned if layer.is_streamed]
        assert all(x.state_bytes == 8 * x.parameters for x in matrices)
        k = engine.optimizer.pipeline.num_gpu_layers
        assert buffer_bytes(planned, k) == engine.optimizer.pipeline.streamed.buffer_bytes
        # Their gradients wait for the step wherever the state is; Adam's, on the host, do not.
        own = [x for n, x in enumerate(planned) if x.is_streamed or n < k]
        assert waiting_bytes(planned, k) == sum(2 * layer.parameters for layer in own)
