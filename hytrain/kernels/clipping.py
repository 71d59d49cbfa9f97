"""The gradient norm, the clip coefficient and the decision to skip a step.

Squares are summed in float64, where no square of an fp32 number overflows: the sum is finite
exactly when every gradient is. One number a layer therefore tells norm and overflow alike. Sums
run in one fixed order, so runs are reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hytrain.kernels.cpu_adam import sum_of_squares

CLIPPED_IN_A_ROW = 8
"""Steps after which the next one is taken for clipped as well. A preview for nothing costs a fifth
of an update, beside backward; those of a whole step that come late cost half an update, with
nothing beside them but forward: clipping must be likely."""


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
        """Nothing about a step is open when backward begins: it can be committed at once."""
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
        coefficient: the clip coefficient, 1.0 where clipping did not act.
        skip: whether the step is skipped.
    """

    scale: float
    norm: float
    coefficient: float
    skip: bool


class ClipForecast:
    """Whether the next step will be clipped, by those before it. No result depends on it."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, outcome: Outcome) -> None:
        """A step's outcome; one that is skipped says nothing."""
        if not outcome.skip:
            self._in_a_row = self._in_a_row + 1 if outcome.coefficient < 1.0 else 0

    @property
    def is_clipped(self) -> bool:
        """Whether it will."""
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
        """
        Args:
            num_layers: number of layers.
            device: where gradients are.
            settings: threshold and overflow check.
            all_reduce: sums a tensor over the ranks, in place.
        """
        self.settings = settings
        self.sums = torch.zeros(num_layers, dtype=torch.float64, device=device)
        self._all_reduce = all_reduce
        self._device = device
        is_cuda = device.type == "cuda"
        self._each = list(self.sums.unbind())
        self._one = torch.ones(1, dtype=torch.float64, device=device)
        self._zero = torch.zeros(1, dtype=torch.float64, device=device)
        self._host = torch.zeros(4, dtype=torch.float64, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None
        self.outcome = torch.zeros(2, dtype=torch.float32, device=device)
        """(scale, skip flag) of the step, for kernels that run before the host knows."""

    def measure(self, layers: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Sums the squares of this rank's shards of some layers, in the current stream.

        What a layer's sum comes to does not depend on which others it is measured with. Together
        they take few launches, each of which takes the host longer than the GPU if they are small.

        Args:
            layers: their numbers.
            gradients: the shard of each.
        """
        if self._device.type != "cuda":
            for layer, gradient in zip(layers, gradients, strict=True):
                self.sums[layer] = sum_of_squares(gradient)
            return
        for dtype in {gradient.dtype for gradient in gradients}:
            same = [i for i, gradient in enumerate(gradients) if gradient.dtype == dtype]
            # torch sums each tensor by itself, in pieces of a fixed size and in a fixed order.
            norms = torch._foreach_norm([gradients[i] for i in same], 2, dtype=torch.float64)  # pyright: ignore
            torch._foreach_mul_(norms, norms)  # pyright: ignore
            torch._foreach_copy_([self._each[layers[i]] for i in same], norms)  # pyright: ignore

    def add_up(self, layer: int, squares: torch.Tensor) -> None:
        """The sum of a layer whose partial sums are known, in the current stream.

        Args:
            layer: number of the layer.
            squares: float64 partial sums over the whole shard.
        """
        torch.sum(squares, dim=0, out=self._each[layer])

    def address(self, layer: int) -> int:
        """Device address of a layer's sum."""
        return self.sums.data_ptr() + 8 * layer

    def launch_decision(self, unscale: float) -> None:
        """Reduces over ranks and computes the outcome on the device; does not wait."""
        total = self.sums.sum(dim=0, keepdim=True)
        self._all_reduce(total)
        norm = total.sqrt()
        if unscale != 1.0:
            norm *= unscale
        coefficient, skip = self._one, self._zero
        if self.settings.max_norm > 0.0:
            # torch.nn.utils.clip_grad_norm_ has the same 1e-6.
            limited = torch.clamp(self.settings.max_norm / (norm + 1e-6), max=1.0)
            # A norm that is no number counts as infinite, as in DeepSpeed: without the overflow
            # check it spoils the elements that spoiled it, not all of them.
            coefficient = torch.nan_to_num(limited, nan=0.0)
        if self.settings.check_overflow:
            skip = (total - total).ne_(0.0)  # 1.0 where it is not finite
        result = torch.cat((coefficient * unscale, skip, norm, coefficient))
        self.outcome = result[:2].float()
        self._host.copy_(result, non_blocking=True)
        if self._event is not None:
            # Behind the copy: it is what the host waits for (read_decision).
            self._event.record(torch.cuda.current_stream(self._device))

    def norm_tensor(self) -> torch.Tensor:
        """The norm as the decision found it, without waiting: valid once the device is there."""
        return self._host[2]

    def read_decision(self) -> Outcome:
        """Waits for the decision (the end of backward on the device) and returns it."""
        if self._event is not None:
            # Without this wait the numbers read would be the last step's. An event, not the device:
            # updates on the device are queued already and need not be waited for.
            self._event.synchronize()
        scale, skip, norm, coefficient = self._host.tolist()
        scale = float(torch.tensor(scale, dtype=torch.float32))
        return Outcome(scale, norm, coefficient, skip != 0.0)
