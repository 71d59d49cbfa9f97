"""Writes what ``torch.save`` writes, with tensors that need not be there at once.

The objects are pickled first; elements follow one storage after another, in any order. So a file of
any size takes the memory of one tensor. Its records are stored as they are (ZIP64 where they are
large), each beginning at a multiple of 64 bytes, as torch's own.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
import torch._utils as torch_utils
from torch.storage import TypedStorage, UntypedStorage

from hytrain.checkpoint.sums import BLOCK_BYTES, SummingFile

_ROOT = "archive"
_ALIGNMENT = 64
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_PADDING_ID = 0x4246  # of an extra field that readers skip; the one that torch uses
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Of every record, so that a file depends on its contents only."""


@dataclass(frozen=True, slots=True)
class LaterTensor:
    """Stands in the objects for a tensor, contiguous, whose elements are written later.

    Attributes:
        key: of its elements; two of one key share them.
        shape, dtype: the tensor's.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        strides: list[int] = []
        step = 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= max(1, size)
        storage = _LaterStorage(self.key, self.dtype, torch.Size(self.shape).numel())
        arguments = (storage, 0, self.shape, tuple(reversed(strides)), False, OrderedDict())
        return torch_utils._rebuild_tensor_v2, arguments  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class _LaterStorage:
    key: str
    dtype: torch.dtype
    numel: int


class PickledObjects:
    """Objects as they are now: later changes of tensors in them are not seen.

    Attributes:
        content: the pickle.
        storages: key -> elements of tensors that were there, copied to the host.
    """

    def __init__(self, objects: object) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(objects)
        self.content = stream.getvalue()
        self.storages = pickler.copies


class _Pickler(pickle.Pickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, protocol=2)
        self.copies: dict[str, torch.Tensor] = {}
        self._keys: dict[int, str] = {}
        self._alive: list[object] = []  # an address names a storage only while that lives

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _LaterStorage):
            return ("storage", _storage_class(obj.dtype), obj.key, "cpu", obj.numel)
        if isinstance(obj, TypedStorage):
            untyped, dtype = cast(Any, obj)._untyped_storage, cast(Any, obj).dtype
            return (
                "storage",
                _storage_class(dtype),
                self._key(untyped),
                "cpu",
                cast(Any, obj)._size(),
            )
        if isinstance(obj, UntypedStorage):
            return ("storage", UntypedStorage, self._key(obj), "cpu", obj.nbytes())
        return None

    def _key(self, storage: Any) -> str:
        address = int(storage._cdata)
        if address not in self._keys:
            self._keys[address] = f"own{len(self._keys)}"
            self._alive.append(storage)
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.copies[self._keys[address]] = content.to("cpu", copy=True)
        return self._keys[address]


def _storage_class(dtype: torch.dtype) -> Any:
    names: dict[torch.dtype, str] = cast(Any, torch.storage)._dtype_to_storage_type_map()
    return vars(torch)[names[dtype]]


class ArchiveWriter:
    """A file of ``torch.load``; :meth:`close` makes it whole."""

    def __init__(self, file: SummingFile) -> None:
        """
        Args:
            file: at its beginning; it need not be able to seek.
        """
        self._zip = zipfile.ZipFile(cast(Any, file), "w", zipfile.ZIP_STORED, allowZip64=True)

    def __del__(self) -> None:
        # One that is given up has no end, and ZipFile would write one.
        cast(Any, self._zip).fp = None

    def write_objects(self, content: bytes) -> None:
        """The pickle, see :class:`PickledObjects`; first of all."""
        self._write("data.pkl", [memoryview(content)])
        self._write(".format_version", [memoryview(b"1")])
        self._write("byteorder", [memoryview(sys.byteorder.encode())])

    def write_elements(self, key: str, tensor: torch.Tensor) -> None:
        """A storage's elements: those of a contiguous tensor on the host."""
        self._write(f"data/{key}", [bytes_of(tensor)])

    def close(self) -> None:
        """Writes the directory of the records."""
        self._write("version", [memoryview(b"3\n")])
        self._zip.close()

    def _write(self, name: str, parts: Sequence[memoryview]) -> None:
        info = zipfile.ZipInfo(f"{_ROOT}/{name}", _EPOCH)
        info.file_size = sum(part.nbytes for part in parts)
        stream = cast(Any, self._zip.fp)
        fixed = stream.tell() + _LOCAL_HEADER_BYTES + len(info.filename) + _ZIP64_EXTRA_BYTES
        pad = -(fixed + 4) % _ALIGNMENT
        info.extra = struct.pack("<HH", _PADDING_ID, pad) + b"Z" * pad
        with self._zip.open(info, "w", force_zip64=True) as record:
            for part in parts:
                for at in range(0, part.nbytes, BLOCK_BYTES):
                    record.write(part[at : at + BLOCK_BYTES])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous host tensor's bytes, of any dtype."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy())).cast("B")
