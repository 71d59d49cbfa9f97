"""Loads a checkpoint into an engine of any number of ranks, shards, placement and chunk size.

Nothing is touched before every byte that is to be used has been held against its checksum, each
rank looking at its share of them, and all ranks have agreed: a checkpoint that does not fit leaves
the engine as it was. State is then read by each rank for its own shard only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hytrain.checkpoint.checks import (
    check_groups,
    check_keys,
    check_module,
    check_names,
    check_plain,
    check_states,
    find_problems,
    no_parameters,
    read_state,
    stored_names,
)
from hytrain.checkpoint.file_checks import Listing, find_damage, list_files, load_file
from hytrain.checkpoint.gather import ParameterPlace, Piece, list_parameters
from hytrain.checkpoint.inert import walk
from hytrain.checkpoint.load_sources import (
    Origin,
    check_begun,
    find_origins,
    groups_left_alone,
    merge_steps,
)
from hytrain.checkpoint.universal import (
    STATES,
    STEP,
    CheckpointPaths,
    OptimizerRecord,
    restore_group,
)
from hytrain.comm.exchange import from_first, raise_together
from hytrain.errors import CheckpointError, DamagedCheckpointError
from hytrain.model.moment_format import MomentFormat
from hytrain.optimizer.kept_state import KeptState

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
        trusted: make objects of whatever classes the file names, which runs their code.
    """

    strict: bool
    with_optimizer: bool
    custom_load: Callable[..., Any] | None
    keys: tuple[str, ...]
    trusted: bool

    @property
    def kinds(self) -> tuple[str, ...]:
        """State tensors to read."""
        if self.with_optimizer:
            return STATES
        return () if self.custom_load is not None else STATES[:1]


