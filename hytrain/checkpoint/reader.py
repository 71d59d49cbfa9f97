"""Loads a checkpoint into an engine of any number of ranks, shards, placement and chunk size.

The engine is not touched before every byte that is to be used has been checked against its
checksum, a share of them by each rank, and all ranks have agreed: a checkpoint that does not fit
leaves the engine as it was. State is then read by each rank for its own shard only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hytrain.checkpoint import inert, torch_files
from hytrain.checkpoint.engine_state import COUNTERS
from hytrain.checkpoint.gather import STATES, ParameterPlace, Piece, list_parameters
from hytrain.checkpoint.host_parts import find_holders
from hytrain.checkpoint.load_checks import (
    check_groups,
    check_keys,
    check_module,
    check_names,
    check_plain,
    read_state,
)
from hytrain.checkpoint.load_sources import (
    Origin,
    check_begun,
    find_origins,
    groups_left_alone,
    merge_steps,
)
from hytrain.checkpoint.progress import Progress
from hytrain.checkpoint.stored_files import StoredFiles, shortened
from hytrain.checkpoint.universal import (
    STEP,
    CheckpointPaths,
    OptimizerRecord,
    no_parameters,
    restore_group,
)
from hytrain.comm.exchange import Transfer, exchange, from_first, raise_together
from hytrain.errors import CheckpointError, DamagedCheckpointError
from hytrain.model.state_format import StateFormat
from hytrain.optimizer.kept_state import KeptState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load.

    Attributes:
        strict: names must match; else what both have is loaded.
        module_only: load weights only, without counters and schedule.
        optimizer_states: moments, steps and hyper-parameters are wanted, from here or elsewhere.
        custom_load: called as ``custom_load(src=module state, dst=module)`` in place of
            ``module.load_state_dict``. Without the optimizer, master weights are what it leaves
            in the module.
        trusted: make objects of any classes that the file names, which runs their code.
    """

    strict: bool
    module_only: bool
    optimizer_states: bool
    scheduler_states: bool
    custom_load: Callable[..., Any] | None
    trusted: bool

    @property
    def with_optimizer(self) -> bool:
        """Whether the optimizer's state is loaded; if not, weights only.

        Then master weights are the checkpoint's fp32 ones if it has them, else the training copy's;
        moments and step counts start at zero, hyper-parameters stay as they are.
        """
        return self.optimizer_states and not self.module_only

    def kinds_of(self, place: ParameterPlace) -> tuple[str, ...]:
        """Names of the state tensors to read."""
        if self.with_optimizer:
            return place.kinds
        return () if self.custom_load is not None else STATES[:1]


_LARGE = {"module", "frozen_param_fragments"}
_NOTHING = Piece(0, 0, 0)
_STATE_BYTES = 12
"""Bytes of an element in files: fp32 master weight and moments."""


def read_checkpoint(
    folder: Path,
    kept: KeptState,
    module: nn.Module,
    module_tensors: Callable[[], Mapping[str, Any]],
    request: LoadRequest,
) -> dict[str, Any]:
    """Restores weights, state, steps and hyper-parameters; a collective.

    Gradients since the last step are dropped. ``module_tensors`` gives the model's state dict,
    without waiting for anything.

    Returns:
        Contents of the model states' file.

    Raises:
        CheckpointError: it does not fit on some rank: nothing was touched. Or reading failed
            half-way, which the message says.
    """
    load = _Load(folder, kept, module_tensors, request)
    load.inspect()
    kept.forget_gradients()
    failure: str | None = None
    try:
        load.restore(module)
    except Exception as error:
        failure = (
            f"loading {folder} failed half-way ({type(error).__name__}: {error}): the engine's "
            "state is incomplete; load again before training"
        )
    raise_together(failure, kept.collectives)
    kept.publish_masters()
    if kept.collectives.rank == 0:
        if load.record is not None:
            _tell_moments(folder, load.record.moments, kept.form)
        if not request.with_optimizer:
            logger.warning(
                "only weights were loaded from %s: moments and step counts start at zero, "
                "hyper-parameters are unchanged",
                folder,
            )
    return load.stored


