"""Training as it is usually written if memory suffices: torch alone, all on one device."""

from __future__ import annotations

from typing import Any

import torch
from options import OptionError


class TorchEngine:
    """The part of a DeepSpeed engine that the loop uses, without DeepSpeed's optimizers.

    The model trains in its own dtype; master weights, the gradients that are clipped, and the
    optimizer's state are fp32, on the same device. The schedule is that of DeepSpeed's own class.
    With Muon, torch's Muon updates the blocks' matrices and AdamW the rest.
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
            model_parameters: groups, as ``torch.optim.AdamW`` takes them; with Muon, all its
                matrices are decayed.
            config: the DeepSpeed JSON; its optimizer, scheduler and clipping are used.

        Raises:
            OptionError: more than one rank, another optimizer than AdamW or Muon, or fp16.
        """
        if torch.distributed.get_world_size() > 1:
            raise OptionError("--engine torch is for one process: leave the launcher out")
        optimizer = config.get("optimizer", {})
        kind = optimizer.get("type")
        if kind not in ("AdamW", "Muon") or config.get("fp16", {}).get("enabled"):
            raise OptionError(
                '--engine torch has AdamW and Muon in bf16 or fp32: set "optimizer" to one of them'
            )
        self._model = model
        self.eval, self.train = model.eval, model.train
        self._clip = float(config.get("gradient_clipping", 0.0))
        self._accumulation = int(config.get("gradient_accumulation_steps", 1))
        self._micro_steps = 0
        self._norm: torch.Tensor | None = None
        self._weights = [w for group in model_parameters for w in group["params"]]
        self._masters = [w.detach().float().clone().requires_grad_() for w in self._weights]
        groups = _with_masters(model_parameters, self._masters)
        if kind == "Muon":
            matrices = _matrices(model, dict(zip(self._weights, self._masters, strict=True)))
            self._optimizers = _muon_and_adamw(groups, matrices, optimizer["params"])
        else:
            self._optimizers = [_adamw(groups, optimizer["params"])]
        self._schedulers = [
            scheduler
            for each in self._optimizers
            if (scheduler := _scheduler(config.get("scheduler"), each)) is not None
        ]

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """The model's forward."""
        return self._model(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds a micro-batch's share of the gradient, summed in the model's dtype."""
        (loss / self._accumulation).backward()

    def step(self) -> None:
        """Updates the weights after the last micro-batch of a step."""
        self._micro_steps += 1
        if self._micro_steps % self._accumulation:
            return
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        if self._clip:
            self._norm = torch.nn.utils.clip_grad_norm_(self._masters, self._clip)
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        for scheduler in self._schedulers:
            scheduler.step()

    def get_lr(self) -> list[float]:
        """Each group's learning rate of the next step."""
        return [group["lr"] for each in self._optimizers for group in each.param_groups]

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Norm of the last step's gradient before clipping; None without clipping."""
        return self._norm

    def destroy(self) -> None:
        """Does nothing: there is nothing to release."""


def _with_masters(
    groups: list[dict[str, Any]], masters: list[torch.Tensor]
) -> list[dict[str, Any]]:
    """The groups, with master weights in place of the weights."""
    remaining = iter(masters)
    return [{**group, "params": [next(remaining) for _ in group["params"]]} for group in groups]


def _adamw(groups: list[dict[str, Any]], parameters: dict[str, Any]) -> torch.optim.Optimizer:
    on_gpu = groups[0]["params"][0].device.type == "cuda"
    return torch.optim.AdamW(groups, **parameters, fused=on_gpu)


def _matrices(
    model: torch.nn.Module, masters: dict[torch.nn.Parameter, torch.Tensor]
) -> list[torch.Tensor]:
    """Master weights of the parameters that DeepSpeed gives to Muon."""
    return [
        masters[parameter]
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and "embed" not in name and "lm_head" not in name
    ]


def _muon_and_adamw(
    groups: list[dict[str, Any]], matrices: list[torch.Tensor], parameters: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """torch's Muon, and AdamW for all but the matrices, with DeepSpeed's names of parameters."""
    muon = torch.optim.Muon(
        matrices,
        lr=parameters["muon_lr"],
        weight_decay=parameters["weight_decay"],
        momentum=parameters["momentum"],
    )
    ids = {id(matrix) for matrix in matrices}
    rest = [{**g, "params": [p for p in g["params"] if id(p) not in ids]} for g in groups]
    names = ("betas", "eps", "weight_decay")
    values = {"lr": parameters["adam_lr"]} | {name: parameters[name] for name in names}
    return [muon, _adamw([group for group in rest if group["params"]], values)]


def _scheduler(section: dict[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    """The DeepSpeed scheduler that the JSON names, on any optimizer; None without one."""
    if section is None:
        return None
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, section["type"])(optimizer, **section.get("params", {}))
