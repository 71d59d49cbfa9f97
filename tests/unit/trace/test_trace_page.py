"""The page in a real browser: it renders, hover and search work, large traces leave it alive."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.chromium import Page, chromium
from support.trace_schedule import CPU, Schedule, write

from hytrain.tools import cli
from hytrain.tools.trace.analysis import Analysis, analyse
from hytrain.tools.trace.causes import CAUSES
from hytrain.tools.trace.kinds import COMPUTE
from hytrain.tools.trace.lanes import COLOURS, legend_of_cause, rows_of
from hytrain.tools.trace.load import load
from hytrain.tools.trace.spans import Span, table
from hytrain.tools.trace.viewer import write_page

SCHEDULE = Schedule(layers=6, steps=5).taking(**{CPU: 900})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Page]:
    with chromium(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trace"), SCHEDULE, first=2)[0]


@pytest.fixture(scope="module")
def page(trace: Path) -> Path:
    out = trace.with_suffix(".html")
    assert cli.main(["trace", "report", str(trace), "--html", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def opened(browser: Page, page: Path) -> Page:
    browser.open(page)
    return browser


def test_it_renders_what_the_trace_has(opened: Page, trace: Path) -> None:
    (rank,) = load([trace])
    analysis = analyse([rank])
    rows = rows_of(rank, analysis.steps[0], rank.steps[0].begin, rank.steps[-1].end)
    assert int(opened.value("document.body.dataset.bars")) == sum(len(row.bars) for row in rows)
    assert opened.value("rows.filter((r) => !r.heading).map((r) => r.label)") == [
        row.label for row in rows
    ]
    assert int(opened.value("document.body.dataset.drawn")) > 30
    assert opened.value("document.querySelector('h1').textContent") == f"{trace.name} (rank 0)"
    assert opened.value(
        "[...document.querySelectorAll('#verdict span')].map((e) => e.textContent)"
    ) == [
        "computing",
        "waiting",
        "do this",
    ]
    assert "The GPU computes" in opened.value("document.querySelector('#verdict p').textContent")
    ceilings = opened.value(
        "[...document.querySelectorAll('.fixes > span')].map((e) => e.textContent)"
    )
    assert ceilings[::2] == [fix.name for fix in analysis.fixes if fix.gain >= 0.001]
    assert opened.value(INK) > 500, "something is painted"


# Pixels in the colour of CPU Adam.
INK = """(() => {
  const pixels = paint.getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i] === 0x58 && pixels[i + 1] === 0xa9 && pixels[i + 2] === 0x45) found++;
  return found;
})()"""
PLACE = """(() => {
  const row = rows.find((one) => one.label === "CPU Adam"), box = canvas.getBoundingClientRect();
  const index = firstAfter(row, view.begin + 0.6 * (view.end - view.begin));
  const middle = (row.begin[index] + row.end[index]) / 2;
  return [box.left + toX(middle), box.top + row.top + 8, row.layer[index]];
})()"""


def test_hovering_a_bar_tells_what_it_is(opened: Page) -> None:
    x, y, layer = opened.value(PLACE)
    opened.mouse("mouseMoved", x, y)
    assert opened.value("hover.style.display") == "block"
    text = opened.value("hover.innerText")
    assert f"update layer {layer} chunk 0" in text
    for words in ("CPU Adam, rank 0: 900.0", f"layer {layer}, step", "30.00 MB", "hidden under"):
        assert words in text
    opened.mouse("mouseMoved", 5, 5)
    assert opened.value("hover.style.display") == "none"


def test_the_wheel_zooms_and_a_click_goes_to_a_bar(opened: Page) -> None:
    opened.value("element('all').click()")
    x, y, _ = opened.value(PLACE)
    wide, at = opened.value("view.end - view.begin"), opened.value(f"toTime({x})")
    opened.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    opened.value("1")  # the event is handled before what comes after it
    assert opened.value("view.end - view.begin") < 0.7 * wide
    assert opened.value(f"toTime({x})") == pytest.approx(at, abs=0.003 * wide)
    for kind in ("mousePressed", "mouseReleased"):
        opened.mouse(kind, x, y, button="left", clickCount=1)
    assert opened.value("view.end - view.begin") == pytest.approx(900_000 * 1.1, rel=0.01)


def test_search_finds_and_counts(opened: Page) -> None:
    opened.value("(element('search').value = 'layer 3', search())")
    found = opened.value("found.map(([row, index]) => row.layer[index])")
    assert found
    assert set(found) == {3}
    assert opened.value("element('found').textContent").startswith(f"{len(found)} found, ")
    opened.value("(element('search').value = '', search())")
    assert opened.value("matches") is None


def test_light_and_dark(opened: Page) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    before = opened.value(back)
    opened.value("element('theme').click()")
    assert opened.value(back) != before
    opened.value("element('theme').click()")


def test_the_page_asks_no_network(page: Path) -> None:
    text = page.read_text()
    for asks in ("http://", "https://", "src="):
        assert asks not in text


def test_a_page_without_a_gpu_is_about_the_device(browser: Page, tmp_path: Path) -> None:
    paths = write(tmp_path, replace(SCHEDULE, ranks=2, gpu_layers=(0,)), first=2, device="cpu")
    page = tmp_path / "cpu.html"
    assert cli.main(["trace", "report", *map(str, paths), "--html", str(page)]) == 0
    browser.open(page)
    labels = browser.value("rows.map((row) => row.label || '')")
    assert {"device waits for", "device compute", "device update"} <= set(labels)
    shown = browser.value("document.body.innerText") + str(browser.value("used"))
    assert "Ceilings" not in shown
    told = ("no GPU was recorded", "Record a run with a GPU")
    assert shown.count("GPU") == sum(shown.count(words) for words in told)


def test_no_two_causes_of_waiting_have_a_colour(opened: Page) -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert len({legend_of_cause(cause) for cause in CAUSES}) == len(CAUSES)
    colours = opened.value("data.runs[0].parts.map((part) => part[2])")
    assert len(set(colours)) == len(colours) > 4


def test_two_runs_are_drawn_below_each_other(browser: Page, trace: Path, tmp_path: Path) -> None:
    (other,) = write(tmp_path, replace(SCHEDULE, gpu_layers=(0, 1, 2)), first=2)
    page = tmp_path / "compare.html"
    assert cli.main(["trace", "compare", str(trace), str(other), "--html", str(page)]) == 0
    browser.open(page)
    assert browser.value("data.runs.length") == 2
    shown = "data.runs.map((run) => run.rows.some((r) => r.label === 'GPU update'))"
    assert browser.value(shown) == [False, True]


def with_kernels(trace: Path, number: int) -> Analysis:
    """The run with so many kernels in place of its layers."""
    (rank,) = load([trace])
    begin, end = rank.steps[0].begin, rank.steps[-1].end
    width = (end - begin) // number
    rows = table([Span(begin, begin, f"gemm {kind}", detail="forward") for kind in range(50)])
    rows = rows.select(np.arange(number) % 50)
    starts = begin + width * np.arange(number)
    compute = replace(rows, begin=starts, end=starts + width - width // 4)
    analysis = analyse([rank])
    many = replace(rank, spans={**rank.spans, COMPUTE: compute}, are_kernels=True)
    return replace(analysis, ranks=(many,))


def test_a_page_of_a_million_bars_stays_alive(browser: Page, trace: Path, tmp_path: Path) -> None:
    """More than a trace of 200 MB has. What is drawn is bounded by pixels, wherever one zooms;
    kernels cover three quarters of the time, far too narrow to be drawn one by one."""
    page = tmp_path / "page.html"
    write_page(page, [("", with_kernels(trace, 1_000_000))], [("computing", "", "words")])
    browser.open(page)
    assert int(browser.value("document.body.dataset.bars")) > 990_000
    browser.value("element('all').click()")
    for _ in range(12):
        assert int(browser.value("document.body.dataset.drawn")) < 40_000
        browser.value("zoom(0.5, (view.begin + view.end) / 2)")
    begin = browser.value("performance.now()")
    browser.value("element('all').click()")
    assert browser.value("performance.now()") - begin < 1000.0
    shades = browser.value(SHADES)
    assert shades["least"] > 0.15 + 0.85 * 0.65
    assert shades["most"] < 0.15 + 0.85 * 0.85


# What is painted in the middle of the row of kernels, as its alpha over the row's background.
SHADES = """(() => {
  const row = rows.find((one) => one.label === "GPU compute");
  // Between two dashes of the lines at ends of steps.
  const gap = (at) => (row.top + at - data.runs[0].top) % 9 === 7;
  const y = row.top + [4, 5, 6, 7, 8, 9, 10, 11, 12].find(gap);
  const back = getComputedStyle(document.documentElement).getPropertyValue("--band").trim();
  const red = (hex) => parseInt(hex.slice(1, 3), 16);
  const full = red(data.legend[row.colour[0]][1]);
  const from = toX(row.begin[0]) + 3, to = toX(row.end[row.end.length - 1]) - 3;
  const [x, line, wide] = [from, y, to - from].map((one) => one * devicePixelRatio);
  const pixels = paint.getImageData(x, line, wide, 1).data, alphas = [];
  for (let i = 0; i < pixels.length; i += 4)
    alphas.push((pixels[i] - red(back)) / (full - red(back)));
  return { least: Math.min(...alphas), most: Math.max(...alphas) };
})()"""


def test_the_picture_is_saved_as_it_is_drawn(opened: Page) -> None:
    replaced = "HTMLAnchorElement.prototype.click = function () { window.saved = this.download; }"
    opened.value(f"({replaced}, true)")
    opened.value("element('save').click()")
    deadline = time.monotonic() + 10.0
    while opened.value("window.saved") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert opened.value("window.saved").endswith(".png")


@pytest.mark.parametrize("width", [400, 1300])
def test_it_fits_the_window_and_nothing_is_cut(browser: Page, page: Path, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.open(page)
    assert browser.value("document.documentElement.scrollWidth") <= width
    bottom = browser.value("canvas.getBoundingClientRect().bottom")
    assert bottom > 0.9 * 900, "the window is used"
    for scale in (1.0, 0.2, 0.02, 0.002):
        texts = browser.value(f"(zoom({scale}, 0), {WRITTEN})")
        names = set(browser.value("data.names.concat(rows.map((r) => r.heading || r.label))"))
        names |= set(browser.value("used.map((entry) => entry[0])"))
        whole = {text for text in texts if text in names or text.isdecimal()}
        times = {text for text in texts if re.fullmatch(r"-?[\d.]+ (s|ms|µs)", text)}
        assert texts
        assert {t for t in texts if t not in whole | times and not t.startswith("step ")} == set()
        assert len({text.split()[1] for text in times}) == 1, "one unit on the axis"
        assert len(times) > 1
    browser.call("Emulation.clearDeviceMetricsOverride")


# Draws, and returns what was written on the canvas.
WRITTEN = """(() => {
  const texts = [], original = paint.fillText;
  paint.fillText = (text, ...rest) => { texts.push(text); original.call(paint, text, ...rest); };
  draw();
  paint.fillText = original;
  return texts;
})()"""
