"""What an optimizer does while all micro-batches of a step go through the layers together."""

from __future__ import annotations

from collections.abc import Callable

from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.layer_major.graph_cut import NotLayerMajor


class LayerPasses:
    """Tells an optimizer where such a step has got to; the owner of a ``LayerMajorStep``."""

    def __init__(self, optimizer: HyTrainZeroOptimizer) -> None:
        self._optimizer = optimizer
        # Under ZeRO-3 with those in which nothing is trained: each is gathered once a pass.
        layers = [layer for layer in optimizer.weights.layers if layer.block is not None]
        self.blocks = [layer.block for layer in layers if layer.block is not None]
        self.names = [layer.name for layer in layers]
        self._trained = [layer.trained for layer in layers]

    # -- for LayerMajorStep ----------------------------------------------------------------------

    def begin_layers(self) -> None:
        """Several forwards begin, which go through the layers together."""
        self._optimizer.begin_layers()

    def turn_back(self, micro_batches: int) -> None:
        """The micro-batches have passed the last block: their backward begins, as one."""
        self._optimizer.turn_back(micro_batches)

    def block_done(self, block: int) -> None:
        """All micro-batches are back at the block of that number, and through it."""
        state = self._trained[block]
        if state is not None:
            self._optimizer.collector.layer_done(state.index)

    def end_layers(self) -> None:
        """The last micro-batch is back at the first layer."""
        self._optimizer.end_layers()

    # -- for who runs it -------------------------------------------------------------------------

    @property
    def can_begin(self) -> bool:
        """Nothing is kept for the next step, and none is under way."""
        return self._optimizer.is_between_steps

    @property
    def is_first(self) -> bool:
        """No step of this manner has been made."""
        return not self._optimizer.collector.knows(by_layer=True)

    @property
    def has_sent(self) -> bool:
        """The update of some layers has begun."""
        return any(state.sent for state in self._optimizer.layer_states)

    @property
    def needs_all(self) -> bool:
        """Whether ranks without samples take part, and all compute in one manner (ZeRO-3)."""
        optimizer = self._optimizer
        return optimizer.weights.active is not None and optimizer.collectives.world_size > 1

    def join(self) -> None:
        """Takes part in a step that other ranks compute layer by layer (ZeRO-3).

        Raises:
            NotLayerMajor: they cannot.
        """
        if not self._optimizer.join_layers():
            raise NotLayerMajor("other ranks cannot compute it so")

    def join_plain_forward(self) -> None:
        """Takes part in a forward without gradients that other ranks make (ZeRO-3)."""
        self._optimizer.join_forward()

    def agree(self, check: Callable[[], None]) -> None:
        """A check that all ranks must pass, where they cannot differ in their manner (ZeRO-3).

        Raises:
            NotLayerMajor: it fails here or elsewhere.
        """
        failure: NotLayerMajor | None = None
        try:
            check()
        except NotLayerMajor as error:
            failure = error
        if self._optimizer.weights.is_sharded:
            anywhere = self._optimizer.collectives.maximum([int(failure is not None)])[0]
            if anywhere and failure is None:
                failure = NotLayerMajor("another rank cannot compute it so")
        if failure is not None:
            raise failure

    def fail(self) -> None:
        """The model's first step cannot be computed so, on this rank or the whole job."""
        self._optimizer.fail_layers()

    def leave(self) -> None:
        """What follows is one forward or backward at a time; what is open counts as aborted."""
        self._optimizer.leave_layers()

    def drop(self) -> None:
        """Nothing of what was begun counts: the step's micro-batches are computed anew."""
        self._optimizer.drop_layers()

    def make_gpu_room(self) -> str:
        """See :meth:`HyTrainZeroOptimizer.make_gpu_room`."""
        return self._optimizer.make_gpu_room()