def read_checkpoint(
    folder: Path,
    kept: KeptState,
    module: nn.Module,
    module_tensors: Callable[[], Mapping[str, Any]],
    request: LoadRequest,
) -> dict[str, Any]:
    """Restores weights, state, steps and hyper-parameters; a collective.

    Gradients since the last step are forgotten.

    Args:
        folder: the checkpoint's.
        kept: the optimizer's.
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
    places = list_parameters(kept.layers)
    found = _inspect(paths, kept, module_tensors, places, request)
    kept.forget_gradients()
    failure: str | None = None
    try:
        _load_module(found.engine, module, kept, request, module_tensors)
        for place, origin in zip(places, found.origins, strict=True):
            _restore(paths, place, origin, kept, request, found.states)
        _restore_progress(paths, kept, places, found)
        _own_memory({key: found.engine[key] for key in found.engine.keys() - _LARGE})
    except Exception as error:
        failure = (
            f"loading {folder} failed half-way ({type(error).__name__}: {error}): the engine's "
            "state is incomplete; load again before training"
        )
    raise_together(failure, kept.collectives)
    kept.publish_masters()
    if found.record is not None and kept.collectives.rank == 0:
        _tell_moments(folder, found.record.moments, kept.moments)
    if not request.with_optimizer and kept.collectives.rank == 0:
        logger.warning(
            "weights only were loaded from %s: moments and step counts start at zero, "
            "hyper-parameters are those that they were",
            folder,
        )
    return found.engine


_LARGE = {"module", "frozen_param_fragments"}


def _own_memory(objects: object) -> None:
    """Tensors that the user is given are no longer those of a file, which may be written over."""
    own: dict[int, torch.UntypedStorage] = {}
    for tensor in {id(found): found for _, found in walk(objects)}.values():
        if isinstance(tensor, torch.Tensor):
            mapped: Any = tensor.untyped_storage()
            if mapped._cdata not in own:
                own[mapped._cdata] = mapped.clone()
            shape, strides = tensor.shape, tensor.stride()
            with torch.no_grad():
                tensor.set_(own[mapped._cdata], tensor.storage_offset(), shape, strides)


@dataclass(slots=True)
class _Found:
    """What a checkpoint has.

    Attributes:
        listing: its files.
        engine: contents of the model states' file.
        record: what the optimizer's file says, where it was asked for.
        origins: where each parameter's state comes from.
        states: (parameter, kind) -> the whole state tensor, of those that this rank has looked at.
    """

    listing: Listing
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    record: OptimizerRecord | None = None
    origins: list[Origin] = field(default_factory=list[Origin])
    states: dict[tuple[str, str], torch.Tensor] = field(
        default_factory=dict[tuple[str, str], torch.Tensor]
    )


def _inspect(
    paths: CheckpointPaths,
    kept: KeptState,
    module_tensors: Callable[[], Mapping[str, Any]],
    places: Sequence[ParameterPlace],
    request: LoadRequest,
) -> _Found:
    """Checks all bytes, reads the small files and checks what they say; a collective.

    Touches nothing.
    """
    ranks = kept.collectives
    listing = from_first(lambda: list_files(paths), ranks)
    assert isinstance(listing, Listing)
    wanted = _wanted(paths, listing, places, request)
    damage = find_damage(paths, listing, wanted, ranks.rank, ranks.world_size)
    raise_together(damage, ranks, DamagedCheckpointError)
    found = _Found(listing)
    try:
        checks = _look(found, paths, kept, module_tensors(), places, request)
        failure = find_problems(checks)
    except CheckpointError as error:
        failure = str(error)
    except Exception as error:
        # Whatever a damaged file makes of itself: the other ranks must hear of it.
        failure = f"{paths.folder} cannot be read ({type(error).__name__}: {error})"
    raise_together(failure, ranks)
    return found


def _look(
    found: _Found,
    paths: CheckpointPaths,
    kept: KeptState,
    current: Mapping[str, Any],
    places: Sequence[ParameterPlace],
    request: LoadRequest,
) -> list[Iterator[str]]:
    """Fills ``found``; returns what looks for reasons why it does not fit."""
    states, strict = stored_names(found.listing.found), request.strict
    stored = found.engine = dict(load_file(paths.model_states, trusted=request.trusted))
    checks = [
        check_plain(paths.model_states, stored),
        check_keys(paths.model_states, stored, request.keys),
    ]
    if request.custom_load is None:
        checks.append(check_module(paths.model_states, stored, current, strict=strict))
    if request.with_optimizer:
        record = found.record = _read_record(paths, trusted=request.trusted)
        checks.append(check_plain(paths.optimizer_state, record.groups))
        count = len(kept.hyper.groups)
        checks.append(check_groups(paths, record, count, places, strict=strict))
        checks.append(check_names(paths, states, places, strict=strict))
    module = stored.get("module", {}) if request.custom_load is None else None
    found.origins = find_origins(places, states, module, current)
    if kept.pipeline.is_partly_committed:
        checks.append(check_begun(places, found.origins))
    # Every state file is looked at once, by the rank that will read most of it.
    rank = kept.collectives.rank
    mine = [place for place in places if place.name in states and _reader_of(place) == rank]
    checks.append(check_states(paths, mine, request.kinds, found.states))
    return checks


def _reader_of(place: ParameterPlace) -> int:
    """The rank that has most of a parameter; the first one where there is nothing of it."""
    return max(place.pieces, key=lambda piece: piece.end - piece.begin, default=_NOTHING).rank


_NOTHING = Piece(0, 0, 0)


def _wanted(
    paths: CheckpointPaths,
    listing: Listing,
    places: Sequence[ParameterPlace],
    request: LoadRequest,
) -> list[str]:
    """The files that a load reads, whether they are there or not; the same on all ranks."""
    files = [paths.model_states]
    known = stored_names(listing.found if listing.manifest is None else listing.manifest)
    states = [place.name for place in places if place.name in known]
    files += [paths.state(name, kind) for name in states for kind in request.kinds]
    if request.with_optimizer:
        files.append(paths.optimizer_state)
        files += [paths.state(name, STEP) for name in states]
    names = [paths.name_of(path) for path in files]
    if request.with_optimizer and listing.manifest is not None:
        # All that was saved is there, though a load that is not strict may not need it.
        names += sorted(listing.manifest.keys() - set(names))
    if listing.manifest is None:
        # Another tool's has what its kind has; what is missed is said where it is missed.
        no_state = not any(name.startswith("zero/") for name in listing.found)
        names = [n for n in names if n in listing.found or not (no_state or n.endswith("step.pt"))]
    return names


def _read_record(paths: CheckpointPaths, *, trusted: bool) -> OptimizerRecord:
    if not paths.zero.is_dir():
        raise CheckpointError(no_parameters(paths))
    path = paths.optimizer_state
    return OptimizerRecord.unpack(load_file(path, trusted=trusted), path)


def _load_module(
    stored: Mapping[str, Any],
    module: nn.Module,
    kept: KeptState,
    request: LoadRequest,
    module_tensors: Callable[[], Mapping[str, Any]],
) -> None:
    if request.custom_load is not None:
        with kept.weights.gathered():
            request.custom_load(src=stored["module"], dst=module)
            kept.weights.adopt()
        return
    weights = dict(stored["module"])
    if kept.weights.is_sharded:
        weights = _load_shards(weights, kept, module_tensors())
    result = module.load_state_dict(weights, strict=request.strict and not kept.weights.is_sharded)
    missing = [name for name in result.missing_keys if name not in stored["module"]]
    if missing or result.unexpected_keys:
        logger.warning(
            "load_module_strict=False: left as they are: %s; not in the model: %s",
            missing,
            result.unexpected_keys,
        )


def _load_shards(
    weights: Mapping[str, Any], kept: KeptState, current: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's pieces of sharded parameters, frozen ones too; returns what is left to load."""
    places = {
        id(slot.parameter): (part.storage, slot)
        for layer in kept.weights.layers
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
    paths: CheckpointPaths,
    place: ParameterPlace,
    origin: Origin,
    kept: KeptState,
    request: LoadRequest,
    states: dict[tuple[str, str], torch.Tensor],
) -> None:
    """This rank's piece of a parameter's state."""
    piece = place.piece_of(kept.collectives.rank)
    if piece is None:
        return
    with torch.no_grad():
        for kind in STATES:
            if origin is Origin.CHECKPOINT and kind in request.kinds:
                whole = states.pop((place.name, kind), None)
                if whole is None:
                    whole = read_state(paths, place, kind)
                place.write(kind, piece, whole.reshape(-1)[piece.begin : piece.end])
            elif origin is Origin.ENGINE and kind in (*request.kinds, STATES[0]):
                pass  # its training copy may be rounded: the master weights stay, too
            elif kind == STATES[0]:
                place.write(kind, piece, place.weights(piece))
            else:
                place.write(kind, piece, torch.zeros(1).expand(piece.end - piece.begin))


