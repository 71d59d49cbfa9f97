"""Makes objects of an archive's pickle; large tensors stay in the file until they are used.

Elements below keys that may wait are mapped and returned checked, piece by piece
(``checked_tensor.py``); all others are read and checked here. Nothing else is made than what
``inert.py`` makes, unless the user trusts the file.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.serialization import StorageType
from torch.storage import TypedStorage

from hytrain.checkpoint import inert
from hytrain.checkpoint.archive import Archive
from hytrain.checkpoint.checked_tensor import Mapped
from hytrain.errors import CheckpointError
from hytrain.kernels.host_limits import describe_free_memory
from hytrain.kernels.host_memory import is_out_of_host_memory

LAZY = ("module", "frozen_param_fragments", "param")
"""Keys that have large tensors."""


def load_archive(archive: Archive, *, wait: Sequence[str] = LAZY, trusted: bool = False) -> Any:
    """The objects in a file, tensors on the CPU.

    Args:
        archive: the file.
        wait: keys of the file's dict whose tensors are read where they are used.
        trusted: make objects of all classes, which runs code that the file names.

    Raises:
        CheckpointError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        content, storages = archive.pickled(), _Storages(archive)
        loaded = _InertUnpickler(content, storages).load()
        others = _not_waiting(loaded, storages, wait)
        if trusted:
            # Tensors inside of others' objects cannot be exchanged: these are made anew.
            storages = _Storages(archive, others)
            loaded = _TrustingUnpickler(content, storages).load()
        else:
            _read(loaded, storages, others)
        for inside, key in list(_slots(loaded, wait)):
            inside[key] = storages.mapped.checked(inside[key])
        return loaded
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
            f"{seen}: the file is damaged, or not torch's; load another tag"
        ) from error


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
    storages = _Storages(archive)
    tensors: list[StoredTensor] = []
    for path, tensor in inert.walk(_InertUnpickler(archive.pickled(), storages).load()):
        key = storages.key_of(tensor)
        if isinstance(tensor, torch.Tensor) and key is not None:
            first, *rest = path or ("the tensor",)
            name = f"{first}: '{'.'.join(rest)}'" if rest else f"'{first}'"
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * step for size, step in steps)
            begin = int(tensor.storage_offset()) * tensor.itemsize
            tensors.append(StoredTensor(name, key, begin, begin + extent * tensor.itemsize))
    return tensors


class _Storages:
    """The storages of a file, by key: as they are in the mapping, or read and checked."""

    def __init__(self, archive: Archive, to_read: Collection[str] = ()) -> None:
        """
        Args:
            archive: the file.
            to_read: keys of those that are read when they are made.
        """
        self.archive = archive
        self.mapped = Mapped(archive.file)
        self._to_read = to_read
        self._made: dict[str, TypedStorage] = {}
        self._keys: dict[int, str] = {}
        self._read: dict[str, torch.UntypedStorage] = {}

    def make(self, pid: Any) -> TypedStorage:
        """What a pickle's persistent id stands for."""
        _, kind, key, _, numel = pid
        if key not in self._made:
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            storage = torch.UntypedStorage(0)
            if numel and key in self._to_read:
                storage = self.read(key)
            elif numel:
                record = self.archive.elements(key)
                storage = self.mapped.storage(record.begin, record.end)
                self._keys[storage.data_ptr()] = key
            self._made[key] = TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        return self._made[key]

    def read(self, key: str) -> torch.UntypedStorage:
        """Its elements, checked; once for all tensors that share them."""
        if key not in self._read:
            record = self.archive.elements(key)
            num_bytes = record.end - record.begin
            self._read[key] = self.archive.file.read(record.begin, num_bytes).untyped_storage()
        return self._read[key]

    def key_of(self, found: object) -> str | None:
        """Of a tensor's storage, or a storage; None where it has no elements in the mapping."""
        if isinstance(found, torch.Tensor):
            return self._keys.get(found.untyped_storage().data_ptr()) if found.numel() else None
        if isinstance(found, TypedStorage):
            return self._keys.get(cast(Any, found)._untyped_storage.data_ptr())
        return None


class _InertUnpickler(inert.Unpickler):
    def __init__(self, content: bytes, storages: _Storages) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.record_bytes = storages.archive.record_bytes
        self._storages = storages

    def persistent_load(self, pid: Any) -> TypedStorage:
        return self._storages.make(pid)


class _TrustingUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, storages: _Storages) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name:
            try:
                return StorageType(name)
            except KeyError:
                pass
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> TypedStorage:
        return self._storages.make(pid)


def _slots(loaded: object, wait: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where tensors may wait: (a dict, the key there)."""
    if isinstance(loaded, dict):
        found = cast("dict[str, Any]", loaded)
        for key in set(wait) & found.keys():
            value = found[key]
            if isinstance(value, dict):
                yield from ((value, name) for name in cast("dict[str, Any]", value))
            else:
                yield found, key


def _not_waiting(loaded: object, storages: _Storages, wait: Sequence[str]) -> set[str]:
    """Storages that something else has than tensors that may wait."""
    waiting = Counter(storages.key_of(inside[key]) for inside, key in _slots(loaded, wait))
    found = Counter(storages.key_of(value) for _, value in inert.walk(loaded))
    return {key for key in found - waiting if key is not None}


def _read(loaded: object, storages: _Storages, keys: Collection[str]) -> None:
    """Reads storages, and gives them to all that have them."""
    for _, value in list(inert.walk(loaded)):
        key = storages.key_of(value)
        if key is None or key not in keys:
            continue
        own: Any = storages.read(key)
        if isinstance(value, TypedStorage):
            cast(Any, value)._untyped_storage = own
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.set_(own, value.storage_offset(), value.shape, value.stride())
