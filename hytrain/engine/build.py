"""The settings of an optimizer that follow from its engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from hytrain.engine.deepspeed_internals import DeepSpeedEngine, create_loss_scaler
from hytrain.hardware.host_share import HostShare
from hytrain.kernels.clipping import ClipSettings
from hytrain.optimizer.engine_view import EngineView
from hytrain.optimizer.loss_scaling import GradScalerRule, LossScaler
from hytrain.zero3.plan import GatherSettings, gather_settings


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Settings that follow from the engine's configuration.

    Attributes:
        device: the device that computes with the training copy.
        clip: clipping and overflow check.
        mean: whether gradients are averaged over ranks (else summed).
        host: this rank's part of its host.
        gathers: DeepSpeed's keys of ZeRO-3; None below ZeRO-3: every rank has all weights.
        on_host: whether this rank's shards of the training copy are kept in host memory.
        gradient_dtype: dtype of gradients; None: that of each layer's training copy.
        refuse_unused: see :class:`StepSettings`.
        communication_dtype: dtype gradients are reduced in; None: the one they accumulate in.
        scaler: moves the loss scale; None: there is none.
    """

    stage: Literal[1, 2, 3]
    device: torch.device
    clip: ClipSettings
    mean: bool
    host: HostShare
    gathers: GatherSettings | None = None
    on_host: bool = False
    gradient_dtype: torch.dtype | None = None
    refuse_unused: bool = False
    communication_dtype: torch.dtype | None = None
    scaler: LossScaler | None = None


def engine_view(engine: DeepSpeedEngine) -> EngineView:
    """Returns what the optimizer asks of the engine, which may still be under construction."""
    internals: Any = engine

    def begin_window() -> None:
        internals.micro_steps -= internals.micro_steps % internals.gradient_accumulation_steps()

    return EngineView(
        is_boundary=lambda: bool(internals.is_gradient_accumulation_boundary()),
        is_reducing=lambda: bool(
            not internals.inside_no_sync_ctxt and internals.enable_backward_allreduce
        ),
        begin_window=begin_window,
        micro_batches=lambda: int(internals.gradient_accumulation_steps()),
    )


def build_settings(engine: DeepSpeedEngine, host: HostShare) -> BuildSettings:
    """Returns an engine's settings for its optimizer."""
    internals: Any = engine
    model_dtype, accumulation_dtype = internals.get_data_types()
    asked = internals._config.communication_data_type
    if internals.bfloat16_enabled():
        config: Any = internals._config
        check_overflow = bool(config.bfloat16_config.check_grad_overflow)
    else:
        check_overflow = True  # as DeepSpeed's ZeRO-1/2 does for fp32
    stage, offload = int(internals.zero_optimization_stage()), internals.zero_offload_param()
    keys = internals._config.zero_config.model_dump(by_alias=True, exclude_unset=True)
    return BuildSettings(
        stage=cast(Literal[1, 2, 3], stage),
        device=torch.device(internals.device),
        gathers=gather_settings(keys) if stage == 3 else None,
        on_host=offload is not None and bool(offload.device == "cpu"),
        gradient_dtype=None if accumulation_dtype == model_dtype else accumulation_dtype,
        clip=ClipSettings(float(internals.gradient_clipping() or 0.0), check_overflow),
        mean=bool(internals.gradient_average),
        # DeepSpeed itself uses this key in stages 1 and 2 only.
        refuse_unused=stage < 3 and not internals.zero_ignore_unused_parameters(),
        host=host,
        # The dtype that the user asks for, by default the training copy's; if ranks share
        # sequences DeepSpeed has put "seq_parallel_communication_data_type" there, by default fp32.
        communication_dtype=asked if isinstance(asked, torch.dtype) else None,
        scaler=_scaler(internals),
    )


def _scaler(internals: Any) -> LossScaler | None:
    if internals.fp16_enabled():
        return create_loss_scaler(internals)
    if internals.torch_autocast_enabled():
        # If the user gives no dtype, DeepSpeed gives torch none; on a GPU that means fp16.
        kind = torch.device(internals.device).type
        dtype = internals.torch_autocast_dtype() or torch.get_autocast_dtype(kind)
        return GradScalerRule() if dtype == torch.float16 else None
    return None
