"""Trains on two hosts until rank 1 kills itself; rank 0 says what it raises. See test_two_hosts.py.

Arguments: "reachable", or "firewall": then the ranks' watches cannot connect to each other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model

from hytrain.comm.peers import Link
from hytrain.errors import RankFailedError


def _listens_at(engine: Any) -> str:
    """The address of the watch's port."""
    return str(engine._collectives.watch._peers._listener._socket.getsockname()[0])


def main(how: str) -> None:
    """See the module."""
    if how == "firewall":
        Link.turn = lambda self: None  # type: ignore[method-assign]
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    with built(make_model("mlp"), make_config()) as engine:
        print("LISTENS", _listens_at(engine), flush=True)
        while how == "reachable" and engine._collectives.watch._peers.unheard():
            time.sleep(0.1)
        for number in range(1000):
            if number == 5 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                engine.backward(loss_of(engine(**make_batch("mlp", number))))
                engine.step()
            except RankFailedError as error:
                print("RAISED", str(error).replace("\n", " "), flush=True)
                raise


if __name__ == "__main__":
    main(sys.argv[1])
