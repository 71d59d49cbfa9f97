"""When layers are gathered and released in a pass over the model: plain data in, plain data out.

A pass (a forward, a backward) is a sequence of uses of layers, known from an earlier pass of that
kind. From it, the layers' sizes and DeepSpeed's keys follows one list of operations, the same on
all ranks: whatever a rank does of it, it does in this order, so that collectives meet.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hytrain.errors import ConfigError


class Action(enum.Enum):
    """What happens to a layer."""

    USE = "use"
    """The pass comes to it: what follows, up to the next USE or END, is done then."""
    GATHER = "gather"
    """Its whole copy is gathered (a collective)."""
    RELEASE = "release"
    """Its whole copy is given up."""
    REDUCE = "reduce"
    """Its gradient is summed over the ranks (a collective)."""
    END = "end"
    """The pass is over; belongs to no layer."""


NO_LAYER = -1


@dataclass(frozen=True, slots=True)
class Operation:
    """An action on the layer of this index."""

    action: Action
    layer: int


# The configuration's key for each field of :class:`GatherSettings`.
_KEYS = {
    "prefetch": "stage3_prefetch_bucket_size",
    "max_live": "stage3_max_live_parameters",
    "max_reuse": "stage3_max_reuse_distance",
    "persistence": "stage3_param_persistence_threshold",
    "max_persistent": "stage3_model_persistence_threshold",
}


@dataclass(frozen=True, slots=True)
class GatherSettings:
    """DeepSpeed's keys of ZeRO-3, all in elements.

    Attributes:
        prefetch: layers are gathered ahead of their use while fewer elements than this are
            (``stage3_prefetch_bucket_size``); 0: none is. The last one may exceed it.
        max_live: most elements of gathered layers, the one in use not counted
            (``stage3_max_live_parameters``); None: 10^9, or the largest layer if it has more.
        max_reuse: a layer stays gathered if fewer elements than this are used before its next use
            (``stage3_max_reuse_distance``).
        persistence: layers of fewer elements are never released
            (``stage3_param_persistence_threshold``).
        max_persistent: most elements of such layers together
            (``stage3_model_persistence_threshold``).
    """

    prefetch: int
    max_live: int | None
    max_reuse: int
    persistence: int
    max_persistent: int

    def __post_init__(self) -> None:
        for name, key in _KEYS.items():
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f'"zero_optimization.{key}" is {value}: it must be 0 or more')


def gather_settings(keys: Mapping[str, int]) -> GatherSettings:
    """Reads DeepSpeed's ``stage3_*`` keys of a configuration; missing ones have their defaults."""
    return GatherSettings(
        prefetch=keys.get(_KEYS["prefetch"], 50_000_000),
        max_live=keys.get(_KEYS["max_live"]),
        max_reuse=keys.get(_KEYS["max_reuse"], 10**9),
        persistence=keys.get(_KEYS["persistence"], 100_000),
        max_persistent=keys.get(_KEYS["max_persistent"], 2**63 - 1),
    )


def persistent_layers(sizes: Sequence[int], settings: GatherSettings) -> set[int]:
    """The layers that stay whole on every rank: the smallest below the threshold, within the sum.

    ``sizes``: elements of each layer.
    """
    kept: set[int] = set()
    total = 0
    for index in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
        if sizes[index] >= settings.persistence or total + sizes[index] > settings.max_persistent:
            break
        kept.add(index)
        total += sizes[index]
    return kept


@dataclass(frozen=True, slots=True)
class PassTrace:
    """What a pass of one kind does.

    Attributes:
        uses: layers in the order of their uses; a layer may come more than once.
        next_uses: uses of the pass that will follow, which may want the same layers; () for none.
        reduces: number of uses made -> layers whose gradients are final by then, in the order in
            which all ranks reduce them.
    """

    uses: tuple[int, ...]
    next_uses: tuple[int, ...] = ()
    reduces: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: {})


def with_left_out(
    uses: Sequence[int], forward: Sequence[int], left_out: Collection[int]
) -> tuple[tuple[int, ...], list[int]]:
    """Adds to a recorded backward's uses those of layers that all ranks had left out.

    They are put where ``forward``, run back, has them.

    Returns:
        The uses; and for each recorded one, how many there are now before the next recorded one: a
        gradient that was final between the two may come after all of them.
    """
    merged: list[int] = []
    before: list[int] = []  # each recorded one

    def take(number: int) -> None:
        for layer in uses[len(before) : len(before) + number]:
            before.append(len(merged))
            merged.append(layer)

    for layer in reversed(forward):
        coming = uses[len(before) :]
        if layer in left_out:
            merged.append(layer)
        elif layer in coming:
            take(coming.index(layer) + 1)
    take(len(uses))
    return tuple(merged), [*before[1:], len(merged)][: len(uses)]


