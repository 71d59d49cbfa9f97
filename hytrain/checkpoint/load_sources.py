"""Where each parameter's state comes from in a load of what checkpoint and model share."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import Any

from hytrain.checkpoint.gather import ParameterPlace
from hytrain.checkpoint.stored_files import listed

logger = logging.getLogger(__name__)


class Origin(Enum):
    """Where a parameter's state comes from."""

    CHECKPOINT = "master weights and moments are the checkpoint's"
    MODULE = "its weights were loaded without a state: moments of other weights would not fit them"
    ENGINE = "the checkpoint has nothing of it: weights and moments stay as they are"


def find_origins(
    places: Iterable[ParameterPlace],
    states: Set[str],
    module: Mapping[str, Any] | None,
    current: Mapping[str, Any],
) -> list[Origin]:
    """Each parameter's origin; the same on all ranks.

    Args:
        places: the parameters.
        states: names of the parameters that the checkpoint has state of.
        module: the weights that the checkpoint loads into the module, by name; None: unknown, all
            count as loaded.
        current: the module's tensors under all their names (a tied one has several).
    """
    loaded = {id(current[name]) for name in set(current) & set(module or ())}

    def origin(place: ParameterPlace) -> Origin:
        if place.name in states:
            return Origin.CHECKPOINT
        is_loaded = module is None or id(place.slot.parameter) in loaded
        return Origin.MODULE if is_loaded else Origin.ENGINE

    return [origin(place) for place in places]


def check_begun(places: Iterable[ParameterPlace], origins: Iterable[Origin]) -> Iterator[str]:
    """Checks that parameters that stay as they are have nothing of an unfinished step.

    Needed if updates are committed while backward runs: those cannot be taken back.
    """
    begun = [
        place.name
        for place, origin in zip(places, origins, strict=True)
        if origin is Origin.ENGINE and place.layer.update.sent
    ]
    if begun:
        yield (
            f"{listed(begun)} would stay as they are, but a step that was begun has changed "
            "them: call step() before you load"
        )


def merge_steps(
    places: Sequence[ParameterPlace],
    origins: Sequence[Origin],
    saved: Sequence[int | None],
    running: Sequence[int],
) -> list[int | None]:
    """Step count of each group after a load: the steps that its moments were made in.

    A group has one count, by which Adam corrects its moments' bias. If the checkpoint has some of
    its parameters, the count is the checkpoint's, and a warning names those that keep moments of
    another count.

    Returns:
        Step count of each group; None if the checkpoint should say and does not.
    """
    merged = list(saved)
    for group in groups_left_alone(places, origins):
        merged[group] = running[group]
    for group, steps in enumerate(merged):
        members = [pair for pair in zip(places, origins, strict=True) if pair[0].group == group]
        if members and all(origin is Origin.MODULE for _, origin in members):
            merged[group] = 0
        kept = [place.name for place, origin in members if origin is Origin.ENGINE]
        if kept and steps is not None and steps != running[group]:
            logger.warning(
                "%s keep moments of %d steps, but their group %d has made %d steps in the "
                "checkpoint: Adam's bias correction takes that number from now on",
                listed(kept),
                running[group],
                group,
                steps,
            )
    return merged


def groups_left_alone(places: Iterable[ParameterPlace], origins: Iterable[Origin]) -> set[int]:
    """Groups of which the checkpoint has no state, and the engine keeps some."""
    origins_of: dict[int, set[Origin]] = {}
    for place, origin in zip(places, origins, strict=True):
        origins_of.setdefault(place.group, set()).add(origin)
    return {
        group
        for group, found in origins_of.items()
        if Origin.ENGINE in found and Origin.CHECKPOINT not in found
    }
