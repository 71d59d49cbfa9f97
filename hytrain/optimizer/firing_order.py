"""What a backward teaches about the order of gradients."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class FiringRecord:
    """What backwards have taught.

    Attributes:
        order: of the layers, the same on all ranks, by the first backward.
        early: which of them may go before the end of a backward; likewise.
        expected: by mode, layer-major or not, of those that were seen: for each layer and
            parameter, how often its hook fires for one micro-batch.
    """

    order: list[int]
    early: list[bool]
    expected: dict[bool, list[list[int]]] = field(default_factory=dict)


ON_SEVERAL_RANKS = (
    "Other ranks may wait in a collective that this one has left: start the job again from a "
    "checkpoint. If a part of the model is recomputed a varying number of times, checkpoint it "
    "with use_reentrant=False or use DeepSpeed's tiles (with compute_params), which may vary; or "
    "the first backward must be one with the most"
)
"""What can be done about a gradient that came after its layer was taken for complete."""
WHERE_COMMITTED = (
    "Without clipping and overflow check some layers may have been committed: load a checkpoint "
    "with engine.load_checkpoint and repeat the step; the counts are learned anew"
)
"""The same, on one rank."""
