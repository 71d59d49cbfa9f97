"""Builds hytrain._C with CMake, and the description; all else is in pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def find_tool(name: str) -> str:
    """Path of cmake or ninja: beside this interpreter (an unactivated venv), else on PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        raise SystemExit(f"hytrain needs {name} to build; `pip install {name}` provides it")
    return found


class CMakeBuild(build_ext):
    """Runs CMake in place of setuptools' own compiler calls.

    ``HYTRAIN_STRICT=1`` in the environment turns warnings into errors.
    """

    def build_extension(self, ext: Extension) -> None:
        """Configures and builds the extension where setuptools expects it."""
        target_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = Path(self.build_temp).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        strict = "ON" if os.environ.get("HYTRAIN_STRICT", "") not in ("", "0") else "OFF"
        cmake = find_tool("cmake")
        configure = [
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            "-G",
            "Ninja",
            # A build folder left by another interpreter or generator would be trusted otherwise.
            "--fresh",
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target_dir}",
            f"-DHYTRAIN_STRICT={strict}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build_dir), "--target", "_C"], check=True)


def description() -> str:
    """README.md for an index of packages: without links and pictures that only a checkout has.

    No address of the repository is published that they could be made absolute with.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<picture>.*?</picture>\n+", "", text, flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]+)\]\((?![a-z]+:)[^)]+\)", r"\1", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension("hytrain._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
