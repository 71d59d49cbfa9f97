"""Cases in which ranks were not started alike, in configuration, model or optimizer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_training import RankShadow, assert_equal_on_all_ranks, backward
from support.engines import built, make_config
from support.models import make_model

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


def not_alike(names: list[str]) -> dict[str, str]:
    """What each case says, on this rank; a refused model is as it was."""
    said: dict[str, str] = {}
    for name in names:
        model, config, keywords = DIFFERENT[name][0](dist.get_rank())
        before = [(p.data_ptr(), p.dtype, p.detach().clone()) for p in model.parameters()]
        with pytest.raises(ConfigError) as raised, built(model, config, **keywords):
            pass
        said[name] = str(raised.value)
        if name == "callable":  # DeepSpeed has converted the model by then
            continue
        for parameter, (address, dtype, values) in zip(model.parameters(), before, strict=True):
            assert (parameter.data_ptr(), parameter.dtype) == (address, dtype)
            assert torch.equal(parameter, values)
    return said


def other_versions() -> str:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_agreement, "__version__", f"0.{rank}.9")
        with pytest.raises(ConfigError) as raised, built(make_model("mlp"), make_config()):
            pass
    return str(raised.value)


def plain_on_one_rank(lacks: str) -> str:
    """Rank 1 builds an engine of plain DeepSpeed, which is not waited for here."""
    config = make_config(stage=3)
    model = make_model("mlp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hytrain.api, "_original_initialize", lambda **_: (model, None, None, None))
        if dist.get_rank() == 1:
            del config[lacks]
            hytrain.initialize(model=model, config=config)
            return ""
        with pytest.raises(ConfigError) as raised:
            hytrain.initialize(model=model, config=config)
        return str(raised.value)


def what_may_differ(folder: str) -> list[str]:
    """Trains; what was logged of weights that differ."""
    rank = dist.get_rank()
    config = make_config(
        gpu_fraction=(0.0, 1.0)[rank],
        steps_per_print=10 + rank,
        my_run={"name": f"rank {rank}"},
        wall_clock_breakdown=False,
        gradient_clipping=(1, 1.0)[rank],
        hytrain={"trace": {"dir": f"{folder}/{rank}"}, "wait_in_stream": bool(rank)},
        offload={"cpu_threads": 1 + rank, "chunk_elements": 1024 * (1 + rank)},
        csv_monitor={"enabled": rank == 0, "output_path": folder},
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
    return said


def _make_step(engine: Any) -> None:
    backward(engine, 1)
    engine.step()


def scheduler_on_one_rank(stage: int, clipping: float) -> str:
    """Rank 1's rate changes between steps: the next step is refused, and made when it is mended."""
    config = make_config(stage=stage, clipping=clipping, bf16=clipping == 0.0)
    with built(make_model("mlp"), config) as engine:
        shadow = RankShadow(engine)
        backward(engine, 0)
        shadow.step()
        engine.synchronize()
        before = [state.master.clone() for state in shadow.states]
        group = engine.optimizer.param_groups[0]
        group["lr"] *= 1 + dist.get_rank()
        with pytest.raises(ConfigError) as raised:
            _make_step(engine)
        group["lr"] = 0.01
        if stage > 1:  # before backward begins; in stage 1 ranks meet at the end of the step
            assert all(map(torch.equal, (state.master for state in shadow.states), before))
            backward(engine, 1)
        shadow.step()
        engine.synchronize()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)
        return str(raised.value)
