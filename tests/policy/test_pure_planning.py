"""What decides works on plain data: it imports no torch."""

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


PURE = (
    "cost",
    "tools/planner",
    "tools/hybrid",
    "tools/uneven",
    "tools/explain",
    "tools/trace",
    "formats",
)
DECISIONS = (
    "backoff", "choose_gpu_layers", "closed_form", "launch_bound", "measure", "memory",
    "peak_memory", "records", "paired_trial",
)  # fmt: skip
"""Of placement/: what decides; the rest measures and moves."""


def test_what_decides_imports_no_torch() -> None:
    files = [path for name in PURE for path in (PACKAGE / name).rglob("*.py")]
    files += [PACKAGE / "placement" / f"{name}.py" for name in DECISIONS]
    assert len(files) > 40
    guilty = {str(path): imported_roots(path.read_text()) & IMPURE for path in files}
    assert not {path: roots for path, roots in guilty.items() if roots}
