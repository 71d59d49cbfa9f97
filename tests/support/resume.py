"""Runs that are saved and resumed: a model with everything in it, a run's settings and state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.comparisons import assert_same_states
from support.engines import built, make_config, split_on_cpu
from support.models import Block

VOCABULARY = 41
WIDTH = 36
GLOBAL_BATCH = 4
LENGTH = 5
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 6, "warmup_min_lr": 3e-3, "warmup_max_lr": 2e-2},
}


class Everything(nn.Module):
    """Tied and frozen weights, a buffer that counts and acts, odd sizes, a layer without blocks."""

    def __init__(self, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x + 0.1 * self.frozen(x))
        loss = nn.functional.cross_entropy(
            self.head(x).float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        self.calls += 1
        return loss * (1 + 0.01 * self.calls)


@dataclass(frozen=True)
class Run:
    """How an engine is built; ``seed`` and ``disturb`` give it a state that must be overwritten."""

    bf16: bool = True
    clipping: float = 0.5
    accumulation: int = 1
    gpu_fraction: float = 0.5
    stage: int = 2
    groups: bool = False
    schedule: str = "warmup"
    chunk_elements: int = 1024
    fractions: tuple[float, ...] | None = None
    check_overflow: bool = True
    seed: int = 0
    disturb: bool = False
    num_blocks: int = 3
    width: int = WIDTH
    asynchronous: bool = False
    sigterm_dir: str | None = None
    run_pickled_code: bool = False
    moments: str = "fp32"
    master: str = "fp32"
    late: float = 0.0
    moments_seed: int = 0

    def __str__(self) -> str:
        words = [
            "bf16" if self.bf16 else "fp32",
            f"clip{self.clipping:g}",
            f"gas{self.accumulation}",
            f"k{self.gpu_fraction:g}",
            f"zero{self.stage}",
            "groups" if self.groups else "",
            self.schedule,
            "" if self.check_overflow else "direct",
        ]
        return "-".join(word for word in words if word)

    def another(self, **changes: Any) -> Run:
        """An engine that starts elsewhere: other weights, other hyper-parameters."""
        return replace(self, seed=9, disturb=True, **changes)


@contextmanager
def engine_of(run: Run) -> Iterator[Any]:
    """An engine for the length of a block; ``disturb``: its state differs from every saved one."""
    torch.manual_seed(run.seed)
    model = Everything(run.num_blocks, run.width)
    hytrain: dict[str, Any] = {
        "moments": run.moments,
        "moments_seed": run.moments_seed,
        "master": run.master,
    }
    if run.fractions is not None:
        hytrain["shard_fractions"] = list(run.fractions)
    if run.asynchronous or run.sigterm_dir is not None:
        hytrain["checkpoint"] = {"async": run.asynchronous, "sigterm_dir": run.sigterm_dir}
    if run.run_pickled_code:
        hytrain.setdefault("checkpoint", {})["run_pickled_code"] = True
    sections: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
    }
    keywords: dict[str, Any] = {}
    if run.schedule == "warmup":
        sections["scheduler"] = WARMUP
    elif run.schedule == "torch":
        keywords["lr_scheduler"] = _cosine
    if run.groups:
        sections["optimizer"] = None
        keywords["optimizer"] = _grouped_optimizer(model, run.disturb)
    config = make_config(
        gpu_fraction=run.gpu_fraction,
        clipping=run.clipping,
        bf16=run.bf16,
        accumulation=run.accumulation,
        stage=run.stage,
        hytrain=hytrain,
        offload={"chunk_elements": run.chunk_elements},
        **sections,
    )
    if run.bf16:
        config["bf16"]["check_grad_overflow"] = run.check_overflow
    with split_on_cpu(run.late), built(model, config, **keywords) as engine:
        if run.disturb:
            for group in engine.optimizer.param_groups:
                group["lr"], group["weight_decay"] = 7.0, 0.77
            with torch.no_grad():
                engine.module.calls.fill_(100)
        yield engine


def _cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)


def _grouped_optimizer(model: Everything, disturb: bool) -> torch.optim.Optimizer:
    blocks = list(model.blocks.parameters())
    inside = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    matrices = [p for p in rest if p.dim() > 1]
    vectors = [p for p in rest if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": blocks, "lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.2},
        {"params": matrices, "lr": 3e-3, "eps": 1e-6},
        {"params": vectors, "lr": 2e-2, "weight_decay": 0.0},
    ]
    if disturb:
        groups[0]["betas"] = (0.5, 0.5)
        groups[1]["eps"] = 1e-2
    return torch.optim.AdamW(groups, lr=1e-3)


def micro_batch(number: int) -> torch.Tensor:
    """This rank's share of global micro-batch ``number``, which is the same on any ranks."""
    generator = torch.Generator().manual_seed(500 + number)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH), generator=generator)
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def train(engine: Any, begin: int, end: int) -> list[float]:
    """Trains on micro-batches ``begin`` to ``end``; returns this rank's losses, not rounded."""
    losses: list[float] = []
    for number in range(begin, end):
        loss = engine(micro_batch(number).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@dataclass
class Snapshot:
    """Everything that decides how a run continues; ``state`` is empty on ranks other than 0."""

    state: dict[str, dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]
    steps: list[int]
    schedule: dict[str, Any]
    counters: tuple[int, int, int]


def snapshot(engine: Any) -> Snapshot:
    """Returns the engine's present state; a collective."""
    state = engine.fp32_state_dict()
    with engine.gathered_parameters():
        module = engine.module.state_dict()
        weights = {name: t.detach().cpu().clone() for name, t in module.items()}
    return Snapshot(
        state={name: dict(tensors) for name, tensors in state.items()},
        weights=weights,
        groups=[
            {key: value for key, value in group.items() if key != "params"}
            for group in engine.optimizer.param_groups
        ],
        steps=list(engine.optimizer.steps),
        schedule=_plain(engine.lr_scheduler.state_dict()) if engine.lr_scheduler else {},
        counters=(engine.global_steps, engine.global_samples, engine.skipped_steps),
    )


def _plain(schedule: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in schedule.items() if isinstance(v, (int, float, list))}


def assert_same_state(actual: Snapshot, expected: Snapshot) -> None:
    """Asserts that master weights, moments and training copies are the same, bit for bit."""
    assert_same_states(actual.state, expected.state)
    for name, tensors in expected.state.items():
        assert tensors.keys() == {"fp32", "exp_avg", "exp_avg_sq"}
        assert all(actual.state[name][kind].shape == t.shape for kind, t in tensors.items())
    assert actual.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert torch.equal(actual.weights[name], tensor), f"weights of {name}"


def assert_same(actual: Snapshot, expected: Snapshot) -> None:
    """Asserts the same as :func:`assert_same_state`, and everything else that is saved."""
    assert_same_state(actual, expected)
    assert actual.groups == expected.groups
    assert actual.steps == expected.steps
    assert actual.schedule == expected.schedule
    assert actual.counters == expected.counters


def save_and_go_on(run: Run, folder: Path, micro_batches: Sequence[int]) -> dict[str, Any]:
    """Trains to ``micro_batches[0]``, saves and trains on to ``micro_batches[1]``.

    Returns:
        "saved": the snapshot at the save, "losses" after it, "end": the snapshot at the end.
        A run without a save has been compared with this one.
    """
    middle, end = micro_batches
    with engine_of(run) as engine:
        straight = train(engine, 0, end)
        expected = snapshot(engine)
    with engine_of(run) as engine:
        assert train(engine, 0, middle) == straight[:middle]
        assert engine.save_checkpoint(str(folder), client_state={"note": [1, "two"]}) is True
        saved = snapshot(engine)
        losses = train(engine, middle, end)
        assert losses == straight[middle:]
        assert_same(snapshot(engine), expected)
    return {"saved": saved, "losses": losses, "end": expected}
