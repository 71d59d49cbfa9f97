"""Saves beside training: one thread per rank writes a step's state while the next steps run.

The threads talk to each other over a process group of their own (gloo, on the host), so that
training's collectives and theirs never meet. What is on the disk at any moment is what a
synchronous save leaves (``writer.py``, ``commit.py``): the tag and ``latest`` change when all files
of all ranks are whole.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hytrain.checkpoint.file_writers import WRITERS
from hytrain.checkpoint.save_contents import SaveContents
from hytrain.checkpoint.save_target import SaveTarget
from hytrain.checkpoint.snapshot import CopyMemory, StateSnapshot
from hytrain.checkpoint.writer import write_contents
from hytrain.comm.collectives import ShardCollectives
from hytrain.errors import CheckpointError
from hytrain.hardware.host_share import HostShare
from hytrain.kernels.host_limits import host_memory_pools
from hytrain.optimizer.kept_state import KeptState
from hytrain.testing import faults

logger = logging.getLogger(__name__)

_RESERVE_BYTES = 2**30
"""Bytes of host memory that copies of the state leave free."""
_GROUP_TIMEOUT = timedelta(hours=2)
"""How long a rank may wait for another's disk; a rank that is gone is noticed at once."""
_ABANDON_SECONDS = 5.0


def _open_group(collectives: ShardCollectives) -> ShardCollectives:
    """A second group of the same ranks, for use in another thread; a collective among them."""
    if collectives.world_size == 1:
        return collectives
    ranks = [collectives.global_rank(rank) for rank in range(collectives.world_size)]
    group = dist.new_group(
        ranks,
        timeout=_GROUP_TIMEOUT,
        backend="gloo",
        use_local_synchronization=collectives.world_size < dist.get_world_size(),
    )
    assert isinstance(group, dist.ProcessGroup)
    return ShardCollectives(group)


def _close_group(collectives: ShardCollectives) -> None:
    """Ends the threads of a group of all ranks, when nothing runs in it.

    A group of some of the ranks stays: torch names it after them, and the next group of that name
    would find the old one's addresses.
    """
    if dist.is_initialized() and collectives.world_size == dist.get_world_size():
        with suppress(ValueError):  # another call has destroyed it
            dist.destroy_process_group(collectives.group)


def free_room(share: HostShare) -> int:
    """Bytes of host memory that copies of this rank's state may take."""
    return max(0, share.memory(host_memory_pools()) - _RESERVE_BYTES)


