"""Faults that other systems have shipped, replayed: after a resume, what is trained is what was.

Each test names a public report of the fault. They are about what no error tells of: a loss that
jumps, weights that are the new model's own, moments that are corrected by another step's number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_bits
from support.damage import damaged, flip
from support.engines import built, make_config
from support.models import make_model
from support.precision import fp16_on_a_cpu, scaled_loss, section_of
from support.resume import Run, Snapshot, assert_same, engine_of, micro_batch, snapshot, train
from torch import nn

from hytrain.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(120)]

LAYOUTS = [(stage, k) for stage in (1, 2, 3) for k in (0.0, 0.5, 1.0)]
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.1
WARNING_OF_WEIGHTS = "moments and step counts start at zero"


class _Saved:
    """A run that was saved after three steps, and how it went on."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        with engine_of(run) as engine:
            train(engine, 0, 3)
            engine.save_checkpoint(folder, tag="three")
            self.state = snapshot(engine)
            self.losses = train(engine, 3, 6)
            self.end = snapshot(engine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> _Saved:
    return _Saved(Run(schedule="none"), tmp_path_factory.mktemp("saved"))


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


@pytest.mark.parametrize(("stage", "gpu_fraction"), LAYOUTS)
def test_the_loss_goes_on(stage: int, gpu_fraction: float, saved: _Saved) -> None:
    """https://github.com/deepspeedai/Megatron-DeepSpeed/issues/274: off by a little, then more."""
    run = saved.run.another(stage=stage, gpu_fraction=gpu_fraction)
    with engine_of(run) as engine:
        train(engine, 40, 41)
        engine.load_checkpoint(saved.folder)
        assert_same(snapshot(engine), saved.state)
        assert train(engine, 3, 6) == saved.losses
        assert_same(snapshot(engine), saved.end)


def test_the_loss_of_an_evaluation_before_the_first_step(saved: _Saved) -> None:
    """https://github.com/huggingface/accelerate/issues/3199: it is the evaluation that jumps."""
    losses: list[float] = []
    with engine_of(saved.run) as engine:
        train(engine, 0, 3)
        losses.append(_evaluated(engine))
    with engine_of(saved.run.another()) as engine:
        engine.load_checkpoint(saved.folder)
        losses.append(_evaluated(engine))
    assert losses[0] == losses[1]


def _evaluated(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        loss = engine(micro_batch(70).to(engine.device)).item()
    engine.train()
    return loss


# -- trained from random weights -----------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gpu_fraction"), LAYOUTS)
def test_weights_alone_reach_the_master_weights(
    stage: int, gpu_fraction: float, saved: _Saved, caplog: pytest.LogCaptureFixture
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/762: the training copy was the checkpoint's
    and the master weights the new model's, which the first step put in its place.
    """
    run = saved.run.another(stage=stage, gpu_fraction=gpu_fraction)
    for arguments in ({"load_module_only": True}, {"load_optimizer_states": False}):
        with engine_of(run) as engine:
            train(engine, 40, 42)
            for group in engine.optimizer.param_groups:
                group["lr"], group["weight_decay"] = 1e-2, DECAY
            caplog.clear()
            with caplog.at_level(logging.WARNING, "hytrain"):
                engine.load_checkpoint(saved.folder, **arguments)
            assert WARNING_OF_WEIGHTS in caplog.text
            now = snapshot(engine)
            for name, tensors in now.state.items():
                assert_same_bits(name, tensors["fp32"], saved.state.state[name]["fp32"])
                assert not tensors["exp_avg"].any()
                assert not tensors["exp_avg_sq"].any()
            for name, weights in now.weights.items():
                assert torch.equal(weights, saved.state.weights[name]), name
            # The next step starts from these weights, and is Adam's first.
            assert _one_step(engine, 3) == {1}


def test_a_universal_checkpoint_is_not_taken_for_weights_alone(saved: _Saved) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/6691: as if initialized from scratch."""
    with engine_of(saved.run.another()) as engine:
        fresh = snapshot(engine)
        engine.load_checkpoint(saved.folder)
        now = snapshot(engine)
    for name, tensors in now.state.items():
        assert not torch.equal(tensors["fp32"], fresh.state[name]["fp32"]) or "bias" in name
        assert tensors["exp_avg"].any()


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


@pytest.mark.parametrize("arguments", _WAYS[:3], ids=lambda a: "-".join(a) or "all")
def test_a_checkpoint_without_a_parameter_is_refused(
    arguments: dict[str, bool], saved: _Saved
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/5475 (a comment of 2024-07-30): a loss of 9
    and no error.
    """
    with engine_of(saved.run.another(num_blocks=4)) as engine:
        before = snapshot(engine)
        with pytest.raises(CheckpointError, match=r"blocks\.3\."):
            engine.load_checkpoint(saved.folder, **arguments)
        assert_same(snapshot(engine), before)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_left_out_on_purpose_is_named(
    stage: int, saved: _Saved, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        engine_of(saved.run.another(num_blocks=4, stage=stage)) as engine,
        caplog.at_level(logging.WARNING, "hytrain"),
    ):
        engine.load_checkpoint(saved.folder, load_module_strict=False)
        now = snapshot(engine)
    assert "blocks.3.up.weight" in caplog.text
    for name, tensors in saved.state.state.items():
        assert_same_bits(name, now.state[name]["fp32"], tensors["fp32"])


# -- a stale number of Adam's step ---------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gpu_fraction"), LAYOUTS)
def test_the_step_that_was_saved_is_counted_on(
    stage: int, gpu_fraction: float, saved: _Saved
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/562 and pull/564: "lost track of step count".

    Layers on the CPU and on the GPU are corrected by the same number: here, and when they move.
    """
    run = saved.run.another(stage=stage, gpu_fraction=gpu_fraction)
    with engine_of(run) as engine:
        train(engine, 40, 47)  # its own count is another
        engine.load_checkpoint(saved.folder)
        assert engine.optimizer.steps == [3]
        assert _one_step(engine, 3) == {4}
        engine.set_gpu_fraction(1.0 - gpu_fraction)
        assert _one_step(engine, 4) == {5}
        engine.load_checkpoint(saved.folder)
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


@pytest.mark.parametrize(("stage", "gpu_fraction"), [(1, 0.0), (2, 0.5), (3, 0.5), (2, 1.0)])
def test_the_older_tags_number_after_a_fallback(
    stage: int, gpu_fraction: float, saved: _Saved, tmp_path: Path
) -> None:
    """A resume that went back to an older checkpoint must not keep the newer one's count."""
    run = saved.run.another(stage=stage, gpu_fraction=gpu_fraction)
    with engine_of(run) as engine:
        engine.load_checkpoint(saved.folder)
        engine.save_checkpoint(tmp_path, tag="older")
        train(engine, 3, 6)
        engine.save_checkpoint(tmp_path, tag="newer")
    with (
        damaged(tmp_path / "newer/zero/norm.bias/exp_avg.pt", flip(8 * 500)),
        engine_of(run) as engine,
    ):
        train(engine, 40, 41)
        path, _ = engine.load_checkpoint(tmp_path)
        assert Path(path).parent.name == "older"
        assert engine.optimizer.steps == [3]
        assert _one_step(engine, 3) == {4}
        assert train(engine, 4, 6) == saved.losses[1:]
        assert_same(snapshot(engine), saved.end)


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


def test_hyper_parameters_are_restored_before_they_are_used(tmp_path: Path) -> None:
    """https://github.com/tenstorrent/tt-metal/issues/53212: powers of the betas that the script
    has given, while the checkpoint's are used.
    """
    run = Run(groups=True, schedule="none")
    with engine_of(run) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 3, 6)
        end = snapshot(engine)
    with engine_of(run.another()) as engine:  # with other betas
        train(engine, 40, 45)
        engine.load_checkpoint(tmp_path)
        assert train(engine, 3, 6) == losses
        assert_same(snapshot(engine), end)
