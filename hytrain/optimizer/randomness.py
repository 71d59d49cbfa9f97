"""A stream of random numbers for each micro-batch, in whatever order their parts are computed.

Dropout draws from torch's default generators. If micro-batches take turns layer by layer, they
would draw from one another's numbers; with a stream each, the order does not matter.
"""

from __future__ import annotations

import torch

State = list[torch.Tensor]
"""States of the default generators: the CPU's and, with a GPU, the device's."""


class MicroBatchRandomness:
    """Context in which the default generators are those of the micro-batch chosen last.

    The seeds come from the CPU's default generator, which afterwards continues after them; the
    device's continues where it was.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._seeds: list[int] = torch.randint(2**62, (count,), device="cpu").tolist()
        self._outside = self.state()
        self._states: list[State | None] = [None] * count
        self._current = -1

    def __enter__(self) -> MicroBatchRandomness:
        return self

    def __exit__(self, *_error: object) -> None:
        self.replay(self._outside)

    def state(self) -> State:
        """The current states of the generators."""
        return [generator.get_state() for generator in self._generators]

    def replay(self, state: State) -> None:
        """Sets the generators to these states; no micro-batch is chosen any more."""
        self._current = -1
        for generator, value in zip(self._generators, state, strict=True):
            generator.set_state(value)

    def choose(self, number: int) -> None:
        """Sets the generators to where this micro-batch's stream has got to."""
        if number == self._current:
            return
        if self._current >= 0:
            self._states[self._current] = self.state()
        state = self._states[number]
        if state is None:
            for generator in self._generators:
                generator.manual_seed(self._seeds[number])
        else:
            self.replay(state)
        self._current = number

    def restart(self) -> None:
        """Restarts the stream of every micro-batch."""
        self._states = [None] * len(self._states)
        self._current = -1
