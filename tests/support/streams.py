"""Delays on an engine's streams, which expose hand-offs without a wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

MAX_CYCLES = 400_000  # about 0.2 ms


def stream_delays(seed: int) -> Callable[[Any], None]:
    """Returns a function that puts sleeps of random length on some of an engine's streams."""
    rng = random.Random(seed)

    def disturb(engine: Any) -> None:
        streams = engine.optimizer.pipeline.streams
        for stream in (
            torch.cuda.current_stream(),
            streams.to_host,
            streams.to_device,
            streams.update,
            streams.communication,
            streams.state_in,
            streams.state_out,
        ):
            if rng.random() < 0.5:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(rng.randrange(MAX_CYCLES))

    return disturb