def plan_pass(
    trace: PassTrace,
    sizes: Sequence[int],
    sharded: Collection[int],
    settings: GatherSettings,
    live: Collection[int],
) -> tuple[Operation, ...]:
    """Makes the list of operations of a pass.

    Every use of a sharded layer finds it gathered or is followed by its gather. Before a layer is
    gathered, layers that are not wanted any more are released: at most the layer in use, those
    prefetched and those kept for ``max_reuse`` are there.

    Args:
        trace: the pass.
        sizes: elements of each layer.
        sharded: layers that have to be gathered; the others are always there.
        settings: DeepSpeed's keys.
        live: layers that are gathered when the pass begins.
    """
    return _Planner(trace, sizes, sharded, settings, live).plan()


def most_live(sizes: Sequence[int], sharded: Collection[int], settings: GatherSettings) -> int:
    """Elements of gathered layers at the peak of a step whose layers are used in their order."""
    forward = tuple(range(len(sizes)))
    traces = [PassTrace(forward, forward[::-1]), PassTrace(forward[::-1])]
    live: set[int] = set()
    peak = 0
    for trace in traces:
        for operation in plan_pass(trace, sizes, sharded, settings, live):
            if operation.action is Action.GATHER:
                live.add(operation.layer)
            elif operation.action is Action.RELEASE:
                live.remove(operation.layer)
            peak = max(peak, sum(sizes[layer] for layer in live))
    return peak


class _Planner:
    def __init__(
        self,
        trace: PassTrace,
        sizes: Sequence[int],
        sharded: Collection[int],
        settings: GatherSettings,
        live: Collection[int],
    ) -> None:
        self._trace = trace
        self._sizes = sizes
        self._sharded = sharded
        self._settings = settings
        # Within DeepSpeed's default no layer of a large block could be gathered ahead.
        default = max(10**9, *sizes)
        self._max_live = default if settings.max_live is None else settings.max_live
        self._live = set(live)
        self._future = trace.uses + trace.next_uses
        self._operations: list[Operation] = []

    def plan(self) -> tuple[Operation, ...]:
        for at, layer in enumerate(self._trace.uses):
            self._operations.append(Operation(Action.USE, layer))
            self._release_unwanted(at)
            self._gather(layer)
            self._prefetch(at)
            for reduced in self._trace.reduces.get(at + 1, ()):
                self._operations.append(Operation(Action.REDUCE, reduced))
        self._operations.append(Operation(Action.END, NO_LAYER))
        self._release_unwanted(len(self._trace.uses))
        return tuple(self._operations)

    def _gather(self, layer: int) -> None:
        if layer in self._sharded and layer not in self._live:
            self._operations.append(Operation(Action.GATHER, layer))
            self._live.add(layer)

    def _elements(self, layers: Collection[int]) -> int:
        return sum(self._sizes[layer] for layer in layers)

    def _release_unwanted(self, at: int) -> None:
        """Before use number ``at``, releases layers that are used late or never."""
        wanted = set(self._window(at, set())) & self._live  # those gathered ahead of their use
        if at < len(self._trace.uses):
            wanted.add(self._trace.uses[at])
        free = self._max_live - self._elements(wanted & self._live)
        for layer, distance in self._distances(at):
            if layer in wanted:
                continue
            if distance < self._settings.max_reuse and self._sizes[layer] <= free:
                free -= self._sizes[layer]
            else:
                self._operations.append(Operation(Action.RELEASE, layer))
                self._live.remove(layer)

    def _window(self, at: int, seen: set[int]) -> Iterator[int]:
        """Yields sharded layers used after use ``at``, but those seen, as far as gathered ahead."""
        ahead = 0
        for layer in self._trace.uses[at + 1 :]:
            if ahead >= self._settings.prefetch:
                return
            if layer in self._sharded and layer not in seen:
                seen.add(layer)
                ahead += self._sizes[layer]
                yield layer

    def _distances(self, at: int) -> list[tuple[int, float]]:
        """(gathered layer, elements used before its next use), the nearest first."""
        distances = dict.fromkeys(self._live, float("inf"))
        passed = 0
        missing = set(self._live)
        for layer in self._future[at:]:
            if not missing:
                break
            if layer in missing:
                missing.remove(layer)
                distances[layer] = passed
            passed += self._sizes[layer]
        return sorted(distances.items(), key=lambda item: (item[1], item[0]))

    def _prefetch(self, at: int) -> None:
        """After use ``at`` has begun, gathers the next layers, as many elements as allowed."""
        in_use = self._trace.uses[at]
        for layer in self._window(at, {in_use}):
            if layer in self._live:
                continue
            others = self._live - {in_use}
            if self._elements(others) + self._sizes[layer] > self._max_live:
                return
            self._gather(layer)
