"""What DeepSpeed's engine, schedulers and checkpoints expect of a ZeRO optimizer beside steps."""

from __future__ import annotations

from typing import Any

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.engine.deepspeed_internals import ZeROOptimizer
from hytrain.errors import UnsupportedError
from hytrain.model.layer_state import LayerState
from hytrain.offload.pipeline import UpdatePipeline
from hytrain.optimizer.hyper import BuiltGroups


class DeepSpeedInterface(ZeROOptimizer):
    """Attributes that are read, and calls that have nothing to do here."""

    custom_loss_scaler = False
    external_loss_scale = None
    torch_autocast_gradscaler = None
    dynamic_loss_scale = False
    loss_scaler = None

    def __init__(
        self,
        basic_optimizer: torch.optim.Optimizer,
        pipeline: UpdatePipeline,
        collectives: ShardCollectives,
    ) -> None:
        """
        Args:
            basic_optimizer: the user's Adam or AdamW.
            pipeline: the update pipeline over this rank's layers.
            collectives: the ranks that share the state.
        """
        super().__init__()
        self.optimizer = basic_optimizer
        self.pipeline = pipeline
        self.collectives = collectives
        self._groups = BuiltGroups(basic_optimizer.param_groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The basic optimizer's own list: schedulers write there.

        Raises:
            UnsupportedError: the list is replaced by groups of other parameters.
        """
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups.check(groups)
        self.optimizer.param_groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: memory for the state is laid out and shared among ranks when it is built.

        Raises:
            UnsupportedError: always.
        """
        del param_group
        raise UnsupportedError(
            "add_param_group was called, but the optimizer's state is laid out when the engine is "
            "built: pass all parameters that will ever be trained, in their groups, to "
            "hytrain.initialize (model_parameters or optimizer), or build a new engine"
        )

    @property
    def state(self) -> dict[Any, Any]:
        """Empty: the state is in the layers (see ``engine.fp32_state_dict``)."""
        return self.optimizer.state

    @property
    def bit16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The trained parameters of each group; DeepSpeed's checkpoints list shapes by it."""
        trained = {id(slot.parameter) for layer in self.layer_states for slot in layer.layout.slots}
        return [[p for p in group["params"] if id(p) in trained] for group in self.param_groups]

    @property
    def round_robin_bit16_groups(self) -> list[list[torch.nn.Parameter]]:
        """As :attr:`bit16_groups`: the name that DeepSpeed looks for first, in every stage."""
        return self.bit16_groups

    @property
    def layer_states(self) -> list[LayerState]:
        """The layers in forward order."""
        return self.pipeline.layers

    @property
    def dp_process_group(self) -> Any:
        """The ranks that share the state."""
        return self.collectives.group

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Nothing: layers are reduced as they become final, the rest in step()."""

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Nothing: see above."""
        del pipeline_parallel

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Nothing: step() completes whatever the backward passes left."""
