"""Reduce-scatter and all-gather of one layer, with equal or unequal shards.

Equal shards use the even collective, which is faster. For unequal ones NCCL takes lists of tensors
in both collectives. Gloo takes them in reduce-scatter only: in the all-gather every rank broadcasts
its shard, which needs no padding copies either.
"""

from __future__ import annotations

import logging
import secrets
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hytrain.comm.agreement import differences
from hytrain.comm.failure_messages import is_connection_error
from hytrain.comm.failure_watch import SAME_NUMBER, RankWatch
from hytrain.comm.local_processes import are_of_one_host, this_process
from hytrain.comm.peers import Listener, Peers, address_for_ranks
from hytrain.comm.process_exit import Ending
from hytrain.comm.stream_gate import GateStream, StreamGate, open_gate
from hytrain.errors import ConfigError, OutOfStepError, RankFailedError
from hytrain.trace.recorder import Recorder

logger = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=20)

# Renamed in torch 2.13; the old names warn there and the new ones are missing before.
_names = vars(dist)
_reduce_scatter_even: Callable[..., object] = (
    _names.get("reduce_scatter_single") or _names["reduce_scatter_tensor"]
)
_all_gather_even: Callable[..., object] = (
    _names.get("all_gather_single") or _names["all_gather_into_tensor"]
)


def _words(flat: torch.Tensor, name: str | None) -> str:
    elements = f"{flat.numel()} elements"
    return elements if name is None else f"'{name}', {elements}"


