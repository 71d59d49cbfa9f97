"""Reads untrusted pickles: nothing is made of one but tensors, containers, numbers and text.

No class is imported and no function called that is not listed here. Whatever else a pickle names
becomes an :class:`Unknown`: its name and what it was to be made of. Time and memory are bounded by
the pickle's length, and a tensor's elements by the record of the file that has them. Operations are
those of pickle's protocol 2, which is torch.save's.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn
from torch.serialization import StorageType
from torch.storage import TypedStorage

_MOST_NESTED = 1000


class Unknown:
    """Stands for an object, a class or a function that is not made here.

    Attributes:
        name: of the class, with its module.
        arguments: what it was to be called with; None: this is the class itself.
        fields: the object's attributes; they can be read as such.
        items: what a container of this class would hold.
    """

    def __init__(
        self,
        name: str,
        arguments: tuple[object, ...] | None = None,
        fields: dict[str, object] | None = None,
        items: list[object] | None = None,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.fields = {} if fields is None else fields
        self.items = [] if items is None else items

    def __reduce__(self) -> tuple[Any, ...]:
        return Unknown, (self.name, self.arguments, self.fields, self.items)

    def __getattr__(self, key: str) -> object:
        # Called for what the object itself does not have; copying asks before there are fields.
        # With names such as __array_interface__ others would read memory that a pickle names.
        fields: dict[str, object] = self.__dict__.get("fields", {})
        if key in fields and not key.startswith("__"):
            return fields[key]
        raise AttributeError(f"nothing was made of a pickled {self.name}: it has no '{key}'")

    def __repr__(self) -> str:
        return f"<pickled {self.name}, not made>"


_Python: Any = vars(pickle)["_Unpickler"]
"""Python's own reader that is written in Python, whose operations can be replaced."""

_REFUSED = ("PERSID", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "DICT")
"""Operations up to protocol 2 that call or hash what they are given, and that nobody writes."""


def _refuse(_reader: object) -> None:
    raise pickle.UnpicklingError("an operation that torch.save does not use")


