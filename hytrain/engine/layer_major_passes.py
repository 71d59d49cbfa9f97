"""A step's micro-batches, layer by layer, as the optimizer sees them: one forward, one backward.

:class:`~hytrain.layer_major.layer_passes.LayerPasses` tells of them.
"""

from __future__ import annotations

from hytrain.engine.zero_passes import PassTracker


class LayerMajorPasses(PassTracker):
    """Follows passes in which several micro-batches go through the layers together."""

    def begin_layers(self) -> None:
        """Several forwards begin, which go through the layers together."""
        self.begin_forward()
        self._by_layer = True
        if self.weights.active is not None:
            self.weights.active.begin("layers")

    def turn_back(self, micro_batches: int) -> None:
        """The micro-batches have passed the last block: their backward begins, as one."""
        if self.weights.active is not None:
            self.weights.active.turn()
        self._turn(micro_batches)

    def _turn(self, micro_batches: int) -> None:
        self.timer.end_forward()
        if not self.collector.knows(by_layer=True):
            self.timer.invalidate()  # layers leave at other times
        self._begin_backward(by_layer=micro_batches)

    def end_layers(self) -> None:
        """The last micro-batch is back at the first layer."""
        self.leave_layers()
        self.end_backward()

    def leave_layers(self) -> None:
        """What follows is one forward or backward at a time; what is open counts as aborted."""
        self._by_layer = False

    def fail_layers(self) -> None:
        """A model's first step cannot be computed so: ranks that only join in are told (ZeRO-3)."""
        if self.weights.active is not None:
            self.weights.active.fail()

    def drop_layers(self) -> None:
        """Nothing of what was begun counts: the step's micro-batches are computed anew."""
        self.timer.invalidate()
        self.discard_gradients()

    def join_layers(self) -> bool:
        """Takes part in a step that other ranks compute layer by layer, with no samples (ZeRO-3).

        Returns:
            Whether they could.
        """
        schedule = self.weights.active
        assert schedule is not None
        self.begin_forward()
        self._by_layer = True
        done = schedule.follow("layers", lambda: self._turn(0))
        self.leave_layers()
        if done:
            self.end_backward()
        return done
