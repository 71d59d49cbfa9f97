"""A plain model and a serial update: what a case's state and gradients must be."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from support.engines import device
from support.reference_adam import copy_away_from_zero, read_moments, stored_moments
from support.rounded_moments import rounding_of

from fuzz import precision
from fuzz.between import penalized
from fuzz.cases import Case, Step
from fuzz.models import FuzzModel, batch_of, dropout_seed
from fuzz.player import StepTrace, parameter_groups
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit
from hytrain.kernels.moment_codes import read_moment, write_moment
from hytrain.kernels.moments import zero_moment
from hytrain.kernels.muon import muon_step, read_group
from hytrain.model.state_format import StateFormat

KINDS = ("fp32", "exp_avg", "exp_avg_sq")
MUONS_KINDS = ("fp32", "momentum_buffer")


@dataclass
class Sums:
    """The sum of one parameter's gradients so far, and what bounds its rounding.

    Attributes:
        size: elementwise sum of absolute values.
        largest: largest absolute value of any element of any summand.
        summands: number of summands.
        is_finite: no element of a summand is infinite or NaN.
    """

    total: torch.Tensor
    size: torch.Tensor
    largest: float = 0.0
    summands: int = 0
    is_finite: bool = True

    def add(self, gradient: torch.Tensor) -> None:
        """Adds one micro-batch's gradient, in fp32."""
        self.total += gradient
        self.size += gradient.abs()
        largest = float(gradient.abs().max())
        self.is_finite = self.is_finite and math.isfinite(largest)
        self.largest = max(self.largest, largest)
        self.summands += 1


