"""Assembles whole parameters from the ranks' shards, one at a time.

A rank's shard of a layer is one run of the layer's flat space, and so is a parameter: each rank
has at most one piece of it. Ranks walk the same list of rounds; in a round every rank may receive
one parameter, so that no rank holds more than one beside its shard, and all receive at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.exchange import Transfer, exchange
from hytrain.kernels.host_memory import host_copy, host_zeros
from hytrain.kernels.moment_codes import part_of, read_moment, write_moment
from hytrain.kernels.moments import Moment
from hytrain.model.layer_state import LayerState
from hytrain.model.layout import LayerLayout, ParameterSlot
from hytrain.model.state_format import StateArrays

STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Names of Adam's state tensors: master weights and two moments. Another optimizer has the same
first one: see :attr:`ParameterPlace.kinds`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``[begin, end)`` of a parameter's elements, owned by ``rank``."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where a parameter's state is.

    Attributes:
        name: as in ``model.named_parameters()``.
        group: index of its parameter group.
        layer: this rank's state of the layer that holds it.
        slot: its place in the layer's flat space.
        pieces: the ranks' pieces of it, in ascending order, without gaps.
    """

    name: str
    shape: torch.Size
    group: int
    layer: LayerState
    slot: ParameterSlot
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.slot.numel

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of its state tensors."""
        return self.layer.form.kinds

    @property
    def dtype(self) -> torch.dtype:
        """The training copy's dtype."""
        return self.slot.parameter.dtype

    def piece_of(self, rank: int) -> Piece | None:
        """What a rank owns of the parameter; None for nothing."""
        return next((piece for piece in self.pieces if piece.rank == rank), None)

    def read(self, kind: str, piece: Piece) -> torch.Tensor:
        """This rank's piece of a state tensor (``kind``: one of :attr:`kinds`).

        fp32, 1-D: a view, on the host or the device as the layer is placed; for moments that are
        kept in fewer bytes, a new tensor of their values, on the host; for split master weights, a
        new tensor of their values, where the layer is placed.
        """
        if kind == STATES[0]:
            return self.layer.read_master(*self._place(piece))
        return self.read_in(self.layer.state, kind, piece)

    def read_in(self, state: StateArrays, kind: str, piece: Piece) -> torch.Tensor:
        """Does :meth:`read` in a given state of the layer's shard."""
        numel = piece.end - piece.begin
        return read_moment(self._part(state, kind, piece), numel, is_second=kind == STATES[2])

    def write(self, kind: str, piece: Piece, values: torch.Tensor) -> None:
        """Sets this rank's piece of a state tensor.

        Values that were read are restored exactly, however moments are kept; others are rounded to
        the nearest. ``values``: 1-D, of the piece's length, any floating dtype, on any device.
        """
        if kind == STATES[0]:
            self.layer.write_master(self._place(piece)[0], values)
            return
        part = self._part(self.layer.state, kind, piece)
        write_moment(part, values, is_second=kind == STATES[2])

    def _part(self, state: StateArrays, kind: str, piece: Piece) -> Moment:
        return part_of(state[self.kinds.index(kind)], *self._place(piece))

    def _place(self, piece: Piece) -> tuple[int, int]:
        """``[begin, end)`` of a piece in this rank's shard of the layer."""
        at = self.slot.offset - self.layer.begin
        return at + piece.begin, at + piece.end

    def weights(self, piece: Piece) -> torch.Tensor:
        """The training copy of a piece: a 1-D view on the device."""
        at = self.slot.offset
        return self.layer.storage.slice(at + piece.begin, at + piece.end)


def list_parameters(layers: Iterable[LayerState]) -> list[ParameterPlace]:
    """All trained parameters in the layers' order, the same list on every rank.

    Tied parameters appear once.
    """
    return [
        ParameterPlace(
            slot.name,
            slot.parameter.shape,
            _group_of(layer.layout, slot),
            layer,
            slot,
            _pieces(slot, layer.sizes),
        )
        for layer in layers
        for slot in layer.layout.slots
    ]


def _group_of(layout: LayerLayout, slot: ParameterSlot) -> int:
    return next(s.group for s in layout.segments if s.begin <= slot.offset < s.end)


def _pieces(slot: ParameterSlot, sizes: Sequence[int]) -> tuple[Piece, ...]:
    cuts = list(accumulate(sizes, initial=0))
    pieces: list[Piece] = []
    for rank, (begin, end) in enumerate(pairwise(cuts)):
        low, high = max(begin, slot.offset), min(end, slot.offset + slot.numel)
        if low < high:
            pieces.append(Piece(rank, low - slot.offset, high - slot.offset))
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A parameter and the rank that gets it whole."""

    place: ParameterPlace
    destination: int


def plan_rounds(places: Iterable[ParameterPlace], num_ranks: int) -> list[list[Delivery]]:
    """Plans rounds in which every rank gets at most one parameter, of about the same size for all.

    The parameters of a round have the same kinds of state.

    A parameter goes to the rank that has most of it, among those with none in the round yet.
    """
    by_kinds: dict[tuple[str, ...], list[ParameterPlace]] = {}
    for place in sorted(places, key=lambda place: -place.numel):
        by_kinds.setdefault(place.kinds, []).append(place)
    rounds: list[list[Delivery]] = []
    for together in (
        ordered[begin : begin + num_ranks]
        for ordered in by_kinds.values()
        for begin in range(0, len(ordered), num_ranks)
    ):
        free = list(range(num_ranks))
        rounds.append([])
        for place in together:
            sizes = {piece.rank: piece.end - piece.begin for piece in place.pieces}
            rank = max(free, key=lambda rank: sizes.get(rank, 0))
            free.remove(rank)
            rounds[-1].append(Delivery(place, rank))
    return rounds


StateSource = Callable[[ParameterPlace, str, Piece], torch.Tensor]
"""This rank's piece of a state tensor, 1-D; see :meth:`ParameterPlace.read`."""


