"""Files and functions stay small enough to be read at one go."""

from __future__ import annotations

import ast
from pathlib import Path

import hytrain

PACKAGE = Path(hytrain.__file__).parent
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100


def long_functions(source: str, limit: int) -> list[str]:
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= limit]


def test_the_check_sees_long_functions() -> None:
    source = "def short():\n    pass\n\ndef long():\n    pass\n    pass\n"
    assert long_functions(source, 2) == ["long"]


def test_no_file_is_long() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".pyi")]
    assert len(files) > 40
    lengths = {str(path): len(path.read_text().splitlines()) for path in files}
    assert not {path: length for path, length in lengths.items() if length > MAX_FILE_LINES}


def test_no_function_is_long() -> None:
    found = {
        str(path): long_functions(path.read_text(), MAX_FUNCTION_LINES)
        for path in PACKAGE.rglob("*.py")
    }
    assert not {path: names for path, names in found.items() if names}
