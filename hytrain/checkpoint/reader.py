"""Loads a checkpoint into an engine of any number of ranks, shards, placement and chunk size.

Nothing is touched before every file has been looked at, each rank looking at its share of them,
and all ranks have agreed: a checkpoint that does not fit leaves the engine as it was. State is
read by each rank for its own shard only, from mapped files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hytrain.checkpoint.checks import (
    check_groups,
    check_keys,
    check_module,
    check_names,
    check_states,
    find_problems,
    no_parameters,
    read_file,
    read_state,
    stored_names,
)
from hytrain.checkpoint.gather import ParameterPlace, list_parameters
from hytrain.checkpoint.universal import (
    LATEST,
    STATES,
    STEP,
    CheckpointPaths,
    OptimizerRecord,
    restore_group,
)
from hytrain.errors import CheckpointError
from hytrain.optim.zero_optimizer import HyTrainZeroOptimizer
from hytrain.parallel.collectives import ShardCollectives
from hytrain.parallel.exchange import from_first, raise_together

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load.

    Attributes:
        strict: names must match; else what both have is loaded.
        with_optimizer: moments, steps and hyper-parameters too. False: weights only; master
            weights are the checkpoint's fp32 ones where it has them, else the training copy's;
            moments and step counts start at zero, hyper-parameters stay as they are.
        custom_load: called as ``custom_load(src=module state, dst=module)`` in place of
            ``module.load_state_dict``. Without the optimizer, master weights are what it leaves
            in the module.
        keys: what the model states' file must hold.
    """

    strict: bool
    with_optimizer: bool
    custom_load: Callable[..., Any] | None
    keys: tuple[str, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """State tensors to read."""
        if self.with_optimizer:
            return STATES
        return () if self.custom_load is not None else STATES[:1]


def find_tag(load_dir: Path, tag: str | None, collectives: ShardCollectives) -> str | None:
    """The tag to load, as rank 0 sees it; a collective.

    Returns:
        The tag, or None, with a warning, where none was given and there is no ``latest``.

    Raises:
        CheckpointError: there is no such checkpoint.
    """

    found = from_first(lambda: _look(load_dir, tag), collectives)
    if found is None:
        logger.warning(
            "%s has no file 'latest': nothing is loaded; pass a tag if there is a checkpoint",
            load_dir,
        )
        return None
    return str(found)


def _look(load_dir: Path, tag: str | None) -> str | None:
    if tag is None:
        tag = _latest(load_dir)
        if tag is None:
            return None
    if not (load_dir / tag).is_dir():
        tags = sorted(p.name for p in load_dir.iterdir() if p.is_dir()) if load_dir.is_dir() else []
        advice = f"pass one of the tags {', '.join(tags)}" if tags else "the folder has none at all"
        raise CheckpointError(f"there is no checkpoint '{tag}' in {load_dir}: {advice}")
    return tag


def _latest(load_dir: Path) -> str | None:
    files = [load_dir / name for name in LATEST]
    tags = [path.read_text(encoding="utf-8").strip() for path in files if path.is_file()]
    if len(tags) == len(files):
        newest, universal = tags
        # DeepSpeed's converter leaves the checkpoint that it read the latest one.
        is_universal = CheckpointPaths(load_dir / universal).zero.is_dir()
        if is_universal and _is_foreign(load_dir / newest):
            logger.warning(
                "%s names '%s', which is no universal checkpoint: '%s' is loaded, the latest one "
                "that was converted",
                files[0],
                newest,
                universal,
            )
            return universal
    return tags[0] if tags else None


def _is_foreign(folder: Path) -> bool:
    return folder.is_dir() and not CheckpointPaths(folder).zero.is_dir()


def read_checkpoint(
    folder: Path,
    optimizer: HyTrainZeroOptimizer,
    module: nn.Module,
    module_tensors: Callable[[], Mapping[str, Any]],
    request: LoadRequest,
) -> dict[str, Any]:
    """Restores weights, state, steps and hyper-parameters; a collective.

    Gradients since the last step are forgotten.

    Args:
        folder: the checkpoint's.
        optimizer: the engine's.
        module: the engine's model.
        module_tensors: the model's state dict, without waiting for anything.
        request: see :class:`LoadRequest`.

    Returns:
        Contents of the model states' file.

    Raises:
        CheckpointError: it does not fit, on whichever rank: nothing was touched. Or reading failed
            half-way, which the message says.
    """
    paths = CheckpointPaths(folder)
    places = list_parameters(optimizer.layer_states)
    found = _inspect(paths, optimizer, module_tensors, places, request)
    _forget_gradients(optimizer)
    failure: str | None = None
    try:
        _load_module(found.engine, module, optimizer, request, module_tensors)
        for place in places:
            _restore(paths if place.name in found.states else None, place, optimizer, request)
        _restore_progress(paths, optimizer, places, found.record)
    except Exception as error:
        failure = (
            f"loading {folder} failed half-way ({type(error).__name__}: {error}): the engine's "
            "state is incomplete; load again before training"
        )
    raise_together(failure, optimizer.collectives)
    _publish(optimizer)
    return found.engine


@dataclass(frozen=True, slots=True)
class _Found:
    """What a checkpoint has.

    Attributes:
        engine: contents of the model states' file.
        record: what the optimizer's file says, where it was asked for.
        states: names of the parameters with state.
    """

    engine: dict[str, Any]
    record: OptimizerRecord | None
    states: Set[str]


def _inspect(
    paths: CheckpointPaths,
    optimizer: HyTrainZeroOptimizer,
    module_tensors: Callable[[], Mapping[str, Any]],
    places: Sequence[ParameterPlace],
    request: LoadRequest,
) -> _Found:
    """Reads the small files and checks everything; a collective. Touches nothing."""
    rank, world = optimizer.collectives.rank, optimizer.collectives.world_size
    stored: dict[str, Any] = {}
    record: OptimizerRecord | None = None
    states: Set[str] = frozenset()
    failure: str | None = None
    try:
        states = stored_names(paths)
        stored = dict(read_file(paths.model_states))
        strict = request.strict
        checks = [check_keys(paths.model_states, stored, request.keys)]
        if request.custom_load is None:
            current = module_tensors()
            checks.append(check_module(paths.model_states, stored, current, strict=strict))
        if request.with_optimizer:
            record = _read_record(paths)
            count = len(optimizer.param_groups)
            checks.append(check_groups(paths, record, count, places, strict=strict))
            checks.append(check_names(paths, states, places, strict=strict))
        # Every state file is looked at once, by whichever rank's turn it is.
        mine = [place for place in places[rank::world] if place.name in states]
        checks.append(check_states(paths, mine, request.kinds))
        failure = find_problems(checks)
    except CheckpointError as error:
        failure = str(error)
    except Exception as error:
        # Whatever a damaged file makes of itself: the other ranks must hear of it.
        failure = f"{paths.folder} cannot be read ({type(error).__name__}: {error})"
    raise_together(failure, optimizer.collectives)
    return _Found(stored, record, states)


def _read_record(paths: CheckpointPaths) -> OptimizerRecord:
    if not paths.zero.is_dir():
        raise CheckpointError(no_parameters(paths))
    try:
        return OptimizerRecord.unpack(read_file(paths.optimizer_state))
    except CheckpointError as error:
        text, name = str(error), str(paths.optimizer_state)
        raise CheckpointError(text if name in text else f"{name} {text}") from None


def _forget_gradients(optimizer: HyTrainZeroOptimizer) -> None:
    if optimizer.pipeline.norm.settings.direct:
        # Updates are committed as they arrive; what they wrote is about to be replaced.
        optimizer.pipeline.cpu.wait_all()
        for layer in optimizer.layer_states:
            if layer.sent:
                layer.sent = False
                layer.gradient = None
                layer.waited = True
    optimizer.discard_gradients()
    optimizer.flush()


def _load_module(
    stored: Mapping[str, Any],
    module: nn.Module,
    optimizer: HyTrainZeroOptimizer,
    request: LoadRequest,
    module_tensors: Callable[[], Mapping[str, Any]],
) -> None:
    if request.custom_load is not None:
        with optimizer.weights.gathered():
            request.custom_load(src=stored["module"], dst=module)
            optimizer.weights.adopt()
        return
    weights = dict(stored["module"])
    if optimizer.weights.is_sharded:
        weights = _load_shards(weights, optimizer, module_tensors())
    result = module.load_state_dict(
        weights, strict=request.strict and not optimizer.weights.is_sharded
    )
    missing = [name for name in result.missing_keys if name not in stored["module"]]
    if missing or result.unexpected_keys:
        logger.warning(
            "load_module_strict=False: left as they are: %s; not in the model: %s",
            missing,
            result.unexpected_keys,
        )


def _load_shards(
    weights: Mapping[str, Any], optimizer: HyTrainZeroOptimizer, current: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's pieces of sharded parameters, frozen ones too; returns what is left to load."""
    places = {
        id(slot.parameter): (part.storage, slot)
        for layer in optimizer.weights.layers
        for part in layer.sharded
        for slot in part.layout.slots
    }
    rest = dict(weights)
    for name in set(weights) & set(current):
        place = places.get(id(current[name]))
        if place is not None:
            storage, slot = place
            storage.take(slot, rest.pop(name))
    return rest


def _restore(
    paths: CheckpointPaths | None,
    place: ParameterPlace,
    optimizer: HyTrainZeroOptimizer,
    request: LoadRequest,
) -> None:
    """This rank's piece of a parameter's state: the checkpoint's, else made from the weights."""
    piece = place.piece_of(optimizer.collectives.rank)
    if piece is None:
        return
    with torch.no_grad():
        for kind in STATES:
            target = place.state(kind, piece)
            if paths is not None and kind in request.kinds:
                whole = read_state(paths, place, kind).reshape(-1)
                target.copy_(whole[piece.begin : piece.end])
            elif kind == STATES[0]:
                target.copy_(place.weights(piece))
            else:
                target.zero_()


def _restore_progress(
    paths: CheckpointPaths,
    optimizer: HyTrainZeroOptimizer,
    places: Sequence[ParameterPlace],
    record: OptimizerRecord | None,
) -> None:
    """Step counts and hyper-parameters of the groups."""
    if record is None:
        optimizer.steps = [0] * len(optimizer.param_groups)
        return
    steps = record.steps
    optimizer.steps = steps if steps is not None else _read_steps(paths, record.groups, places)
    for group, saved in zip(optimizer.param_groups, record.groups, strict=True):
        restore_group(group, saved)


def _read_steps(
    paths: CheckpointPaths, groups: Sequence[Mapping[str, Any]], places: Sequence[ParameterPlace]
) -> list[int]:
    """Another tool's checkpoint: a group's steps are those of its first parameter with any."""
    steps: list[int | None] = [group.get(STEP) for group in groups]
    for place in places:
        path = paths.state(place.name, STEP)
        if steps[place.group] is None and path.is_file():
            steps[place.group] = int(read_file(path))
    if any(step is None for step in steps):
        raise CheckpointError(f"{paths.zero} does not say how many steps were made")
    return [int(step) for step in steps if step is not None]


def _publish(optimizer: HyTrainZeroOptimizer) -> None:
    """The training copy becomes the master weights', on all ranks; a collective."""
    pipeline = optimizer.pipeline
    with torch.no_grad():
        for layer in pipeline.layers:
            for start, weights in layer.storage.shard_slices(layer.begin, layer.end):
                at = start - layer.begin
                weights.copy_(layer.master[at : at + weights.numel()])
    # The gather runs beside the compute stream and does not wait for these copies.
    pipeline.streams.synchronize()
    for layer in pipeline.layers:
        layer.waited = False
        layer.gather_due = not layer.storage.is_sharded
        layer.storage.mark_overwritten()
    for weights in optimizer.weights.layers:
        if weights.frozen is not None:
            weights.frozen.storage.mark_overwritten()
    pipeline.wait_all()
    pipeline.streams.synchronize()
