"""Ranks that were not started alike are told so before anything is built, with keys and values."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from harness import on_ranks
from rank_shadow import backward, followed
from support.engines import built, from_all_ranks, make_config
from support.models import make_model
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hytrain
import hytrain.api
from hytrain.engine import build_agreement
from hytrain.errors import ConfigError

Build = tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]

"""Model, configuration and further arguments of a rank."""


def _with(path: str, value: Any) -> Build:
    config = copy.deepcopy(make_config())
    section = config
    *parents, last = path.split(".")
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
    return make_model("mlp"), config, {}


def _frozen() -> Build:
    model = make_model("mlp")
    next(model.parameters()).requires_grad_(False)
    return model, make_config(), {}


def _another_shape() -> Build:
    model = make_model("mlp")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.bias = torch.nn.Parameter(torch.zeros(module.out_features + 1))
            break
    return model, make_config(), {}


def _client(rate: float, *, is_callable: bool = False, split: int = 1) -> Build:
    model = make_model("mlp")

    def make(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        groups = [{"params": every[:split]}, {"params": every[split:], "betas": (0.8, 0.99)}]
        return torch.optim.AdamW(groups, lr=rate)

    optimizer = make if is_callable else make(model.parameters())
    return model, make_config(optimizer=None), {"optimizer": optimizer}


STAGE = "zero_optimization.stage"

DIFFERENT: dict[str, tuple[Callable[[int], Build], list[str]]] = {
    "rate": (
        lambda rank: _with("optimizer.params.lr", 0.01 * (1 + rank)),
        ['"optimizer.params.lr" is 0.01 on rank 0 (host ', "; 0.02 on rank 1 (host "],
    ),
    "stage": (lambda rank: _with(STAGE, 2 + rank), [f'"{STAGE}" is 2 on rank 0']),
    "clipping": (lambda rank: _with("gradient_clipping", 1.0 + rank), ['"gradient_clipping" is 1']),
    "accumulation": (
        lambda rank: _with("gradient_accumulation_steps", 1 + rank),
        ['"gradient_accumulation_steps" is 1 on rank 0'],
    ),
    "moments": (
        lambda rank: _with("hytrain.moments", ("fp32", "bf16")[rank]),
        ['"hytrain.moments" is "fp32" on rank 0', '"bf16" on rank 1'],
    ),
    "sigterm": (
        lambda rank: _with("hytrain.checkpoint.sigterm_dir", (None, "/tmp")[rank]),
        ['"hytrain.checkpoint.sigterm_dir" is not there on rank 0', "given on rank 1"],
    ),
    "scheduler": (
        lambda rank: _with("scheduler", (None, {"type": "WarmupLR"})[rank]),
        ['"scheduler.type" is not there on rank 0', '"WarmupLR" on rank 1'],
    ),
    "frozen": (
        lambda rank: (_frozen if rank else lambda: _with(STAGE, 2))(),
        ["torch.float32, trained on rank 0", "torch.float32, frozen on rank 1"],
    ),
    "shape": (lambda rank: _another_shape() if rank else _with(STAGE, 2), ["parameter '", "(33,)"]),
    "client": (
        lambda rank: _client(0.01 * (1 + rank)),
        ['parameter group 0: "lr" is 0.01 on rank 0', 'parameter group 1: "lr"'],
    ),
    "callable": (
        lambda rank: _client(0.01 * (1 + rank), is_callable=True),
        ['parameter group 0: "lr" is 0.01 on rank 0', 'parameter group 1: "lr"'],
    ),
    "groups": (lambda rank: _client(0.01, split=1 + rank), ["the parameter group of '", "is 1 on"]),
}


@on_ranks(2)
def test_ranks_that_are_not_alike() -> None:
    """All are told the same, and a refused model is as it was."""
    for name, (build, words) in DIFFERENT.items():
        model, config, keywords = build(dist.get_rank())
        before = [(p.data_ptr(), p.dtype, p.detach().clone()) for p in model.parameters()]
        with pytest.raises(ConfigError) as raised, built(model, config, **keywords):
            pass
        text = str(raised.value)
        assert from_all_ranks(text) == [text, text]
        assert all(word in text for word in words), text
        assert name != "rate" or text.count("\n") == 1, "one line for one difference"
        if name == "callable":  # DeepSpeed has converted the model by then
            continue
        for parameter, (address, dtype, values) in zip(model.parameters(), before, strict=True):
            assert (parameter.data_ptr(), parameter.dtype) == (address, dtype)
            assert torch.equal(parameter, values)


@on_ranks(2)
def test_other_versions() -> None:
    rank = dist.get_rank()
    says = r"(?s)the version of hytrain is 0\.0\.9 on rank 0.*0\.1\.9 on rank 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_agreement, "__version__", f"0.{rank}.9")
        with pytest.raises(ConfigError, match=says), built(make_model("mlp"), make_config()):
            pass


@pytest.mark.parametrize("lacks", ["hytrain", "optimizer"])
@on_ranks(2)
def test_plain_deepspeed_on_one_rank(lacks: str) -> None:
    """It is not waited for here."""
    config = make_config(stage=3)
    model = make_model("mlp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hytrain.api, "_original_initialize", lambda **_: (model, None, None, None))
        if dist.get_rank() == 1:
            del config[lacks]
            hytrain.initialize(model=model, config=config)
            return
        with pytest.raises(ConfigError) as raised:
            hytrain.initialize(model=model, config=config)
    text = str(raised.value)
    assert "the engine is one of hytrain's on rank 0" in text
    assert "DeepSpeed's own (" in text
    assert lacks in text
    assert text.count("\n") == 1


@on_ranks(2)
def test_what_ranks_may_have_otherwise(tmp_path: Path) -> None:
    """They train; of weights that differ rank 0 is warned."""
    rank = dist.get_rank()
    config = make_config(
        gpu_fraction=(0.0, 1.0)[rank],
        steps_per_print=10 + rank,
        my_run={"name": f"rank {rank}"},
        wall_clock_breakdown=False,
        gradient_clipping=(1, 1.0)[rank],
        hytrain={"trace": {"dir": f"{tmp_path}/{rank}"}, "wait_in_stream": bool(rank)},
        offload={"cpu_threads": 1 + rank, "chunk_elements": 1024 * (1 + rank)},
        csv_monitor={"enabled": rank == 0, "output_path": str(tmp_path)},
    )
    model = make_model("mlp")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("hytrain.engine.build_agreement")
    logger.addHandler(handler)
    try:
        with built(model, config) as engine:
            backward(engine, 0)
            engine.step()
    finally:
        logger.removeHandler(handler)
    assert len(said) == 1 - rank
    assert all("weights on ranks [1] are not those of rank 0" in text for text in said)


def _make_step(engine: Any) -> None:
    backward(engine, 1)
    engine.step()


@pytest.mark.parametrize(("stage", "clipping"), [(1, 1.0), (2, 0.0), (3, 1.0)])
@on_ranks(2)
def test_a_scheduler_that_differs(stage: int, clipping: float) -> None:
    """Rank 1's rate changes between steps: the next step is refused, and made when it is mended."""
    config = make_config(stage=stage, clipping=clipping, bf16=clipping == 0.0)
    with followed(make_model("mlp"), config) as shadow:
        engine = shadow.engine
        backward(engine, 0)
        shadow.step()
        engine.synchronize()
        before = [state.master.clone() for state in shadow.states]
        group = engine.optimizer.param_groups[0]
        group["lr"] *= 1 + dist.get_rank()
        says = '"lr" of parameter group 0 is 0.01 on rank 0; 0.02 on rank 1'
        with pytest.raises(ConfigError, match=says):
            _make_step(engine)
        group["lr"] = 0.01
        if stage > 1:  # before backward begins; in stage 1 ranks meet at the end of the step
            assert all(map(torch.equal, (state.master for state in shadow.states), before))
            backward(engine, 1)
        shadow.step()


@pytest.mark.parametrize("knows", [False, True], ids=["counts one", "counts two"])
@on_ranks(2)
def test_accelerate_that_counts_one_rank_is_refused(knows: bool) -> None:
    """As TrainingArguments without use_cpu: each rank would train on the samples of both."""
    model = make_model("mlp")
    config = make_config(optimizer=None) | {"zero_force_ds_cpu_optimizer": False}
    with hytrain.register():
        try:
            if knows:
                PartialState(cpu=True)
            accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
            optimizer = torch.optim.AdamW(model.parameters())
            if knows:
                accelerator.prepare(model, optimizer)[0].destroy()
            else:
                with pytest.raises(ConfigError, match=r"counts 1 process\(es\), but .* 2 ranks"):
                    accelerator.prepare(model, optimizer)
        finally:
            unset_hf_deepspeed_config()
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
