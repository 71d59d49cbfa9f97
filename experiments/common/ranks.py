"""The ranks of a group: who they are, process groups for DeepSpeed, and meetings beside them.

Ranks meet through a store of their own, not through collectives: while one GPU works alone no other
may be kept busy, and a rank that failed must be able to tell.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from experiments.common.records import Json


class DataParallel:
    """What DeepSpeed asks of an `mpu`: the ranks that share a job, of all that there are."""

    def __init__(self, group: Any, members: Sequence[int]) -> None:
        self._group = group
        self._members = list(members)

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._members

    def get_data_parallel_world_size(self) -> int:
        return len(self._members)

    def get_data_parallel_rank(self) -> int:
        return self._members.index(dist.get_rank())

    def get_model_parallel_group(self) -> Any:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


class Ranks:
    """This process among the others."""

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.device = device
        port = int(os.environ["STAGES_PORT"])
        # torch exports it without saying so.
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "127.0.0.1", port, self.size, self.rank == 0, datetime.timedelta(seconds=600)
        )
        self._groups: dict[tuple[int, ...], DataParallel] = {}

    def connect(self) -> None:
        """The process group of all ranks, as DeepSpeed makes it."""
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        from deepspeed import comm

        from hytrain.engine.deepspeed_internals import avoid_cpu_communication_build

        avoid_cpu_communication_build()
        comm.init_distributed("nccl" if self.device == "cuda" else "gloo", verbose=False)
        everyone = tuple(range(self.size))
        self._groups[everyone] = DataParallel(dist.group.WORLD, everyone)

    def sharing(self, members: Sequence[int]) -> DataParallel:
        """A job of some ranks; all ranks must ask for it, in one order, the first time."""
        key = tuple(members)
        if key not in self._groups:
            self._groups[key] = DataParallel(dist.new_group(list(key)), key)
        return self._groups[key]

    def everyone(self) -> DataParallel:
        """A job of all ranks."""
        return self._groups[tuple(range(self.size))]

    def alone(self) -> DataParallel:
        """A job of each rank; a collective the first time."""
        for rank in range(self.size):
            self.sharing([rank])
        return self.sharing([self.rank])

    def gather(self, key: str, value: Json, seconds: float = 600.0) -> list[Json]:
        """Everyone's values, once everyone has come; the key is used once.

        Raises:
            dist.DistStoreError: someone did not come in time.
        """
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, datetime.timedelta(seconds=seconds))
        return [json.loads(self._store.get(key)) for key in keys]
