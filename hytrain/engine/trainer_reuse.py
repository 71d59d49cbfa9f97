"""Lets one Trainer of transformers prepare its model more than once.

A Trainer prepares its model in the first evaluate() or train() and keeps that engine: a train()
after an evaluate() would have an engine without an optimizer, a second train() one that has been
destroyed. transformers' ``deepspeed_init`` is called before either; here it releases the engine.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hytrain.config import HyTrainConfig
from hytrain.engine.deepspeed_internals import DeepSpeedEngine
from hytrain.engine.engine import HyTrainEngine

_MODULE = "transformers.trainer"
_TAKEN = ("optimizer", "scheduler")
"""Sections that transformers removes from the configuration for an evaluation, for good."""


class TrainerReuse:
    """Replaces ``deepspeed_init`` in transformers' Trainer."""

    def __init__(self, evaluates: Callable[[torch.nn.Module], None]) -> None:
        """``evaluates`` is called with a model that is to be prepared for an evaluation alone."""
        self._evaluates = evaluates
        self._original: Any = None
        self._sections: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        """Trainer -> sections that were removed from its configuration."""

    def install(self) -> None:
        """Replaces the function if transformers' Trainer is imported. May be called again."""
        module = sys.modules.get(_MODULE)
        if module is not None and self._original is None and hasattr(module, "deepspeed_init"):
            self._original = vars(module)["deepspeed_init"]
            vars(module)["deepspeed_init"] = self._prepare

    def undo(self) -> None:
        """Puts back the original function."""
        module = sys.modules.get(_MODULE)
        # What others have put there since then stays.
        if module is not None and vars(module).get("deepspeed_init") == self._prepare:
            vars(module)["deepspeed_init"] = self._original
        self._original = None

    def _prepare(
        self, trainer: Any, num_training_steps: int, inference: bool = False, **more: Any
    ) -> Any:
        """Returns what transformers' does: optimizer and scheduler, both None for an evaluation."""
        held = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
        # Wrong values are refused in hytrain's words, before accelerate sees an "auto" among them.
        if HyTrainConfig.from_deepspeed(held.config) is None:
            return self._original(trainer, num_training_steps, inference, **more)
        if not inference:
            self._let_go(trainer)
            held.config.update(self._sections.pop(trainer, {}))
            return self._original(trainer, num_training_steps, inference, **more)
        taken = {key: copy.deepcopy(held.config[key]) for key in _TAKEN if key in held.config}
        self._sections[trainer] = {**self._sections.get(trainer, {}), **taken}
        self._evaluates(trainer.model)
        if held.is_zero3():
            return self._original(trainer, num_training_steps, inference, **more)
        # transformers refuses an evaluation without ZeRO-3, which whole weights do not need.
        held.trainer_config_finalize(trainer.args, trainer.model, num_training_steps)
        for key in _TAKEN:
            held.config.pop(key, None)
        return None, None

    def _let_go(self, trainer: Any) -> None:
        """Releases an engine that is not to train: the Trainer then prepares its model itself."""
        engine = trainer.model_wrapped
        if not isinstance(engine, DeepSpeedEngine):
            return
        if isinstance(engine, HyTrainEngine):
            engine.destroy()
        trainer.model_wrapped = trainer.model
        trainer.deepspeed = None
        accelerator = trainer.accelerator
        accelerator.deepspeed_engine_wrapped = None
        accelerator._models = [model for model in accelerator._models if model is not engine]
