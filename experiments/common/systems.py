"""The measured systems: a model with its optimizer, ready to train, the same way for each of them.

A job's fields for its system: "system", "clip" (gradient clipping norm; None: no clipping) and
"accumulation" (micro-batches a step);
- forward and backward only: "drops" (each gradient is freed as soon as it is final, for a model
  whose gradients would not all fit);
- DeepSpeed and FSDP2: "threads" (CPU thread counts to try for the update); FSDP2 also
  "reshard_after_forward" and "offload" (True; else all state is on the GPUs);
- DeepSpeed and hytrain: "optimizer" (its section; AdamW unless given);
- hytrain: "gpu_fraction", "stage" (2), "streamed" (ZeRO-3, weights in host memory), "direct" (no
  overflow check, so that without clipping the update is committed at once, with nothing to
  preview), "section" (further keys of its section) and "train_batch" (steps are the engine's
  train_batch).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from experiments.common.model import Batch
from experiments.common.records import Json

ADAMW: Json = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
MUON: Json = {"lr": 2e-3, "momentum": 0.95, "weight_decay": 0.01}
OFFLOAD: Json = {"device": "cpu", "pin_memory": True}
_OVERLAPPED: Json = {"overlap_comm": True, "contiguous_gradients": True}
ZERO: dict[str, Json] = {
    "deepspeed_zero2": {"stage": 2, **_OVERLAPPED},
    # Gradients move to the host during backward, Adam runs after it.
    "deepspeed_zero2_offload": {"stage": 2, **_OVERLAPPED, "offload_optimizer": OFFLOAD},
    "deepspeed_zero3_offload": {"stage": 3, **_OVERLAPPED, "offload_optimizer": OFFLOAD},
    "deepspeed_zero3_streamed": {
        "stage": 3,
        "offload_optimizer": OFFLOAD,
        "offload_param": OFFLOAD,
    },
    # A part of the update stays on the GPU. DeepSpeed splits by whole sub-groups: its default of
    # 1e9 elements gives a 3 B model three of them, and a ratio of 0.5 would be two thirds.
    "deepspeed_twin_flow": {
        "stage": 3,
        **_OVERLAPPED,
        "sub_group_size": 100_000_000,
        "offload_optimizer": {**OFFLOAD, "ratio": 0.5},
    },
    # Overlaps updates only without clipping. "ratio" 0.9: a tenth of the sub-groups is on the GPU.
    "deepspeed_superoffload": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 400_000_000,
        "sub_group_size": 400_000_000,
        "offload_optimizer": {
            **OFFLOAD,
            **{"ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9},
        },
    },
    # Not exact: the columns of small gradients are updated every fourth step, and one step late.
    "deepspeed_zenflow": {
        "stage": 2,
        **_OVERLAPPED,
        "offload_optimizer": OFFLOAD,
        "zenflow": {
            **{"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True},
            **{"select_strategy": "step", "select_interval": 16},
        },
    },
}
"""DeepSpeed's systems: their "zero_optimization" section."""

MakeModel = Callable[[torch.dtype], Any]


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """The loss, computed by the model itself, in the same way for every system."""
    return model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss


def fused_adamw(parameters: Iterable[Any]) -> torch.optim.AdamW:
    """torch's fused AdamW, on whatever device the parameters are."""
    return torch.optim.AdamW(parameters, **ADAMW, fused=True)


