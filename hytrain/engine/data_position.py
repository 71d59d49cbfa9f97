"""The position of ``engine.training_dataloader``: a resumed run goes on with the next batch.

DeepSpeed's loader over ``training_data`` begins its pass anew in each process. A checkpoint has the
number of samples that all ranks together have drawn in a pass, and the generator's state when the
pass began, which determines the order of the samples. (DeepSpeed itself records curricula.)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, cast

import torch

from hytrain.engine.deepspeed_internals import DeepSpeedDataLoader


class PositionedDataLoader(DeepSpeedDataLoader):
    """DeepSpeed's loader, which counts the batches drawn in a pass and can go on in its middle."""

    _drawn = 0
    _generator: torch.Tensor | None = None
    """torch's generator state when the pass began."""
    _resumed: Mapping[str, Any] | None = None
    """Where the next pass is to begin."""

    def __iter__(self) -> PositionedDataLoader:
        resumed, self._resumed = self._resumed, None
        if resumed is None or not resumed["samples"]:
            self._drawn = 0
            self._generator = torch.get_rng_state()
            super().__iter__()
        else:
            self._go_on(resumed)
        return self

    def __next__(self) -> Any:
        if self._resumed is not None:  # the pass was begun before the checkpoint was loaded
            iter(self)
        try:
            batch = super().__next__()
        except StopIteration:
            self._drawn = 0
            self._generator = None
            raise
        self._drawn += 1
        return batch

    def position(self) -> dict[str, Any]:
        """Returns the position, for a checkpoint; ranks that have drawn as many batches agree."""
        if self._resumed is not None:
            return dict(self._resumed)  # nothing has been drawn since it was loaded
        return {
            "samples": self._drawn * self.batch_size * self._replicas(),
            "generator": self._generator,
            "epoch": getattr(self.data_sampler, "epoch", None),
        }

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Continues after what had been drawn when the position was taken.

        On another number of ranks this is rounded down to whole batches of all of them.
        """
        self._resumed = position
        self._drawn = 0
        self.data = None

    def _replicas(self) -> int:
        return int(getattr(self.data_sampler, "num_replicas", 1))

    def _go_on(self, position: Mapping[str, Any]) -> None:
        sampler: Any = self.data_sampler
        if position["epoch"] is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(position["epoch"])
        self._drawn = position["samples"] // (self.batch_size * self._replicas())
        self._generator = position["generator"]
        # Later draws by others get what they would in the uninterrupted run: the loader's own
        # draws, of its workers' seed and then of the order, were made before the checkpoint.
        with torch.random.fork_rng(devices=[]):
            if self._generator is not None:
                torch.set_rng_state(self._generator)
            torch.empty((), dtype=torch.int64).random_()
            rest = list(islice(sampler, self._drawn * self.batch_size, None))
            if self._generator is not None:
                torch.set_rng_state(self._generator)
            self.data_sampler = rest
            try:
                loader = cast("Any", self)._create_dataloader()
                self.data = iter(loader)
            finally:
                self.data_sampler = sampler


def count_batches(loader: object) -> object:
    """Makes DeepSpeed's loader one that knows its position; others stay as they are."""
    if type(loader) is DeepSpeedDataLoader and not cast("Any", loader).curriculum_learning_enabled:
        loader.__class__ = PositionedDataLoader
    return loader
