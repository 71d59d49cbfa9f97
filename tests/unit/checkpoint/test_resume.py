"""A resumed run is the uninterrupted one, bit for bit, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.covering import everyday
from support.engines import built, device, environment, make_config
from support.models import make_model
from support.precision import fp16_on_a_cpu, scaled_loss, section_of
from support.resume import (
    Run,
    assert_same,
    assert_same_state,
    engine_of,
    micro_batch,
    save_and_go_on,
    snapshot,
    train,
)

from hytrain.optimizer import model_cut

pytestmark = pytest.mark.usefixtures("process_group")

RUNS = [
    Run(),
    Run(bf16=False, accumulation=2, groups=True, schedule="torch", gpu_fraction=0.0),
    Run(groups=True, gpu_fraction=1.0, stage=1, schedule="none"),
    Run(clipping=0.0, check_overflow=False, accumulation=2),
    Run(moments="bf16"),
    Run(moments="8bit", asynchronous=True),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_resumed_equals_uninterrupted(run: Run, tmp_path: Path) -> None:
    middle, end = 3 * run.accumulation, 6 * run.accumulation
    expected = save_and_go_on(run, tmp_path, (middle, end))
    with engine_of(run.another()) as engine:
        path, client_state = engine.load_checkpoint(str(tmp_path))
        assert path == str(tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
        assert client_state["note"] == [1, "two"]
        assert_same(snapshot(engine), expected["saved"])
        assert train(engine, middle, end) == expected["losses"]
        assert_same(snapshot(engine), expected["end"])


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_any_layout_resumes_any_other(moments: str, tmp_path: Path) -> None:
    run = Run(moments=moments)
    expected = save_and_go_on(run, tmp_path, (3, 6))
    for changes in (
        {"gpu_fraction": 0.0},
        {"stage": 3},
        {"gpu_fraction": 1.0, "stage": 1, "chunk_elements": 4096},
    ):
        with engine_of(run.another(**changes)) as engine:
            train(engine, 20, 22)  # something to overwrite, and a gradient that is pending
            engine.load_checkpoint(tmp_path)
            assert_same(snapshot(engine), expected["saved"])
            if device().type == "cpu":  # a GPU's own kernel may differ in the last bit
                assert train(engine, 3, 6) == expected["losses"]
                assert_same(snapshot(engine), expected["end"])


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("elements", [(2**30, 3000), (3000, 2**30)])
def test_blocks_in_pieces_and_whole_ones_resume_each_other(
    elements: tuple[int, int], moments: str, tmp_path: Path
) -> None:
    # Norms are added up layer by layer: a clipped step would differ in its last bit.
    run = Run(moments=moments, clipping=0.0)
    with patch.object(model_cut, "MOST_ELEMENTS", elements[0]):
        expected = save_and_go_on(run, tmp_path, (3, 6))
    with patch.object(model_cut, "MOST_ELEMENTS", elements[1]), engine_of(run.another()) as engine:
        assert len(engine.optimizer.layer_states) == (11 if elements[1] == 3000 else 5)
        engine.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), expected["saved"])
        if device().type == "cpu":
            assert train(engine, 3, 6) == expected["losses"]
            assert_same(snapshot(engine), expected["end"])


@pytest.mark.parametrize("bf16", [True, False])
def test_the_training_copy_is_the_cast_of_the_master(bf16: bool, tmp_path: Path) -> None:
    with engine_of(Run(bf16=bf16)) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
    masters = [tensors["fp32"] for tensors in saved.state.values()]
    assert all(not torch.equal(t, t.bfloat16().float()) for t in masters)
    dtype = torch.float32 if bf16 else torch.bfloat16
    with engine_of(Run(bf16=not bf16).another()) as engine:
        engine.load_checkpoint(tmp_path)
        now = snapshot(engine)
        for name, tensors in saved.state.items():
            assert torch.equal(now.state[name]["fp32"], tensors["fp32"])
            assert torch.equal(now.weights[name], tensors["fp32"].to(dtype))
        train(engine, 3, 4)


def test_two_saves_and_the_older_one_by_its_tag(tmp_path: Path) -> None:
    with engine_of(Run()) as engine:
        engine.save_checkpoint(tmp_path, tag="start")  # right after initialize
        first = snapshot(engine)
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, tag="again", save_latest=False)
        second = snapshot(engine)
        rest = train(engine, 2, 4)
        engine.load_checkpoint(tmp_path, tag="start")
        assert_same(snapshot(engine), first)
        engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), second)
        assert train(engine, 2, 4) == rest
        engine.load_checkpoint(tmp_path, tag="again")
        assert_same(snapshot(engine), second)


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_save_inside_an_accumulation_window(gpu_fraction: float, tmp_path: Path) -> None:
    run = Run(accumulation=2, gpu_fraction=gpu_fraction)
    with engine_of(run) as engine:
        straight = train(engine, 0, 6)
        expected = snapshot(engine)
    with engine_of(run) as engine:
        assert train(engine, 0, 3) == straight[:3]
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
        # The window goes on with the gradient that it had.
        loss = engine(micro_batch(3).to(engine.device))
        engine.backward(loss)
        engine.save_checkpoint(tmp_path, tag="before the step")
        engine.step()
        assert [loss.item(), *train(engine, 4, 6)] == straight[3:]
        assert_same(snapshot(engine), expected)
        # A load in the middle of a window forgets the window's gradients and starts another.
        train(engine, 6, 7)
        engine.load_checkpoint(tmp_path, tag="global_step1")
        assert_same_state(snapshot(engine), saved)
        with torch.no_grad():
            engine.module.calls.fill_(2)
        assert train(engine, 2, 6) == straight[2:]
        assert_same_state(snapshot(engine), expected)


@everyday({"master": ("fp32", "split"), "direct": (False, True)}, pairs=False)
def test_load_between_backward_and_step(direct: bool, master: str, tmp_path: Path) -> None:
    """Several times: new weights that are still on their way must not overwrite what is loaded."""
    run = Run(clipping=0.0, check_overflow=not direct, master=master)
    with environment("HYTRAIN_DELAYS", "3:2000"), engine_of(run) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
        rest = train(engine, 2, 4)
        for _ in range(10):
            engine.backward(engine(micro_batch(4).to(engine.device)))
            engine.load_checkpoint(tmp_path)
            assert_same(snapshot(engine), saved)
        assert train(engine, 2, 4) == rest


def _halve(src: dict[str, Any], dst: torch.nn.Module) -> None:
    dst.load_state_dict({k: v / 2 if v.is_floating_point() else v for k, v in src.items()})


@pytest.mark.parametrize(("stage", "gpu_fraction"), [(2, 0.0), (1, 1.0), (3, 0.5)])
def test_weights_only(
    stage: int, gpu_fraction: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    with engine_of(run) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
    other = run.another(gpu_fraction=gpu_fraction, stage=stage)
    for arguments in ({"load_module_only": True}, {"load_optimizer_states": False}):
        with engine_of(other) as engine:
            train(engine, 0, 1)
            lr = [group["lr"] for group in engine.optimizer.param_groups]
            caplog.clear()
            engine.load_checkpoint(tmp_path, **arguments)
            assert "moments and step counts start at zero" in caplog.text
            now = snapshot(engine)
            # The fp32 weights are the checkpoint's, not rounded to the training copy's dtype.
            for name, tensors in saved.state.items():
                assert torch.equal(now.state[name]["fp32"], tensors["fp32"])
                assert not now.state[name]["exp_avg"].any()
                assert not now.state[name]["exp_avg_sq"].any()
            assert all(torch.equal(now.weights[name], t) for name, t in saved.weights.items())
            assert now.steps == [0]
            assert [group["lr"] for group in engine.optimizer.param_groups] == lr
            module_only = "load_module_only" in arguments
            assert now.counters[0] == (1 if module_only else 3)
            assert (now.schedule == saved.schedule) is not module_only
            train(engine, 3, 5)
    with engine_of(other) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False, custom_load_fn=_halve)
        now = snapshot(engine)
        for name, tensors in now.state.items():
            assert torch.equal(tensors["fp32"], (saved.weights[name] / 2).float())


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    with engine_of(Run()) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        saved = snapshot(engine)
    stored = torch.load(tmp_path / "global_step2/mp_rank_00_model_states.pt", weights_only=False)
    assert not [name for name in stored["module"] if name.startswith("frozen")]
    with engine_of(Run().another()) as engine:
        frozen = engine.module.frozen.weight.clone()
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert torch.equal(engine.module.frozen.weight, frozen)
        now = snapshot(engine)
        assert all(
            torch.equal(now.state[name]["fp32"], saved.state[name]["fp32"]) for name in saved.state
        )


def test_decisions_about_k_are_kept(tmp_path: Path) -> None:
    """A checkpoint tells where the layers were and why; a resumed run goes on from there."""
    with engine_of(Run(gpu_fraction=0.0)) as engine:
        train(engine, 0, 2)
        engine.set_gpu_fraction(1.0)
        train(engine, 2, 3)
        engine.save_checkpoint(tmp_path, client_state={"mine": 1})
        decisions = engine.placement_decisions()
    assert next(iter(decisions)).gpu_layers_target == 0
    assert decisions[-1].gpu_layers_target == decisions[-1].num_layers
    with engine_of(Run(gpu_fraction=0.5)) as engine:
        _, client_state = engine.load_checkpoint(tmp_path)
        found = engine.placement_decisions()
        assert found[: len(decisions)] == decisions
        assert len(found) == len(decisions) + 1
        assert (found[-1].step, found[-1].reason) == (3, "gpu_fraction is 0.5")
        assert client_state["mine"] == 1
        assert "hytrain" not in client_state
        train(engine, 3, 4)


@pytest.mark.parametrize(("stage", "gpu_fraction"), [(1, 0.0), (2, 0.5), (3, 1.0)])
def test_skipped_steps_are_not_counted(stage: int, gpu_fraction: float, tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/5289: the engine counts them, Adam not.

    Of four steps two overflow; the checkpoint lies between an overflow and the next step.
    """
    section = section_of(initial_scale_power=14, loss_scale_window=50, hysteresis=1)
    config = make_config(stage=stage, gpu_fraction=gpu_fraction, **section)

    def run(engine: Any, begin: int, end: int) -> list[float]:
        losses: list[float] = []
        for number in range(begin, end):
            loss = scaled_loss(engine, number, 1e9 if number in (1, 3) else 1.0)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    with fp16_on_a_cpu(), built(make_model("llama"), config) as engine:
        run(engine, 0, 4)
        assert engine.skipped_steps == 2
        engine.save_checkpoint(str(tmp_path))
        losses = run(engine, 4, 7)
        end = snapshot(engine)
    moved = make_config(stage=stage, gpu_fraction=1.0 - gpu_fraction, **section)
    for other in (config, moved):
        with fp16_on_a_cpu(), built(make_model("llama", seed=1), other) as engine:
            run(engine, 0, 1)
            engine.load_checkpoint(str(tmp_path))
            assert (engine.global_steps, engine.skipped_steps) == (4, 2)
            assert engine.optimizer.steps == [2]
            assert run(engine, 4, 7) == losses
            assert engine.optimizer.steps == [5]
            assert_same(snapshot(engine), end)
