"""DeepSpeed takes seconds to import and writes to stdout: it is imported only where it is used."""

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


@pytest.mark.parametrize(
    "module", ["hytrain", "hytrain.tools.cli", "hytrain.config", "hytrain.tools.profiler"]
)
def test_the_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'deepspeed', 'torch'}} & set(sys.modules)))"
    assert _python("-c", code) == "[]\n"


@pytest.mark.parametrize(
    "module", ["hytrain.tools.kernel_bench.run", "hytrain.offload.update_pipeline"]
)
def test_what_computes_does_without_deepspeed(module: str) -> None:
    code = f"import sys, {module}; print('deepspeed' in sys.modules)"
    assert _python("-c", code) == "False\n"


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