class Unpickler(_Python):
    """Python's unpickler, with other operations in place of those that call what they are given.

    A class for ``torch.load``'s ``pickle_module``; ``torch.load`` sets ``persistent_load``.
    """

    record_bytes: Mapping[str, int]
    """Key of a storage -> bytes that the file has of it; set by a subclass for each file."""

    dispatch: ClassVar[dict[int, Any]] = collections.defaultdict(lambda: _refuse) | {
        ord(one.code): _Python.dispatch[ord(one.code)]
        for one in pickletools.opcodes
        if one.proto <= 2 and one.name not in _REFUSED
    }

    def __init__(self, file: Any, **options: Any) -> None:
        content: bytes = file.read()
        super().__init__(io.BytesIO(content), **options)
        self._left = 4 * len(content) + 1000

    def charge(self, count: int) -> None:
        """Counts copied or hashed elements, which a pickle might ask for without end."""
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("it makes more than it has bytes for")

    def _charge_parts(self, values: tuple[object, ...]) -> None:
        """Charges what :data:`_MAKERS` and attributes take: each value, and dicts' entries."""
        dicts = [cast("Sized", value) for value in values if isinstance(value, dict)]
        self.charge(len(values) + sum(map(len, dicts)))

    def charge_all(self, values: Iterable[object]) -> None:
        """Charges all that is in ``values``, each as often as it is there, as a tuple is hashed."""
        left: list[Any] = list(values)
        while left:
            value = left.pop()
            if isinstance(value, (torch.Tensor, np.ndarray, TypedStorage)):
                raise pickle.UnpicklingError("elements of a tensor where there are none")
            if isinstance(value, (str, bytes, bytearray, list, tuple, dict, set, frozenset)):
                self.charge(len(cast("Sized", value)))
            if isinstance(value, dict):
                left += value.items()
            elif isinstance(value, (list, tuple, set, frozenset)):
                left += value

    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get(module, module)
        if module in ("torch", "torch.storage", "torch.cuda") and name.endswith("Storage"):
            if name == "UntypedStorage":
                return torch.UntypedStorage
            try:
                return StorageType(name)
            except KeyError:
                pass
        full = f"{module}.{name}"
        return _VALUES[full] if full in _VALUES else Unknown(full)

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        if not isinstance(arguments, tuple):
            raise pickle.UnpicklingError(f"arguments are a {type(arguments).__name__}")
        values = cast("tuple[object, ...]", arguments)
        self._charge_parts(values)
        name = _name_of(function)
        make = _MAKERS.get(name)
        if make is None and name in _COPIES:
            self.charge_all(values)
            make = _COPIES[name]
        self.stack[-1] = Unknown(name, values) if make is None else make(*values)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        parts = cast("tuple[object, ...]", state) if isinstance(state, tuple) else (state,)
        self._charge_parts(parts)
        if isinstance(target, Unknown):
            for part in parts:
                if isinstance(part, dict):
                    target.fields |= cast("dict[str, object]", part)
            target.items.append(state)
        elif isinstance(target, np.ndarray):
            self._fill_array(cast(Any, target), state)
        else:
            _set_fields(target, state)

    def _fill_array(self, target: Any, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        self.charge(len(content))
        dtype = _numpy_type(kind)
        target.__setstate__((1, _sizes(shape), dtype, bool(by_columns), _bytes(content)))

    def load_binpersid(self) -> None:
        pid = self.stack.pop()
        word, kind, key, _, numel = cast("tuple[Any, ...]", pid)
        is_known = kind is torch.UntypedStorage or isinstance(kind, StorageType)
        if word != "storage" or not is_known or type(key) is not str or type(numel) is not int:
            raise pickle.UnpicklingError("a storage was expected")
        dtype = kind.dtype if isinstance(kind, StorageType) else torch.uint8
        if numel and self.record_bytes.get(key) != numel * dtype.itemsize:
            raise pickle.UnpicklingError(
                f"record {key} has not the {numel * dtype.itemsize} bytes that its tensor has"
            )
        self.append(self.persistent_load(pid))

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, values: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not list and not isinstance(target, Unknown):
            raise pickle.UnpicklingError(f"elements of a {type(target).__name__}")
        (target.items if isinstance(target, Unknown) else target).extend(values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def load_setitems(self) -> None:
        self._update(self.pop_mark())

    def _update(self, values: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Unknown):
            target.items.extend(values)
            return
        if not isinstance(target, dict):
            raise pickle.UnpicklingError(f"entries of a {type(target).__name__}")
        self.charge_all(key for key in values[::2] if isinstance(key, (tuple, frozenset)))
        target.update(zip(values[::2], values[1::2], strict=True))

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.BINPERSID[0]: load_binpersid,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _name_of(function: object) -> str:
    """The name of an :class:`Unknown` for the function's result."""
    if isinstance(function, Unknown):
        return function.name if function.arguments is None else f"a {function.name}'s"
    return str(getattr(function, "__name__", type(function)))


def _set_fields(target: Any, state: object) -> None:
    """Sets attributes of a tensor or a dict (a state dict's ``_metadata``); none of its class's."""
    if not isinstance(target, (torch.Tensor, OrderedDict)) or not isinstance(state, dict):
        raise pickle.UnpicklingError(f"attributes of a {type(target).__name__}")
    for name, value in cast("dict[str, object]", state).items():
        if type(name) is not str or hasattr(type(target), name):
            raise pickle.UnpicklingError(f"an attribute {name!r}")
        vars(target)[name] = value


def _default_dict(factory: Any = None) -> object:
    if factory is not None and factory not in (dict, float, int, list, str):
        return Unknown("collections.defaultdict", (factory,))
    return collections.defaultdict(factory)


def _bytes(text: object = b"", encoding: object = "latin1") -> bytes:
    if isinstance(text, (str, bytes, bytearray)) and encoding in ("latin1", "latin-1"):
        return text.encode("latin-1") if isinstance(text, str) else bytes(text)
    raise pickle.UnpicklingError("bytes of something else than text")


def _stage(number: object) -> int:
    """A ZeRO stage: DeepSpeed computes with it when it reads its own checkpoints."""
    return _sizes((number,))[0]


def _member(owner: object = None, name: object = None, *more: object) -> object:
    """An enumeration's member by its name, as Python 3.11.0 to 3.11.3 pickles it."""
    if not isinstance(owner, Unknown) or owner.arguments is not None or more:
        return Unknown("builtins.getattr", (owner, name, *more))
    if owner.name == _STAGE_ENUM and name in _STAGES:
        return _STAGES[name]
    return Unknown(owner.name, (name,))


def _size(sizes: object = ()) -> torch.Size:
    return torch.Size(_sizes(sizes))


def _sizes(values: object) -> tuple[int, ...]:
    sizes = cast("tuple[int, ...]", values)
    if not isinstance(values, (list, tuple)) or len(sizes) > 64:
        raise pickle.UnpicklingError("a shape was expected")
    if any(type(size) is not int or not 0 <= size < 2**62 for size in sizes):
        raise pickle.UnpicklingError("a shape has something else than sizes")
    return tuple(sizes)


def _unknown(name: object, arguments: Any, fields: Any, items: Any) -> Unknown:
    """An :class:`Unknown` that was pickled again, as DeepSpeed's converter does."""
    if type(fields) is not dict or type(items) is not list:
        raise pickle.UnpicklingError("parts of an object of an unknown class")
    return Unknown(str(name), arguments, fields, items)


def _tensor(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    flags: object = None,
) -> torch.Tensor:
    if not isinstance(storage, TypedStorage) or hooks or flags:
        raise pickle.UnpicklingError("a tensor of something else than elements")
    begin, shape, steps = _sizes((offset,))[0], _sizes(size), _sizes(stride)
    extent = sum((count - 1) * step for count, step in zip(shape, steps, strict=True))
    inner = cast(Any, storage)
    if math.prod(shape) and begin + extent >= inner._size():
        raise pickle.UnpicklingError("a tensor ends behind its storage")
    made = torch.empty(0, dtype=inner.dtype)
    made.set_(inner._untyped_storage, begin if math.prod(shape) else 0, shape, steps)
    return made.requires_grad_(bool(requires_grad))


def _parameter(data: object, requires_grad: object, hooks: object, state: object = None) -> object:
    if not isinstance(data, torch.Tensor) or hooks:
        raise pickle.UnpicklingError("a parameter of something else than a tensor")
    made = nn.Parameter(data, bool(requires_grad))
    if state:
        _set_fields(made, state)
    return made


def _typed(make: object, kind: object, arguments: Any, state: object) -> object:
    """A tensor with attributes; an :class:`Unknown` for other classes than torch's own."""
    maker = _MAKERS.get(_name_of(make))
    is_own = kind is torch.Tensor or kind is nn.Parameter
    if maker is None or not is_own or not isinstance(arguments, tuple):
        return Unknown(_name_of(kind), (arguments, state))
    made = maker(*arguments)
    if not isinstance(made, torch.Tensor):
        raise pickle.UnpicklingError("a tensor of something else than elements")
    if state:
        _set_fields(made, state)
    return made


def _array(kind: object, *_: object) -> object:
    if isinstance(kind, Unknown) and kind.name == "numpy.ndarray":
        return np.empty(0, np.uint8)  # its state follows
    return Unknown("an array", (kind,))


def _scalar(kind: object, content: object) -> object:
    return np.frombuffer(_bytes(content), _numpy_type(kind))[0]


def _numpy_type(kind: object) -> np.dtype[Any]:
    """The dtype of numbers; structures, dates and objects are refused."""
    if isinstance(kind, Unknown) and kind.name == "numpy.dtype" and kind.arguments:
        name, order = kind.arguments[0], "="
        if kind.items:
            order = cast(Any, kind.items[-1])[1]
        if name in _NUMBERS:
            return np.dtype(name).newbyteorder("=" if order == "|" else order)
    raise pickle.UnpicklingError("a numpy array of something else than numbers")


_NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")

_MOVED = {"torch.tensor": "torch._tensor", "__builtin__": "builtins"} | {
    "numpy.core.multiarray": "numpy._core.multiarray"
}
"""Old names of modules -> their present names."""

_VALUES: dict[str, object] = {
    **{f"torch.{name}": d for name, d in vars(torch).items() if isinstance(d, torch.dtype)},
    **{f"builtins.{kind.__name__}": kind for kind in (dict, float, int, list, str)},
    **{"torch.Tensor": torch.Tensor, "torch.nn.parameter.Parameter": nn.Parameter},
}

_STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
_STAGES: dict[object, int] = {
    "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3
}  # fmt: skip
"""ZeRO stages by their names in DeepSpeed's checkpoints."""

_COPIES: dict[str, Callable[..., object]] = {
    "_codecs.encode": _bytes,
    "builtins.bytearray": lambda *given: bytearray(_bytes(*given)),
    "builtins.bytes": _bytes,
    "builtins.complex": complex,
    "builtins.frozenset": frozenset,
    "builtins.set": set,
    "collections.Counter": collections.Counter,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _default_dict,
    _STAGE_ENUM: _stage,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy._core.multiarray.scalar": _scalar,
    "torch.Size": _size,
    "torch.device": torch.device,
}
"""Functions that take time and memory as their arguments are large, and call nothing."""

_MAKERS: dict[str, Callable[..., object]] = {
    f"{__name__}.Unknown": _unknown,
    "builtins.getattr": _member,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
}
"""Functions whose results share their arguments."""


def walk(objects: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yields (keys that lead to it, it) for all tensors, storages and unknown objects.

    What several containers hold is yielded several times, and a container's contents once.

    Raises:
        pickle.UnpicklingError: objects are nested too deeply.
    """
    seen: set[int] = set()
    left: list[tuple[tuple[str, ...], Any]] = [((), objects)]
    while left:
        path, found = left.pop()
        if isinstance(found, (torch.Tensor, TypedStorage, Unknown)):
            yield path, found
        if id(found) in seen or isinstance(found, TypedStorage):
            continue
        seen.add(id(found))
        if len(path) > _MOST_NESTED:
            raise pickle.UnpicklingError(f"it is nested {_MOST_NESTED} times")
        inside: list[tuple[Any, Any]] = []
        if isinstance(found, (Unknown, torch.Tensor, OrderedDict)):
            inside += vars(found).items()
        if isinstance(found, dict):
            inside += [*found.items(), *(("a key", key) for key in found)]
        elif isinstance(found, (list, tuple, set, frozenset)):
            inside += enumerate(found)
        for key, value in reversed(inside):
            if not isinstance(value, _NO_PARTS):
                left.append(((*path, str(key) if isinstance(key, (str, int)) else "a key"), value))


_NO_PARTS = (str, int, float, bytes, bytearray, type(None), complex, torch.dtype, np.generic)
