"""What decides works on plain data: placement and planner import no torch."""

from __future__ import annotations

import ast
from pathlib import Path

import hytrain

PACKAGE = Path(hytrain.__file__).parent
IMPURE = {"torch", "deepspeed"}


def imported_roots(source: str) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def test_the_check_sees_imports() -> None:
    assert imported_roots("import torch.nn\nfrom deepspeed import comm") == IMPURE


def test_placement_and_planner_import_no_torch() -> None:
    files = [path for name in ("placement", "planner") for path in (PACKAGE / name).rglob("*.py")]
    guilty = {str(path): imported_roots(path.read_text()) & IMPURE for path in files}
    assert not {path: roots for path, roots in guilty.items() if roots}
