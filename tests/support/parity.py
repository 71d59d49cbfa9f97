"""Runs a training case and keeps what a serial optimizer needs to repeat it.

Whole trajectories are chaotic: one different rounding grows over the steps. The references are
therefore fed the reduced gradients that the run recorded, and compared elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hytrain.kernels.clipping import Outcome
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit, sum_of_squares
from hytrain.kernels.moments import Moment
from hytrain.model.layer_state import LayerState
from support.engines import (
    OFFLOAD_AT_SCALE,
    built,
    device,
    first_split_on_cpu,
    from_all_ranks,
    make_config,
    split_on_cpu,
)
from support.models import loss_of, make_batch, make_model
from support.reference_adam import copy_away_from_zero
from support.rounded_moments import commit_by_definition, copy_of, joined, part_of, rounding_of

# The gradient's norm swings by a factor of 1000 between steps, so that one threshold between the
# two sizes clips sometimes.
LOSS_FACTORS = (0.01, 10.0, 0.01)
THRESHOLDS = {"never": 1e6, "sometimes": 0.3, "always": 1e-4, "off": 0.0}
BETAS = ((0.9, 0.95), (0.8, 0.999))
DECAYS = (0.1, 0.0)


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        fractions: shard fractions, one per rank; () for one rank.
        observe: steps after which the training copy is read.
        moments: how moments are stored.
        master: how master weights are stored.
        late: share of layers, the last ones, for whose whole master weights the host has no memory.
        offload_param: the training copy is kept in host memory (ZeRO-3).
    """

    model: str = "llama"
    gpu_fraction: float = 0.0
    clipping: str = "never"
    accumulation: int = 1
    dtype: str = "bf16"
    stage: int = 2
    fractions: tuple[float, ...] = ()
    steps: int = 50
    observe: tuple[int, ...] = (1, 17, 40)
    moments: str = "fp32"
    offload_param: bool = False
    master: str = "fp32"
    late: float = 0.0

    @property
    def num_ranks(self) -> int:
        return max(1, len(self.fractions))

    def __str__(self) -> str:
        shards = "-".join(str(f) for f in self.fractions) or "1rank"
        return (
            f"{self.model}-k{self.gpu_fraction}-{self.clipping}-acc{self.accumulation}"
            f"-{self.dtype}-z{self.stage}-{shards}"
            f"{'' if self.moments == 'fp32' else '-' + self.moments}"
            f"{'' if self.master == 'fp32' else '-' + self.master}"
            f"{f'-late{self.late:g}' if self.late else ''}"
            f"{'-host' if self.offload_param else ''}"
        )

    def config(self) -> dict[str, Any]:
        config = make_config(
            gpu_fraction=self.gpu_fraction,
            clipping=THRESHOLDS[self.clipping],
            bf16=self.dtype == "bf16",
            accumulation=self.accumulation,
            stage=self.stage,
            hytrain={
                "shard_fractions": list(self.fractions) or None,
                "moments": self.moments,
                "master": self.master,
            },
            offload=OFFLOAD_AT_SCALE if self.model == "llama-100m" else None,
        )
        if self.offload_param:
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        return config


def learning_rate(step: int, group: int) -> float:
    """Returns a rate that changes at every step, as under a scheduler."""
    return (1e-3, 2e-3)[group] * (1.0 + 0.5 * math.sin(step))


def hyper_of(step: int, group: int) -> AdamHyper:
    """Returns the hyper-parameters with which ``group`` must be updated in ``step`` (from 1)."""
    return AdamHyper(
        lr=learning_rate(step, group),
        beta1=BETAS[group][0],
        beta2=BETAS[group][1],
        eps=1e-8,
        weight_decay=DECAYS[group],
        step=step,
    )


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay; norms and biases without it, with a higher rate, other betas."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {
            "params": [p for p in trained if (p.dim() < 2) == bool(group)],
            "betas": BETAS[group],
            "weight_decay": DECAYS[group],
        }
        for group in (0, 1)
    ]


HyperOf = Callable[[int], AdamHyper]


