"""Makes objects of an archive's pickle; large tensors stay in the file until they are used.

The pickle is read twice. First nothing is made but a map of where each tensor's elements are: no
class of anybody's is looked up, so that a damaged file can be asked, too. Then the objects are
made. Elements below keys that may wait are mapped and returned checked, piece by piece
(``checked_tensor.py``); all others are read and checked here.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.serialization import StorageType
from torch.storage import TypedStorage

from hytrain.checkpoint.archive import Archive
from hytrain.checkpoint.checked_tensor import Mapped
from hytrain.errors import CheckpointError
from hytrain.kernels.host_limits import describe_free_memory
from hytrain.kernels.host_memory import is_out_of_host_memory

LAZY = ("module", "frozen_param_fragments", "param")
"""Keys that have large tensors."""

_PLAIN = ("_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2")
"""What makes tensors that are nothing but elements, shape and strides; their first argument."""

_MOVED = {"torch.tensor": "torch._tensor"}
"""Modules that old files name otherwise; torch has the same table."""


def load_archive(archive: Archive, *, wait: Sequence[str] = LAZY) -> Any:
    """The objects in a file, tensors on the CPU.

    Args:
        archive: the file.
        wait: keys of the file's dict whose tensors are read where they are used.

    Raises:
        CheckpointError: it is damaged.
        OSError: it cannot be read.
    """
    content = archive.pickled()
    mapped = Mapped(archive.file)
    try:
        lazy = _lazy_keys(content, wait)
        loaded = _Unpickler(content, archive, mapped, lazy).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        seen = f"{archive.file.path} cannot be read ({type(error).__name__}: {error})"
        if is_out_of_host_memory(error):
            raise CheckpointError(
                f"{seen}: the host has no memory for it; {describe_free_memory()}: free "
                "some, or use more ranks or hosts"
            ) from error
        raise CheckpointError(
            f"{seen}: the file is damaged, or a class in it is not there; load another tag"
        ) from error
    return _with_checked(loaded, mapped, wait) if lazy else loaded


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, for messages.

    Attributes:
        name: as ``"module: 'blocks.0.weight'"``.
        key: of the storage that its elements are in.
        begin, end: where in the storage, in bytes.
    """

    name: str
    key: str
    begin: int
    end: int


def stored_tensors(archive: Archive) -> list[StoredTensor]:
    """The tensors in a file.

    Raises:
        Exception: whatever a damaged file makes of itself.
    """
    tensors: list[StoredTensor] = []
    for path, place in _walk((), _Mapper(archive.pickled()).load()):
        first, *rest = path or ("the tensor",)
        name = f"{first}: '{'.'.join(rest)}'" if rest else f"'{first}'"
        tensors.append(StoredTensor(name, place.key, place.begin, place.end))
    return tensors


@dataclass(frozen=True, slots=True)
class _Place:
    """In place of a tensor or a storage: ``[begin, end)`` of a storage's bytes."""

    key: str
    begin: int
    end: int
    item_bytes: int


class _Anything:
    """In place of an object of any class; knows what it was made of."""

    parts: list[object]

    def __new__(cls, *arguments: object, **named: object) -> _Anything:
        made = super().__new__(cls)
        made.parts = [*arguments, *named.values()]
        return made

    def __init__(self, *arguments: object, **named: object) -> None: ...

    def __call__(self, *arguments: object) -> _Anything:
        self.parts.extend(arguments)
        return self

    def __setstate__(self, state: object) -> None:
        self.parts.append(state)

    def __setitem__(self, key: object, value: object) -> None:
        self.parts.append(value)

    def append(self, value: object) -> None:
        self.parts.append(value)

    def extend(self, values: Sequence[object]) -> None:
        self.parts.extend(values)

    add, update = append, extend  # what sets are filled by


class _Mapper(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if name.endswith("Storage"):
            return _item_bytes(name)
        return _narrowed if name in _PLAIN else _Anything

    def persistent_load(self, pid: Any) -> _Place:
        _, item_bytes, key, _, numel = pid
        return _Place(key, 0, numel * item_bytes, item_bytes)


def _item_bytes(storage: str) -> int:
    return 1 if storage == "UntypedStorage" else StorageType(storage).dtype.itemsize


def _narrowed(whole: Any, offset: Any = None, size: Any = (), stride: Any = (), *_: object) -> Any:
    """The part of a storage that a tensor has; a parameter has all of its tensor."""
    if not isinstance(whole, _Place) or not isinstance(size, tuple) or isinstance(offset, bool):
        return whole
    steps = zip(cast("tuple[int, ...]", size), stride, strict=True)
    begin = offset * whole.item_bytes
    extent = 1 + sum((count - 1) * step for count, step in steps)
    return replace(whole, begin=begin, end=begin + extent * whole.item_bytes)


def _walk(path: tuple[str, ...], found: object) -> Iterator[tuple[tuple[str, ...], _Place]]:
    if isinstance(found, _Anything):
        found = found.parts
    if isinstance(found, _Place):
        yield path, found
    elif isinstance(found, Mapping):
        for key, value in cast("Mapping[object, object]", found).items():
            yield from _walk((*path, str(key)), value)
    elif isinstance(found, (list, tuple)):
        for index, value in enumerate(cast("Sequence[object]", found)):
            yield from _walk((*path, str(index)), value)


def _lazy_keys(content: bytes, wait: Sequence[str]) -> set[str]:
    """Storages that may wait: nothing but plain tensors right under these keys have them."""
    lazy: set[str] = set()
    others: set[str] = set()
    for path, place in _walk((), _Mapper(content).load()):
        may_wait = 1 <= len(path) <= 2 and path[0] in wait
        (lazy if may_wait else others).add(place.key)
    return lazy - others


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, archive: Archive, mapped: Mapped, lazy: Set[str]) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._archive = archive
        self._mapped = mapped
        self._lazy = lazy
        self._storages: dict[str, TypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name:
            try:
                return StorageType(name)
            except KeyError:
                pass
        return super().find_class(_MOVED.get(module, module), name)

    def persistent_load(self, pid: Any) -> TypedStorage:
        word, kind, key, _, numel = pid
        if word != "storage":
            raise ValueError(f"a {word} where a storage was expected")
        if key not in self._storages:
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            self._storages[key] = TypedStorage(
                wrap_storage=self._storage(key, numel * dtype.itemsize),
                dtype=dtype,
                _internal=True,
            )
        return self._storages[key]

    def _storage(self, key: str, num_bytes: int) -> torch.UntypedStorage:
        if num_bytes == 0:
            return torch.UntypedStorage(0)
        record = self._archive.elements(key)
        if record.end - record.begin != num_bytes:
            raise ValueError(f"record {key} has not the {num_bytes} bytes that its tensor has")
        if key in self._lazy:
            return self._mapped.storage(record.begin, record.end)
        return self._archive.file.read(record.begin, num_bytes).untyped_storage()


def _with_checked(loaded: Any, mapped: Mapped, wait: Sequence[str]) -> Any:
    """``loaded``, its tensors that wait made such that check what they return."""
    if not isinstance(loaded, dict):
        return loaded
    checked = cast("dict[str, Any]", loaded)
    for key in set(wait) & checked.keys():
        value = checked[key]
        if isinstance(value, dict):
            tensors = cast("dict[str, Any]", value)
            for name in list(tensors):
                tensors[name] = mapped.checked(tensors[name])
        else:
            checked[key] = mapped.checked(value)
    return checked
