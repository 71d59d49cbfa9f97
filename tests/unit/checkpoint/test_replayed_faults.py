"""Faults that other systems have shipped, replayed: after a resume, what is trained is what was.

Each test names a public report of the fault. They are about what no error tells of: a loss that
jumps, weights that are the new model's own, moments that are corrected by another step's number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import make_model
from support.precision import fp16_on_a_cpu, scaled_loss, section_of
from support.resume import Run, Snapshot, assert_same, engine_of, micro_batch, snapshot, train
from torch import nn

from hytrain.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(120)]

LAYOUTS = [(stage, k) for stage in (1, 2, 3) for k in (0.0, 0.5, 1.0)]
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.1


RUN = Run(schedule="none")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Path:
    """A checkpoint after three steps."""
    folder = tmp_path_factory.mktemp("saved")
    with engine_of(RUN) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(folder)
    return folder


def _step_of(before: Snapshot, after: Snapshot, lr: float) -> set[int]:
    """The number, of 1 to 40, that explains each parameter's update best: Adam's correction.

    In float64 from the moments after the step, without anything of ours.
    """
    found: set[int] = set()
    for name, now in after.state.items():
        p, m, v = (now[kind].double() for kind in ("fp32", "exp_avg", "exp_avg_sq"))
        old = before.state[name]["fp32"].double() * (1 - lr * DECAY)

        def distance(t: int, p: Any = p, m: Any = m, v: Any = v, old: Any = old) -> float:
            denominator = (v / (1 - BETAS[1] ** t)).sqrt() + EPS
            return (old - lr * m / (1 - BETAS[0] ** t) / denominator - p).abs().max().item()

        best = min(range(1, 41), key=distance)
        assert distance(best) < 0.1 * min(distance(t) for t in range(1, 41) if t != best), name
        found.add(best)
    return found


def _one_step(engine: Any, number: int) -> set[int]:
    """Trains a step; returns the numbers by which Adam has corrected its moments."""
    before = snapshot(engine)
    train(engine, number, number + 1)
    (lr,) = (group["lr"] for group in engine.optimizer.param_groups)
    return _step_of(before, snapshot(engine), lr)


# -- the loss jumps ------------------------------------------------------------------------------


def test_the_loss_of_an_evaluation_before_the_first_step(saved: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/3199: it is the evaluation that jumps."""
    losses: list[float] = []
    with engine_of(RUN) as engine:
        train(engine, 0, 3)
        losses.append(_evaluated(engine))
    with engine_of(RUN.another()) as engine:
        engine.load_checkpoint(saved)
        losses.append(_evaluated(engine))
    assert losses[0] == losses[1]


def _evaluated(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = engine(micro_batch(70).to(engine.device)).item()
    engine.train()
    return loss


# -- trained from random weights -----------------------------------------------------------------


class _Wrapped(nn.Module):
    """What DistributedDataParallel, or a trainer, makes of a model's names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


def _mlp(wrapped: bool, seed: int) -> nn.Module:
    model = make_model("mlp", seed=seed)
    return _Wrapped(model) if wrapped else model


@pytest.mark.parametrize("was_wrapped", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_names_with_another_prefix_are_refused(
    stage: int, was_wrapped: bool, tmp_path: Path
) -> None:
    """https://github.com/facebookresearch/moco-v3/issues/30: every name has one more "module.".

    A load that takes what both have would take nothing, and train the new model's own weights.
    """
    config = make_config(gpu_fraction=0.5, stage=stage)
    with built(_mlp(was_wrapped, 0), config) as engine:
        engine.save_checkpoint(tmp_path)
    with built(_mlp(not was_wrapped, 1), config) as engine:
        before = {name: t.clone() for name, t in _masters(engine).items()}
        for arguments in _WAYS:
            with pytest.raises(CheckpointError, match=r"module\.") as told:
                engine.load_checkpoint(tmp_path, **arguments)
            # That the names differ in their beginning alone is the thing to be told.
            assert "begin with 'module.'" in str(told.value)
        after = _masters(engine)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


_WAYS: tuple[dict[str, bool], ...] = (
    {},
    {"load_module_only": True},
    {"load_optimizer_states": False},
    {"load_module_strict": False},
    {"load_module_strict": False, "load_module_only": True},
)


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensors["fp32"] for name, tensors in engine.fp32_state_dict().items()}


# -- a stale number of Adam's step ---------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gpu_fraction"), LAYOUTS)
def test_the_step_that_was_saved_is_counted_on(
    stage: int, gpu_fraction: float, saved: Path
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/562 and pull/564: "lost track of step count".

    Layers on the CPU and on the GPU are corrected by the same number: here, and when they move.
    """
    run = RUN.another(stage=stage, gpu_fraction=gpu_fraction)
    with engine_of(run) as engine:
        train(engine, 40, 47)  # its own count is another
        engine.load_checkpoint(saved)
        assert engine.optimizer.steps == [3]
        assert _one_step(engine, 3) == {4}
        engine.set_gpu_fraction(1.0 - gpu_fraction)
        assert _one_step(engine, 4) == {5}
        engine.load_checkpoint(saved)
        assert _one_step(engine, 3) == {4}


@pytest.mark.parametrize("steps", [256, 2048])
def test_a_number_that_16_bits_cannot_hold(steps: int, tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8496: counters stand still, at 256 in bf16."""
    with engine_of(Run(schedule="none")) as engine:
        engine.optimizer.kept.hyper.steps = [steps]
        engine.save_checkpoint(tmp_path)
    with engine_of(Run(schedule="none").another()) as engine:
        engine.load_checkpoint(tmp_path)
        train(engine, 0, 2)
        assert engine.optimizer.steps == [steps + 2]


@pytest.fixture
def _fp16() -> Iterator[None]:
    with fp16_on_a_cpu():
        yield


@pytest.mark.usefixtures("_fp16")
@pytest.mark.parametrize(("stage", "gpu_fraction"), LAYOUTS)
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

    with built(make_model("llama"), config) as engine:
        run(engine, 0, 4)
        assert engine.skipped_steps == 2
        engine.save_checkpoint(str(tmp_path))
        losses = run(engine, 4, 7)
        end = snapshot(engine)
    moved = make_config(stage=stage, gpu_fraction=1.0 - gpu_fraction, **section)
    for other in (config, moved):
        with built(make_model("llama", seed=1), other) as engine:
            run(engine, 0, 1)
            engine.load_checkpoint(str(tmp_path))
            assert (engine.global_steps, engine.skipped_steps) == (4, 2)
            assert engine.optimizer.steps == [2]
            before = snapshot(engine)
            assert run(engine, 4, 5) == losses[:1]
            assert _step_of(before, snapshot(engine), 1e-2) == {3}
            assert run(engine, 5, 7) == losses[1:]
            assert_same(snapshot(engine), end)
