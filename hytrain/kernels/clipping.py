"""The gradient norm, the clip coefficient and the decision to skip a step.

Squares are summed in float64, where no square of an fp32 number overflows: the sum is finite
exactly when every gradient is. One number a layer therefore gives both norm and overflow. Sums
run in one fixed order, so runs are reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hytrain.kernels.square_sums import SquareSums

CLIPPED_IN_A_ROW = 8
"""Clipped steps after which the next one is expected to be clipped too. A useless preview costs a
fifth of an update, beside backward; previews of a whole step that come late cost half an update,
with only forward beside them: clipping must be likely."""
_ADDED_TO_NORM = 1e-6
"""Added to the norm, as in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """What the decision depends on, fixed for a run.

    Attributes:
        max_norm: gradient clipping threshold; 0 for none.
        check_overflow: whether an inf or NaN in any gradient skips the step.
    """

    max_norm: float
    check_overflow: bool

    @property
    def direct(self) -> bool:
        """Whether a step can be committed at once: nothing is undecided when backward begins."""
        return self.max_norm <= 0.0 and not self.check_overflow

    def sum_limit(self, unscale: float) -> float:
        """The sum of squares of scaled gradients beyond which clipping is certain.

        ``unscale`` is what a gradient is multiplied by to undo loss scale and summation.
        """
        if self.max_norm <= 0.0:
            return math.inf if not self.check_overflow else torch.finfo(torch.float64).max
        return (self.max_norm / unscale) ** 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's outcome on the host.

    Attributes:
        scale: what every gradient is multiplied by: clip coefficient * unscale, in fp32.
        norm: the unscaled gradient's norm over all ranks.
        coefficient: the clip coefficient, 1.0 if clipping did not act.
        skip: whether the step is skipped.
    """

    scale: float
    norm: float
    coefficient: float
    skip: bool


class ClipForecast:
    """Predicts from the last steps whether the next is clipped. No result depends on it."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, outcome: Outcome) -> None:
        """Notes a step's outcome; one that is skipped says nothing."""
        if not outcome.skip:
            self._in_a_row = self._in_a_row + 1 if outcome.coefficient < 1.0 else 0

    @property
    def is_clipped(self) -> bool:
        """Whether the next step is expected to be clipped."""
        return self._in_a_row >= CLIPPED_IN_A_ROW


class GradientNorm:
    """Sums of squares, one float64 a layer on the device, and what follows from them."""

    def __init__(
        self,
        num_layers: int,
        device: torch.device,
        settings: ClipSettings,
        all_reduce: Callable[[torch.Tensor], None],
    ) -> None:
        """``settings``: threshold and overflow check; ``all_reduce``: sums a tensor over the ranks,
        in place.
        """
        self.settings = settings
        self._squares = SquareSums(num_layers, device)
        self.sums = self._squares.values
        self._all_reduce = all_reduce
        self._device = device
        is_cuda = device.type == "cuda"
        self._each = list(self.sums.unbind())
        self._result = torch.zeros(4, dtype=torch.float64, device=device)
        self._host = torch.zeros(4, dtype=torch.float64, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None
        self._constants = torch.zeros(3, dtype=torch.float64, device=device)
        self._constants_of: float | None = None  # unscale
        self.outcome = torch.zeros(2, dtype=torch.float32, device=device)
        """(scale, skip flag) of the step, for kernels that run before the host knows."""

    def measure(self, layers: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Sums the squares of this rank's shards of some layers, in the current stream.

        A layer's sum does not depend on which others it is measured with. Together they take few
        launches, each of which takes the host longer than the GPU if the layers are small.

        ``layers``: their numbers; ``gradients``: the shard of each.
        """
        self._squares.measure(layers, gradients)

    def add_up(self, layer: int, squares: torch.Tensor) -> None:
        """Adds up a layer's sum from known partial sums, in the current stream.

        ``squares``: float64 partial sums over the whole shard.
        """
        torch.sum(squares, dim=0, out=self._each[layer])

    def address(self, layer: int) -> int:
        """Device address of a layer's sum."""
        return self.sums.data_ptr() + 8 * layer

    def launch_decision(self, unscale: float) -> None:
        """Reduces over ranks and computes the outcome on the device; does not wait."""
        total = self.sums.sum(dim=0, keepdim=True)
        self._all_reduce(total)
        # New ones: updates of the last step may still read the old outcome, on their own stream,
        # and the user may keep each step's norm.
        self.outcome = torch.empty(2, dtype=torch.float32, device=self._device)
        self._result = torch.empty(4, dtype=torch.float64, device=self._device)
        if self._event is None:
            reference_decision(total, unscale, self.settings, self._result, self.outcome)
        else:
            self.triton_decision(total, unscale, self.outcome)
        self._host.copy_(self._result, non_blocking=True)
        if self._event is not None:
            # Behind the copy: it is what the host waits for (read_decision).
            self._event.record(torch.cuda.current_stream(self._device))

    def triton_decision(self, total: torch.Tensor, unscale: float, outcome: torch.Tensor) -> None:
        """:func:`reference_decision` in one launch: each of its many takes host time.

        Triton's interpreter (TRITON_INTERPRET) takes CPU tensors.
        """
        # Triton comes with torch's CUDA builds only; it is imported where a GPU is present.
        from hytrain.kernels import triton_norm

        kernel: Any = triton_norm.decision_kernel
        settings = self.settings
        if self._constants_of != unscale:
            self._constants_of = unscale
            # By kernels: a copy from the host would wait until backward has ended.
            for each, value in zip(
                self._constants, (unscale, settings.max_norm, _ADDED_TO_NORM), strict=True
            ):
                each.fill_(value)
        kernel[(1,)](
            total, self._constants, self._result, outcome,
            CLIPS=settings.max_norm > 0.0, CHECKS=settings.check_overflow, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip

    def norm_tensor(self) -> torch.Tensor:
        """The last step's norm, on the device: reading it waits for the decision."""
        return self._result[2]

    def read_decision(self) -> Outcome:
        """Waits for the decision (the end of backward on the device) and returns it."""
        if self._event is not None:
            # Without this wait the numbers read would be the last step's. An event, not the device:
            # updates on the device are queued already and need not be waited for.
            self._event.synchronize()
        scale, skip, norm, coefficient = self._host.tolist()
        scale = float(torch.tensor(scale, dtype=torch.float32))
        return Outcome(scale, norm, coefficient, skip != 0.0)


def reference_decision(
    total: torch.Tensor,
    unscale: float,
    settings: ClipSettings,
    result: torch.Tensor,
    outcome: torch.Tensor,
) -> None:
    """Computes what a step's gradients are multiplied by, and whether it is skipped.

    Args:
        total: the gradients' sum of squares over all ranks, float64, one element.
        unscale: undoes loss scale and summation.
        settings: threshold and overflow check.
        result: receives scale, skip flag, norm and clip coefficient, float64.
        outcome: receives scale and skip flag, fp32.
    """
    norm = total.sqrt() * unscale
    coefficient, skip = torch.ones_like(total), torch.zeros_like(total)
    if settings.max_norm > 0.0:
        limited = torch.clamp(settings.max_norm / (norm + _ADDED_TO_NORM), max=1.0)
        # A NaN norm counts as infinite, as in DeepSpeed: without the overflow check
        # it spoils the elements that spoiled it, not all of them.
        coefficient = torch.nan_to_num(limited, nan=0.0)
    if settings.check_overflow:
        skip = (total - total).ne_(0.0)  # 1.0 if it is not finite
    torch.cat((coefficient * unscale, skip, norm, coefficient), out=result)
    outcome.copy_(result[:2])
