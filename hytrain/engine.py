"""The engine: overrides of DeepSpeed's, no algorithm of its own."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

import torch

from hytrain._deepspeed import DeepSpeedEngine
from hytrain.config import HyTrainConfig
from hytrain.errors import ConfigError, EngineClosedError, UnsupportedError
from hytrain.layers.guards import LayerGuards
from hytrain.optim.build import BuildSettings, build_optimizer
from hytrain.optim.norm import ClipSettings
from hytrain.optim.statistics import StepStatistics
from hytrain.optim.zero_optimizer import EngineView, HyTrainZeroOptimizer
from hytrain.parallel.collectives import ShardCollectives


class HyTrainEngine(DeepSpeedEngine):
    """DeepSpeed's engine with updates that overlap backward and the next forward.

    Everything that DeepSpeed's engine offers works as there; in addition :meth:`synchronize`,
    :meth:`fp32_state_dict` and :meth:`step_statistics`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes DeepSpeed's arguments; ``config`` must have a "hytrain" section."""
        section = HyTrainConfig.from_deepspeed(kwargs["config"])
        if section is None:
            raise ConfigError('the configuration has no "hytrain" section')
        # nn.Module's __init__ has not run: plain attributes are safe, modules are not.
        object.__setattr__(self, "hytrain_config", section)
        object.__setattr__(self, "_guards", None)
        super().__init__(*args, **kwargs)
        if not isinstance(self.optimizer, HyTrainZeroOptimizer):
            raise ConfigError(
                'no optimizer was given: add an "optimizer" section to the configuration or pass '
                "optimizer=torch.optim.AdamW(...)"
            )
        self._guards = LayerGuards(self.module, self.optimizer)
        _close_at_exit(self)

    hytrain_config: HyTrainConfig
    _guards: LayerGuards | None

    # -- construction --------------------------------------------------------------------------

    def get_optimizer_configuration(
        self, optimizer_parameters: dict[str, Any], adam_w_mode: bool, **kwargs: Any
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """torch's Adam or AdamW for the JSON's optimizer: only its parameter groups are used.

        DeepSpeed would compile its own CPU Adam here.
        """
        del kwargs
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

    def _configure_zero_optimizer(
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
        return build_optimizer(
            self.module,
            optimizer,
            self.hytrain_config,
            self._build_settings(),
            ShardCollectives(self.seq_data_parallel_group),
            EngineView(
                is_boundary=self.is_gradient_accumulation_boundary,
                is_reducing=lambda: not self.inside_no_sync_ctxt and self.enable_backward_allreduce,
            ),
        )

    def _build_settings(self) -> BuildSettings:
        model_dtype, accumulation_dtype = self.get_data_types()
        communication_dtype = self._config.communication_data_type
        if communication_dtype not in (None, accumulation_dtype):
            raise UnsupportedError(
                f'"communication_data_type" is {communication_dtype} but gradients are accumulated '
                f"in {accumulation_dtype}: gradients are reduced in the dtype they are accumulated "
                'in; set "data_types": {"grad_accum_dtype": ...} to that dtype and remove it'
            )
        if self.bfloat16_enabled():
            check_overflow = bool(self._config.bfloat16_config.check_grad_overflow)
        else:
            check_overflow = True  # as DeepSpeed's ZeRO-1/2 does for fp32
        return BuildSettings(
            stage=2 if self.zero_optimization_partition_gradients() else 1,
            clip=ClipSettings(float(self.gradient_clipping() or 0.0), check_overflow),
            gradient_dtype=None if accumulation_dtype == model_dtype else accumulation_dtype,
            mean=bool(self.gradient_average),
            ranks_on_host=_ranks_on_host(),
        )

    # -- training ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward; each layer's waits for that layer's newest weights only."""
        self._check_open().begin_forward()
        return super().forward(*inputs, **kwargs)

    def step_statistics(self) -> StepStatistics:
        """What the last step took on this rank.

        Raises:
            HyTrainError: no step has been made.
        """
        return self._check_open().step_statistics()

    def synchronize(self) -> None:
        """Waits for every update: all weights are the newest, readable from any stream.

        Weights whose step was not taken yet are those of the last step again. Called by the
        engine itself before ``state_dict``, checkpoints and ``eval``.
        """
        self._check_open().synchronize()

    def train(self, mode: bool = True) -> HyTrainEngine:
        """As nn.Module.train; switching to evaluation synchronizes first."""
        guards = self.__dict__.get("_guards")
        if not mode and guards is not None and isinstance(self.optimizer, HyTrainZeroOptimizer):
            self.synchronize()
        super().train(mode)
        return self

    def destroy(self) -> None:
        """Stops the update worker and frees pinned memory; the engine cannot be used any more."""
        if self._guards is not None:
            self._guards.remove()
        super().destroy()

    def _check_open(self) -> HyTrainZeroOptimizer:
        optimizer = self.optimizer
        if not isinstance(optimizer, HyTrainZeroOptimizer):
            raise EngineClosedError("the engine is not fully built")
        return optimizer


def _ranks_on_host() -> int:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 1


def _close_at_exit(engine: HyTrainEngine) -> None:
    """Stops the worker when the interpreter ends without destroy(): it would abort otherwise."""
    optimizer = weakref.ref(engine.optimizer)

    def close() -> None:
        alive = optimizer()
        if alive is not None:
            alive.destroy()

    atexit.register(close)
