"""Markdown tables, and what the reports say about claims and machines. Plain data."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common.checks import Check
from experiments.common.records import Json

CHECK_HEADER = ("claim", "measured", "limit", "ceiling", "verdict", "part")


def slug_of(name: str | None) -> str:
    """For a folder's name: lower case, words joined by an underscore; None is no GPU."""
    return "_".join(name.lower().split()) if name else "cpu"


def markdown(header: Sequence[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def check_rows(checks: Sequence[Check]) -> list[list[str]]:
    """Under CHECK_HEADER."""
    rows: list[list[str]] = []
    for check in checks:
        value = "-" if check.value is None else f"{check.value:#.3g}"
        sign = ">=" if check.at_least else "<="
        limit = "-" if check.limit is None else f"{sign} {check.limit:g}"
        ceiling = "" if check.ceiling is None else f"{check.ceiling:#.3g}"
        rows.append([check.claim, value, limit, ceiling, check.verdict, check.part])
    return rows


def hardware_lines(hardware: Json) -> list[str]:
    """Machine and versions."""
    versions = dict(hardware["versions"])
    if hardware.get("cuda") and versions.get("torch"):
        versions["torch"] = f"{versions['torch']} (CUDA {hardware['cuda']})"
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        f"Machine: {hardware['gpu'] or 'no GPU'}; {hardware['cores']} cores of {hardware['cpu']}",
        f"Software: Python {hardware['python']}, {software}",
    ]
