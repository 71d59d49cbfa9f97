"""Training as it is usually written where the memory is there: torch alone, all on one device."""

from __future__ import annotations

from typing import Any

import torch
from options import OptionError


class TorchEngine:
    """The part of a DeepSpeed engine that the loop uses, without DeepSpeed's optimizers.

    The model trains in its own dtype; master weights, gradients as they are clipped, and AdamW's
    moments are fp32, beside it on its device. What the schedule is, DeepSpeed's own class says.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_parameters: list[dict[str, Any]],
        config: dict[str, Any],
    ) -> None:
        """
        Args:
            model: on its device, in the dtype of its passes.
            model_parameters: groups, as ``torch.optim.AdamW`` takes them.
            config: the DeepSpeed JSON; its optimizer, scheduler and clipping are used.

        Raises:
            OptionError: more than one rank, another optimizer than AdamW, or fp16.
        """
        if torch.distributed.get_world_size() > 1:
            raise OptionError("--engine torch is for one process: leave the launcher out")
        optimizer = config.get("optimizer", {})
        if optimizer.get("type") != "AdamW" or config.get("fp16", {}).get("enabled"):
            raise OptionError('--engine torch has AdamW in bf16 or fp32: set "optimizer" to AdamW')
        self._model = model
        self.eval, self.train = model.eval, model.train
        self._clip = float(config.get("gradient_clipping", 0.0))
        self._accumulation = int(config.get("gradient_accumulation_steps", 1))
        self._micro_steps = 0
        self._norm: torch.Tensor | None = None
        self._weights = [w for group in model_parameters for w in group["params"]]
        self._masters = [w.detach().float().clone().requires_grad_() for w in self._weights]
        groups = _with_masters(model_parameters, self._masters)
        on_gpu = self._weights[0].device.type == "cuda"
        self._adamw = torch.optim.AdamW(groups, **optimizer["params"], fused=on_gpu)
        self._scheduler = _scheduler(config.get("scheduler"), self._adamw)

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """The model's forward."""
        return self._model(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's share of the gradient, summed in the model's dtype."""
        (loss / self._accumulation).backward()

    def step(self) -> None:
        """Update, after the last micro-batch of a step."""
        self._micro_steps += 1
        if self._micro_steps % self._accumulation:
            return
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        if self._clip:
            self._norm = torch.nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._adamw.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        if self._scheduler is not None:
            self._scheduler.step()

    def get_lr(self) -> list[float]:
        """Each group's learning rate of the next step."""
        return [group["lr"] for group in self._adamw.param_groups]

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Of the last step's gradient before clipping; None without clipping."""
        return self._norm

    def destroy(self) -> None:
        """Nothing to give back."""


def _with_masters(
    groups: list[dict[str, Any]], masters: list[torch.Tensor]
) -> list[dict[str, Any]]:
    """The groups, with master weights in the weights' places."""
    remaining = iter(masters)
    return [{**group, "params": [next(remaining) for _ in group["params"]]} for group in groups]


def _scheduler(section: dict[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's scheduler of the JSON's name, on any optimizer; None without one."""
    if section is None:
        return None
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, section["type"])(optimizer, **section.get("params", {}))
