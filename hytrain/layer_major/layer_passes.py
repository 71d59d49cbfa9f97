"""A step's micro-batches, layer by layer, as the optimizer sees them: one forward, one backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hytrain.layer_major.graph_cut import NotLayerMajor
from hytrain.optimizer.pass_tracker import PassTracker


class LayerPasses:
    """Tells the optimizer how far such a step has got; the owner of a ``LayerMajorStep``."""

    def __init__(self, passes: PassTracker) -> None:
        self._passes = passes
        # Under ZeRO-3 including frozen ones: each is gathered once per pass.
        layers = [layer for layer in passes.weights.layers if layer.block is not None]
        self.blocks = [layer.block for layer in layers if layer.block is not None]
        self.names = [layer.name for layer in layers]
        self._trained = [layer.trained for layer in layers]

    # -- for LayerMajorStep ----------------------------------------------------------------------

    def begin_layers(self) -> None:
        """Begins several forwards, which go through the layers together."""
        self._passes.weights.begin("layer_major")

    def turn_back(self, micro_batches: int) -> None:
        """Begins the micro-batches' backward, as one: they have passed the last block."""
        if self._passes.weights.active is not None:
            self._passes.weights.active.turn()
        self._turn(micro_batches)

    def _turn(self, micro_batches: int) -> None:
        self._passes.timer.end_forward()
        if self.is_first:
            self._passes.timer.invalidate()  # layers leave at other times
        self._passes.begin_backward(micro_batches=micro_batches)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns what is run back for a micro-batch's loss: fp16 has a loss scale."""
        return self._passes.scaling.apply(loss)

    def block_done(self, block: int) -> None:
        """Notes that the backward of all micro-batches has passed the block of that number."""
        for state in reversed(self._trained[block]):
            self._passes.collector.layer_done(state.index)

    def end_layers(self) -> None:
        """Ends the backward: the last micro-batch is back at the first layer."""
        self._passes.end_backward()

    # -- for the caller that runs it -------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether no step has been computed layer by layer yet."""
        return not self._passes.collector.knows(layer_major=True)

    @property
    def needs_all(self) -> bool:
        """Whether ranks without samples take part, and all compute in one mode (ZeRO-3)."""
        return self._passes.weights.active is not None and self._passes.collectives.world_size > 1

    def join(self) -> None:
        """Takes part, with no samples, in a step that other ranks compute layer by layer (ZeRO-3).

        Raises:
            NotLayerMajor: the other ranks cannot compute it so.
        """
        schedule = self._passes.weights.active
        assert schedule is not None
        if not schedule.follow("layer_major", lambda: self._turn(1)):
            raise NotLayerMajor("other ranks cannot compute it so")
        self._passes.end_backward()

    def agree(self, check: Callable[[], None]) -> None:
        """Runs a check, which all ranks must pass if they cannot differ in their mode (ZeRO-3).

        Raises:
            NotLayerMajor: it fails here or elsewhere.
        """
        failure: NotLayerMajor | None = None
        try:
            check()
        except NotLayerMajor as error:
            failure = error
        if self._passes.weights.is_sharded:
            anywhere = self._passes.collectives.maximum([int(failure is not None)])[0]
            if anywhere and failure is None:
                failure = NotLayerMajor("another rank cannot compute it so")
        if failure is not None:
            raise failure

    def fail(self) -> None:
        """Tells ranks that only join in that the first step cannot be computed so (ZeRO-3)."""
        if self._passes.weights.active is not None:
            self._passes.weights.active.fail()
