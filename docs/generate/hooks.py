"""Hooks that mkdocs calls while it builds the site."""

from __future__ import annotations

import re
from typing import Any

# The script that the offline plugin would make a search from disk load from the network.
_SHIM = "https://unpkg.com/iframe-worker/shim"
# References in docstrings, as :meth:`~package.Class.name`.
_ROLE = re.compile(r":(?:class|meth|func|attr|mod):<code>~?(?:[\w.]*\.)?(\w+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Turns references in docstrings into plain names."""
    return _ROLE.sub(r"<code>\1</code>", html)


def on_post_page(output: str, **_: Any) -> str:
    """Makes a search from disk need no network: docs/search_from_disk.js."""
    return output.replace(_SHIM, "search_from_disk.js")


on_post_template = on_post_page  # 404.html
