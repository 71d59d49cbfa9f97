"""Saves and loads an engine, as universal checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint.archive_writer import LaterTensor, PickledObjects
from hytrain.checkpoint.async_save import AsyncSaver
from hytrain.checkpoint.commit import unusable_tag
from hytrain.checkpoint.engine_state import (
    DATA,
    PLACEMENT,
    RANDOMNESS,
    client_state_of,
    own_record,
    pack_model_states,
    restore_engine,
    taken_keys,
)
from hytrain.checkpoint.gather import ParameterPlace, list_parameters
from hytrain.checkpoint.reader import LoadRequest, read_checkpoint
from hytrain.checkpoint.save_contents import (
    ModelStates,
    ModelStatesLater,
    ModuleTensors,
    copy_objects,
    copy_tensors,
    restore_random_states,
    take_contents,
)
from hytrain.checkpoint.save_target import SaveTarget
from hytrain.checkpoint.tags import look_up_tag, older_tags
from hytrain.checkpoint.writer import write_contents
from hytrain.comm.exchange import from_first, raise_together
from hytrain.engine.data_position import PositionedDataLoader
from hytrain.engine.deepspeed_internals import DeepSpeedEngine
from hytrain.engine.foreign_checkpoints import universal_tag
from hytrain.engine.saved_structure import SavedStructure
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import CheckpointError, DamagedCheckpointError, HyTrainError
from hytrain.placement.records import Decision

logger = logging.getLogger(__name__)


class EngineCheckpoints:
    """Saves and loads one engine; see :meth:`HyTrainEngine.save_checkpoint` and its counterpart."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        optimizer: HyTrainZeroOptimizer,
        module_tensors: Callable[[], Mapping[str, Any]],
    ) -> None:
        """``module_tensors`` returns the module's state dict, without waiting for anything."""
        self._engine: Any = engine  # with DeepSpeed's private names
        self._optimizer = optimizer
        self._module_tensors = module_tensors
        self._structure = SavedStructure(engine, module_tensors)

    def prepare(self) -> None:
        """Does in advance what would make the first asynchronous save's call longer than others."""
        if self._optimizer.collectives.rank == 0:
            with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
                self._structure.module_tensors(self._places, no_frozen=False)
                with self._structure.answering():
                    pass

    @cached_property
    def _places(self) -> list[ParameterPlace]:
        return list_parameters(self._optimizer.kept.layers)

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
        """See :meth:`HyTrainEngine.save_checkpoint`; a ``saver`` writes beside training."""
        optimizer = self._optimizer
        # A rank may have got other arguments than the others, which would wait for it.
        no_folder = None if folder else "save_dir is empty: pass the folder to save in"
        refusal = no_folder or unusable_tag(tag) or taken_keys(client_state)
        # Over the saver's group on the host, if there is one: the other waits for the device.
        collectives = optimizer.collectives if saver is None else saver.collectives
        raise_together(refusal, collectives)
        target = SaveTarget(Path(folder), tag, latest)
        model_states = partial(
            self._model_states, client=client_state, no_frozen=no_frozen, later=saver is not None
        )
        is_first = optimizer.collectives.rank == 0
        frozen = () if no_frozen else optimizer.weights.frozen_on_first(is_first)
        kept = optimizer.kept
        if saver is not None:
            kept.begin_reading()
        else:
            self._engine._checkpoint_tag_validation(tag)
            kept.flush()  # changes no number
        contents = take_contents(kept, self._places, model_states, collectives)
        if saver is not None:
            saver.save(target, contents, frozen)
        else:
            write_contents(target, contents(), frozen, collectives, kept.device)

    def load(
        self, folder: Path, tag: str | None, request: LoadRequest
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See :meth:`HyTrainEngine.load_checkpoint`."""
        engine = self._engine
        found = self._read(folder, tag, request)
        if found is None:
            return None, None
        name, stored = found
        try:
            self._restore_rest(stored, request)
        except HyTrainError:
            raise
        except Exception as error:  # a file that is not ours may cause any
            raise CheckpointError(
                f"loading {folder / name} failed half-way ({type(error).__name__}: {error}): the "
                "engine's state is incomplete; load again before training"
            ) from error
        client_state = client_state_of(
            stored,
            module_only=request.module_only,
            with_optimizer=request.optimizer_states,
            with_scheduler=request.scheduler_states,
        )
        return str(engine._get_ckpt_name(str(folder), name)), client_state

    def _restore_rest(self, stored: Mapping[str, Any], request: LoadRequest) -> None:
        engine, optimizer = self._engine, self._optimizer
        record = own_record(stored)
        if not request.module_only:
            restore_engine(engine, stored, with_scheduler=request.scheduler_states)
            decisions = [Decision.from_json(entry) for entry in record.get(PLACEMENT, [])]
            optimizer.placement.resume(engine.global_steps, decisions)
            position = record.get(DATA)
            loader = engine.training_dataloader
            if position is not None and isinstance(loader, PositionedDataLoader):
                loader.go_on_from(position)
        if request.with_optimizer:
            # Last: loading, and the user's custom_load_fn, may draw random numbers.
            randomness = record.get(RANDOMNESS)
            restore_random_states(randomness, optimizer.kept.device, optimizer.collectives)

    def _read(
        self, folder: Path, tag: str | None, request: LoadRequest
    ) -> tuple[str, dict[str, Any]] | None:
        """Returns tag and model states: of the newest whole checkpoint if the latest is damaged."""
        collectives = self._optimizer.collectives

        def find() -> str | None:
            found = look_up_tag(folder, tag)
            if found is None:
                return None
            return universal_tag(
                folder, found, with_optimizer=request.with_optimizer, trusted=request.trusted
            )

        name: str | None = None
        try:
            name = from_first(find, collectives)
            if name is None:
                logger.warning(
                    "%s has no file 'latest': nothing is loaded; pass a tag if there is a "
                    "checkpoint",
                    folder,
                )
                return None
            return name, self._read_one(folder / name, request)
        except DamagedCheckpointError as error:
            if tag is not None:
                raise
            # Nothing of the engine has been touched; all ranks are here.
            first = error
        for older in from_first(partial(older_tags, folder, name), collectives):
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

    def _model_states(
        self, *, client: Mapping[str, Any], no_frozen: bool, later: bool
    ) -> ModelStatesLater:
        # Only names, shapes and dtypes are read here, no values: no update need be waited for, and
        # checking that for each tensor takes milliseconds of an asynchronous save's call.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            common, module = self._common_state(no_frozen=no_frozen)
        decisions = tuple(self._optimizer.placement.decisions)
        loader = self._engine.training_dataloader
        position = loader.position() if isinstance(loader, PositionedDataLoader) else None
        taken = common, client, position
        if later:
            taken = _copied(*taken)

        def put_together(randomness: Sequence[Mapping[str, Any]]) -> ModelStates:
            states, client, position = taken
            objects = pack_model_states(states, client, decisions, randomness, position)
            metadata = {**objects, "module": {}, "frozen_param_fragments": {}}
            return ModelStates(PickledObjects(objects), module.constants, metadata)

        return put_together

    def _common_state(self, *, no_frozen: bool) -> tuple[dict[str, Any], ModuleTensors]:
        module = self._structure.module_tensors(self._places, no_frozen=no_frozen)
        # DeepSpeed would copy frozen weights now, and under ZeRO-3 they are not there.
        with self._structure.answering():
            common = self._engine._common_checkpoint_state(
                module.state, True, save_frozen_param=False
            )
        if not no_frozen:
            frozen = {one.name: one.tensor.shape for one in module.constants.values()}
            common["frozen_param_shapes"] = frozen
            common["frozen_param_fragments"] = {name: module.state[name] for name in frozen}
        return common, module


_KNOWN = (
    "buffer_names",
    "param_shapes",
    "shared_params",
    "frozen_param_shapes",
    "frozen_param_fragments",
)
"""Keys that follow from the module's structure: nobody changes their objects."""


def _copied(
    common: Mapping[str, Any],
    client: Mapping[str, Any],
    position: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], Mapping[str, Any], Mapping[str, Any] | None]:
    """Copies all of it, so that later changes do not reach the save."""
    state = common["module"]
    buffers = {name: v for name, v in state.items() if isinstance(v, torch.Tensor)}
    own = torch.Tensor, LaterTensor
    others = {name: value for name, value in state.items() if not isinstance(value, own)}
    changing = {key: value for key, value in common.items() if key not in (*_KNOWN, "module")}
    others, changing, client, position = copy_objects((others, changing, client, position))
    state = {**state, **copy_tensors(buffers), **others}
    return {**common, **changing, "module": state}, client, position
