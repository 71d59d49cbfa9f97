"""Tensors in a mapped file that check each byte of it that they return.

A :class:`CheckedTensor` is a view of a mapping that is never read: it has shape and dtype, and says
where its elements are. Whatever computes with it gets a copy that was read and checked for that
purpose, of these elements alone: what is checked is what is used, and host memory grows by one
tensor, or by the piece of it that is used. What ``copy_`` fills on the host is itself that copy;
what it fills elsewhere, or in another dtype, gets one by pieces of a few MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from hytrain import _C
from hytrain.checkpoint.archive_writer import bytes_of
from hytrain.checkpoint.checked_file import CheckedFile
from hytrain.checkpoint.sums import BLOCK_BYTES
from hytrain.kernels.host_memory import host_zeros

_LOOKS = frozenset(
    ("__get__", "__len__", "dim", "element_size", "is_complex", "is_contiguous",
     "is_floating_point", "ndimension", "nelement", "numel", "size", "storage_offset", "stride")
)  # fmt: skip
"""Asked of a tensor without reading an element, unless the answer is a tensor."""

_VIEWS = frozenset(("__getitem__", "detach", "flatten", "narrow", "reshape", "view"))
"""What these return may be in the file as well."""


_PIECE_BYTES = 4 << 20
"""Of a file, on their way to a device or another dtype: they stay in the cores' cache meanwhile."""

_unused: list[torch.Tensor] = []
"""Memory for such pieces, which else the system would have to clear for each tensor."""


@contextmanager
def _piece_memory() -> Generator[torch.Tensor]:
    try:
        memory = _unused.pop()
    except IndexError:
        memory = host_zeros(
            _PIECE_BYTES, dtype=torch.uint8, purpose="a piece of a checkpoint's tensor"
        )
    yield memory
    _unused.append(memory)


def give_back_memory() -> None:
    """Gives memory back that further reads would use again."""
    _unused.clear()
    _C.trim_write_buffers()


class Mapped:
    """The mapping of a file."""

    def __init__(self, file: CheckedFile) -> None:
        self._file = file
        self._storage: torch.UntypedStorage | None = None

    def storage(self, begin: int, end: int) -> torch.UntypedStorage:
        """The file's bytes ``[begin, end)``, not to be read."""
        if self._storage is None:
            self._storage = cast(
                torch.UntypedStorage,
                torch.UntypedStorage.from_file(str(self._file.path), False, self._file.num_bytes),
            )
        return self._storage[begin:end]

    def checked(self, value: Any) -> Any:
        """``value``, if it is in the mapping as a tensor that checks what it returns."""
        if not isinstance(value, torch.Tensor) or not self.has(value):
            return value
        tensor = value.detach().as_subclass(CheckedTensor)
        tensor.mapped, tensor.place = self, value.detach()
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's elements are in the mapping."""
        if self._storage is None or tensor.device.type != "cpu":
            return False
        begin = self._storage.data_ptr()
        return begin <= tensor.data_ptr() < begin + self._file.num_bytes

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the mapping, in memory of its own.

        Raises:
            CheckpointError: its bytes are not those that were written.
        """
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        # Not malloc's, which keeps what is freed: as much as a tensor, for each size there is.
        num_bytes = extent * tensor.element_size()
        content = host_zeros(
            num_bytes, dtype=torch.uint8, purpose="a tensor of a checkpoint", inherited=True
        )
        self._file.read_into(self._begin(tensor), bytes_of(content))
        return content.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def read_into(self, tensor: torch.Tensor, target: torch.Tensor) -> None:
        """Fills a contiguous tensor with one of the mapping, as contiguous.

        Raises:
            CheckpointError: its bytes are not those that were written; ``target`` then has some.
        """
        begin = self._begin(tensor)
        if target.device.type == "cpu" and target.dtype == tensor.dtype:
            self._file.read_into(begin, bytes_of(target))
            torch.autograd.graph.increment_version(target)
            return
        item, flat, at = tensor.element_size(), target.detach().view(-1), 0
        with _piece_memory() as memory:
            while at < flat.numel():
                # Up to where a block of the file ends: each is read once.
                most = _PIECE_BYTES - (begin + at * item) % BLOCK_BYTES
                end = min(at + max(1, most // item), flat.numel())
                piece = memory[: (end - at) * item]
                self._file.read_into(begin + at * item, bytes_of(piece))
                # Back when the piece is there: its memory is the next one's.
                flat[at:end].copy_(piece.view(tensor.dtype))
                at = end

    def _begin(self, tensor: torch.Tensor) -> int:
        assert self._storage is not None
        return tensor.data_ptr() - self._storage.data_ptr()


class CheckedTensor(torch.Tensor):
    """See the module's description.

    Attributes:
        mapped: the mapping that it is in.
        place: it, as a plain tensor of the mapping.
        own: the copy that it keeps, if it was written into.
    """

    mapped: Mapped
    place: torch.Tensor
    own: torch.Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _LOOKS or name in _VIEWS:
            found = _on_mapping(func, name, args, named)
            if found is not None:
                return found
        if name == "copy_" and len(args) > 1 and _fits(args[0], args[1]):
            args[1].mapped.read_into(args[1].place, args[0])
            return args[0]
        if _changes(name) and args and isinstance(args[0], CheckedTensor):
            args[0].own = _read(args[0])
        return func(*_read(args), **cast("dict[str, Any]", _read(named)))


def _on_mapping(
    func: Callable[..., Any], name: str, args: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """What a function finds in the mapping; None where elements are to be read."""
    tensor = args[0]
    if not isinstance(tensor, CheckedTensor) or any(
        isinstance(other, CheckedTensor) for other in (*args[1:], *named.values())
    ):
        return None
    if name in _VIEWS and tensor.own is not None:
        return None
    place = tensor.place
    if name == "reshape" and not place.is_contiguous():
        return None  # it might copy
    found = func(place, *args[1:], **named)
    if name in _VIEWS and isinstance(found, torch.Tensor) and tensor.mapped.has(found):
        return tensor.mapped.checked(found)
    return None if isinstance(found, torch.Tensor) else found


def _fits(target: torch.Tensor, source: object) -> bool:
    """Whether a tensor can be read to where it is copied to, with no copy of the whole."""
    return (
        isinstance(source, CheckedTensor)
        and source.own is None
        and type(target) in (torch.Tensor, torch.nn.Parameter)
        and not (target.requires_grad and torch.is_grad_enabled())
        and target.shape == source.place.shape
        and target.is_contiguous()
        and source.place.is_contiguous()
    )


def _changes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def _read(value: Any) -> Any:
    """``value``, or the like of it, with checked copies in place of what is in a file."""
    if isinstance(value, CheckedTensor):
        if value.own is not None:
            return value.own
        return value.mapped.read(value.place)
    if isinstance(value, (list, tuple)):
        values = [_read(item) for item in cast("Sequence[Any]", value)]
        return values if isinstance(value, list) else tuple(values)
    if isinstance(value, dict):
        return {key: _read(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value
