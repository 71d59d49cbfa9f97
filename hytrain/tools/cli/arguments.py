"""Types and checks of the commands' arguments, and the text of an error."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hytrain.errors import ConfigError
from hytrain.formats.dtypes import Dtype
from hytrain.formats.file_kind import kind_of

DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")
"""Dtypes of the training copy, the default first."""

_MOST_WORDS = 4000


_Number = TypeVar("_Number", int, float)


def _number(
    kind: Callable[[str], _Number], accepts: Callable[[_Number], bool], words: str
) -> Callable[[str], _Number]:
    """A type of arguments: values not of the kind, or not accepted, are refused in these words."""

    def read(text: str) -> _Number:
        with suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}")

    return read


positive_int = _number(int, lambda n: n >= 1, "a whole number of at least 1")
rank_count = _number(int, lambda n: 1 <= n <= 2**16, "a number of ranks from 1 to 65536")
rank_number = _number(int, lambda n: n >= 0, "a rank: ranks are whole numbers and count from 0")
# Not so large or small that products and quotients leave a float's range.
positive_float = _number(float, lambda x: 1e-30 < x < 1e30, "a number above 0")
share = _number(float, lambda x: 0.0 <= x <= 1.0, "a share: it must be from 0 to 1")


def gibibytes(text: str) -> float:
    """A number of GiB above 0, with that unit or without one."""
    try:
        return positive_float(text.removesuffix("GiB"))
    except argparse.ArgumentTypeError as error:
        has_unit = text.upper().endswith("B")
        of_unit = ": write a plain number (a GPU of 80 GB has about 78 to use)" if has_unit else ""
        raise argparse.ArgumentTypeError(f"{error} of GiB{of_unit}") from None


def positive_ints(text: str) -> tuple[int, ...]:
    """Positive whole numbers with commas between them."""
    return tuple(positive_int(part) for part in text.split(","))


def positive_floats(text: str) -> tuple[float, ...]:
    """Finite positive numbers with commas between them."""
    return tuple(positive_float(part) for part in text.split(","))


def check_folders(*folders: Path) -> None:
    """Refuses paths that are no folders, before torch is imported, which takes seconds."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is no folder: give the folder that checkpoints were saved in"
            )


def check_outputs(
    outputs: Mapping[str, Path | None], inputs: Iterable[tuple[str, Path | None]], *, kind: str
) -> None:
    """Refuses outputs that cannot be written; called before work whose result would be lost.

    Args:
        outputs: flag -> file that will be written; None if it was not given.
        inputs: (flag, file) of what is read.
        kind: the outputs', as of :func:`kind_of`: only an earlier file of it may be replaced.

    Raises:
        ConfigError: a file's folder is not there, or writing it would destroy another one.
    """
    taken = [(flag, path) for flag, path in inputs if path is not None]
    for flag, path in outputs.items():
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"{flag} {path} is a folder: give a file")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")
        for other, read in taken:
            if path.resolve() == read.resolve():
                raise ConfigError(
                    f"{flag} {path} would replace the file of {other}: give another name"
                )
        if path.is_file() and path.stat().st_size and kind_of(path) != kind:
            raise ConfigError(
                f"{flag} {path} would replace a file that is no {kind}: give another name, or "
                "remove it"
            )
        taken.append((flag, path))


def flag(name: str) -> str:
    """The option of an attribute of the parsed arguments."""
    return f"--{name.replace('_', '-')}"


def given_flags(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """The options with these names that were given; those not given are None."""
    return [flag(name) for name in names if getattr(arguments, name) is not None]


def refuse_flags_of_plan(
    defaults: Mapping[str, Any], arguments: argparse.Namespace, subject: str, *, own: Sequence[str]
) -> None:
    """Refuses flags of `hytrain plan` given before a subject to which they mean nothing.

    ``own`` are names that the subject (`uneven` or `hybrid`) has, too.

    Raises:
        ConfigError: there is one.
    """
    given = [
        flag(name)
        for name, value in defaults.items()
        if name not in own and getattr(arguments, name) != value
    ]
    if given:
        raise ConfigError(f"{', '.join(given)}: not for `hytrain plan {subject}`: leave it out")


def error_text(error: Exception) -> str:
    """An error's message, a line for each of several (see ``refuse_all``), cut if a file's content
    makes it long."""
    parts = (part.splitlines() for part in str(error).split(";\n"))
    text = "\n  ".join(" ".join(line.strip() for line in part) for part in parts)
    return text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]} ..."
