"""``engine.coalesce_grad_reduction()``: several backward passes, reduced once, make one step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from hytrain.errors import ConfigError, NestedReductionError

_MARK = "_hytrain_coalesces"


@contextmanager
def coalesced(engine: Any) -> Generator[None]:
    """A block of such backward passes.

    Args:
        engine: the HyTrainEngine.

    Raises:
        ConfigError: it cannot begin here, see the engine's method.
        NestedReductionError: it is in such a block, or in ``no_sync()``.
    """
    if not engine.managed_gradient_accumulation():
        raise ConfigError(
            "coalesce_grad_reduction() with gradient accumulation that the script manages itself: "
            "gradients are summed until step() anyway; leave it out"
        )
    if engine.inside_no_sync_ctxt or vars(engine).get(_MARK, False):
        raise NestedReductionError(
            "coalesce_grad_reduction() nested in no_sync() or another such block: leave one of "
            "them out"
        )
    boundary = vars(engine).get("_is_gradient_accumulation_boundary")
    vars(engine)[_MARK] = True
    engine.set_gradient_accumulation_boundary(False)
    # Under ZeRO-3 the plan of a backward has reductions among the gathers: they stay.
    engine.inside_no_sync_ctxt = not engine.open_optimizer().weights.is_sharded
    try:
        yield
    finally:
        engine.inside_no_sync_ctxt = False
        vars(engine)[_MARK] = False
        # Gradients that no backward has announced as the step's last are reduced in step().
        vars(engine)["_is_gradient_accumulation_boundary"] = boundary


def refuse_coalescing(engine: Any) -> None:
    """A step may not be taken in such a block.

    Raises:
        NestedReductionError: it is in one.
    """
    if vars(engine).get(_MARK, False):
        raise NestedReductionError(
            "step() within coalesce_grad_reduction() (or no_sync()): call it behind the block"
        )
