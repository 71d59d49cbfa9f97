"""Detects reads of weights outside of their modules, where no hook fires.

Hooks report the one use that they know of: a module's forward. A weight may be read anywhere else:
by a head that multiplies with the embedding's, a penalty on a weight, an average or a log after the
step. So while a parameter's memory does not hold what a reader expects, the parameter is of a
special subclass of its class, through which torch reports every function that is called with it. A
parameter that can be read as usual is of its own class, and its reads cost nothing.

Reads that do not pass through Python are not detected: by a C++ extension that is given the
parameter itself, and by ``torch.tensor(parameter)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from hytrain.errors import UnsupportedError

_OF_SHAPE = frozenset(
    ("__set__", "__delete__", "__len__", "dim", "size", "numel", "nelement", "stride", "ndimension",
     "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
     "element_size", "get_device", "requires_grad_", "register_hook", "retain_grad",
     "register_post_accumulate_grad_hook", "is_shared", "is_inference", "is_conj", "is_neg",
     "is_same_size", "is_set_to", "has_names", "_is_view", "_has_compatible_shallow_copy_type",
     "result_type", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
     "randn_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
)  # fmt: skip
"""Functions that read none of a tensor's elements."""
_OF_ADDRESS = frozenset(
    ("data_ptr", "untyped_storage", "storage", "_typed_storage", "is_pinned", "__repr__",
     "__format__")
)  # fmt: skip
"""Functions that tell where the elements are, or show them to a person: never to be refused."""
_ELEMENTS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes that are another tensor with the same elements."""


IN_BACKWARD = "used in backward"
"""Reported in place of a function's name if autograd reads what it has saved."""


class Reader(Protocol):
    """A callback before a read."""

    def __call__(self, name: str, *, may_refuse: bool = True, was_read: bool = False) -> None:
        """Makes the weights what the reader expects, or raises.

        Args:
            name: of the function that reads.
            may_refuse: False: it only tells an address, or shows numbers to a person.
            was_read: it is too late for the read itself, but not for its backward.
        """
        ...


class WatchedParameters:
    """Parameters whose reads are reported while they are not readable."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], read: Reader, *, may_be_away: bool = False
    ) -> None:
        """The parameters are readable at first.

        ``read``: called before a read; may raise, and may make them readable. ``may_be_away``: if
        it raises an UnsupportedError, they are not on this rank, and state dicts have them without
        values.
        """
        self._read = read
        self.may_be_away = may_be_away
        self._readers = 1
        classes: dict[type[nn.Parameter], type[nn.Parameter]] = {}
        self._items: list[tuple[nn.Parameter, type[nn.Parameter], type[nn.Parameter]]] = []
        for parameter in parameters:
            own = type(parameter)
            if own not in classes:
                classes[own] = _watched_class(own, self)
            self._items.append((parameter, own, classes[own]))

    @property
    def are_readable(self) -> bool:
        """Whether reads are not reported."""
        return self._readers > 0

    def allow(self) -> None:
        """Adds a reader."""
        self._readers += 1
        if self._readers == 1:
            for parameter, own, watched in self._items:
                if type(parameter) is watched:
                    parameter.__class__ = own

    def disallow(self) -> None:
        """Removes a reader; after the last one, reads are reported."""
        if self._readers == 1:
            self.disallow_all()
        elif self._readers:
            self._readers -= 1

    def disallow_all(self) -> None:
        """Removes all readers."""
        if not self._readers:
            return
        self._readers = 0
        for parameter, own, watched in self._items:
            if type(parameter) is own:
                parameter.__class__ = watched

    def tell(self, name: str) -> None:
        """Reports that a torch function that reads is about to be given one of them."""
        self._read(name, may_refuse=name not in _OF_ADDRESS)

    def tell_saved(self) -> None:
        """Reports that autograd saves one of them, or a view, for a backward."""
        if not self._readers:
            self._read("saved for backward", was_read=True)

    def tell_used(self) -> None:
        """Reports that a backward is about to use what autograd saved of one of them."""
        if not self._readers:
            self._read(IN_BACKWARD)

    def close(self) -> None:
        """Ends the reports; parameters get their own classes back. May be called twice."""
        self.allow()
        self._items = []  # refers to classes, which refer to this: nothing of an engine stays here
        self._read = _ignored


def _ignored(name: str, *, may_refuse: bool = True, was_read: bool = False) -> None:
    """Ignores a read."""


class _Watched(nn.Parameter):
    """A parameter whose memory does not hold what a reader expects."""

    watch: ClassVar[WatchedParameters]
    own: ClassVar[type[nn.Parameter]]

    @classmethod
    @torch.compiler.disable
    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reports what ``func`` reads, then calls it."""
        del types
        named = kwargs or {}
        # Quick for what is called often: loops that ask all parameters for their gradients, say.
        name = _read_by(func) if func not in _reads_nothing else None
        if name is not None:
            try:
                _tell(name, (*args, *named.values()))
            except UnsupportedError as refusal:
                if _calling_code() is _MAKES_STATE_DICT and _may_be_away(args):
                    return _without_values(args[0], str(refusal))
                raise
        # Some may still be watched: they were not read, or their read needs no action.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **named)
        if func is torch.Tensor.detach and _calling_code() is nn.Parameter.__new__.__code__:
            # For a subclass it expects detach to return an object of that subclass.
            return torch.Tensor._make_subclass(type(args[0]), result, False)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy is made with the class that the parameter has when it can be read.
        self.watch.tell("deepcopy")
        with _as_own(self) as own:
            return own.__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        self.watch.tell("pickle")
        with _as_own(self) as own:
            return own.__reduce_ex__(proto)


