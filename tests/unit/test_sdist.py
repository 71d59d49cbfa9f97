"""The source distribution has what the build needs, and the README without links as description."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "CMakeLists.txt", "MANIFEST.in"]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def test_it_can_be_built_from(tmp_path: Path) -> None:
    pytest.importorskip("pybind11", reason="setup.py imports it")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    for name in (*NEEDED, "hytrain/__init__.py", "hytrain/version.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=tree, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        found = {name.partition("/")[2] for name in opened.getnames()}
        information = opened.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert information is not None
        text = information.read().decode()
    assert "Description-Content-Type: text/markdown" in text
    for heading in re.findall(r"^## .*", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert heading in text
    # A package index has no pages beside this one.
    assert not re.findall(r"\]\((?!https?://)[^)]*\)|<picture>", text)
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")}
    assert {*NEEDED, *sources} <= found
