"""Writes type, default and limits of every key into docs/configuration.md: make keys

They are taken from the models that check the "hytrain" section; tests/unit/test_docs.py fails where
the page differs from them. The text of a key is the page's own.
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hytrain.config import HyTrainConfig

PAGE = Path(__file__).resolve().parents[1] / "configuration.md"
HEADING = re.compile(r"^### `([a-z_.]+)`$", flags=re.MULTILINE)
_FACTS = re.compile(r"^### `([a-z_.]+)`\n\n(?:\*[^*\n]+\* `.*`\n\n)?", flags=re.MULTILINE)
"""A heading, and the line below it that is rewritten."""
_ROW = re.compile(r"^\| \[`([a-z_.]+)`\]\(#\w+\) \| `[^|\n]*` \|", flags=re.MULTILINE)
"""A row of the table of all keys: its link and default are rewritten."""
_SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: as in the JSON, with the section's own name left out: ``offload.cpu_threads``.
        default: as JSON.
        type: the values it takes, in words.
        limits: as ``>= 1``; empty if there are none.
    """

    name: str
    default: str
    type: str
    limits: str


def all_keys(model: type[BaseModel] = HyTrainConfig, prefix: str = "") -> Iterator[Key]:
    """Yields all keys in the order of the models; a nested section's keys are consecutive."""
    for name, field in model.model_fields.items():
        shown = prefix + (field.alias or name)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from all_keys(annotation, f"{shown}.")
            continue
        yield Key(shown, json.dumps(field.default), _words(annotation), _limits(field))


def fill(markdown: str) -> str:
    """Returns the page with present facts below each heading and in the table.

    Raises:
        ValueError: a key has no heading or no row in the table, or one of them belongs to no key.
    """
    known = {key.name: key for key in all_keys()}
    for place, pattern in (("heading", HEADING), ("row", _ROW)):
        found = pattern.findall(markdown)
        if sorted(found) != sorted(known):
            missing, unknown = set(known) - set(found), set(found) - set(known)
            raise ValueError(f"docs/configuration.md: no {place} of {missing}, no key {unknown}")
    filled = _FACTS.sub(
        lambda match: f"### `{match[1]}`\n\n{_facts(known[match[1]])}\n\n", markdown
    )
    return _ROW.sub(lambda match: _row(known[match[1]]), filled)


def _row(key: Key) -> str:
    return f"| [`{key.name}`](#{key.name.replace('.', '')}) | `{key.default}` |"


def _facts(key: Key) -> str:
    limits = f", {key.limits}" if key.limits else ""
    return f"*{key.type}{limits}; default* `{key.default}`"


def _words(annotation: Any) -> str:
    plain = {bool: "true or false", int: "integer", float: "number", str: "string"}
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = annotation.__origin__
    if annotation in plain:
        return plain[annotation]
    if annotation is type(None):
        return "null"
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in inner)
    if origin is tuple:
        return f"list of {_words(inner[0])}s"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in inner)
    return str(annotation)


def _limits(field: FieldInfo) -> str:
    found = [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for kind, name, sign in _SIGNS
        if isinstance(limit, kind)
    ]
    return " and ".join(found)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
