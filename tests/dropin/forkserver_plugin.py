"""A pytest plugin: DeepSpeed's test ranks are forked with everything imported, seconds sooner."""

from __future__ import annotations

import multiprocessing
from typing import Any


def pytest_configure(config: Any) -> None:
    """Before any rank is started."""
    del config
    import swapped_engine  # an error in the forkserver's own import would be silent

    multiprocessing.set_forkserver_preload([swapped_engine.__name__])