@dataclass
class Shard:
    """Copies of a layer's shard on this rank, on the CPU."""

    name: str
    begin: int
    end: int
    segments: list[tuple[int, int, int]]
    """(group, begin, end) of the parts of this shard, relative to it."""
    p: torch.Tensor
    m: Moment
    v: Moment
    slots: list[tuple[str, int, int]] = field(default_factory=list)
    """(name, begin, end) of its parameters in the layer, padding included."""
    placement: str = "cpu"
    copy_dtype: torch.dtype = torch.float32
    rounds_away: bool = False

    def training_copy(self) -> torch.Tensor:
        """Returns its master weights, rounded."""
        return copy_away_from_zero(self.p) if self.rounds_away else self.p.to(self.copy_dtype)

    def clone(self) -> Shard:
        return replace(self, p=self.p.clone(), m=copy_of(self.m), v=copy_of(self.v))

    def commit(self, gradient: torch.Tensor, scale: float, hyper_of: HyperOf) -> None:
        """Makes one step of a serial loop.

        Args:
            gradient: the shard's gradient.
            scale: the gradient's factor.
            hyper_of: gives a parameter group's hyper-parameters.
        """
        for group, begin, end in self.segments:
            hyper = hyper_of(group)
            if isinstance(self.m, torch.Tensor) and self.m.dtype == torch.float32:
                assert isinstance(self.v, torch.Tensor)
                step = Gradient(gradient[begin:end], scale, hyper)
                commit(self.p[begin:end], self.m[begin:end], self.v[begin:end], step)
                continue
            for name, first, stop in self.slots:
                low, high = max(begin, first - self.begin), min(end, stop - self.begin)
                if low < high:
                    moments = (part_of(moment, low, high) for moment in (self.m, self.v))
                    rounding = rounding_of(name, low + self.begin - first)
                    step = Gradient(gradient[low:high], scale, hyper)
                    commit_by_definition(self.p[low:high], *moments, step, rounding)


@dataclass
class Run:
    """What a run leaves: initial and final state, gradients, outcomes, observed copies."""

    case: Case
    world_size: int
    initial: list[Shard]
    final: list[Shard] = field(default_factory=list)
    gradients: list[dict[int, torch.Tensor]] = field(default_factory=list)
    """A step's reduced gradient shard of each layer, on the CPU."""
    outcomes: list[Outcome | None] = field(default_factory=list)
    copies: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Step -> the whole training copy of each layer, on the CPU."""

    @property
    def max_norm(self) -> float:
        return THRESHOLDS[self.case.clipping]


def shard_of(state: LayerState) -> Shard:
    """Returns a copy of a layer's present shard."""
    segments = [
        (s.group, max(s.begin, state.begin) - state.begin, min(s.end, state.end) - state.begin)
        for s in state.layout.segments
        if max(s.begin, state.begin) < min(s.end, state.end)
    ]
    return Shard(
        state.name,
        state.begin,
        state.end,
        segments,
        state.read_master(0, state.shard_size).detach().cpu().clone(),
        copy_of(state.exp_avg),
        copy_of(state.exp_avg_sq),
        _slots(state),
        placement=state.placement,
        copy_dtype=state.storage.parts[0][1].dtype,
        rounds_away=state.form.rounds_away,
    )


def _slots(state: LayerState) -> list[tuple[str, int, int]]:
    slots = state.layout.slots
    ends = [*(slot.offset for slot in slots[1:]), state.layout.size]
    return [(slot.name, slot.offset, end) for slot, end in zip(slots, ends, strict=True)]


def copies_of(states: list[LayerState]) -> list[torch.Tensor]:
    """Returns each layer's whole training copy (of one dtype); under ZeRO-3 from ranks' shards."""
    copies: list[torch.Tensor] = []
    for state in states:
        ((_begin, whole),) = state.storage.parts
        if state.storage.is_sharded:
            ((_start, mine),) = state.storage.shard_slices(state.begin, state.end)
            whole = torch.cat(from_all_ranks(mine.detach().cpu()))
        copies.append(whole.detach().cpu().clone())
    return copies


