"""``python -m hytrain``: the `hytrain` command."""

from __future__ import annotations

import sys

from hytrain.tools.cli import main

sys.exit(main())
