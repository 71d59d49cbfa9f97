"""Writes the options of every command into docs/cli.md: make keys

They are taken from the parsers, and the texts are those of `--help`; tests/unit/test_docs.py fails
where the page differs from them.
"""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS, ArgumentParser, HelpFormatter, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hytrain.tools import cli

PAGE = Path(__file__).resolve().parents[1] / "cli.md"
_PART = re.compile(
    r"(?<=^<summary>Options of )(hytrain \w+)</summary>\n.*?(?=</details>$)",
    flags=re.MULTILINE | re.DOTALL,
)


def fill(markdown: str) -> str:
    """Returns the page with each command's options in its collapsed part.

    Raises:
        ValueError: a command has no such part, or a part belongs to no command.
    """
    known = {parser.prog: parser for parser in _commands(cli._parser())}
    if (found := _PART.findall(markdown)) != list(known):
        raise ValueError(f"docs/cli.md: has options of {found}, the commands are {list(known)}")
    return _PART.sub(lambda at: f"{at[1]}</summary>\n\n{_tables(known[at[1]])}", markdown)


def _commands(parser: ArgumentParser) -> list[ArgumentParser]:
    found = [one.choices for one in parser._actions if isinstance(one, _SubParsersAction)]
    return [command for choices in found for command in choices.values()]


def _tables(parser: ArgumentParser) -> str:
    """Returns a table of the command's arguments, then the tables of its subcommands."""
    rows: list[str] = []
    for number, group in enumerate(parser._action_groups):
        of_group = list(_rows(parser, group._group_actions))
        is_titled = number > 1 and of_group  # the first two are argparse's own
        rows += [f"| **{group.title}** | |", *of_group] if is_titled else of_group
    own = "\n".join([f"| `{parser.prog}` | |", "| --- | --- |", *rows, "", ""]) if rows else ""
    return own + "".join(_tables(command) for command in _commands(parser))


def _rows(parser: ArgumentParser, actions: list[Any]) -> Iterator[str]:
    words = HelpFormatter(parser.prog)
    for action in actions:
        if action.default is SUPPRESS or isinstance(action, _SubParsersAction):
            continue  # --help, and names of subcommands
        value = words._format_args(action, action.dest.upper())
        name = " ".join((*action.option_strings, value)).strip()
        text = re.sub(r"(?<![\w`-])--[a-z][a-z-]+", r"`\g<0>`", words._expand_help(action))
        required = "; required" if action.required and action.option_strings else ""
        yield f"| `{name}` | {text}{required} |"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
