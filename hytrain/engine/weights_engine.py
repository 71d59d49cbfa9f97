"""What an engine does about weights that no rank has whole."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from hytrain.checkpoint.export import collect_module_state, shared_parameters
from hytrain.comm.collectives import ShardCollectives
from hytrain.engine.deepspeed_internals import DeepSpeedEngine
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import EngineClosedError
from hytrain.zero3.forward_hooks import LayerGuards
from hytrain.zero3.plan import GatherSettings

logger = logging.getLogger(__name__)


class WeightsEngine(DeepSpeedEngine):
    """DeepSpeed's engine with ZeRO-3's weights in hytrain's hands."""

    _guards: LayerGuards | None

    def open_optimizer(self) -> HyTrainZeroOptimizer:
        """The optimizer of an engine that is built.

        Raises:
            EngineClosedError: it is not.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, HyTrainZeroOptimizer):
            raise EngineClosedError("the engine is not fully built")
        return optimizer

    @property
    def _model(self) -> nn.Module:
        return cast(nn.Module, self.module)  # DeepSpeed does not say so

    # -- construction --------------------------------------------------------------------------

    def gather_settings(self) -> GatherSettings:
        """DeepSpeed's keys of ZeRO-3."""
        config: Any = self._config
        zero = config.zero_config
        return GatherSettings(
            prefetch=int(zero.prefetch_bucket_size),
            max_live=int(zero.max_live_parameters),
            max_reuse=int(zero.max_reuse_distance),
            persistence=int(zero.param_persistence_threshold),
            max_persistent=int(zero.model_persistence_threshold),
        )

    def offloads_weights(self) -> bool:
        """Whether the training copy is kept in host memory."""
        offload: Any = self.zero_offload_param()
        return offload is not None and bool(offload.device == "cpu")

    def _configure_distributed_model(self, model: nn.Module) -> None:
        if int(self.zero_optimization_stage()) == 3:
            # The model may not fit on the device: its layers go there one by one.
            self.dont_change_device = True
        super()._configure_distributed_model(model)

    def _broadcast_model(self) -> None:
        """Rank 0's parameters on all ranks; under ZeRO-3 each layer's when it is sharded.

        DeepSpeed's takes no parameters without dimensions, and no transposed ones.
        """
        if self.dist_backend is None or int(self.zero_optimization_stage()) == 3:
            return
        collectives = ShardCollectives(
            cast("dist.ProcessGroup | None", self.seq_data_parallel_group)
        )
        for parameter in self._model.parameters():
            if not hasattr(parameter, "ds_optim_param"):  # DeepSpeed's OptimizedLinear: shards
                collectives.broadcast_from_first(parameter.data)

    def zero_optimization_partition_weights(self) -> bool:
        """False: what DeepSpeed does to modules and checkpoints under ZeRO-3 is done here."""
        return False

    # -- reading -------------------------------------------------------------------------------

    def module_tensors(self) -> Mapping[str, Any]:
        """The module's state dict as it is, with nothing waited for: for names and shapes."""
        assert self._guards is not None
        with self._guards.reading_names():
            return self._model.state_dict(keep_vars=True)

    @contextmanager
    def gathered_parameters(self) -> Generator[None]:
        """All weights whole on every rank for the length of the block; a collective.

        Under ZeRO-3 a rank has its shards only; below it this is :meth:`synchronize`. What is
        written into parameters meanwhile is lost.
        """
        optimizer = self.open_optimizer()
        optimizer.synchronize()
        with optimizer.weights.gathered():
            optimizer.pipeline.streams.synchronize()
            yield

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict with the newest weights.

        Under ZeRO-3 a collective: layer by layer the weights come to the host of rank 0; other
        ranks get an empty dict.
        """
        optimizer = self.open_optimizer()
        if not optimizer.weights.is_sharded or optimizer.weights.are_readable:
            return super().module_state_dict(
                destination, prefix, keep_vars, exclude_frozen_parameters
            )
        state = collect_module_state(
            optimizer, self.module_tensors, with_frozen=not exclude_frozen_parameters
        )
        found = {} if destination is None else destination
        found.update({prefix + name: tensor for name, tensor in state.items()})
        return found

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, Any] | None:
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self.open_optimizer().collectives.rank != 0:
            return None
        return OrderedDict((name, tensor.cpu()) for name, tensor in state.items())

    def _get_param_fragment_func(self, param: nn.Parameter) -> torch.Tensor:
        """What a checkpoint has of a frozen parameter that is whole on this rank: all of it."""
        return param.detach().cpu()

    def _get_shared_params(self) -> dict[str, str]:
        """Tied parameters: name -> the name under which the tensor is stored."""
        return shared_parameters(self._model)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's, a collective; under ZeRO-3 the weights come together on rank 0.

        Returns:
            Whether a file was written: False under ZeRO-3 where
            ``stage3_gather_16bit_weights_on_model_save`` is not set.
        """
        config: Any = self._config
        is_sharded = self.open_optimizer().weights.is_sharded
        if is_sharded and not config.zero_config.gather_16bit_weights_on_model_save:
            logger.warning(
                "%s/%s is not written: set stage3_gather_16bit_weights_on_model_save",
                save_dir,
                save_filename,
            )
            return False
        return bool(super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters))