_MAKES_STATE_DICT: CodeType = vars(nn.Module)["_save_to_state_dict"].__code__


def _tell(name: str, arguments: Iterable[Any]) -> None:
    """Reports the watched parameters among a torch function's arguments, before it reads them."""
    for value in arguments:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, _Watched):
                item.watch.tell(name)


def _may_be_away(arguments: Sequence[Any]) -> bool:
    return isinstance(arguments[0], _Watched) and arguments[0].watch.may_be_away


class _WithoutValues(torch.Tensor):
    """What a state dict has of a weight that is not on this rank: its shape, on the meta device.

    Libraries make state dicts for the names alone (peft, for modules that it saves whole), or on
    ranks that save nothing. Whoever reads it gets torch's error of meta tensors; torch.save, which
    would write it, the refusal of the read.
    """

    refusal: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    def __reduce_ex__(self, proto: Any) -> Any:
        raise UnsupportedError(self.refusal)


def _without_values(parameter: nn.Parameter, refusal: str) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        meta = torch.empty_like(parameter, device="meta", requires_grad=False)
        found = meta.as_subclass(_WithoutValues)
    found.refusal = refusal
    return found


def _calling_code() -> CodeType | None:
    """The code that called this function's caller, past what keeps that out of torch.compile."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch._dynamo"):
        frame = frame.f_back
    return None if frame is None else frame.f_code


_autograd: Any = vars(torch._C)["_autograd"]  # pyright: ignore[reportPrivateUsage]
"""torch's stack of hooks for what autograd saves."""
_reads_nothing: set[Callable[..., Any]] = set()
"""Functions for which :func:`_read_by` has returned None."""


def _read_by(function: Callable[..., Any]) -> str | None:
    """The name of a torch function, or of an attribute, if it reads elements; else None."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
        if name in _ELEMENTS:
            return name
    elif name not in _OF_SHAPE:
        return name
    _reads_nothing.add(function)
    return None


@contextmanager
def _as_own(parameter: nn.Parameter) -> Generator[nn.Parameter]:
    """Gives the parameter its own class for the length of the block."""
    watched = type(parameter)
    if issubclass(watched, _Watched):
        parameter.__class__ = watched.own
    try:
        yield parameter
    finally:
        if issubclass(watched, _Watched) and not watched.watch.are_readable:
            parameter.__class__ = watched


def _watched_class(own: type[nn.Parameter], watch: WatchedParameters) -> type[nn.Parameter]:
    """The class that parameters of class ``own`` have while they are watched."""
    bases = (_Watched,) if own is nn.Parameter else (_Watched, own)
    return type(own)(
        own.__name__, bases, {"watch": watch, "own": own, "__module__": own.__module__}
    )


class SavedWeights:
    """Reports weights that autograd saves outside of their modules, while a block runs.

    So an extension's read of a weight in a graph is reported; and, in the backward of what ran in
    the block, the use of weights that no hook has gathered: it would compute with memory that has
    been freed. Functions that torch.compile has made run uncompiled in the block: they would be
    compiled for it, and again for all that follow. Every saved tensor costs some microseconds: this
    is for a model's first pass.

    Under such hooks autograd gives a function's backward a copy of what it saved; otherwise the
    object itself, with the attributes that users expect of a parameter. So call :meth:`stop` if a
    user's function is known to read weights.
    """

    def __init__(self, watched: Mapping[int, WatchedParameters]) -> None:
        """``watched``: handle of a storage of weights -> the parameters that are views of it."""
        self._watched = watched
        self._hooks = (self._pack, self._unpack)
        self._is_stopped = False
        self._stack = ExitStack()

    def __enter__(self) -> SavedWeights:
        if "torch._dynamo" in sys.modules:  # whose import takes seconds
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_stopped:
            _autograd._push_saved_tensors_default_hooks(*self._hooks)  # for the context to pop
        self._stack.close()

    def stop(self) -> None:
        """Ends the reports in this block; does nothing inside of hooks that others have set."""
        if not self._is_stopped and _top_hooks() == self._hooks:
            _autograd._pop_saved_tensors_default_hooks()
            self._is_stopped = True

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (found := self._find(tensor)) is not None:
            found.tell_saved()
        return tensor

    def _unpack(self, saved: torch.Tensor) -> torch.Tensor:
        if (found := self._find(saved)) is not None:
            found.tell_used()
        return saved

    def _find(self, tensor: torch.Tensor) -> WatchedParameters | None:
        if isinstance(tensor, _Watched):  # while the layer is away it has none of its memory
            return tensor.watch
        try:
            return self._watched.get(storage_handle(tensor))
        except (RuntimeError, NotImplementedError):  # sparse ones have none
            return None


def _top_hooks() -> Any:
    return _autograd._top_saved_tensors_default_hooks(False)


def storage_handle(tensor: torch.Tensor) -> int:
    """A key that a tensor and its views have in common, whatever memory they have."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return int(tensor.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]
