"""Plans of gathers: every use finds its layer, and no more is there than the keys allow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hytrain.errors import ConfigError
from hytrain.zero3.plan import (
    Action,
    GatherSettings,
    Operation,
    PassTrace,
    gather_settings,
    most_live,
    persistent_layers,
    plan_pass,
    with_left_out,
)

NO_LIMIT = 10**12


def settings(
    prefetch: int = 0, max_live: int = NO_LIMIT, max_reuse: int = 0, persistence: int = 0
) -> GatherSettings:
    return GatherSettings(prefetch, max_live, max_reuse, persistence, NO_LIMIT)


def text(plan: Sequence[Operation]) -> str:
    letters = {Action.USE: "u", Action.GATHER: "g", Action.RELEASE: "r", Action.REDUCE: "R"}
    return " ".join(
        "end" if o.action is Action.END else f"{letters[o.action]}{o.layer}" for o in plan
    )


def test_without_prefetch_one_layer_is_there() -> None:
    plan = plan_pass(PassTrace((0, 1, 2)), [10, 10, 10], {0, 1, 2}, settings(), ())
    assert text(plan) == "u0 g0 u1 r0 g1 u2 r1 g2 end r2"


@pytest.mark.parametrize(
    ("uses", "left_out", "merged", "places"),
    [
        ((3, 0), {1, 2}, (3, 2, 1, 0), [3, 4]),
        ((0, 3, 1, 0), {2}, (0, 3, 2, 1, 0), [1, 3, 4, 5]),  # tied: first and last
        ((), {3}, (3,), []),
        ((2, 3, 7), {0}, (2, 3, 0, 7), [1, 3, 4]),  # forward has no 7, and another order
    ],
)
def test_layers_that_were_left_out_are_where_forward_has_them(
    uses: tuple[int, ...], left_out: set[int], merged: tuple[int, ...], places: list[int]
) -> None:
    assert with_left_out(uses, (0, 1, 2, 3), left_out) == (merged, places)


def test_one_layer_ahead() -> None:
    plan = plan_pass(PassTrace((0, 1, 2)), [10, 10, 10], {0, 1, 2}, settings(prefetch=1), ())
    assert text(plan) == "u0 g0 g1 u1 r0 g2 u2 r1 end r2"


def test_the_window_counts_elements() -> None:
    plan = plan_pass(PassTrace((0, 1, 2, 3)), [10, 4, 4, 9], {0, 1, 2, 3}, settings(5), ())
    assert text(plan) == "u0 g0 g1 g2 u1 r0 g3 u2 r1 u3 r2 end r3"


def test_max_live_stops_the_prefetch() -> None:
    plan = plan_pass(
        PassTrace((0, 1, 2)), [10, 10, 10], {0, 1, 2}, settings(NO_LIMIT, max_live=10), ()
    )
    assert text(plan) == "u0 g0 g1 u1 r0 g2 u2 r1 end r2"


@pytest.mark.parametrize(("keys", "is_ahead"), [({}, True), ({"max_live": 10**9}, False)])
def test_a_layer_above_the_default_is_gathered_ahead(keys: dict[str, int], is_ahead: bool) -> None:
    large = gather_settings({f"stage3_{key}_parameters": value for key, value in keys.items()})
    plan = plan_pass(PassTrace((0, 1)), [2 * 10**9] * 2, {0, 1}, large, ())
    assert text(plan) == ("u0 g0 g1 u1 r0 end r1" if is_ahead else "u0 g0 u1 r0 g1 end r1")


def test_what_the_next_pass_begins_with_stays() -> None:
    trace = PassTrace((0, 1, 2), next_uses=(2, 1, 0))
    forward = plan_pass(trace, [10, 10, 10], {0, 1, 2}, settings(max_reuse=11), ())
    assert text(forward) == "u0 g0 u1 r0 g1 u2 r1 g2 end"
    forward = plan_pass(trace, [10, 10, 10], {0, 1, 2}, settings(max_reuse=21), ())
    assert text(forward) == "u0 g0 u1 r0 g1 u2 g2 end"
    backward = plan_pass(PassTrace((2, 1, 0)), [10] * 3, {0, 1, 2}, settings(), {1, 2})
    assert text(backward).startswith("u2")
    assert "g2" not in text(backward)


def test_a_layer_that_is_used_twice() -> None:
    plan = plan_pass(PassTrace((0, 1, 0)), [10, 10], {0, 1}, settings(), ())
    assert text(plan) == "u0 g0 u1 r0 g1 u0 r1 g0 end r0"
    kept = plan_pass(PassTrace((0, 1, 0)), [10, 10], {0, 1}, settings(max_reuse=11), ())
    assert text(kept) == "u0 g0 u1 g1 u0 r1 end r0"


def test_resident_layers_are_not_gathered() -> None:
    plan = plan_pass(PassTrace((0, 1, 2)), [10, 10, 10], {0, 2}, settings(prefetch=1), ())
    assert text(plan) == "u0 g0 g2 u1 r0 u2 end r2"


def test_reductions_come_after_what_is_gathered_ahead() -> None:
    trace = PassTrace((2, 1, 0), reduces={1: (2,), 3: (1, 0)})
    plan = plan_pass(trace, [10, 10, 10], {0, 1, 2}, settings(prefetch=1), ())
    assert text(plan) == "u2 g2 g1 R2 u1 r2 g0 u0 r1 R1 R0 end r0"


@pytest.mark.parametrize("seed", range(200))
def test_any_pass(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 8)
    sizes = [rng.randint(1, 20) for _ in range(count)]
    sharded = {i for i in range(count) if rng.random() < 0.8}
    uses = tuple(rng.randrange(count) for _ in range(rng.randint(0, 15)))
    following = tuple(rng.randrange(count) for _ in range(rng.randint(0, 10)))
    live = {i for i in sharded if rng.random() < 0.3}
    keys = settings(rng.randint(0, 40), rng.randint(0, 80), rng.randint(0, 60))
    plan = plan_pass(PassTrace(uses, following), sizes, sharded, keys, live)
    assert plan == plan_pass(
        PassTrace(uses, following), sizes, sharded, keys, sorted(live, reverse=True)
    )
    seen: list[int] = []
    for at, operation in enumerate(plan):
        layer = operation.layer
        if operation.action is Action.USE:
            seen.append(layer)
            following_operations = plan[at + 1 :]
            upto = next(
                i
                for i, o in enumerate(following_operations)
                if o.action in (Action.USE, Action.END)
            )
            now = following_operations[:upto]
            assert layer not in sharded or layer in live or Operation(Action.GATHER, layer) in now
            assert Operation(Action.RELEASE, layer) not in now
        elif operation.action is Action.GATHER:
            assert layer in sharded - live
            live.add(layer)
            others = sum(sizes[i] for i in live - {seen[-1]})
            assert layer == seen[-1] or others <= keys.max_live
        elif operation.action is Action.RELEASE:
            live.remove(layer)
    assert tuple(seen) == uses
    assert keys.max_reuse > 0 or not live


def test_the_most_that_is_there_at_once() -> None:
    sizes = [10, 4, 4, 4, 7]
    everything = set(range(5))
    assert most_live(sizes, everything, settings()) == 10
    assert most_live(sizes, everything, settings(prefetch=1)) == 14
    assert most_live(sizes, everything, settings(prefetch=5)) == 18
    assert most_live(sizes, {1, 2, 3}, settings(prefetch=1)) == 8
    kept = most_live(sizes, everything, settings(max_reuse=NO_LIMIT))
    assert kept == sum(sizes)
    assert most_live(sizes, everything, settings(max_live=8, max_reuse=NO_LIMIT)) < kept


def test_small_layers_stay_whole() -> None:
    assert persistent_layers([5, 100, 7, 9], settings(persistence=9)) == {0, 2}
    bounded = GatherSettings(0, 0, 0, 10, 12)
    assert persistent_layers([5, 100, 7, 9], bounded) == {0, 2}
    assert persistent_layers([5, 100, 7, 9], settings()) == set()


def test_a_negative_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        settings(prefetch=-1)
