"""Inside the package only the compiled module is imported from the root.

The root gathers the public names from the top of the package; importing one of them from below
would turn the direction of imports around. The root imports them at first use only, which the
import checker does not see; neither does it see what is imported for type checkers.
"""

from __future__ import annotations

import ast
from pathlib import Path

import hytrain

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
