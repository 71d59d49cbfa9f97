"""DeepSpeed takes seconds to import and writes to stdout: only what needs it imports it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hytrain


def _python(*arguments: str, **environment: str) -> str:
    """What an interpreter writes to stdout."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_imports_are_light() -> None:
    """What plans does without torch, and what computes without DeepSpeed."""
    code = """
import sys
for module in ("hytrain", "hytrain.config", "hytrain.tools.cli", "hytrain.tools.profiler"):
    __import__(module)
    print(module, sorted({"deepspeed", "torch"} & set(sys.modules)))
for module in ("hytrain.tools.kernel_bench.run", "hytrain.offload.update_pipeline"):
    __import__(module)
    print(module, "deepspeed" in sys.modules)
"""
    lines = _python("-c", code).splitlines()
    assert [line for line in lines if not line.endswith(("[]", "False"))] == []
    assert len(lines) == 6


def test_public_names_are_found_at_first_use() -> None:
    namespace: dict[str, object] = {}
    exec("from hytrain import *", namespace)
    assert set(hytrain.__all__) <= set(namespace)
    assert set(hytrain.__all__) <= set(dir(hytrain))
    assert hytrain.initialize.__module__ == "hytrain.api"
    with pytest.raises(AttributeError, match="has no attribute 'initialise'"):
        _ = hytrain.initialise  # type: ignore[attr-defined]


def test_the_version_alone_is_printed() -> None:
    assert _python("-m", "hytrain", "--version") == f"hytrain {hytrain.__version__}\n"


def test_json_is_all_that_reaches_stdout(tmp_path: Path) -> None:
    """Although DeepSpeed is imported and its build fails for want of a compiler."""
    arguments = ["-m", "hytrain", "bench", "kernel", "--json"]
    small = ["--elements", "200000", "--repeats", "1"]
    text = _python(*arguments, *small, CXX="false", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert json.loads(text)["machine"]["num_elements"] == 200000