def train(case: Case, disturb: Callable[[Any], None] | None = None) -> Run:
    """Trains a case and records it.

    Args:
        case: what to train.
        disturb: called with the engine before every forward, backward and step, and whenever a
            reduced gradient is handed over.
    """
    rank = dist.get_rank()
    model = make_model(case.model)
    with (
        split_on_cpu(case.late),
        built(model, case.config(), model_parameters=parameter_groups(model)) as engine,
    ):
        states = engine.optimizer.layer_states
        is_direct = engine.optimizer.pipeline.norm.settings.direct
        has_whole = case.master == "split" and not is_direct
        first = first_split_on_cpu(len(states), case.late) if has_whole else 0
        for state in states:
            is_whole = state.form.host_master == "fp32"
            assert state.placement == "gpu" or is_whole is (state.index < first)
        run = Run(case, dist.get_world_size(), [shard_of(state) for state in states])
        recorded: dict[int, torch.Tensor] = {}

        def observe(state: LayerState, gradient: torch.Tensor) -> None:
            if disturb:
                disturb(engine)
            recorded[state.index] = gradient.detach().clone()

        engine.optimizer.passes.reducer.on_reduced_gradient = observe
        for step in range(1, case.steps + 1):
            for group in (0, 1):
                engine.optimizer.param_groups[group]["lr"] = learning_rate(step, group)
            for micro in range(case.accumulation):
                number = ((step * case.accumulation) + micro) * run.world_size + rank
                _micro_batch(engine, case, number, LOSS_FACTORS[step % 3], disturb)
            run.outcomes.append(engine.optimizer.pipeline.norm.read_decision())
            run.gradients.append({index: g.cpu() for index, g in recorded.items()})
            recorded.clear()
            if step in case.observe:
                engine.synchronize()
                run.copies[step] = copies_of(states)
        engine.optimizer.flush()
        run.copies[case.steps] = copies_of(states)
        run.final = [shard_of(state) for state in states]
    return run


def _micro_batch(
    engine: Any, case: Case, number: int, factor: float, disturb: Callable[[Any], None] | None
) -> None:
    batch = make_batch(case.model, number, device())
    if "pixel_values" in batch and case.dtype == "bf16":
        batch["pixel_values"] = batch["pixel_values"].bfloat16()
    disturb = disturb or (lambda _engine: None)
    disturb(engine)
    loss = loss_of(engine(**batch)) * factor
    disturb(engine)
    engine.backward(loss)
    disturb(engine)
    engine.step()


# -- references --------------------------------------------------------------------------------


def expected_outcomes(run: Run) -> list[Outcome]:
    """Returns norm, clip coefficient and scale of each step, from the recorded gradients."""
    unscale = 1.0 / run.world_size
    outcomes: list[Outcome] = []
    for gradients in run.gradients:
        sums = [sum_of_squares(gradients[index]) for index in range(len(run.initial))]
        total = torch.tensor(sums, dtype=torch.float64).sum().reshape(1)
        if run.world_size > 1:
            total = total.to(device())  # NCCL reduces on the GPU only
            dist.all_reduce(total)
            total = total.cpu()
        norm = math.sqrt(float(total)) * unscale
        coefficient = min(1.0, run.max_norm / (norm + 1e-6)) if run.max_norm else 1.0
        scale = float(torch.tensor(coefficient * unscale, dtype=torch.float32))
        outcomes.append(Outcome(scale, norm, coefficient, not math.isfinite(norm)))
    return outcomes


def serial_states(run: Run, outcomes: list[Outcome], until: int | None = None) -> list[Shard]:
    """Returns the state after ``until`` steps of a loop that commits the recorded gradients."""
    shards = [shard.clone() for shard in run.initial]
    steps_made = 0
    for step, (gradients, outcome) in enumerate(zip(run.gradients, outcomes, strict=True), 1):
        if until is not None and step > until:
            break
        if outcome.skip:
            continue
        steps_made += 1
        for index, shard in enumerate(shards):
            shard.commit(
                gradients[index],
                outcome.scale,
                lambda group, step=step, made=steps_made: replace(hyper_of(step, group), step=made),
            )
    return shards