class _Load:
    """One load, and what is known of the checkpoint so far.

    Attributes:
        stored: contents of the model states' file.
        record: what the optimizer's file says, if it was asked for.
    """

    def __init__(
        self,
        folder: Path,
        kept: KeptState,
        module_tensors: Callable[[], Mapping[str, Any]],
        request: LoadRequest,
    ) -> None:
        self._paths, self._kept, self._request = CheckpointPaths(folder), kept, request
        self._module_tensors = module_tensors
        self._places = list_parameters(kept.layers)
        self._files = StoredFiles(self._paths, {}, None)
        self.stored: dict[str, Any] = {}
        self.record: OptimizerRecord | None = None
        self._origins: list[Origin] = []
        # Whole state tensors that this rank has looked at, memory-mapped.
        self._states: dict[tuple[str, str], torch.Tensor] = {}
        # If hosts have parts of the checkpoint, the rank that reads each file; else empty.
        self._holders: dict[str, int] = {}
        self._failure: Exception | None = None

    def inspect(self) -> None:
        """Checks all bytes, reads the small files and checks what they say; a collective.

        Does not touch the engine.
        """
        ranks = self._kept.collectives
        files = from_first(lambda: StoredFiles.of(self._paths), ranks)
        self._files = replace(files, paths=self._paths)  # the folder may have another name here
        wanted, share = self._wanted(), (ranks.rank, ranks.world_size)
        if files.hosts:
            self._files, self._holders = find_holders(self._files, ranks)
            wanted, share = [n for n in wanted if self._holders.get(n) == ranks.rank], (0, 1)
        damage = self._files.find_damage(wanted, *share)
        raise_together(damage, ranks, DamagedCheckpointError)
        try:
            failure = shortened(list(self._look()), "; ") or None
        except CheckpointError as error:
            failure = str(error)
        except Exception as error:
            # A damaged file may raise anything, and the other ranks must hear of it.
            failure = f"{self._paths.folder} cannot be read ({type(error).__name__}: {error})"
        raise_together(failure, ranks)

    def _wanted(self) -> list[str]:
        """The files that a load reads, whether they are there or not; the same on all ranks."""
        paths, found, request = self._paths, self._files.found, self._request
        known = self._files.parameters
        files = [paths.model_states]
        states = [place for place in self._places if place.name in known]
        files += [paths.state(x.name, kind) for x in states for kind in request.kinds_of(x)]
        if request.with_optimizer:
            files.append(paths.optimizer_state)
            files += [paths.state(place.name, STEP) for place in states]
        names = [paths.name_of(path) for path in files]
        if self._files.manifest is None:
            # What another tool writes depends on its kind; missing files are reported when needed.
            no_state = not any(name.startswith("zero/") for name in found)
            names = [n for n in names if n in found or not (no_state or n.endswith("step.pt"))]
        elif request.with_optimizer:
            # All that was saved must be there, though a load that is not strict may not need it.
            names += sorted(set(self._files.saved) - set(names))
        return names

    def _look(self) -> Iterator[str]:
        """Reads the small files; yields reasons why they do not fit."""
        paths, kept, request, places = self._paths, self._kept, self._request, self._places
        states, current = self._files.parameters, self._module_tensors()
        stored = self.stored = dict(
            torch_files.load_states(paths.model_states, trusted=request.trusted)
        )
        yield from check_plain(paths.model_states, stored)
        keys = ("module",) if request.module_only else ("module", *COUNTERS)
        yield from check_keys(paths.model_states, stored, keys)
        if request.custom_load is None:
            yield from check_module(paths.model_states, stored, current, strict=request.strict)
        if request.with_optimizer:
            if not paths.zero.is_dir():
                raise CheckpointError(no_parameters(paths))
            record = OptimizerRecord.read(paths.optimizer_state, trusted=request.trusted)
            self.record = record
            yield from check_plain(paths.optimizer_state, record.groups)
            count = len(kept.hyper.groups)
            yield from check_groups(paths, record, count, places, strict=request.strict)
            yield from check_names(paths, states, places, strict=request.strict)
        module = stored.get("module", {}) if request.custom_load is None else None
        self._origins = find_origins(places, states, module, current)
        if kept.pipeline.is_partly_committed:
            yield from check_begun(places, self._origins)
        # Every state file is looked at once, by the rank that will read most of it.
        rank = kept.collectives.rank
        mine = [place for place in places if place.name in states]
        for place, kind in ((x, kind) for x in mine for kind in request.kinds_of(x)):
            if self._reader_of(place, kind) != rank:
                continue
            try:
                self._states[place.name, kind] = read_state(paths, place, kind)
            except CheckpointError as error:
                yield str(error)

    def restore(self, module: nn.Module) -> None:
        """Loads into the engine, on this rank."""
        self._load_module(module)
        rank = self._kept.collectives.rank
        pieces = [place.piece_of(rank) for place in self._places]
        sizes = [0 if piece is None else piece.end - piece.begin for piece in pieces]
        progress = Progress(f"loading {self._paths.folder}", _STATE_BYTES * sum(sizes), rank)
        with torch.no_grad():
            for place, origin, piece in zip(self._places, self._origins, pieces, strict=True):
                if piece is not None or self._holders:
                    piece = piece or _NOTHING
                    self._restore_state(place, piece, origin)
                    progress.add(_STATE_BYTES * (piece.end - piece.begin))
        if self._failure is not None:
            raise self._failure
        self._restore_progress()
        _own_memory({key: self.stored[key] for key in self.stored.keys() - _LARGE})

    def _load_module(self, module: nn.Module) -> None:
        kept, request = self._kept, self._request
        if request.custom_load is not None:
            with kept.weights.gathered():
                request.custom_load(src=self.stored["module"], dst=module)
                kept.weights.adopt()
            return
        weights = dict(self.stored["module"])
        is_sharded = kept.weights.is_sharded
        if is_sharded:
            self._load_shards(weights)
        result = module.load_state_dict(weights, strict=request.strict and not is_sharded)
        missing = [name for name in result.missing_keys if name not in self.stored["module"]]
        if missing or result.unexpected_keys:
            logger.warning(
                "load_module_strict=False: left as they are: %s; not in the model: %s",
                missing,
                result.unexpected_keys,
            )

    def _load_shards(self, weights: dict[str, Any]) -> None:
        """Takes this rank's pieces of sharded parameters, frozen ones too, out of ``weights``."""
        places = {
            id(slot.parameter): (part.storage, slot)
            for layer in self._kept.weights.layers
            for part in layer.sharded
            for slot in part.layout.slots
        }
        current = self._module_tensors()
        for name in set(weights) & set(current):
            place = places.get(id(current[name]))
            if place is not None:
                storage, slot = place
                storage.take(slot, weights.pop(name))

    def _restore_state(self, place: ParameterPlace, piece: Piece, origin: Origin) -> None:
        """Restores this rank's piece of a parameter's state."""
        kinds = self._request.kinds_of(place)
        for kind in place.kinds:
            if origin is Origin.CHECKPOINT and kind in kinds:
                values = self._values(place, kind, piece)
            elif piece is _NOTHING:
                continue
            elif origin is Origin.ENGINE and kind in (*kinds, STATES[0]):
                continue  # its training copy may be rounded: the master weights stay, too
            elif kind == STATES[0]:
                values = place.weights(piece)
            else:
                values = torch.zeros(1).expand(piece.end - piece.begin)
            if piece is not _NOTHING:
                place.write(kind, piece, values)

    def _values(self, place: ParameterPlace, kind: str, piece: Piece) -> torch.Tensor:
        """This rank's piece of a state tensor; a collective if hosts have parts."""
        ranks, holder = self._kept.collectives, self._reader_of(place, kind)
        if not self._holders:
            return self._whole(place, kind)[piece.begin : piece.end]
        whole, mine = None, torch.empty(piece.end - piece.begin)
        if ranks.rank == holder:
            try:
                whole = self._whole(place, kind).to(mine.dtype)
            except Exception as error:  # the others wait for it
                self._failure, whole = self._failure or error, torch.zeros(place.numel)
        transfers = [
            Transfer(
                holder,
                each.rank,
                each.end - each.begin,
                outgoing=None if whole is None else whole[each.begin : each.end],
                incoming=mine if each.rank == ranks.rank else None,
            )
            for each in place.pieces
        ]
        exchange(transfers, ranks, self._kept.device)
        return mine

    def _whole(self, place: ParameterPlace, kind: str) -> torch.Tensor:
        whole = self._states.pop((place.name, kind), None)
        return (read_state(self._paths, place, kind) if whole is None else whole).reshape(-1)

    def _reader_of(self, place: ParameterPlace, kind: str) -> int:
        """The rank that reads a state tensor: it has the file, else most of the parameter."""
        name = self._paths.name_of(self._paths.state(place.name, kind))
        most = max(place.pieces, key=lambda piece: piece.end - piece.begin, default=_NOTHING)
        return self._holders.get(name, most.rank)

    def _restore_progress(self) -> None:
        """Restores the loss scale, and the groups' step counts and hyper-parameters."""
        hyper, record, places = self._kept.hyper, self.record, self._places
        if record is None:
            hyper.steps = [0] * len(hyper.groups)
            return
        self._kept.scaling.load(record.loss_scale)
        saved = self._read_steps(record.groups) if record.steps is None else record.steps
        steps = merge_steps(places, self._origins, saved, hyper.steps)
        if None in steps:
            raise CheckpointError(f"{self._paths.zero} does not say how many steps were made")
        hyper.steps = [int(count) for count in steps if count is not None]
        kept_groups = groups_left_alone(places, self._origins)
        for index, (group, values) in enumerate(zip(hyper.groups, record.groups, strict=True)):
            if index not in kept_groups:
                restore_group(group, values)

    def _read_steps(self, groups: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """Steps in another tool's checkpoint: each group's, else its first parameter's with any."""
        steps: list[int | None] = [group.get(STEP) for group in groups]
        for place in self._places:
            path = self._paths.state(place.name, STEP)
            if steps[place.group] is None and self._paths.name_of(path) in self._files.found:
                steps[place.group] = int(torch_files.load(path))
        return steps


def _own_memory(objects: object) -> None:
    """Gives the user's tensors their own memory: the file they map may be overwritten."""
    own: dict[int, torch.UntypedStorage] = {}
    for tensor in {id(found): found for _, found in inert.walk(objects)}.values():
        if isinstance(tensor, torch.Tensor):
            mapped: Any = tensor.untyped_storage()
            if mapped._cdata not in own:
                own[mapped._cdata] = mapped.clone()
            shape, strides = tensor.shape, tensor.stride()
            with torch.no_grad():
                tensor.set_(own[mapped._cdata], tensor.storage_offset(), shape, strides)


def _tell_moments(folder: Path, saved: StateFormat, here: StateFormat) -> None:
    """Warns if training does not go on bit for bit as it would have."""
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