class ShardCollectives:
    """Collectives among the ranks that share the optimizer state."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """``group``: the data-parallel process group; None for the default one."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.is_nccl = dist.get_backend(group) == "nccl"
        """Whether collectives run on the device, beside compute; else on the host, by gloo."""
        self.watch: RankWatch | None = None
        """Ends waits for ranks that have failed; None before :meth:`start_watch`."""
        self._gate: StreamGate | None = None
        self.trace: Recorder | None = None
        """Records the collectives' times; None while no step is recorded."""

    def start_watch(self) -> None:
        """Starts the watch, by which the ranks tell each other of failures. All ranks call it."""
        if self.world_size == 1 or self.watch is not None:
            return
        # The declared type does not say that a store can be cloned.
        shared: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]

        def connect() -> Any:
            store = shared.clone()
            store.set_timeout(_STORE_TIMEOUT)
            return store

        token: str | None = None
        try:
            connect()
            token = secrets.token_hex(8)
        except Exception as error:
            # A store of another kind (MPI has none) cannot be shared with a thread.
            logger.warning("a failed rank will be noticed at the timeout only: %s", error)
        notes = self._gathered((this_process(), token))
        if any(token is None for _, token in notes):
            return
        processes = [process for process, _ in notes]
        self.watch = RankWatch(
            self.rank,
            self.world_size,
            connect=connect,
            abort=self._abort,
            prefix=f"hytrain/watch/{notes[0][1]}",
            can_interrupt=self.is_nccl,
            mark=torch.cuda.Event() if self.is_nccl else None,
            processes=processes,
            peers=None if are_of_one_host(processes) else self._connect_hosts(),
            ending=Ending(),
        )

    def _connect_hosts(self) -> Peers | None:
        listener: Listener | None = None
        host = address_for_ranks()
        try:
            listener = Listener(host) if host is not None else None
        except OSError as error:
            logger.info("this rank cannot listen at %s: %s", host, error)
        addresses = self._gathered(listener and listener.address)
        if listener is None:
            return None
        return Peers(self.rank, listener, addresses)

    def _gathered(self, value: Any) -> list[Any]:
        """Returns a value of every rank; for use before there is a watch."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def start_gate(self, device: torch.device, *, is_wanted: bool = True) -> None:
        """Makes NCCL's kernels start only when all ranks of this host have come to them.

        All ranks call it. It does nothing with gloo, whose ranks wait on the host.

        ``is_wanted``: whether this rank takes part; a host's gate is among its ranks that do.
        """
        if self.is_nccl and self.world_size > 1:
            self._gate = open_gate(
                self.rank,
                self.world_size,
                self.group,
                lambda: GateStream(device),
                is_wanted=is_wanted,
            )

    def leave(self) -> None:
        """Announces to ranks that wait for this one that its process ends."""
        if self.watch is not None:
            self.watch.leave("its process has ended, before engine.destroy()")

    def close(self) -> None:
        """Ends what :meth:`start_watch` and :meth:`start_gate` began. May be called twice."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    @contextmanager
    def reporting_failures(self) -> Generator[None]:
        """Publishes what the block raises to the other ranks, which wait for this one in a step."""
        try:
            yield
        except Exception as error:
            if self.watch is None:
                raise
            is_lost = is_connection_error(error) and not isinstance(error, RankFailedError)
            failure = self.watch.explain(error) if is_lost else None
            if failure is not None and failure is not error:
                raise failure from error
            self.watch.tell(error, final=False)
            raise

    def waiting(self) -> AbstractContextManager[None]:
        """Declares that the host waits, on the device, for the other ranks while the block runs.

        Raises:
            RankFailedError, OutOfStepError: the wait is in vain.
        """
        return nullcontext() if self.watch is None else self.watch.waiting()

    def _abort(self) -> None:
        # The gate first: an abort may have to wait for collectives that are queued behind it.
        if self._gate is not None:
            self._gate.open_for_good()
        group: Any = self.group or distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
        group._get_backend(torch.device("cuda")).abort()

    def _run(
        self,
        what: str,
        collective: Callable[..., Any],
        *arguments: Any,
        layer: str | None = None,
        **named: Any,
    ) -> None:
        """Issues a collective; with gloo, also waits for it.

        Args:
            what: describes it, for messages; the same on all ranks.
            collective: a function of torch.distributed.
            arguments, named: the function's arguments, without the group.
            layer: name of the layer that it is for, for traces.
        """
        if self.trace is not None:
            collective = self.trace.collective(collective, layer)
        watch = self.watch
        if watch is not None:
            watch.issue(what)  # before the call: if it never returns, the others see where this is
        if self._gate is not None:
            self._gate.arrive()  # directly before: the collective must be what is queued next
        if watch is None:
            collective(*arguments, **named, group=self.group)
            return
        watch.run(partial(collective, *arguments, **named, group=self.group))

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Gathers a value of every rank on every rank; a collective that waits.

        ``value``: this rank's value; it is pickled. ``what``: describes what is gathered; the same
        on all ranks.
        """
        values: list[Any] = [value] * self.world_size
        self._run_objects(what, dist.all_gather_object, values, value)
        return values

    def objects_on_first(self, value: Any, what: str) -> list[Any]:
        """Gathers a value of every rank on rank 0, [] elsewhere; a collective that waits.

        The arguments are those of :meth:`gather_objects`.
        """
        values: list[Any] | None = [value] * self.world_size if self.rank == 0 else None
        self._run_objects(what, dist.gather_object, value, values, self.global_rank(0))
        return values or []

    def object_from_first(self, value: Any, what: str) -> Any:
        """Returns rank 0's value on every rank; a collective that waits.

        ``value``: rank 0's value; it is pickled. The other ranks' values are not used. ``what``:
        describes what is sent; the same on all ranks.
        """
        values = [value]
        self._run_objects(what, dist.broadcast_object_list, values, self.global_rank(0))
        return values[0]

    def _run_objects(self, what: str, collective: Callable[..., Any], *arguments: Any) -> None:
        if self.world_size > 1:
            # With NCCL, too, the host waits here.
            with self.waiting() if self.is_nccl else nullcontext():
                self._run(what, collective, *arguments)

    def guarded(self, transfer: Callable[[], object]) -> None:
        """Runs a transfer among some of the ranks only.

        Raises:
            RankFailedError, OutOfStepError: it will not end.
        """
        if self.watch is None:
            transfer()
        else:
            self.watch.run(transfer)

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        shard: torch.Tensor,
        name: str | None = None,
    ) -> None:
        """Sums ``flat`` over the ranks into this rank's shard.

        Args:
            flat: 1-D, sum(sizes) elements, on every rank; not changed.
            sizes: elements of each rank's shard.
            shard: 1-D, this rank's elements, of the same dtype; overwritten.
            name: name of what is summed, for messages; the same on all ranks.
        """
        if self.world_size == 1:
            shard.copy_(flat)
            return
        what = f"the reduce-scatter of {_words(flat, name)}"
        if len(set(sizes)) == 1:
            self._run(what, _reduce_scatter_even, shard, flat, layer=name)
        else:
            parts = list(flat.split(list(sizes)))
            self._run(what, dist.reduce_scatter, shard, parts, layer=name)

    def all_gather(
        self,
        flat: torch.Tensor,
        sizes: Sequence[int],
        name: str | None = None,
        *,
        part: torch.Tensor | None = None,
    ) -> None:
        """Fills ``flat`` from every rank's own shard of it.

        Args:
            flat: 1-D, sum(sizes) elements; overwritten.
            sizes: elements of each rank's shard.
            name: name of what is gathered, for messages; the same on all ranks.
            part: 1-D, this rank's shard; None: it is already in its place in ``flat``.
        """
        if self.world_size == 1:
            return
        shards = list(flat.split(list(sizes)))
        part = shards[self.rank] if part is None else part
        what = f"the all-gather of {_words(flat, name)}"
        if len(set(sizes)) == 1:
            self._run(what, _all_gather_even, flat, part, layer=name)
        elif self.is_nccl:
            self._run(what, dist.all_gather, shards, part, layer=name)
        else:
            if part.data_ptr() != shards[self.rank].data_ptr():
                shards[self.rank].copy_(part)
            for rank, shard in enumerate(shards):
                if shard.numel():
                    self._run(what, dist.broadcast, shard, self.global_rank(rank), layer=name)

    def agree_on_use(
        self,
        index: int | None,
        words: Callable[[int], str],
        choose: Callable[[int, int], int | None] = lambda _smallest, _largest: None,
    ) -> int:
        """Agrees with all ranks on what to do next, as one number; a collective that waits.

        Args:
            index: this rank's number; None: it does what the others do.
            words: says what a number stands for.
            choose: called with the smallest and the largest number if the ranks' numbers differ;
                returns the one to take, or None: they must not differ.

        Raises:
            OutOfStepError: the ranks do not agree; on all of them.
        """
        if self.world_size == 1:
            assert index is not None
            return index
        none = torch.iinfo(torch.int64).min
        mine = [none, none] if index is None else [index, -index]
        seen = torch.tensor(mine, device=self._device())
        what = "the agreement on the next layer"
        self._run(what, dist.all_reduce, seen, op=dist.ReduceOp.MAX)
        with self.waiting():  # tolist() waits for the device, which may wait for a failed rank
            largest, negated = (int(value) for value in seen.tolist())
        if largest != -negated and largest != none:
            if (chosen := choose(-negated, largest)) is not None:
                return chosen
            own = "this rank has no samples" if index is None else f"this rank's is {words(index)}"
            raise OutOfStepError(
                "the ranks' passes over the model differ: where one of them has come to "
                f"{words(-negated)}, another one has come to {words(largest)} ({own}). Under "
                "ZeRO-3 ranks may use other layers than the others in a pass; but a weight that a "
                "later pass is the first to read outside of its module must be read on all of them "
                "at one place, and a layer that is used more often than in the first pass as often "
                "on all of them"
            )
        return largest

    def maximum(self, values: Sequence[int], what: str = "the agreement on gradients") -> list[int]:
        """Returns the largest of each number over the ranks; a collective that waits."""
        if self.world_size == 1:
            return list(values)
        table = torch.tensor(list(values), device=self._device())
        self._run(what, dist.all_reduce, table, op=dist.ReduceOp.MAX)
        with self.waiting():
            return [int(value) for value in table.tolist()]

    def _device(self) -> torch.device:
        return torch.device("cuda" if self.is_nccl else "cpu")

    def broadcast_from_first(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's contents of a tensor of any dtype to all ranks, in place."""
        if self.world_size > 1:
            what = f"the broadcast of {tensor.numel()} weights"
            whole = tensor.contiguous()
            flat = whole.view(-1).view(torch.uint8)
            self._run(what, dist.broadcast, flat, self.global_rank(0))
            if whole is not tensor:
                tensor.copy_(whole)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over the ranks, in place."""
        if self.world_size > 1:
            self._run(f"the all-reduce of {tensor.numel()} elements", dist.all_reduce, tensor)

    def meet(self, what: str, alike: Callable[[], Mapping[str, str]] = dict) -> None:
        """Checks that all ranks are about to begin the same thing, where they could be out of step.

        NCCL's collectives wait for one another, so it is enough to note what begins. Gloo ends the
        process without a message if two collectives do not fit, so its ranks compare first.

        Args:
            what: describes what begins.
            alike: returns the settings that all ranks must begin with, by key; used with gloo only.

        Raises:
            OutOfStepError: another rank begins something else; raised on all ranks.
            ConfigError: all begin the same, but with different settings; raised on all ranks.
        """
        if self.world_size == 1:
            return
        if self.is_nccl:
            if self.watch is not None:
                self.watch.issue(what)
            return
        mine = (what, dict(alike()))
        code = zlib.crc32(repr(mine).encode())
        largest, negated = self.maximum([code, -code], "the ranks' meeting")
        if largest == -negated:
            return
        ranks: list[tuple[str, dict[str, str]]] = self.gather_objects(mine, "the ranks' words")
        others = [rank for rank, (where, _) in enumerate(ranks) if where != what]
        if others:
            raise OutOfStepError(
                f"the ranks are out of step: rank {self.rank} has come to {what}, ranks {others} "
                f"to {ranks[others[0]][0]}. {SAME_NUMBER}"
            )
        values = {rank: settings for rank, (_, settings) in enumerate(ranks)}
        lines = differences(values, list(mine[1]), {rank: f"rank {rank}" for rank in values})
        raise ConfigError(
            f"the ranks have come to {what} with different settings: make them "
            "alike (does one rank step its scheduler more often?):\n  " + "\n  ".join(lines)
        )

    def agree_on_order(
        self, order: Sequence[int], early: Sequence[bool], *, has_seen: bool
    ) -> tuple[list[int], list[bool]] | None:
        """Agrees on one order of the layers for all ranks, and on which of them are early.

        The order is that of the lowest rank that has seen a backward; a rank without one (it
        computes no samples) has no say. A layer is early only if it is on all ranks that have a
        say. Returns None if no rank has.
        """
        what = "the agreement on the layers' order"
        source = -self.maximum([-self.rank if has_seen else -self.world_size], what)[0]
        if source == self.world_size:
            return None
        mine = order if self.rank == source else [0] * len(order)
        late = [has_seen and not is_early for is_early in early]
        agreed = self.maximum([*mine, *map(int, late)], what)
        return agreed[: len(order)], [not is_late for is_late in agreed[len(order) :]]
