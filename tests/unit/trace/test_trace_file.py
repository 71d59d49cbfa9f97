"""Traces are read with checks: what is broken is named, foreign files are no error."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support.trace_schedule import Schedule
from support.trace_schedule import write as write_schedule

from hytrain.errors import TraceError
from hytrain.formats.trace_file import Peaks, read_trace
from hytrain.tools import cli

HEADER: dict[str, Any] = {
    **{"format": 1, "rank": 0, "world_size": 2, "steps": [10, 13], "layers": 24},
    **{"device": "NVIDIA H200", "peaks": {"dram_bytes_per_s": 2.5e11, "cores": None}},
}
SPAN: dict[str, Any] = {
    **{"ph": "X", "name": "update layer 3", "cat": "cpu_update", "pid": 0, "tid": 7},
    **{"ts": 10.5, "dur": 2.0, "args": {"layer": 3}},
}


def write(folder: Path, values: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_a_trace_of_ours(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, {"traceEvents": [SPAN], "hytrain": HEADER, "more": 1}))
    header = trace.header
    assert header is not None
    assert trace.events == [SPAN]
    assert (header.rank, header.steps, header.layers) == (0, (10, 13), 24)
    assert header.peaks == Peaks(dram_bytes_per_s=2.5e11)
    assert trace.top == {"more": 1}


def test_a_gzipped_one_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    content = gzip.compress(json.dumps({"traceEvents": [SPAN]}).encode())
    path.write_bytes(content)
    assert read_trace(path).events == [SPAN]
    path.write_bytes(content[:-20])
    with pytest.raises(TraceError, match=r"trace\.json cannot be unpacked"):
        read_trace(path)
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 2**25))
    with pytest.raises(TraceError, match="unpacks to more than 100 times its size"):
        read_trace(path)


def test_foreign_traces(tmp_path: Path) -> None:
    """Both forms that Chrome's format has, with control characters in a name."""
    assert read_trace(write(tmp_path, [SPAN])).header is None
    path = tmp_path / "kineto.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": "a\tb", "ts": 1, "dur": 0}]}')
    assert read_trace(path).events[0]["name"] == "a\tb"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"traceEvents": [1,}', "is not JSON: [^;]*$"),
        ("a script\n", "is not JSON: [^;]*$"),
        ('{"traceEvents": [{"ph": "X", "na', "ends in the middle"),
        ("3", "is no trace: it holds a int"),
        ('{"step": 1, "loss": 2}', 'an object with "step", "loss"'),
        ("{}", "an object with no keys"),
        ('{"traceEvents": {}}', "is no trace"),
    ],
)
def test_what_is_no_trace(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)
    path = tmp_path / "binary"
    path.write_bytes(b"\x80\x02ccopy")
    with pytest.raises(TraceError, match="is not JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (3, "an object is needed, not 3"),
        ({}, '"ph" must be a string, not None'),
        (SPAN | {"ts": "1"}, '"ts" must be a finite number'),
        (SPAN | {"ts": math.nan}, '"ts" must be a finite number of microseconds, not nan'),
        (SPAN | {"dur": -1}, "\"dur\" of 'update layer 3' must be at least 0, not -1"),
        (SPAN | {"dur": math.inf}, '"dur"'),
        ({"ph": "X", "ts": 1, "dur": 1}, 'must have a "name"'),
        (SPAN | {"args": [1]}, '"args" must be an object'),
        ({"ph": "C", "name": "power"}, '"ts"'),
    ],
)
def test_a_broken_event_is_named(event: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"traceEvents": [SPAN, event]})
    with pytest.raises(TraceError, match="event 1") as raised:
        read_trace(path)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEADER | {"format": 2}, "has format 2, this hytrain reads 1"),
        (3, "has format None"),
        ([HEADER], "has format None"),
        (HEADER | {"layers": -1}, r"hytrain, layers: "),
        (HEADER | {"peaks": {"cores": 0}}, r"hytrain, peaks\.cores: "),
        ({"format": 1}, r"hytrain, rank: Field required"),
    ],
)
def test_a_header_that_is_refused(header: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, {"traceEvents": [], "hytrain": header}))


@pytest.mark.parametrize(
    "change",
    [
        {"ts": 1e308}, {"ts": 10**400}, {"ts": -1e300}, {"dur": 1e300}, {"pid": {}}, {"tid": []},
        {"args": 5}, {"ph": "M", "args": 5}, {"args": {"step": 10**40}}, {"dur": 0}, {"ts": 0},
        {"name": "step " + "9" * 40}, {"args": {"step": 10**19}}, {"args": {"layer": {}}},
    ],
)  # fmt: skip
def test_what_no_trace_has_is_an_error_or_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    file = write_schedule(tmp_path, Schedule(layers=2, steps=3), first=2)[0]
    content = json.loads(file.read_text())
    for event in content["traceEvents"]:
        event |= change
    file.write_text(json.dumps(content))
    is_broken = change.keys() & {"pid", "tid", "args"} and not isinstance(change.get("args"), dict)
    assert cli.main(["trace", "report", str(file)]) in ((2,) if is_broken else (0, 2))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" + "9" * 6000 + "]", "", "\x00", '{"a":' * 9, "\xff"]
)
def test_json_that_no_reader_takes(text: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(text, encoding="latin-1")
    for command in (["trace", "report"], ["explain"], ["plan", "--profile"]):
        assert cli.main([*command, str(file)]) == 2


def test_names_are_text_on_a_page(tmp_path: Path) -> None:
    file = write_schedule(tmp_path, Schedule(layers=2, steps=3), first=2)[0]
    content = json.loads(file.read_text())
    names = ["{{block}}", "{{title}}", "<!--<script>", "</script><script>alert(1)</script>", "\\1"]
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    for number, event in enumerate(spans):
        if not event["name"].startswith("step "):
            event["name"] = f"{event['name']} {names[number % len(names)]}"
    file.write_text(json.dumps(content))
    page = tmp_path / "page.html"
    assert cli.main(["trace", "report", str(file), "--html", str(page)]) == 0
    text = page.read_text()
    parts = re.findall(r'<script id="(\w+)" type="[^"]*">(.*?)</script>', text, flags=re.DOTALL)
    held = dict(parts)
    assert "<" not in held["content"]
    shown = json.loads(held["content"])["names"]
    assert all(any(name in one for one in shown) for name in names)
    assert gzip.decompress(base64.b64decode(held["block"]))
    assert text.count("<script") == 3