def _tell_moments(folder: Path, saved: MomentFormat, here: MomentFormat) -> None:
    """Where training does not go on bit for bit as it would have."""
    if saved.name != here.name:
        how = "to the nearest" if here.is_rounded else "without loss"
        logger.warning(
            '%s has moments that were kept as "%s"; "hytrain.moments" is "%s" here, and they were '
            "converted %s: training goes on with these, not bit for bit as it would have",
            folder,
            saved.name,
            here.name,
            how,
        )
    elif here.is_rounded and saved.seed != here.seed:
        logger.warning(
            '%s was trained with "hytrain.moments_seed" %d, here it is %d: moments are rounded by '
            "other random bits from here on",
            folder,
            saved.seed,
            here.seed,
        )


def _restore_progress(
    paths: CheckpointPaths, kept: KeptState, places: Sequence[ParameterPlace], found: _Found
) -> None:
    """Step counts and hyper-parameters of the groups."""
    record = found.record
    if record is None:
        kept.hyper.steps = [0] * len(kept.hyper.groups)
        return
    kept.scaling.load(record.loss_scale)
    saved = record.steps
    if saved is None:
        saved = _read_steps(paths, found.listing, record.groups, places)
    steps = merge_steps(places, found.origins, saved, kept.hyper.steps)
    if None in steps:
        raise CheckpointError(f"{paths.zero} does not say how many steps were made")
    kept.hyper.steps = [int(count) for count in steps if count is not None]
    kept_groups = groups_left_alone(places, found.origins)
    for index, (group, saved) in enumerate(zip(kept.hyper.groups, record.groups, strict=True)):
        if index not in kept_groups:
            restore_group(group, saved)


def _read_steps(
    paths: CheckpointPaths,
    listing: Listing,
    groups: Sequence[Mapping[str, Any]],
    places: Sequence[ParameterPlace],
) -> list[int | None]:
    """Another tool's checkpoint: a group's steps are those of its first parameter with any."""
    steps: list[int | None] = [group.get(STEP) for group in groups]
    for place in places:
        path = paths.state(place.name, STEP)
        if steps[place.group] is None and paths.name_of(path) in listing.found:
            steps[place.group] = int(load_file(path))
    return steps
