"""The engine's checkpoints: what DeepSpeed's engine saves and loads, as universal checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from hytrain.checkpoint.commit import unusable_tag
from hytrain.checkpoint.engine_state import (
    COUNTERS,
    begin_window,
    client_state_of,
    pack_model_states,
    restore_engine,
    stored_decisions,
    taken_keys,
)
from hytrain.checkpoint.gather import gather_to_first
from hytrain.checkpoint.reader import LoadRequest, read_checkpoint
from hytrain.checkpoint.tags import find_tag
from hytrain.checkpoint.writer import write_checkpoint
from hytrain.comm.exchange import raise_together
from hytrain.engine.weights_engine import WeightsEngine


class CheckpointEngine(WeightsEngine):
    """What of an engine is about state that outlives it."""

    def fp32_state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Master weights and moments as of the last step; a collective.

        Returns:
            On rank 0, parameter name (as in ``module.named_parameters()``) -> {"fp32", "exp_avg",
            "exp_avg_sq"}, fp32 tensors of the parameter's shape on the CPU; on other ranks an
            empty dict. Frozen parameters have none, tied ones appear once.
        """
        optimizer = self.open_optimizer()
        optimizer.flush()
        return gather_to_first(
            optimizer.layer_states, optimizer.collectives, optimizer.pipeline.streams.device
        )

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Literal[True]:
        """Saves a universal checkpoint; a collective. Training goes on as if it had not been.

        It takes its place when all of it is written. A checkpoint that was saved under the tag
        before stays whole until then (there must be room for both), and is then removed; other
        files that are beside it in the tag's folder stay.

        Args:
            save_dir: folder of checkpoints; made where missing; one that all hosts share.
            tag: name of the checkpoint, the same on all ranks; default ``global_step<n>``.
            client_state: saved along, returned by :meth:`load_checkpoint`.
            save_latest: whether loading without a tag shall find this one.
            exclude_frozen_parameters: leave frozen weights out.

        Returns:
            True.

        Raises:
            CheckpointError: a rank could not write, or was called with what cannot be saved;
                raised on all. What is saved under the tag, and ``latest``, are unchanged.
        """
        optimizer = self.open_optimizer()
        client = dict(client_state or {})
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        no_folder = None if str(save_dir) else "save_dir is empty: pass the folder to save in"
        # A rank may have been given something else than the others, which would wait for it.
        refusal = no_folder or unusable_tag(name) or taken_keys(client)
        raise_together(refusal, optimizer.collectives)
        self._checkpoint_tag_validation(name)
        # Under ZeRO-3 all ranks take part in this; what is written below rank 0 writes alone.
        module = (
            self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
            if optimizer.weights.is_sharded
            else None
        )
        write_checkpoint(
            Path(save_dir),
            name,
            optimizer,
            lambda: self._model_states(client, exclude_frozen_parameters, module),
            save_latest=save_latest,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a universal checkpoint, saved with any number of ranks and any layout.

        A collective. Gradients since the last step are forgotten, and the next micro-batch is the
        first of a step. With ``load_module_only`` or without ``load_optimizer_states`` only
        weights are loaded: master weights are the checkpoint's fp32 ones where it has them,
        moments and step counts start at zero, hyper-parameters stay as they are.

        Args:
            load_dir: folder of checkpoints.
            tag: which; default: the one that ``latest`` names, or ``latest_universal`` where that
                one is DeepSpeed's own and was converted.
            load_module_strict: refuse a checkpoint whose names differ from the model's; else what
                both have is loaded. Parameters that it has nothing of keep weights and moments,
                and a parameter group without any others its step count and hyper-parameters.
            load_optimizer_states: moments, step counts and the parameter groups' hyper-parameters.
            load_lr_scheduler_states: the LR scheduler's state.
            load_module_only: weights only, and no counters or schedule either.
            custom_load_fn: called as ``custom_load_fn(src=module state, dst=module)`` to load the
                weights. The master weights then are the checkpoint's with
                ``load_optimizer_states``, and what it left in the module without.

        Returns:
            (path of the model states' file, client state); (None, None) with a warning where no
            tag is given and there is no ``latest``.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged or another model's; raised
                on all ranks, before anything is touched.
        """
        optimizer = self.open_optimizer()
        name = find_tag(Path(load_dir), None if tag is None else str(tag), optimizer.collectives)
        if name is None:
            return None, None
        with_optimizer = load_optimizer_states and not load_module_only
        keys = ("module",) if load_module_only else ("module", *COUNTERS)
        stored = read_checkpoint(
            Path(load_dir) / name,
            optimizer,
            self._model,
            self.module_tensors,
            LoadRequest(load_module_strict, with_optimizer, custom_load_fn, keys),
        )
        begin_window(self)
        if not load_module_only:
            restore_engine(self, stored, with_scheduler=load_lr_scheduler_states)
            optimizer.placement.resume(self.global_steps, stored_decisions(stored))
        client_state = client_state_of(
            stored,
            module_only=load_module_only,
            with_optimizer=load_optimizer_states,
            with_scheduler=load_lr_scheduler_states,
        )
        return str(self._get_ckpt_name(str(load_dir), name)), client_state

    def _model_states(
        self, client_state: Mapping[str, Any], no_frozen: bool, module: dict[str, Any] | None
    ) -> dict[str, Any]:
        if module is None:
            module = self.module_state_dict(exclude_frozen_parameters=no_frozen)
            common = self._common_checkpoint_state(module, True, save_frozen_param=not no_frozen)
        else:
            # DeepSpeed would take frozen weights from the parameters, which are not there.
            common = self._common_checkpoint_state(module, True, save_frozen_param=False)
            if not no_frozen:
                common.update(self._frozen_weights(module))
        return pack_model_states(common, client_state, self.open_optimizer().placement.decisions)

    def _frozen_weights(self, module: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What DeepSpeed's checkpoints have of weights that no optimizer has, by name."""
        weights: dict[str, torch.Tensor] = {
            name: module[name]
            for name in self._get_zero_frozen_param_attributes(self._get_param_shape_func)
        }
        return {
            "frozen_param_shapes": {name: tensor.shape for name, tensor in weights.items()},
            "frozen_param_fragments": {name: tensor.cpu() for name, tensor in weights.items()},
        }
