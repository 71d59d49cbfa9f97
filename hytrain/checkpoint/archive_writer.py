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
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
import torch._utils as torch_utils
from torch.storage import TypedStorage, UntypedStorage

from hytrain import _C
from hytrain.checkpoint.sums import SummingFile
from hytrain.kernels.host_memory import host_zeros

_ROOT = "archive"
_ALIGNMENT = 64
_PIECE_BYTES = 1 << 20
_PADDING_ID = 0x4246  # of an extra field that readers skip; the one that torch uses


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
        storages: key -> elements of tensors that were there, on the host.
    """

    def __init__(self, objects: object, *, copy: bool = True) -> None:
        """
        Args:
            objects: whatever can be pickled.
            copy: elements are copied; False: nobody changes them before they are written.
        """
        stream = io.BytesIO()
        pickler = _Pickler(stream, copy=copy)
        pickler.dump(objects)
        self.content = stream.getvalue()
        self.storages = pickler.storages


class _Pickler(pickle.Pickler):
    def __init__(self, stream: IO[bytes], *, copy: bool) -> None:
        super().__init__(stream, protocol=2)
        self._copy = copy
        self.storages: dict[str, torch.Tensor] = {}
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
            self.storages[self._keys[address]] = content.to("cpu", copy=self._copy)
        return self._keys[address]


def _storage_class(dtype: torch.dtype) -> Any:
    names: dict[torch.dtype, str] = cast(Any, torch.storage)._dtype_to_storage_type_map()
    return vars(torch)[names[dtype]]


def write_objects(file: SummingFile, objects: object) -> None:
    """A whole file of ``torch.load``, of objects that nobody changes meanwhile.

    Raises:
        OSError: it cannot be written.
    """
    pickled = PickledObjects(objects, copy=False)
    archive = ArchiveWriter(file)
    archive.write_objects(pickled.content)
    for key, tensor in pickled.storages.items():
        archive.write_elements(key, tensor)
    archive.close()


class ArchiveWriter:
    """A file of ``torch.load``; :meth:`close` makes it whole.

    Records' lengths and sums follow them, in a descriptor: a record is read once to be written. The
    file's fields are those of the ZIP specification (APPNOTE.TXT 4.3), with 64-bit lengths.
    """

    def __init__(self, file: SummingFile) -> None:
        """
        Args:
            file: at its beginning.
        """
        self._file = file
        self._memory: torch.Tensor | None = None
        self._entries: list[_Entry] = []

    def write_objects(self, content: bytes) -> None:
        """The pickle, see :class:`PickledObjects`; first of all."""
        # No ".format_version": with it torch computes where storages begin (for the device "meta",
        # as from_pretrained does) from the order and keys that torch.save gives them.
        self._write("data.pkl", memoryview(content))
        self._write("byteorder", memoryview(sys.byteorder.encode()))

    def write_elements(
        self, key: str, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        """A storage's elements.

        Args:
            key: of them.
            tensor: contiguous, on the host.
            dtype: that they are rounded to, by pieces that stay in the core's cache; None: as they
                are.
        """
        name = f"data/{key}"
        if dtype is None or dtype == tensor.dtype:
            self._write(name, bytes_of(tensor))
            return
        flat = tensor.detach().reshape(-1)
        self._write_pieces(name, dtype.itemsize * flat.numel(), self._rounded(flat, dtype))

    def _rounded(self, flat: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
        memory = self._memory
        if memory is None:
            memory = self._memory = host_zeros(
                _PIECE_BYTES, dtype=torch.uint8, purpose="a piece of a training copy to save"
            )
        target = memory.view(dtype)
        for at in range(0, flat.numel(), len(target)):
            part = flat[at : at + len(target)]
            yield bytes_of(target[: len(part)].copy_(part))

    def close(self) -> None:
        """Writes the directory of the records."""
        self._write("version", memoryview(b"3\n"))
        begin = self._file.tell()
        directory = b"".join(entry.directory() for entry in self._entries)
        self._file.write(directory + _end(len(self._entries), begin, len(directory)))

    def _write(self, name: str, content: memoryview) -> None:
        self._write_pieces(name, content.nbytes, [content])

    def _write_pieces(self, name: str, size: int, pieces: Iterable[memoryview]) -> None:
        encoded = f"{_ROOT}/{name}".encode()
        begin = self._file.tell()
        head = _LOCAL.size + len(encoded) + _LOCAL_SIZES.size
        pad = -(begin + head + _EXTRA.size) % _ALIGNMENT
        flags = _SUM_FOLLOWS if encoded.isascii() else _SUM_FOLLOWS | _UTF_8
        padding = _EXTRA.pack(_PADDING_ID, pad) + b"Z" * pad
        local = _LOCAL.pack(
            b"PK\3\4", _VERSION, flags, 0, 0, _DATE, 0, _IN_EXTRA, _IN_EXTRA,
            len(encoded), _LOCAL_SIZES.size + len(padding),
        )  # fmt: skip
        self._file.write(local + encoded + padding + _LOCAL_SIZES.pack(_SIZES_ID, 16, 0, 0))
        crc = 0
        for piece in pieces:
            crc = _C.crc32_joined(crc, self._file.append(piece), piece.nbytes)
        self._file.write(_DESCRIPTOR.pack(b"PK\7\x08", crc, size, size))
        self._entries.append(_Entry(encoded, flags, crc, size, begin, padding))


_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_LOCAL_SIZES = struct.Struct("<HHQQ")
_EXTRA = struct.Struct("<HH")
_DESCRIPTOR = struct.Struct("<4sIQQ")
_CENTRAL = struct.Struct("<4sBBHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_VERSION = 45  # of the specification, which has 64-bit lengths
_UNIX = 3
_MODE = 0o600 << 16
_DATE = (1 << 5) | 1
"""1980-01-01, of every record: a file depends on its contents only."""
_SUM_FOLLOWS, _UTF_8 = 0x08, 0x800
_SIZES_ID = 1
_IN_EXTRA, _MANY = 0xFFFFFFFF, 0xFFFF
"""What stands where a number does not fit, which is elsewhere then."""
_LARGE = 2**31 - 1
"""Some readers take these numbers as signed."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record, for the directory."""

    name: bytes
    flags: int
    crc: int
    size: int
    begin: int
    padding: bytes

    def directory(self) -> bytes:
        """Its entry there."""
        size, begin, more = self.size, self.begin, b""
        if size > _LARGE:
            more, size = struct.pack("<QQ", size, size), _IN_EXTRA
        if begin > _LARGE:
            more, begin = more + struct.pack("<Q", begin), _IN_EXTRA
        extra = (_EXTRA.pack(_SIZES_ID, len(more)) + more if more else b"") + self.padding
        fixed = _CENTRAL.pack(
            b"PK\1\2", _VERSION, _UNIX, _VERSION, self.flags, 0, 0, _DATE, self.crc, size, size,
            len(self.name), len(extra), 0, 0, 0, _MODE, begin,
        )  # fmt: skip
        return fixed + self.name + extra


def _end(count: int, begin: int, size: int) -> bytes:
    """What ends a file: where the directory is."""
    before = b""
    if count >= _MANY or begin > _LARGE or size > _LARGE:
        before = _END_64.pack(
            b"PK\6\6", _END_64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, begin
        ) + _LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
        count, size, begin = min(count, _MANY), min(size, _IN_EXTRA), min(begin, _IN_EXTRA)
    return before + _END.pack(b"PK\5\6", 0, 0, count, count, size, begin, 0)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous host tensor's bytes, of any dtype."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy())).cast("B")
