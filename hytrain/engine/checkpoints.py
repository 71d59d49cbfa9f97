"""What DeepSpeed's engine saves and loads, as universal checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint.archive_writer import PickledObjects
from hytrain.checkpoint.async_save import AsyncSaver
from hytrain.checkpoint.commit import unusable_tag
from hytrain.checkpoint.contents import ModelStates, ModuleTensors
from hytrain.checkpoint.engine_state import (
    begin_window,
    client_state_of,
    pack_metadata,
    pack_model_states,
    restore_engine,
    stored_decisions,
    stored_position,
    stored_randomness,
    taken_keys,
)
from hytrain.checkpoint.gather import ParameterPlace
from hytrain.checkpoint.random_states import random_states, restore_random_states
from hytrain.checkpoint.reader import LoadRequest, read_checkpoint
from hytrain.checkpoint.tags import find_tag, older_tags
from hytrain.checkpoint.target import SaveTarget
from hytrain.checkpoint.writer import write_checkpoint
from hytrain.comm.exchange import from_first, raise_together
from hytrain.engine.data_position import PositionedDataLoader
from hytrain.engine.deepspeed_internals import DeepSpeedEngine
from hytrain.engine.foreign_checkpoints import universal_tag
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import DamagedCheckpointError

logger = logging.getLogger(__name__)


class EngineCheckpoints:
    """Saves and loads an engine; see :meth:`HyTrainEngine.save_checkpoint` and its counterpart."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        optimizer: HyTrainZeroOptimizer,
        module_tensors: Callable[[], Mapping[str, Any]],
    ) -> None:
        """
        Args:
            engine: whose module, counters and schedule are saved.
            optimizer: of the engine.
            module_tensors: the module's state dict, without waiting for anything.
        """
        self._engine: Any = engine  # with DeepSpeed's private names
        self._optimizer = optimizer
        self._module_tensors = module_tensors

    def save(
        self,
        folder: str,
        tag: str,
        client_state: dict[str, Any],
        *,
        latest: bool,
        no_frozen: bool,
        saver: AsyncSaver | None,
    ) -> None:
        """Saves a checkpoint; a collective.

        Args:
            folder: of checkpoints.
            tag: the checkpoint's name.
            client_state: saved along.
            latest: whether loading without a tag finds this one.
            no_frozen: leave frozen weights out.
            saver: writes it beside training; None: now.

        Raises:
            CheckpointError: a rank could not write, or was called with what cannot be saved.
        """
        optimizer = self._optimizer
        # A rank may have been given something else than the others, which would wait for it.
        no_folder = None if folder else "save_dir is empty: pass the folder to save in"
        refusal = no_folder or unusable_tag(tag) or taken_keys(client_state)
        # Over a group on the host, where there is one: the other waits for the device.
        collectives = optimizer.collectives if saver is None else saver.collectives
        raise_together(refusal, collectives)
        target = SaveTarget(Path(folder), tag, latest)
        randomness = random_states(optimizer.kept.device, collectives)

        def model_states(places: list[ParameterPlace]) -> ModelStates:
            return self._model_states(places, client_state, randomness, no_frozen)

        is_first = optimizer.collectives.rank == 0
        frozen = () if no_frozen else optimizer.weights.frozen_on_first(is_first)
        if saver is not None:
            saver.save(target, model_states, frozen)
            return
        self._engine._checkpoint_tag_validation(tag)
        write_checkpoint(target, optimizer.kept, model_states, frozen)

    def load(
        self,
        folder: Path,
        tag: str | None,
        request: LoadRequest,
        *,
        module_only: bool,
        with_optimizer: bool,
        with_scheduler: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a checkpoint; a collective.

        Args:
            folder: of checkpoints.
            tag: which; None: the latest.
            request: what of it.
            module_only: weights only, and no counters or schedule either.
            with_optimizer: the caller wants the optimizer's state, wherever it comes from.
            with_scheduler: the LR scheduler's state.

        Returns:
            See :meth:`HyTrainEngine.load_checkpoint`.
        """
        engine, optimizer = self._engine, self._optimizer
        found = self._read(folder, tag, request)
        if found is None:
            return None, None
        name, stored = found
        begin_window(engine)
        if not module_only:
            restore_engine(engine, stored, with_scheduler=with_scheduler)
            optimizer.placement.resume(engine.global_steps, stored_decisions(stored))
            position = stored_position(stored)
            loader = engine.training_dataloader
            if position is not None and isinstance(loader, PositionedDataLoader):
                loader.go_on_from(position)
        if request.with_optimizer:
            # Last: what is loaded, and the user's custom_load_fn, may draw numbers.
            restore_random_states(
                stored_randomness(stored), optimizer.kept.device, optimizer.collectives
            )
        client_state = client_state_of(
            stored,
            module_only=module_only,
            with_optimizer=with_optimizer,
            with_scheduler=with_scheduler,
        )
        return str(engine._get_ckpt_name(str(folder), name)), client_state

    def _read(
        self, folder: Path, tag: str | None, request: LoadRequest
    ) -> tuple[str, dict[str, Any]] | None:
        """The tag that was loaded: where the latest is damaged, the newest that is whole."""
        collectives = self._optimizer.collectives
        name: str | None = None
        try:
            name = find_tag(folder, tag, collectives)
            if name is None:
                return None
            found, wanted = name, request.with_optimizer
            name = str(
                from_first(lambda: universal_tag(folder, found, with_optimizer=wanted), collectives)
            )
            return name, self._read_one(folder / name, request)
        except DamagedCheckpointError as error:
            if tag is not None:
                raise
            # Nothing of the engine has been touched; all ranks are here.
            first = error
        for older in older_tags(folder, name, collectives):
            try:
                stored = self._read_one(folder / older, request)
            except DamagedCheckpointError as error:
                logger.warning("'%s' is damaged, too: %s", older, error)
                continue
            logger.warning(
                "THE LATEST CHECKPOINT IS DAMAGED: %s. Loaded in its place: '%s', step %s, the "
                "newest that is whole; what was trained after it is lost (name a tag to have an "
                "error instead)",
                first,
                older,
                stored.get("global_steps"),
            )
            return older, stored
        raise first

    def _read_one(self, folder: Path, request: LoadRequest) -> dict[str, Any]:
        kept, module = self._optimizer.kept, self._engine.module
        return read_checkpoint(folder, kept, module, self._module_tensors, request)

    def _data_position(self) -> Mapping[str, Any] | None:
        loader = self._engine.training_dataloader
        return loader.position() if isinstance(loader, PositionedDataLoader) else None

    def _model_states(
        self,
        places: list[ParameterPlace],
        client_state: Mapping[str, Any],
        randomness: Sequence[Mapping[str, Any]],
        no_frozen: bool,
    ) -> ModelStates:
        # Names, shapes and dtypes are looked at here, and no values: nothing is to be waited for,
        # and seeing to that for each takes milliseconds of an asynchronous save's call.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            common, module = self._common_state(places, no_frozen=no_frozen)
        decisions = self._optimizer.placement.decisions
        objects = pack_model_states(
            common, client_state, decisions, randomness, self._data_position()
        )
        return ModelStates(PickledObjects(objects), module.constants, pack_metadata(objects))

    def _common_state(
        self, places: list[ParameterPlace], *, no_frozen: bool
    ) -> tuple[dict[str, Any], ModuleTensors]:
        tensors = self._module_tensors()
        if no_frozen:
            tensors = {
                name: value
                for name, value in tensors.items()
                if not isinstance(value, torch.nn.Parameter) or value.requires_grad
            }
        module = ModuleTensors(tensors, places)
        # DeepSpeed would copy frozen weights now, and under ZeRO-3 they are not there.
        common = self._engine._common_checkpoint_state(module.state, True, save_frozen_param=False)
        if not no_frozen:
            frozen = self._engine._get_zero_frozen_param_attributes(
                self._engine._get_param_shape_func
            )
            common["frozen_param_shapes"] = frozen
            common["frozen_param_fragments"] = {name: module.state[name] for name in frozen}
        return common, module