class Reference:
    """A case's state by parameter name, and its plain model."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype = precision.copy_dtype(case)
        self.scale = precision.Scale(case)
        self._kind = StateFormat(case.moments).kind
        self.model = FuzzModel(case.model, seed=0).to(device(), self.dtype)
        groups = parameter_groups(self.model, case.optimizer)
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        self.state: dict[str, list[torch.Tensor]] = {}
        self.group: dict[str, int] = {}
        self.shapes: dict[str, torch.Size] = {}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in group_of:
                flat = parameter.detach().cpu().float().flatten().clone()
                self.state[name] = [flat, torch.zeros_like(flat), torch.zeros_like(flat)]
                self.group[name] = group_of[id(parameter)]
                self.shapes[name] = parameter.shape
        by_muon = [bool(group.get("use_muon")) for group in groups]
        self._muons = {name for name, group in self.group.items() if by_muon[group]}
        self.steps = 0
        self._saved: Any = None

    def tensors(self, name: str) -> list[tuple[str, torch.Tensor]]:
        """A parameter's state: (kind, tensor)."""
        kinds = MUONS_KINDS if name in self._muons else KINDS
        return list(zip(kinds, self.state[name], strict=False))

    def copy_of(self, name: str) -> torch.Tensor:
        """The training copy of a parameter."""
        master = self.state[name][0]
        is_split = self.case.master == "split"
        copy = copy_away_from_zero(master) if is_split else master.to(self.dtype)
        return copy.view(self.shapes[name])

    def save(self) -> None:
        """Saves a checkpoint."""
        self._saved = copy.deepcopy((self.state, self.steps, self.scale.state))

    def load(self) -> None:
        """Loads the last checkpoint."""
        self.state, self.steps, self.scale.state = copy.deepcopy(self._saved)

    # -- gradients -------------------------------------------------------------------------------

    def take_weights(self) -> None:
        """Gives the plain model the weights of the last step."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.state:
                    parameter.copy_(self.copy_of(name))

    def losses(self, number: int, rank: int, micro: int, step: Step) -> list[torch.Tensor]:
        """Returns the losses of one micro-batch's forwards."""
        found: list[torch.Tensor] = []
        for part in range(step.num_forwards):
            torch.manual_seed(dropout_seed(number, rank, micro, part))
            # The engine applies autocast; "module" bypasses it.
            is_past = step.style == "module"
            with contextlib.nullcontext() if is_past else precision.autocasting(self.case):
                batch = batch_of(self.case, number, rank, micro, step, part)
                is_plain = step.style != "penalty"
                found.append(self.model(**batch) if is_plain else self._penalized(batch))
        return found

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns one loss's gradients, scaled, fp32, flat, on the host; zeros for missing ones."""
        self.model.zero_grad(set_to_none=True)
        if loss.requires_grad:
            self.scale_loss(loss).backward()
        return {
            name: torch.zeros_like(self.state[name][0])
            if parameter.grad is None
            else _dense(parameter.grad).detach().cpu().float().flatten()
            for name, parameter in self.model.named_parameters()
            if name in self.state
        }

    def _penalized(self, batch: dict[str, Any]) -> torch.Tensor:
        return penalized(self.model, self.model, batch, self.scale_loss, self.scale.value)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss multiplied by this step's scale."""
        return loss * self.scale.value

    def sums(self) -> dict[str, Sums]:
        """Returns sums without any summands."""
        return {
            name: Sums(torch.zeros_like(p), torch.zeros_like(p))
            for name, (p, _m, _v) in self.state.items()
        }

    @property
    def rounding(self) -> float:
        """The epsilon of the dtype in which gradients are summed."""
        return torch.finfo(precision.compute_dtype(self.case)).eps

    @property
    def noise(self) -> float:
        """The relative difference between two computations of the same values.

        On a GPU, kernels are chosen by the alignment of memory, and the weights of the two
        computations differ in the last bit if their state was on the GPU.
        """
        if device().type == "cpu":
            return 2e-6
        return {torch.float32: 1e-4, torch.float16: 0.01}.get(
            precision.compute_dtype(self.case), 0.05
        )

    def bound(self, sums: Sums) -> torch.Tensor:
        """How far a sum of gradients may be from this one, elementwise.

        One micro-batch's gradient is computed by the same operations on the same weights. Sums of
        several, or of several uses of a weight, round as often as there are summands.
        """
        uses = 1
        model = self.case.model
        if model.recompute == "reentrant" or model.outside != "none" or model.head == "tied":
            uses = 4
        if model.shared or model.embed == "sparse" or model.tiled != "none":
            uses = 8
        # A division before the sum over ranks is one rounding more.
        is_divided = precision.copy_dtype(self.case) == torch.float16 and self.case.ranks > 1
        additions = sums.summands * uses - 1 + is_divided
        noise = self.noise * sums.largest
        spread = sums.size + (sums.largest if uses > 1 else 0.0)
        # Below its smallest normal number fp16 rounds to multiples of its smallest number.
        least = torch.finfo(precision.compute_dtype(self.case)).smallest_normal * self.rounding
        return additions * (self.rounding * spread + least) + noise + 1e-30

    def set_gradient(self, sums: Sums, value: torch.Tensor) -> None:
        """Notes that a gradient was replaced by ``value``."""
        sums.total, sums.size = value.clone(), value.abs()
        sums.largest, sums.summands, sums.is_finite = float(value.abs().max()), 1, True

    # -- the update ------------------------------------------------------------------------------

    def update(self, gradients: Mapping[str, torch.Tensor], scale: float, trace: StepTrace) -> None:
        """Makes one step with these gradients."""
        self.steps += 1
        hypers = [self._hyper(group) for group in trace.groups]
        for name, (p, m, v) in self.state.items():
            if name in self._muons:
                self._update_by_muon(name, gradients[name], scale, trace.groups[self.group[name]])
                continue
            hyper = hypers[self.group[name]]
            commit(p, m, v, Gradient(gradients[name].contiguous(), scale, hyper))
            if self._kind != torch.float32:
                kept = stored_moments(m, v, self._kind, rounding_of(name, 0), hyper.step)
                self.state[name][1:] = [x[: p.numel()].clone() for x in read_moments(*kept)]

    def _update_by_muon(
        self, name: str, gradient: torch.Tensor, scale: float, group: Mapping[str, Any]
    ) -> None:
        state = (*self.state[name][:2], gradient.float())
        p, m, g = (x.view(self.shapes[name]).to(device()) for x in state)
        g = g * torch.tensor(scale, device=g.device)
        muon_step(p, (m,), g, read_group(group, self.steps), torch.nn.Parameter(p))
        self.state[name][:2] = [p.flatten().cpu(), self._kept(m.flatten().cpu())]

    def _kept(self, momentum: torch.Tensor) -> torch.Tensor:
        return momentum if self._kind == torch.float32 else momentum.bfloat16().float()

    def set_first_moment(self, name: str, values: torch.Tensor) -> None:
        """Sets a first moment by hand: its stored form is the nearest."""
        if name in self._muons:
            self.state[name][1] = self._kept(values.clone())
            return
        moment = zero_moment(self._kind, values.numel())
        write_moment(moment, values, is_second=False)
        self.state[name][1] = read_moment(moment, values.numel(), is_second=False)

    def _hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        spec = self.case.optimizer
        decoupled = spec.kind == "AdamW" or (not spec.client and spec.adam_w_mode is not False)
        correction = True if spec.bias_correction is None else spec.bias_correction
        return AdamHyper(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=self.steps,
            decoupled_decay=decoupled,
            bias_correction=correction,
        )

    def clip_coefficient(self, norm: float) -> float:
        """The coefficient as in DeepSpeed: without the check, a norm that is NaN is infinite."""
        if not self.case.clipping:
            return 1.0
        return min(1.0, self.case.clipping / (norm + 1e-6)) if math.isfinite(norm) else 0.0


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