class AsyncSaver:
    """Runs one save at a time."""

    def __init__(self, kept: KeptState, current_step: Callable[[], int], share: HostShare) -> None:
        """A collective. Takes host memory for copies of the state, as far as there is room."""
        self._kept = kept
        self._current_step = current_step
        self.collectives = _open_group(kept.collectives)
        self._share = share
        self._memory = CopyMemory()
        self._memory.fit(kept.layers, lambda: free_room(share))
        self._agreed = threading.Event()
        """Set, except while the ranks agree on the step after which they raise a failure."""
        self._agreed.set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._ended.set()
        self._is_given_up = False
        # Started before the first save: starting a thread takes milliseconds of a call, as Python
        # lets the new one run first. A daemon: the interpreter's end would join any other, which
        # may wait for ranks that are gone. An orderly wait for a save is the task of close().
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, self._ended), name="hytrain-save", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)
        self._error: CheckpointError | None = None
        self._raise_at = 0
        self._warned = False
        self._snapshot: StateSnapshot | None = None

    def save(
        self,
        target: SaveTarget,
        contents: Callable[[], SaveContents],
        frozen: Iterable[Mapping[int, torch.Tensor]],
    ) -> None:
        """Begins a save of the present state; an earlier save must have been waited for.

        ``contents``: puts the contents together, in the saver's thread. ``frozen``: see
        :func:`write_contents`; walked through before this returns.
        """
        assert self._ended.is_set()
        taken = self._kept.pipeline.streams.record_current()
        copies = list(frozen)
        # Layers may have come to the host, or left it.
        self._memory.fit(self._kept.layers, lambda: free_room(self._share))
        snapshot = self._snapshot = StateSnapshot(self._kept.pipeline, self._memory)
        self._ended.clear()
        write = partial(self._write, target, contents, copies, snapshot)
        self._jobs.put(partial(self._run, target, write, taken, snapshot))

    def _run(
        self,
        target: SaveTarget,
        write: Callable[[], None],
        taken: torch.cuda.Event | None,
        snapshot: StateSnapshot,
    ) -> None:
        try:
            streams = self._kept.pipeline.streams
            with streams.beside():
                # Without this wait buffers that the call has copied could be read half copied.
                streams.compute_waits(taken)
                write()
        except BaseException as error:
            self._note(target, error)
        finally:
            # Training may wait for a layer: whatever has happened, it goes on.
            snapshot.release()
            self._snapshot = None
            if free_room(self._share) == 0:
                # Others need what is left; the next save takes it anew, if it is there.
                self._memory.give_back()

    def _write(
        self,
        target: SaveTarget,
        put_together: Callable[[], SaveContents],
        frozen: list[Mapping[int, torch.Tensor]],
        snapshot: StateSnapshot,
    ) -> None:
        faults.point("save.begun")
        begun = time.monotonic()
        without = snapshot.take(free_room(self._share))
        copied = time.monotonic()
        if without and not self._warned:
            self._warned = True
            logger.warning(
                "rank %d: host memory has no room for a copy of %.2f GB of the state: training "
                "waits until that is written, after each asynchronous save",
                self.collectives.rank,
                without / 1e9,
            )
        faults.point("save.snapshot")
        contents = put_together()
        write_contents(
            target,
            contents,
            frozen,
            self.collectives,
            self._kept.device,
            snapshot.state,
            snapshot.written,
            threads=max(2, min(WRITERS, self._share.cores // 8)),  # training has the other cores
        )
        if self.collectives.rank == 0:
            seconds = time.monotonic() - copied
            logger.info(
                "%s is saved: %.2f GB, copied in %.2f s, written in %.2f s (%.2f GB/s)",
                target.folder,
                contents.num_bytes / 1e9,
                copied - begun,
                seconds,
                contents.num_bytes / 1e9 / seconds,
            )

    def _note(self, target: SaveTarget, error: BaseException) -> None:
        if not isinstance(error, CheckpointError):
            error = CheckpointError(
                f"{target.folder} could not be saved ({type(error).__name__}: {error}); what was "
                "saved under the tag before is unchanged"
            )
        self._raise_at = 0
        # Before this rank tells its step: none goes past that step until all have agreed.
        self._agreed.clear()
        try:
            # On all ranks at the end of the same step, which none has come to yet.
            steps = self.collectives.gather_objects(self._current_step(), "the ranks' steps")
            self._raise_at = max(steps) + 1
        except Exception:
            logger.debug("the ranks are not asked where they are", exc_info=True)
        self._error = error
        self._agreed.set()

    @property
    def copy_bytes(self) -> int:
        """Host memory for copies of the state, kept from save to save."""
        return self._memory.num_bytes

    @property
    def is_running(self) -> bool:
        """Whether a save has not ended."""
        return not self._ended.is_set()

    def check(self) -> None:
        """Raises, after a step, what a save has failed with; on all ranks after the same step.

        Raises:
            CheckpointError: the last save failed; training can go on.
        """
        self._agreed.wait()
        if self._error is not None and self._current_step() >= self._raise_at:
            self.wait()

    def wait(self) -> None:
        """Waits until the last save has ended.

        Raises:
            CheckpointError: it failed, and that has not been raised yet.
        """
        self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, abandon: bool) -> None:
        """Waits for the save; to be called before the engine's state is freed.

        ``abandon``: other ranks, if there are any, may be gone: it waits for a few seconds only.
        What an abandoned save leaves is no checkpoint, and is removed by a later save.
        """
        abandon = abandon and self.collectives.world_size > 1
        self._jobs.put(None)
        has_ended = self._ended.wait(_ABANDON_SECONDS if abandon else None)
        snapshot = self._snapshot
        if not has_ended:
            self._is_given_up = True
            self._ended = threading.Event()  # the thread has the other
            self._ended.set()
            logger.warning("an asynchronous save is given up: its checkpoint will not be there")
            if snapshot is not None:
                snapshot.release()
        elif self._error is not None:
            logger.error("the last asynchronous save failed: %s", self._error)
        if has_ended and not self._is_given_up:
            self._thread.join()
            if not abandon and self.collectives is not self._kept.collectives:
                _close_group(self.collectives)
                self.collectives = self._kept.collectives  # nothing refers to the group now
        self._memory.give_back()


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None], ended: threading.Event) -> None:
    # Refers to the queue alone: a saver that is dropped takes its engine's state with it.
    while (job := jobs.get()) is not None:
        job()
        del job
        ended.set()
