"""Facts about the keys of the "hytrain" section, taken from the models that check them.

The page docs/configuration.md has a heading a key. Type, default and limits are put below each
heading when the site is built, so that they cannot differ from the code. Where the page has no text
of its own for a key, the model's docstring is its explanation: one explanation a key.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hytrain.config import HyTrainConfig

EXAMPLE = "<!-- every key -->"
HEADING = re.compile(r"^### `([a-z_.]+)`$", flags=re.MULTILINE)
_HEADING_AND_NEXT = re.compile(r"^### `([a-z_.]+)`\n+(?=(#?))", flags=re.MULTILINE)
"""A key, and "#" where its text is empty: the next heading follows at once."""
_SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: as in the JSON, with the section's own name left out: ``offload.cpu_threads``.
        default: as JSON.
        type: what values it takes, in words.
        limits: as ``>= 1``; empty where there are none.
        description: the model's docstring of the field.
    """

    name: str
    default: str
    type: str
    limits: str
    description: str


def all_keys(model: type[BaseModel] = HyTrainConfig, prefix: str = "") -> Iterator[Key]:
    """All keys in the order of the models; a nested section's follow one another."""
    told = _docstrings(model)
    for name, field in model.model_fields.items():
        shown = prefix + (field.alias or name)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from all_keys(annotation, f"{shown}.")
            continue
        yield Key(
            shown, json.dumps(field.default), _words(annotation), _limits(field), told.get(name, "")
        )


def fill(markdown: str) -> str:
    """The page with the facts below each heading.

    Raises:
        ValueError: a key has no heading, or a heading is no key.
    """
    known = {key.name: key for key in all_keys()}
    found = HEADING.findall(markdown)
    if sorted(found) != sorted(known):
        missing, unknown = set(known) - set(found), set(found) - set(known)
        raise ValueError(f"docs/configuration.md: without heading {missing}, no key {unknown}")
    filled = _HEADING_AND_NEXT.sub(
        lambda match: f"### `{match[1]}`\n\n{_facts(known[match[1]], not match[2])}\n\n", markdown
    )
    return filled.replace(EXAMPLE, f"```json\n{example()}\n```")


def example() -> str:
    """The section with every key at its default."""
    section = HyTrainConfig().model_dump(by_alias=True, mode="json")
    return '"hytrain": ' + json.dumps(section, indent=2)


def _facts(key: Key, is_explained: bool) -> str:
    limits = f", {key.limits}" if key.limits else ""
    head = f"*{key.type}{limits}; default* `{key.default}`"
    return head if is_explained else f"{head}\n\n{key.description.replace('``', '`')}"


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found[field.target.id] = inspect.cleandoc(str(below.value.value))  # type: ignore[union-attr]
    return found


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
