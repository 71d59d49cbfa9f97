"""What files of checked records have in common: JSON of one version, read and written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hytrain.errors import PlanError


class Record(BaseModel):
    """Values that were checked and do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_File = TypeVar("_File", bound=Record)


def read_text(path: Path, what: str) -> str:
    """A file's text.

    Args:
        path: the file.
        what: it is, for errors: "profile" or "plan".

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
    """A file's text as the record that it holds.

    Args:
        kind: the record's class.
        version: that it is of.
        text: the file's.
        path: the file, for errors.
        what: it is, likewise.
        remedy: what to do about another version.

    Raises:
        PlanError: no JSON, another version, or values that the record refuses.
    """
    try:
        values: Any = json.loads(text)
    except ValueError as error:
        raise PlanError(f"the {what} {path} is not JSON: {error}") from None
    found = values.get("version") if isinstance(values, dict) else None
    if found != version:
        raise PlanError(
            f"the {what} {path} has version {found}, this hytrain reads {version}: {remedy}"
        )
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise PlanError(f"the {what} {path}, {where}: {first['msg']}") from None


def write_record(path: Path, record: Record, *, what: str) -> None:
    """Writes a record as JSON: all of the file or nothing.

    Args:
        path: the file.
        record: what it holds.
        what: it is, for errors.

    Raises:
        PlanError: it cannot be written.
    """
    write_json(path, record.model_dump(mode="json"), what=what)


def write_json(path: Path, values: object, *, what: str) -> None:
    """As :func:`write_record`, of what JSON can hold."""
    text = json.dumps(values, indent=2) + "\n"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise PlanError(f"cannot write the {what} {path} ({error.strerror})") from None
