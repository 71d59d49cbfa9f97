"""Weights for another program, such as an inference engine: by name, a bucket at a time.

Weights that ZeRO-3 shards are gathered in buckets, the next one while the caller uses the current
one. There are never more than two: a bucket is asked for when the caller has taken the first tensor
of the bucket before it, and so has let go of the one before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

from hytrain.errors import ConfigError
from hytrain.model.partition import in_buckets
from hytrain.offload.host_blocks import HostBlock, block_bytes
from hytrain.optimizer.kept_state import KeptState
from hytrain.zero3.weight_passes import Bucket

Named = tuple[str, torch.Tensor]
_Found = dict[int, tuple[torch.Tensor, list[str]]]
"""``id`` of a tensor -> itself, and its names."""

_REMEDY = "take smaller buckets (bucket_bytes), or weights on the device (on_host=False)"


class WeightHandover:
    """Walks a module's weights; see :meth:`HyTrainEngine.iterate_weights`."""

    def __init__(self, kept: KeptState, module_tensors: Callable[[], Mapping[str, Any]]) -> None:
        """``module_tensors`` returns the module's state dict, without waiting for anything."""
        self._kept = kept
        self._streams = kept.pipeline.streams
        self._module_tensors = module_tensors
        self._blocks: list[HostBlock] = []
        self._walks = 0

    def iterate(
        self, dtype: torch.dtype | None, limit: int, *, on_host: bool, with_frozen: bool
    ) -> Iterator[Named]:
        """Returns an iterator over the module's tensors by name. ``limit``: bytes of a bucket."""
        self._kept.come_to_rest()
        self._walks += 1
        find = cache(partial(self._find, with_frozen=with_frozen))
        buckets = self._buckets(find, limit, with_frozen=with_frozen)
        if on_host:
            # By map(), which keeps no bucket: otherwise one would stay beside the next two.
            copy = partial(self._copy_to_host, dtype)
            buckets = map(copy, cycle((0, 1)), _one_ahead(buckets))
        return self._items(buckets, find, dtype, on_host=on_host)

    def _find(self, *, with_frozen: bool) -> _Found:
        found: _Found = {}
        for name, tensor in self._module_tensors().items():
            is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            if isinstance(tensor, torch.Tensor) and (with_frozen or not is_frozen):
                found.setdefault(id(tensor), (tensor, []))[1].append(name)
        return found

    def _buckets(
        self, find: Callable[[], _Found], limit: int, *, with_frozen: bool
    ) -> Iterator[Bucket]:
        weights = self._kept.weights
        yield from weights.buckets(lambda layer: layer.parts(with_frozen=with_frozen), limit)
        sharded = {
            id(slot.parameter)
            for layer in weights.layers
            for part in layer.sharded
            for slot in part.layout.slots
        }
        whole = [tensor for key, (tensor, _names) in find().items() if key not in sharded]
        for some in in_buckets(whole, lambda tensor: tensor.nbytes, limit):
            yield Bucket({id(tensor): tensor.detach() for tensor in some}, None)

    def _copy_to_host(self, dtype: torch.dtype | None, number: int, bucket: Bucket) -> Bucket:
        self._streams.compute_waits(bucket.arrived)
        like = {
            key: torch.empty(t.shape, dtype=_dtype_of(t, dtype), device="meta")
            for key, t in bucket.tensors.items()
        }
        block = self._block(number, block_bytes(list(like.values())))
        copies = dict(zip(like, block.cut(list(like.values())), strict=True))
        for key, copy in copies.items():
            copy.copy_(bucket.tensors[key], non_blocking=True)
        return Bucket(copies, self._streams.record_current())

    def _block(self, number: int, num_bytes: int) -> HostBlock:
        """Returns one of two blocks, kept for reuse; the caller is done with the copies in it."""
        if number < len(self._blocks) and self._blocks[number].num_bytes >= num_bytes:
            return self._blocks[number]
        if number < len(self._blocks):
            self._blocks[number].close()
        purpose = "weights that are handed over (iterate_weights)"
        device = self._streams.device
        block = HostBlock(num_bytes, device, pin=True, purpose=purpose, remedy=_REMEDY)
        self._blocks[number : number + 1] = [block]
        return block

    def _items(
        self,
        buckets: Iterator[Bucket],
        find: Callable[[], _Found],
        dtype: torch.dtype | None,
        *,
        on_host: bool,
    ) -> Iterator[Named]:
        version = self._version

        def items_of(bucket: Bucket) -> Iterator[Named]:
            for key, tensor in bucket.tensors.items():
                for name in found[key][1] if key in found else ():
                    self._refuse_change(version)
                    yield name, tensor.to(_dtype_of(tensor, dtype))

        with self._kept.collectives.reporting_failures():
            bucket = next(buckets, None)
            found = find()  # while the first bucket is on its way
            while bucket is not None:
                if not on_host:
                    self._streams.compute_waits(bucket.arrived)
                elif bucket.arrived is not None:
                    bucket.arrived.synchronize()  # else the host could read it half copied
                items = items_of(bucket)
                yield from islice(items, 1)
                self._refuse_change(version)
                bucket = next(buckets, None)  # see the module's description
                yield from items

    @property
    def _version(self) -> tuple[int, int]:
        return self._kept.pipeline.overwrites, self._walks

    def _refuse_change(self, version: tuple[int, int]) -> None:
        if self._version != version or any(layer.update.sent for layer in self._kept.layers):
            raise ConfigError(
                "a backward, a step, a load or another iterate_weights() came while the tensors of "
                "iterate_weights() were being taken: take all of them before"
            )

    def close(self) -> None:
        """Frees host memory."""
        for block in self._blocks:
            block.close()
        self._blocks.clear()


def _one_ahead(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    """Yields each bucket once the next is on its way: gathers run beside copies to the host."""
    held = next(buckets, None)
    for following in buckets:
        assert held is not None
        yield held
        held = following
    if held is not None:
        yield held


def _dtype_of(tensor: torch.Tensor, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and tensor.is_floating_point() else tensor.dtype
