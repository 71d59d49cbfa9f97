"""What a checkpoint says of the engine itself: module, schedule, counters, the client's state."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hytrain.checkpoint.universal import (
    RECORD,
    RESERVED_CLIENT_KEYS,
    UNIVERSAL_INFO,
    UNIVERSAL_VERSION,
)
from hytrain.placement.records import Decision
from hytrain.version import __version__

logger = logging.getLogger(__name__)

COUNTERS = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size")
"""Keys that a resumed run needs."""

_NOT_CLIENT = {"module", *COUNTERS, "data_sampler", "random_ltd", UNIVERSAL_INFO, RECORD}

PLACEMENT = "placement"
RANDOMNESS = "random_states"
DATA = "data_position"
_KEPT_DECISIONS = 50


def taken_keys(client_state: Mapping[str, Any]) -> str | None:
    """What is wrong with keys that would replace what the engine needs; None if nothing is."""
    taken = sorted(RESERVED_CLIENT_KEYS & set(client_state))
    if not taken:
        info = client_state.get(UNIVERSAL_INFO, {})
        if isinstance(info, Mapping):
            return None
        return f'client_state["{UNIVERSAL_INFO}"] is a {type(info).__name__}: give a dict'
    return (
        f"client_state has the keys {', '.join(taken)}, under which the checkpoint keeps its own "
        "state: rename them"
    )


def pack_model_states(
    common: Mapping[str, Any],
    client_state: Mapping[str, Any],
    decisions: Sequence[Decision],
    randomness: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The contents of the model states' file; only the last decisions about k are kept."""
    record = {
        "version": __version__,
        PLACEMENT: [decision.to_json() for decision in decisions[-_KEPT_DECISIONS:]],
        RANDOMNESS: list(randomness),
        DATA: data,
    }
    # A client may add what converters need to know of its parameters (patterns of sharded ones).
    universal = {**client_state.get(UNIVERSAL_INFO, {}), **UNIVERSAL_VERSION}
    return {**common, RECORD: record, **client_state, UNIVERSAL_INFO: universal}


def own_record(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """hytrain's own record in the model states; empty in DeepSpeed's, smaller in older ones."""
    record = stored.get(RECORD)
    return record if isinstance(record, Mapping) else {}


def restore_engine(engine: Any, stored: Mapping[str, Any], *, with_scheduler: bool) -> None:
    """Sets a DeepSpeed engine's schedule and counters to what was saved."""
    if with_scheduler and engine.lr_scheduler is not None:
        schedule = stored.get("lr_scheduler")
        if schedule is None:
            logger.warning(
                "the checkpoint was saved without an LR scheduler: the engine's starts anew"
            )
        else:
            engine.lr_scheduler.load_state_dict(schedule)
    if engine.random_ltd_enabled() and stored.get("random_ltd") is not None:
        engine.random_ltd_scheduler.load_state_dict(stored["random_ltd"])
    loader = engine.training_dataloader
    if loader is not None and stored.get("data_sampler") is not None:
        loader.data_sampler.load_state_dict(stored["data_sampler"])
    engine.global_steps = stored["global_steps"]
    samples = engine.global_steps * engine.train_batch_size()
    engine.global_samples = stored.get("global_samples", samples)
    engine.skipped_steps = stored["skipped_steps"]
    engine.loaded_checkpoint_mp_world_size = stored["mp_world_size"]
    engine.loaded_checkpoint_dp_world_size = stored["dp_world_size"]


def client_state_of(
    stored: Mapping[str, Any], *, module_only: bool, with_optimizer: bool, with_scheduler: bool
) -> dict[str, Any]:
    """The part of the model states that ``load_checkpoint`` returns, as DeepSpeed's does."""
    own = {"module", UNIVERSAL_INFO, RECORD} if module_only else set(_NOT_CLIENT)
    if with_scheduler:
        own.add("lr_scheduler")
    if with_optimizer:
        own.add("optimizer")
    info = stored.get(UNIVERSAL_INFO)
    if isinstance(info, Mapping) and set(info) - set(UNIVERSAL_VERSION):
        own.discard(UNIVERSAL_INFO)  # the client's
    return {key: value for key, value in stored.items() if key not in own}