@dataclass
class TorchReference:
    """State by torch.optim.AdamW and clip_grad_norm_, and the sizes that bound the moments."""

    states: list[Shard]
    largest_g: list[torch.Tensor]
    """Elementwise: the largest clipped gradient so far."""


def torch_states(run: Run, *, forget_clipping_in: int | None = None) -> TorchReference:
    """Repeats a run of one rank (or a gathered one) in plain torch, in fp32.

    Args:
        run: whole layers: one rank's run or :func:`gathered`.
        forget_clipping_in: a step in which the reference does not clip, to see the test fail.
    """
    shards = [shard.clone() for shard in run.initial]
    parts = [
        (index, group, begin, end)
        for index, shard in enumerate(shards)
        for group, begin, end in shard.segments
    ]
    weights = [nn.Parameter(shards[i].p[begin:end]) for i, _, begin, end in parts]
    groups = [
        {
            "params": [w for w, part in zip(weights, parts, strict=True) if part[1] == group],
            "betas": BETAS[group],
            "weight_decay": DECAYS[group],
        }
        for group in (0, 1)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    largest = [torch.zeros_like(shard.p) for shard in shards]
    for step, gradients in enumerate(run.gradients, 1):
        for weight, (index, _group, begin, end) in zip(weights, parts, strict=True):
            weight.grad = gradients[index][begin:end].float() / run.world_size
        if run.max_norm and step != forget_clipping_in:
            clip_exactly(weights, run.max_norm)
        for group in (0, 1):
            optimizer.param_groups[group]["lr"] = learning_rate(step, group)
        optimizer.step()
        for weight, (index, _group, begin, end) in zip(weights, parts, strict=True):
            assert weight.grad is not None
            torch.maximum(
                largest[index][begin:end], weight.grad.abs(), out=largest[index][begin:end]
            )
    for weight, (index, _group, begin, end) in zip(weights, parts, strict=True):
        shards[index].p[begin:end] = weight.detach()
        shards[index].m[begin:end] = optimizer.state[weight]["exp_avg"]
        shards[index].v[begin:end] = optimizer.state[weight]["exp_avg_sq"]
    return TorchReference(shards, largest)


def clip_exactly(weights: list[nn.Parameter], max_norm: float) -> None:
    """Clips like clip_grad_norm_, with the norm summed in float64.

    In fp32 the norm of 1e8 elements is off by some 1e-5, which reaches the weights undamped if eps
    dominates the denominator: an error of the reference, far above the bound.
    """
    norms = [torch.linalg.vector_norm(w.grad, dtype=torch.float64) for w in weights]
    total = torch.linalg.vector_norm(torch.stack(norms))
    torch.nn.utils.clip_grads_with_norm_(weights, max_norm, total)


def gathered(run: Run) -> Run:
    """Returns the same run with whole layers, on every rank."""
    if run.world_size == 1:
        return run
    everywhere = from_all_ranks((run.initial, run.final, run.gradients))

    def whole(part: int) -> list[Shard]:
        return [_joined([ranks[part][index] for ranks in everywhere]) for index in layers]

    layers = range(len(run.initial))
    gradients = [
        {index: torch.cat([ranks[2][step][index] for ranks in everywhere]) for index in layers}
        for step in range(len(run.gradients))
    ]
    return replace(run, initial=whole(0), final=whole(1), gradients=gradients)


def _joined(shards: list[Shard]) -> Shard:
    segments = [
        (group, shard.begin + begin, shard.begin + end)
        for shard in shards
        for group, begin, end in shard.segments
    ]
    moments = (joined([getattr(s, name) for s in shards]) for name in ("m", "v"))
    whole = torch.cat([s.p for s in shards])
    return Shard(shards[0].name, 0, shards[-1].end, segments, whole, *moments, shards[0].slots)