def whole_on_host(
    place: ParameterPlace, kind: str, source: StateSource, hold: Callable[[int], None]
) -> tuple[torch.Tensor, int]:
    """A state tensor of a parameter that this rank owns whole: not copied if it need not be.

    ``hold`` is called with the bytes of a copy, before that is made.

    Returns:
        An fp32 tensor of the parameter's shape, on the host, with a storage of its own. It must not
        be written to: it may be the state itself. And the bytes that were held for it.
    """
    piece, num_bytes = Piece(0, 0, place.numel), 4 * place.numel
    if kind != STATES[0] and place.layer.form.is_rounded:
        hold(num_bytes)  # reading it makes a tensor
        return source(place, kind, piece).view(place.shape), num_bytes
    state = source(place, kind, piece)
    if state.device.type == "cpu" and state.untyped_storage().nbytes() > state.nbytes:
        hold(0)
        # Not the view itself: with a view torch saves all of the layer's storage.
        return torch.from_numpy(state.detach().numpy()).view(place.shape), 0
    hold(num_bytes)
    if state.device.type != "cpu":
        state = host_copy(state, state.dtype, purpose=f"a state of parameter '{place.name}'")
    return state.view(place.shape), num_bytes


def gather_round(
    deliveries: Sequence[Delivery],
    kind: str,
    collectives: ShardCollectives,
    device: torch.device,
    deliver: Callable[[ParameterPlace, str, torch.Tensor], None],
    source: StateSource = ParameterPlace.read,
    *,
    as_trained: bool = False,
) -> None:
    """Brings one state tensor of each parameter of a round to its destination; a collective.

    Nothing may be pending. Host memory grows by one state tensor of one parameter.

    Args:
        deliveries: the same on all ranks; no rank is a destination twice.
        deliver: called on a delivery's destination with the parameter, the state's name and the
            whole tensor (fp32, the parameter's shape, on the host, its own memory). It must not
            raise: the other ranks would wait for this one.
        source: reads this rank's pieces.
        as_trained: whether it is rounded to the training copy's dtype before it is sent.
    """
    rank = collectives.rank
    transfers: list[Transfer] = []
    received: tuple[ParameterPlace, torch.Tensor] | None = None
    for place, destination in ((d.place, d.destination) for d in deliveries):
        whole, mine, piece = None, None, place.piece_of(rank)
        if destination == rank:
            whole = _whole(place, place.dtype if as_trained else torch.float32)
            received = place, whole
        if piece is not None:
            mine = source(place, kind, piece)
            mine = mine.to(place.dtype) if as_trained else mine
        transfers += _transfers(place, destination, rank, mine, whole)
    exchange(transfers, collectives, device)
    if received is not None:
        place, whole = received
        deliver(place, kind, whole.view(place.shape))


def gather_everywhere(
    place: ParameterPlace,
    mine: torch.Tensor,
    collectives: ShardCollectives,
    device: torch.device,
) -> torch.Tensor:
    """A whole tensor of one parameter on every rank, from the ranks' pieces; a collective.

    ``mine``: this rank's piece, 1-D fp32; empty if it owns none.

    Returns:
        fp32, of the parameter's shape, its own memory.
    """
    whole = _whole(place)
    transfers = [
        transfer
        for destination in range(collectives.world_size)
        for transfer in _transfers(place, destination, collectives.rank, mine, whole)
    ]
    exchange(transfers, collectives, device)
    return whole.view(place.shape).to(device)


def _transfers(
    place: ParameterPlace,
    destination: int,
    rank: int,
    mine: torch.Tensor | None,
    whole: torch.Tensor | None,
) -> list[Transfer]:
    """Transfers of all pieces to a rank: ``mine`` is this rank's, ``whole`` where it gets them."""
    return [
        Transfer(
            piece.rank,
            destination,
            piece.end - piece.begin,
            outgoing=mine if piece.rank == rank else None,
            incoming=whole[piece.begin : piece.end]
            if whole is not None and destination == rank
            else None,
        )
        for piece in place.pieces
    ]


def gather_to_first(
    layers: Sequence[LayerState], collectives: ShardCollectives, device: torch.device
) -> dict[str, dict[str, torch.Tensor]]:
    """All state on rank 0; a collective. Nothing may be pending.

    Returns:
        On rank 0, parameter name -> state name -> fp32 tensor of the
        parameter's shape, on the host; on other ranks an empty dict.
    """
    gathered: dict[str, dict[str, torch.Tensor]] = {}

    def deliver(place: ParameterPlace, kind: str, tensor: torch.Tensor) -> None:
        gathered.setdefault(place.name, {})[kind] = tensor

    for place in list_parameters(layers):
        for kind in place.kinds:
            gather_round([Delivery(place, 0)], kind, collectives, device, deliver)
    return gathered


def _whole(place: ParameterPlace, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    remedy = "leave it more than one whole parameter in fp32, which is the least that is gathered"
    purpose = f"one state of parameter '{place.name}', gathered from all ranks"
    # Not malloc's, which keeps what is freed: as much as a parameter, for each size.
    return host_zeros(place.numel, dtype=dtype, purpose=purpose, inherited=True, remedy=remedy)
