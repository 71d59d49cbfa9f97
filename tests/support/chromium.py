"""A headless Chromium, driven by the DevTools protocol over a pipe, without a library."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_FLAGS += ("--no-first-run", "--remote-debugging-pipe", "--window-size=1400,900")


class Page:
    """An open page."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out = into, out
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], 60.0)
            assert ready, "Chromium does not answer"
            part = os.read(self._out, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def value(self, expression: str) -> Any:
        """Returns the value of a script's expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, path: Path, timeout: float = 60.0) -> float:
        """Opens one of the project's pages; returns the seconds until it says that it is ready."""
        begin = time.monotonic()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while self.value("document.body && document.body.dataset.ready") is None:
            assert time.monotonic() - begin < timeout, "the page does not become ready"
            time.sleep(0.02)
        assert self.value("document.body.dataset.ready") == "yes"
        return time.monotonic() - begin

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Sends a mouse event: "mouseMoved", "mousePressed", "mouseReleased" or "mouseWheel"."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


@contextlib.contextmanager
def chromium(folder: Path) -> Generator[Page]:
    """A browser with an empty page; skips the test if no browser is installed."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    theirs_in, into = os.pipe()
    out, theirs_out = os.pipe()
    # Chromium reads its pipe from descriptor 3 and answers on 4. Other shells know only ten.
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, program, *_FLAGS, f"--user-data-dir={folder / 'chromium'}"],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(into, out)
    finally:
        os.close(into)
        os.close(out)
        process.kill()
        process.wait()
