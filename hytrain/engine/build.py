"""How DeepSpeed's engine comes to have hytrain's optimizer."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from hytrain.checkpoint.engine_state import begin_window
from hytrain.comm.collectives import ShardCollectives
from hytrain.config import HyTrainConfig
from hytrain.engine.build_optimizer import BuildSettings, build_optimizer
from hytrain.engine.build_weights import WeightSettings
from hytrain.engine.checkpoint_engine import CheckpointEngine
from hytrain.engine.engine_view import EngineView
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import ConfigError
from hytrain.hardware.host_share import HostShare, share_host
from hytrain.kernels.norm import ClipSettings
from hytrain.optimizer.batches import DealtSizes


class EngineBuild(CheckpointEngine):
    """What DeepSpeed's construction asks of an engine, and is told."""

    hytrain_config: HyTrainConfig
    _collectives: ShardCollectives | None = None
    _in_train_batch = False
    _dealt: DealtSizes | None = None

    def get_optimizer_configuration(
        self,
        optimizer_parameters: dict[str, Any],
        adam_w_mode: bool,
        allow_legacy_fallback: bool = False,
        **kwargs: Any,
    ) -> tuple[type[torch.optim.AdamW] | type[torch.optim.Adam], dict[str, Any]]:
        """torch's Adam or AdamW for the JSON's optimizer: only its parameter groups are used.

        DeepSpeed would compile its own CPU Adam here.
        """
        del allow_legacy_fallback, kwargs
        for key in ("torch_adam", "fp32_optimizer_states"):
            optimizer_parameters.pop(key, None)
        self._bias_correction = optimizer_parameters.pop("bias_correction", True)
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam), {}

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """False: a client's torch optimizer is as good as DeepSpeed's, its step is never called."""
        return False

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        # torch's schedulers insist on a torch.optim.Optimizer; both share their param_groups.
        del optimizer
        return super()._scheduler_from_config(self.basic_optimizer)

    # DeepSpeed's base names no class of optimizers: what the checker infers is a list of its own.
    def _configure_zero_optimizer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: torch.optim.Optimizer | None
    ) -> HyTrainZeroOptimizer:
        if optimizer is None:
            raise ConfigError(
                'no optimizer was given: add an "optimizer" section to the configuration or pass '
                "optimizer=torch.optim.AdamW(...)"
            )
        if not self.__dict__.get("_bias_correction", True):
            for group in optimizer.param_groups:
                group["bias_correction"] = False
        group = cast("dist.ProcessGroup | None", self.seq_data_parallel_group)
        collectives = self._collectives = ShardCollectives(group)
        collectives.start_watch()
        device = torch.device(cast(Any, self.device))
        collectives.start_gate(device, is_wanted=self.hytrain_config.wait_in_stream)
        with collectives.telling():
            return self._build_optimizer(optimizer, collectives)

    def _build_optimizer(
        self, optimizer: torch.optim.Optimizer, collectives: ShardCollectives
    ) -> HyTrainZeroOptimizer:
        return build_optimizer(
            self._model,
            optimizer,
            self.hytrain_config,
            self._build_settings(share_host(collectives)),
            collectives,
            EngineView(
                is_boundary=lambda: bool(self.is_gradient_accumulation_boundary()),
                is_reducing=lambda: bool(
                    not self.inside_no_sync_ctxt
                    and self.enable_backward_allreduce
                    # Ranks may have different numbers of micro-batches: they reduce once a step.
                    # Where weights are gathered they all take part in all of them.
                    and (
                        not self._in_train_batch
                        or self.is_gradient_accumulation_boundary()
                        or self.open_optimizer().weights.is_sharded
                    )
                ),
                begin_window=lambda: begin_window(self),
            ),
        )

    def _build_settings(self, host: HostShare) -> BuildSettings:
        model_dtype, accumulation_dtype = self.get_data_types()
        if self.bfloat16_enabled():
            config: Any = self._config
            check_overflow = bool(config.bfloat16_config.check_grad_overflow)
        else:
            check_overflow = True  # as DeepSpeed's ZeRO-1/2 does for fp32
        stage = int(self.zero_optimization_stage())
        return BuildSettings(
            stage=cast(Literal[1, 2, 3], stage),
            weights=WeightSettings(
                device=torch.device(cast(Any, self.device)),
                gathers=self.gather_settings() if stage == 3 else None,
                on_host=self.offloads_weights(),
                gradient_dtype=None if accumulation_dtype == model_dtype else accumulation_dtype,
            ),
            clip=ClipSettings(float(self.gradient_clipping() or 0.0), check_overflow),
            mean=bool(self.gradient_average),
            host=host,
        )
