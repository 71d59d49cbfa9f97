"""What the folders promise: one class over DeepSpeed's each, one owner of the open step's flags."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hytrain
from hytrain.engine.deepspeed_internals import DeepSpeedEngine, ZeROOptimizer
from hytrain.engine.engine import HyTrainEngine
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer

PACKAGE = Path(hytrain.__file__).parent
KNOWS_DEEPSPEED = (
    "api.py",
    "engine/deepspeed_internals.py",
    "engine/unsupported.py",
)
"""The first takes its public names only."""


@pytest.mark.parametrize(
    ("ours", "theirs"), [(HyTrainEngine, DeepSpeedEngine), (HyTrainZeroOptimizer, ZeROOptimizer)]
)
def test_one_class_of_ours_is_above_deepspeeds(ours: type, theirs: type) -> None:
    assert ours.__bases__ == (theirs,)


def _imports_deepspeed(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.split(".")[0] == "deepspeed" for name in names):
            return True
    return False


def test_few_files_import_deepspeed() -> None:
    assert _imports_deepspeed("from deepspeed.runtime import engine")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.parent.parts[-1] != "tools" and "tools" not in path.relative_to(PACKAGE).parts
        if _imports_deepspeed(path.read_text())
    }
    assert found <= set(KNOWS_DEEPSPEED)


def _assigned(source: str, owner: str) -> list[str]:
    """Attributes of ``....owner`` that are assigned."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
        for target in targets:
            value = target.value if isinstance(target, ast.Attribute) else None
            if isinstance(value, ast.Attribute) and value.attr == owner:
                found.append(ast.unparse(target))
    return found


SET_ONCE = ("gradient_ready", "weights_ready", "reads")
"""Events and observers that a build gives to a layer's update."""


@pytest.mark.parametrize("owner", ["open_step", "update"])
def test_the_open_step_is_changed_by_its_own_methods_only(owner: str) -> None:
    assert _assigned(f"self.{owner}.sent = True", owner) == [f"self.{owner}.sent"]
    guilty: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        found = _assigned(path.read_text(), owner)
        guilty += [name for name in found if name.rsplit(".", 1)[1] not in SET_ONCE]
    assert not guilty
