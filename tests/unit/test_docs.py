"""The documents name every error and every key; links lead somewhere, examples parse."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hytrain import errors
from hytrain.config import HyTrainConfig
from hytrain.tools import cli
from hytrain.tools.planner.device_sheets import SHEETS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITH_LINKS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ds_configs/README.md", *PAGES]
HEADING = re.compile(r"^#+ (.+?)\s*$", flags=re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _prose(text: str) -> str:
    """The page without its blocks of code, in which a comment looks like a heading."""
    return re.sub(r"^( {4}.*)$", "", BLOCK.sub("", text), flags=re.MULTILINE)


def _anchor(heading: str) -> str:
    words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[\s]+", "-", words)


def _anchors(page: Path) -> set[str]:
    return {_anchor(heading) for heading in HEADING.findall(_prose(_read(page)))}


def _broken_links(page: Path) -> list[str]:
    broken: list[str] = []
    for target in LINK.findall(BLOCK.sub("", _read(page))):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if anchor in ("gh-light-mode-only", "gh-dark-mode-only"):  # of pictures, for one scheme
            anchor = ""
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    return broken


def _blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(_read(page)) if name == language]


def _generator(name: str = "configuration") -> ModuleType:
    path = DOCS / "generate" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_error_has_its_cause_and_remedy() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    names = {c.__name__ for c in classes if issubclass(c, errors.HyTrainError)}
    assert len(names) > 10
    page = _read(DOCS / "errors.md")
    sections = re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)
    assert sorted(sections) == sorted(names)
    assert re.findall(r"^\| \[`(\w+)`\]", page, flags=re.MULTILINE) == sections


def test_every_command_has_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    (\w+)(?: |$)", capsys.readouterr().out, flags=re.MULTILINE)
    assert {"explain", "checkpoint", "trace"} <= set(commands)
    headings = HEADING.findall(_prose(_read(DOCS / "cli.md")))
    assert [name for name in commands if f"hytrain {name}" not in headings] == []


def test_every_key_has_its_type_and_default_on_the_page() -> None:
    generator, page = _generator(), _read(DOCS / "configuration.md")
    assert generator.fill(page) == page, "run `make keys`"
    assert (
        "### `offload.cpu_threads`\n\n*integer or null, >= 1 and <= 1024; default* `null`\n" in page
    )
    for key in generator.all_keys():
        text = page.split(f"### `{key.name}`\n\n{generator._facts(key)}\n\n")[1]
        assert not text.startswith("#"), f"{key.name} has no text"
    assert generator.fill(page.replace("<= 1024", "<= 9")) == page
    assert "| [`offload.cpu_threads`](#offloadcpu_threads) | `null` | " in page
    assert generator.fill(page.replace("threads) | `null`", "threads) | `2`")) == page
    for heading in ("### `offload.cpu_threads`", "| [`offload.cpu_threads`]"):
        with pytest.raises(ValueError, match=r"offload\.cpu_threads"):
            generator.fill(page.replace(heading, ""))


def test_every_option_of_a_command_is_on_the_page() -> None:
    generator, page = _generator("commands"), _read(DOCS / "cli.md")
    assert generator.fill(page) == page, "run `make keys`"
    assert (
        "\n| `--stage {1,2,3}` | ZeRO stage (default: as in `--deepspeed-config`, else 2) |\n"
        in page
    )
    assert "\n| `hytrain checkpoint merge` | |\n| --- | --- |\n| `DIR [DIR ...]` | " in page
    assert re.findall(r"^\| `.+` \| (?:None|==SUPPRESS==)? \|$", page, flags=re.MULTILINE) == []
    for was, is_wrong in (("ZeRO stage", "stage"), ("| `--no-idle` |", "| `--gone` |")):
        assert generator.fill(page.replace(was, is_wrong)) == page
    with pytest.raises(ValueError, match="hytrain trace"):
        generator.fill(page.replace("<summary>Options of hytrain trace</summary>", ""))


def test_every_gpu_with_a_data_sheet_is_on_the_page() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    assert [name for name in SHEETS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert _broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](page.md#two) [c](gone.md) [d](#one)\n")
    assert _broken_links(page) == ["page.md#two", "gone.md"]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.name)
def test_examples_parse(page: Path) -> None:
    for text in _blocks(page, "python"):
        ast.parse(text)
    for text in _blocks(page, "json"):
        config: dict[str, Any] = json.loads(text if text.startswith("{") else "{" + text + "}")
        is_part = not text.startswith("{") and "hytrain" not in config
        assert (HyTrainConfig.from_deepspeed(config) is None) == is_part


def test_examples_are_on_their_page() -> None:
    shown = re.findall(r'^--8<-- "(examples/.+)"$', _read(DOCS / "examples.md"), flags=re.MULTILINE)
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")]
    assert sorted(shown) == sorted(files)


def test_readme_has_its_examples() -> None:
    assert _blocks(ROOT / "README.md", "json")
    assert len(_blocks(ROOT / "README.md", "python")) == 1


def test_readme_and_landing_page_have_measured_shares() -> None:
    measured = re.findall(r"\b(\d+(?:\.\d)?) %", _read(DOCS / "benchmarks.md"))
    rounded = {f"{float(share):.0f}" for share in measured}
    for page, least in ((ROOT / "README.md", 5), (DOCS / "index.md", 2)):
        shares = re.findall(r"\[(\d+)(?: %)?(?: of [a-z\s]+)?\]", _read(page))
        assert len(shares) >= least
        assert set(shares) <= rounded


def test_charts_have_the_figures_of_their_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = _generator("pictures")
    steps = {name: seconds for name, seconds, _, _ in pictures.headline()[1]}
    headline = _read(DOCS / "benchmarks.md").split("\n## Headline\n")[1].split("\n## ")[0]
    row = r"^\| (.+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) \|$"
    runs = re.findall(row, headline, flags=re.MULTILINE)
    ratios: dict[bool, list[str]] = {False: [], True: []}  # all of hytrain's state on the host?
    for name, ours, zero2, ratio in runs:
        assert ratio == f"{float(zero2) / float(ours):.1f}", name
        ratios["all of hytrain's state on the host" in name].append(ratio)
    zero2 = steps["DeepSpeed ZeRO-2 offload"]
    for on_host, ours in enumerate(("default settings", "all state on the host")):
        assert f"{zero2 / steps[f'hytrain, {ours}']:.1f}" in ratios[bool(on_host)]
    said = [f"{min(found)} to {max(found)}" for found in ratios.values()]
    for page in (ROOT / "README.md", DOCS / "index.md"):
        text = " ".join(_read(page).split())
        assert [one for one in said if f"[{one}" not in text] == [], page.name
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "pictures")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "benchmarks.md").write_text(_read(DOCS / "benchmarks.md"), encoding="utf-8")
    for dark in (False, True):
        for name in ("step_times", "in_trl", "largest_model"):
            getattr(pictures, name)(dark=dark)
            file = f"{name}_{'dark' if dark else 'light'}.svg"
            assert _read(tmp_path / "pictures" / file) == _read(DOCS / "pictures" / file), (
                "run `python docs/generate/pictures.py`"
            )


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for tool in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed: make install installs it (extra 'docs')")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for page in tmp_path.glob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="?https?:[^>]*', _read(page))
        assert loaded == [], "pages from disk need no network"
    api = _read(tmp_path / "api.html")
    listed = r"::: ([\w.]+)\n    options:\n      members:\n((?: {8}- \w+\n)+)"
    members = [
        f"{owner}.{name}"
        for owner, names in re.findall(listed, _read(DOCS / "api.md"))
        for name in re.findall(r"- (\w+)", names)
    ]
    assert len(members) > 10
    assert [name for name in members if f'id="{name}"' not in api] == []