class System:
    """Forward and backward only: the limit that the others are compared with, and their protocol.

    Gradients are computed and dropped.
    """

    thread_candidates: tuple[int, ...] = ()
    """CPU thread counts to try for the update; the fastest is kept. Empty: the system decides."""

    def __init__(self, model: Any, *, drops: bool = False) -> None:
        self.model = model
        self._hooks: list[Any] = []
        if drops:
            hooked = (p.register_post_accumulate_grad_hook for p in model.parameters())
            self._hooks = [register(_drop) for register in hooked]

    def step(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Forward and backward of each micro-batch, and the update; waits for nothing.

        Returns:
            The last micro-batch's loss, detached.
        """
        loss = self._add_gradients(batches)
        for parameter in self.model.parameters():
            parameter.grad = None
        return loss

    def _add_gradients(self, batches: Sequence[Batch]) -> torch.Tensor:
        for batch in batches:
            loss = loss_of(self.model, batch)
            (loss / len(batches)).backward()
        return loss.detach()

    def observe(self) -> Json | None:
        """The numbers of the newest step, with its number under "step"; must not wait."""
        return None

    def drain(self) -> None:
        """Finishes whatever the last step left in flight; most systems leave nothing."""

    def close(self) -> None:
        """Releases what outlives the system; what ends with the process needs no closing."""
        for hook in self._hooks:
            hook.remove()


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


class AllGpu(System):
    """Mixed precision with all state on the GPU: bf16 weights, fp32 masters, fused AdamW."""

    def __init__(self, model: Any, clip: float | None) -> None:
        super().__init__(model)
        self._clip = clip
        self._weights = list(model.parameters())
        self._masters = [w.detach().float().requires_grad_() for w in self._weights]
        self._optimizer = fused_adamw(self._masters)

    def step(self, batches: Sequence[Batch]) -> torch.Tensor:
        loss = self._add_gradients(batches)
        for weight, master in zip(self._weights, self._masters, strict=True):
            # The fused kernel refuses bf16 gradients beside fp32 state, and the norm is taken in
            # fp32. Every weight of this model has a gradient.
            master.grad = weight.grad.float()
            weight.grad = None
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._masters, self._clip, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        return loss


class AllGpuMuon(AllGpu):
    """AllGpu with Muon for the blocks' matrices, by hytrain's step; all state stays on the GPU."""

    def __init__(self, model: Any, clip: float | None) -> None:
        super().__init__(model, clip)
        from hytrain.kernels.muon import MuonValues, muon_step

        pairs = zip(model.named_parameters(), self._masters, strict=True)
        self._matrices = [
            (master, torch.zeros_like(master))
            for (name, _), master in pairs
            if master.dim() >= 2 and "embed" not in name and "lm_head" not in name
        ]
        ids = {id(master) for master, _ in self._matrices}
        others = fused_adamw(master for master in self._masters if id(master) not in ids)
        values = MuonValues(MUON["lr"], MUON["weight_decay"], MUON["momentum"], "gram")

        class Both:
            @torch.no_grad()
            def step(self) -> None:
                others.step()
                for master, momentum in muons:
                    muon_step(master.data, (momentum,), master.grad, values, master)

            def zero_grad(self, *, set_to_none: bool) -> None:
                others.zero_grad(set_to_none=set_to_none)
                for master, _ in muons:
                    master.grad = None

        muons = self._matrices
        self._optimizer = Both()  # type: ignore[assignment]


class TorchaoOffload(System):
    """torchao's CPUOffloadOptimizer around torch's fused AdamW; it does not support clipping.

    Its state has the weights' dtype: bf16 here, 6 bytes a parameter, without fp32 master weights.
    """

    def __init__(self, model: Any) -> None:
        # Only this system needs it.
        from torchao.optim import CPUOffloadOptimizer

        super().__init__(model)
        self._optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)

    def step(self, batches: Sequence[Batch]) -> torch.Tensor:
        loss = self._add_gradients(batches)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss


class Fsdp2(System):
    """PyTorch FSDP2: fp32 weights, gradients and moments live on the host, or on the GPUs.

    Every decoder layer is a unit of its own, the rest belongs to the root. On the host it is
    measured without clipping: a norm of gradients there would be one more pass over all of them
    before the update, so leaving it out is in this system's favour.
    """

    def __init__(self, model: Any, job: Json) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        super().__init__(model)
        device = job["device"]
        self.thread_candidates = tuple(job.get("threads", ()))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        settings: Json = {
            "mesh": init_device_mesh(device, (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
            ),
            "reshard_after_forward": job.get("reshard_after_forward", True),
        }
        self._clip = None
        if job.get("offload", True):
            # Page-locked memory needs a driver.
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
        else:
            self._clip = job.get("clip")
        shard = functools.partial(fully_shard, **settings)
        for layer in model.get_submodule("model.layers").children():
            shard(layer)
        shard(model)
        self._optimizer = fused_adamw(model.parameters())

    def step(self, batches: Sequence[Batch]) -> torch.Tensor:
        loss = self._add_gradients(batches)
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def close(self) -> None:
        dist.destroy_process_group()


def ds_config(job: Json) -> Json:
    """The DeepSpeed JSON of a job, with hytrain's section if the job's system is hytrain."""
    config: Json = {
        "train_micro_batch_size_per_gpu": job["batch"],
        "gradient_accumulation_steps": job.get("accumulation", 1),
        "gradient_clipping": job.get("clip") or 0.0,
        "bf16": {"enabled": not job.get("fp32", False)},
        "optimizer": job.get("optimizer", {"type": "AdamW", "params": ADAMW}),
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if job["system"] in ZERO:
        config["zero_optimization"] = ZERO[job["system"]]
        if "offload_optimizer" not in config["zero_optimization"]:
            # torch's AdamW: DeepSpeed's fused Adam would have to be compiled first.
            config["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
        return copy.deepcopy(config)  # the engine writes into it
    zero: Json = {"stage": job.get("stage", 2), "offload_optimizer": OFFLOAD}
    if job.get("streamed", False):
        zero |= {"stage": 3, "offload_param": OFFLOAD}
    if job.get("direct", False):
        config["bf16"]["check_grad_overflow"] = False
    section = {"gpu_fraction": job.get("gpu_fraction", "solve"), **job.get("section", {})}
    return copy.deepcopy({**config, "zero_optimization": zero, "hytrain": section})


class DeepSpeed(System):
    """A DeepSpeedEngine, used as its documentation says."""

    def __init__(self, model: Any, job: Json) -> None:
        super().__init__(model)
        self.thread_candidates = tuple(job.get("threads", ()))
        self._uses_train_batch = job.get("train_batch", False)
        self.engine: Any = self._initialize(model, ds_config(job))

    def _initialize(self, model: Any, config: Json) -> Any:
        import deepspeed

        return deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]

    def step(self, batches: Sequence[Batch]) -> torch.Tensor:
        if self._uses_train_batch:
            return self.engine.train_batch(iter(batches))
        for batch in batches:
            loss = loss_of(self.engine, batch)
            self.engine.backward(loss)
            self.engine.step()
        return loss.detach()

    def close(self) -> None:
        self.engine.destroy()


class HyTrain(DeepSpeed):
    """A HyTrainEngine, with its statistics and decisions about k."""

    def _initialize(self, model: Any, config: Json) -> Any:
        import hytrain

        return hytrain.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]

    def observe(self) -> Json | None:
        statistics = self.engine.step_statistics()
        return None if statistics is None else dataclasses.asdict(statistics)

    def drain(self) -> None:
        self.engine.synchronize()

    def decisions(self) -> list[Any]:
        """The decisions about k, oldest first."""
        return list(self.engine.placement_decisions())

    @property
    def num_layers(self) -> int:
        """The number of layers that k counts."""
        return self.decisions()[0].num_layers

    def gpu_layers(self) -> int:
        """The number of layers on the GPU in the last step."""
        return round(self.engine.step_statistics().gpu_fraction * self.num_layers)

    def place(self, gpu_layers: int) -> None:
        """Places this many layers on the GPU from the next step on."""
        self.engine.set_gpu_fraction(gpu_layers / self.num_layers)

    def costs(self) -> Any:
        """The costs that the solver has measured; None before it has."""
        return self.engine.optimizer.placement.costs()


class StreamedAdamW(HyTrain):
    """A HyTrainEngine whose AdamW is updated on the GPU, with state streamed from the host."""

    def _initialize(self, model: Any, config: Json) -> Any:
        import hytrain

        hytrain.register_optimizer(
            _StreamedAdamW, hytrain.DeviceOptimizer(("exp_avg", "exp_avg_sq"), _adam_values, _adam)
        )
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
        return hytrain.initialize(
            model=model, config=config, optimizer=_StreamedAdamW(model.parameters(), **ADAMW)
        )[0]


class _StreamedAdamW(torch.optim.AdamW):
    """A separate class, since hytrain updates AdamW itself on the CPU. Its step is never called."""


def _adam_values(group: Any, step: int) -> Json:
    names = ("lr", "weight_decay", "eps")
    beta1, beta2 = group["betas"]
    return {**{n: group[n] for n in names}, "beta1": beta1, "beta2": beta2, "step": step}


def _adam(weight: Any, states: Any, gradient: Any, values: Json, _parameter: Any) -> None:
    (first, second), others = states, dict(values)
    made = torch.full((), float(others.pop("step") - 1), device=weight.device)
    adamw(
        [weight], [gradient], [first], [second], [], [made],
        fused=weight.is_cuda, amsgrad=False, maximize=False, **others,
    )  # fmt: skip


REFERENCE = "forward_backward"
NAMES = (
    *(REFERENCE, "all_gpu", "all_gpu_muon", "torchao", "fsdp2", "hytrain"),
    *("hytrain_streamed_adamw", *ZERO),
)


def build(job: Json, make_model: MakeModel) -> Any:
    """Builds the job's system, with a model in the dtype that the system needs.

    Raises:
        ValueError: the system is unknown.
    """
    name = job["system"]
    if name not in NAMES:
        raise ValueError(f"system {name!r} is unknown: choose one of {', '.join(NAMES)}")
    if name == "fsdp2":
        return Fsdp2(make_model(torch.float32), job)
    model = make_model(torch.bfloat16)
    if name == REFERENCE:
        return System(model, drops=job.get("drops", False))
    if name == "torchao":
        return TorchaoOffload(model)
    if name == "all_gpu_muon":
        return AllGpuMuon(model, job.get("clip"))
    if name == "all_gpu":
        return AllGpu(model, job.get("clip"))
    if name == "hytrain_streamed_adamw":
        return StreamedAdamW(model, job)
    return HyTrain(model, job) if name == "hytrain" else DeepSpeed(model, job)
