"""What may be imported where."""

from __future__ import annotations

import ast
from pathlib import Path

import hytrain

# -- inside the package only the compiled module is imported from the root ---------------------

PACKAGE = Path(hytrain.__file__).parent


def names_from_root(source: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {a.name for node in nodes if node.module == "hytrain" for a in node.names}


def test_the_check_sees_them() -> None:
    assert names_from_root("from hytrain import initialize, _C") == {"initialize", "_C"}


def test_only_the_compiled_module_comes_from_the_root() -> None:
    # A folder of the package may be imported that way too: the import checker sees it by name.
    modules = {"_C"} | {path.stem for path in PACKAGE.iterdir() if path.suffix != ".pyi"}
    for path in PACKAGE.rglob("*.py"):
        assert names_from_root(path.read_text()) <= modules, path


def test_only_the_root_imports_for_type_checkers() -> None:
    guilty = [path for path in PACKAGE.rglob("*.py") if "TYPE_CHECKING" in path.read_text()]
    assert guilty == [PACKAGE / "__init__.py"]


# -- what decides works on plain data ----------------------------------------------------------

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
    "backoff", "choose_gpu_layers", "launch_bound", "measure", "memory", "peak_memory", "records",
)  # fmt: skip
"""Of placement/: what decides; the rest measures and moves."""


def test_what_decides_imports_no_torch() -> None:
    files = [path for name in PURE for path in (PACKAGE / name).rglob("*.py")]
    files += [PACKAGE / "placement" / f"{name}.py" for name in DECISIONS]
    assert len(files) > 40
    guilty = {str(path): imported_roots(path.read_text()) & IMPURE for path in files}
    assert not {path: roots for path, roots in guilty.items() if roots}
