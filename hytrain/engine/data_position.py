"""Where ``engine.training_dataloader`` has got to: a resumed run goes on with the next batch.

DeepSpeed's loader over ``training_data`` begins its pass anew in each process. A checkpoint has how
many samples all ranks together have drawn of a pass, and the generator as it was when the pass
began, of which the order of the samples follows. (Curricula have DeepSpeed's own record.)
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, cast

import torch

from hytrain.engine.deepspeed_internals import DeepSpeedDataLoader


class PositionedDataLoader(DeepSpeedDataLoader):
    """DeepSpeed's loader, which counts what was drawn of a pass and can go on in the middle."""

    _drawn = 0
    _generator: torch.Tensor | None = None
    """When the pass began."""
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
        """For a checkpoint; the same on ranks that have drawn as many batches."""
        if self._resumed is not None:
            return dict(self._resumed)  # nothing has been drawn since it was loaded
        return {
            "samples": self._drawn * self.batch_size * self._replicas(),
            "generator": self._generator,
            "epoch": getattr(self.data_sampler, "epoch", None),
        }

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """What is drawn next comes after what was drawn when the position was taken.

        On another number of ranks: after as many whole batches as all of them had drawn.
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
        # Who draws afterwards gets what the uninterrupted run would have: the loader's own draws,
        # of its workers' seed and then of the order, were made before the checkpoint.
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
    """DeepSpeed's loader becomes one that knows its position; others stay as they are."""
    if type(loader) is DeepSpeedDataLoader and not cast("Any", loader).curriculum_learning_enabled:
        loader.__class__ = PositionedDataLoader
    return loader
