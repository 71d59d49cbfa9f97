"""Files for ``torch.load``, written by torch's own writer, without all elements in memory at once.

The objects are pickled first; elements follow one storage after another, in any order. So writing a
file of any size takes the memory of one tensor.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
import torch._utils as torch_utils
from torch.storage import TypedStorage, UntypedStorage

from hytrain.checkpoint.summed_files import SummingFile


@dataclass(frozen=True, slots=True)
class LaterTensor:
    """Stands in the objects for a contiguous tensor whose elements are written later.

    Attributes:
        key: of its elements; two with one key share them. torch's reader ignores the case.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        strides = torch.empty(self.shape, device="meta").stride()
        arguments = (_LaterStorage(self), 0, self.shape, strides, False, OrderedDict())
        return torch_utils._rebuild_tensor_v2, arguments  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, slots=True)
class _LaterStorage:
    tensor: LaterTensor


class PickledObjects:
    """Objects pickled as they are now: later changes of tensors in them are not seen.

    Attributes:
        content: the pickle.
        storages: key -> elements of the tensors in the objects, on the host.
    """

    def __init__(self, objects: object) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(objects)
        self.content = stream.getvalue()
        self.storages = pickler.storages


class _Pickler(pickle.Pickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, protocol=2)
        self.storages: dict[str, torch.Tensor] = {}
        self._keys: dict[int, str] = {}
        self._alive: list[object] = []  # an address names a storage only while that lives

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _LaterStorage):
            later = obj.tensor
            numel = torch.Size(later.shape).numel()
            return ("storage", _storage_class(later.dtype), later.key, "cpu", numel)
        if isinstance(obj, TypedStorage):
            storage: Any = obj
            key, kind = self._key(storage._untyped_storage), _storage_class(storage.dtype)
            return ("storage", kind, key, "cpu", storage._size())
        if isinstance(obj, UntypedStorage):
            return ("storage", UntypedStorage, self._key(obj), "cpu", obj.nbytes())
        return None

    def _key(self, storage: Any) -> str:
        address = int(storage._cdata)
        if address not in self._keys:
            self._keys[address] = f"own{len(self._keys)}"
            self._alive.append(storage)
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.storages[self._keys[address]] = content.to("cpu", copy=True)
        return self._keys[address]


def _storage_class(dtype: torch.dtype) -> Any:
    names: dict[torch.dtype, str] = cast(Any, torch.storage)._dtype_to_storage_type_map()
    return vars(torch)[names[dtype]]


class ArchiveWriter:
    """A file for ``torch.load``; :meth:`close` completes it. Each method may raise an OSError."""

    def __init__(self, file: SummingFile, content: bytes) -> None:
        """``file`` is at its beginning; ``content``: the objects, see :class:`PickledObjects`."""
        self.file = file
        # The one that torch.save uses.
        writer: Any = torch._C  # pyright: ignore[reportPrivateUsage]
        self._writer: Any = writer.PyTorchFileWriter(file)
        # No ".format_version": with it torch computes where storages begin (for the device "meta",
        # as from_pretrained does) from the order and keys that torch.save gives them.
        for name, record in (("data.pkl", content), ("byteorder", sys.byteorder.encode())):
            self._writer.write_record(name, record, len(record))
        file.check()

    def write_elements(self, key: str, tensor: torch.Tensor) -> None:
        """Writes a storage's elements, from a tensor on the host."""
        content = bytes_of(tensor)
        if content.nbytes:
            # A storage of its own, which torch's writer reads without Python's lock.
            storage = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
            self._writer.write_record(f"data/{key}", storage, content.nbytes)
        else:
            self._writer.write_record(f"data/{key}", b"", 0)
        self.file.check()

    def close(self) -> None:
        """Writes the directory of the records."""
        self._writer.write_end_of_file()
        self.file.check()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A host tensor's bytes, of any dtype; not copied if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(cast(Any, flat.numpy())).cast("B")
