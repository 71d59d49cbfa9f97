"""Reads and writes files of checked records: JSON of one version."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from hytrain.errors import HyTrainError, PlanError
from hytrain.formats.file_kind import other_kind


class Record(BaseModel):
    """Checked values that do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_File = TypeVar("_File", bound=Record)


_MOST_DIGITS = 20
"""Most digits of a whole number: those of 64 bits. No count, time or address has more."""


def parse_json(
    text: str | bytes,
    what: str,
    error: Callable[[str], HyTrainError] = PlanError,
    *,
    strict: bool = True,
) -> Any:
    """Parses JSON from outside; all of hytrain's files are read by this.

    Args:
        text: the file's text, or a part of it.
        what: what it is, for errors: "the plan PATH".
        error: class of the error.
        strict: False allows raw control characters in strings.

    Raises:
        HyTrainError: of the class ``error``: it is not JSON, is nested more deeply than any file of
            ours, or has a whole number of more than 20 digits.
    """
    try:
        return json.loads(text, strict=strict, parse_int=_whole)
    except RecursionError:
        raise error(f"{what} is nested too deeply to be read") from None
    except ValueError as problem:
        seen = f"not JSON: {problem}{_cut(text)}" if text.strip() else "empty"
        raise error(f"{what} is {seen}") from None


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a whole number has {len(digits)} digits")
    return int(digits)


def _cut(text: str | bytes) -> str:
    ends = text.strip()[:1], text.strip()[-1:]
    begins = ends[0] in ("[", "{", b"[", b"{")
    is_cut = begins and ends[1] not in ("]", "}", b"]", b"}")
    return "; it ends in the middle: its writer was stopped" if is_cut else ""


def checked(
    kind: Any, values: object, what: str, error: Callable[[str], HyTrainError] = PlanError
) -> Any:
    """Converts values from JSON to the type that they should have.

    Args:
        kind: a pydantic model, a dataclass, or any other type that pydantic knows.
        values: from :func:`parse_json`.
        what: what they are, for errors.
        error: class of the error.

    Raises:
        HyTrainError: of the class ``error``: a value does not fit; the message says which.
    """
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise error(f"{what}, {where[:200]}: {first['msg'][:500]}") from None


def read_text(path: Path, what: str) -> str:
    """A file's text. ``what``: the file's kind, for errors: "profile" or "plan".

    Raises:
        PlanError: it cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read the {what} {path} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"the {what} {path} is not JSON: {error}") from None


def parse_record(
    kind: type[_File], version: int, text: str, path: Path, *, what: str, remedy: str
) -> _File:
    """Parses a file's text as the record that it holds.

    ``version``: the one that it must have; ``remedy``: what to do if its version or keys differ.

    Raises:
        PlanError: no JSON, another kind of file or version, or values that the record refuses.
    """
    if other := other_kind(path, what):
        raise PlanError(f"{other}: give a {what}")
    values = parse_json(text, f"the {what} {path}")
    found = values.get("version") if isinstance(values, dict) else None
    if found != version:
        raise PlanError(
            f"the {what} {path} has version {str(found)[:40]}, this hytrain reads {version}: "
            f"{remedy}"
        )
    # An unreleased version of the same number may have had other keys.
    return checked(
        kind, values, f"the {what} {path}", lambda words: PlanError(f"{words}: {remedy}")
    )


@contextmanager
def replacing(path: Path) -> Generator[TextIO]:
    """A file to write that takes the place of ``path`` at the end, or leaves nothing on an error.

    A reader sees the old file or the new one, never half of it.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield file
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_record(path: Path, record: Record, *, what: str) -> None:
    """Writes a record as JSON: all of the file or nothing. ``what``: the file's kind, for errors.

    Raises:
        PlanError: it cannot be written.
    """
    text = json.dumps(record.model_dump(mode="json"), indent=2) + "\n"
    try:
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise PlanError(f"cannot write the {what} {path} ({error.strerror})") from None
