"""Packed training sequences: shuffled, shared out over ranks, resumable at any position.

The corpus is cut into sequences of ``seq_len`` tokens that do not overlap. A few, evenly spaced,
are held out for evaluation: they come from the same mixture as the rest, and may be parts of
documents whose other parts are trained on. The rest is visited in an order that depends on the
seed and the epoch alone, so "how many sequences were consumed" is the whole state of the data,
and the sequences of a step do not depend on the number of ranks.

Shapes: B = micro-batch (sequences), T = seq_len (tokens).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from corpus import Corpus, DataError

_HELD_OUT_FRACTION = 0.02
_MAX_HELD_OUT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run is in its data; kept in the checkpoint's client state."""

    consumed: int
    """Sequences that all ranks together have trained on."""
    seed: int
    """Seed of the order."""
    seq_len: int
    """Tokens a sequence."""
    digest: str
    """SHA-256 of the corpus's tokens."""

    def state(self) -> dict[str, Any]:
        """Return the position as plain data."""
        return asdict(self)


class PackedSequences:
    """Sequences of a corpus in training order, and the held-out ones."""

    def __init__(self, corpus: Corpus, *, seq_len: int, seed: int) -> None:
        """Cut ``corpus`` into sequences of ``seq_len`` tokens, ordered by ``seed``.

        Raises:
            DataError: the corpus has fewer than 2 sequences, or the seed is not in [0, 2**32).
        """
        total = len(corpus.tokens) // seq_len
        if total < 2:
            raise DataError(
                f"the corpus has {len(corpus.tokens)} tokens, which is {total} sequences of "
                f"--seq-len {seq_len}; 2 are the least (one to train on, one held out): give "
                "more --data or a smaller --seq-len"
            )
        if not 0 <= seed < 1 << 32:
            raise DataError(f"--seed {seed} is outside [0, 2**32)")
        self._corpus = corpus
        self.seq_len = seq_len
        self._seed = seed
        num_held_out = min(max(1, round(total * _HELD_OUT_FRACTION)), _MAX_HELD_OUT)
        held_out = np.linspace(0, total - 1, num_held_out + 2)[1:-1].round().astype(np.int64)
        self._held_out = np.unique(held_out)
        self._train = np.setdiff1d(np.arange(total, dtype=np.int64), self._held_out)
        self._epoch = -1
        self._order = self._train

    @property
    def num_train(self) -> int:
        """Sequences to train on in one epoch."""
        return len(self._train)

    @property
    def num_held_out(self) -> int:
        """Sequences that are only evaluated."""
        return len(self._held_out)

    def train_batch(self, first: int, count: int) -> torch.Tensor:
        """Return training sequences ``first`` to ``first + count`` of the endless order.

        Args:
            first: position in the order, in sequences since the start of the run.
            count: B.

        Returns:
            int64 ids, shape [B, T].
        """
        return self._rows([self._sequence_at(i) for i in range(first, first + count)])

    def held_out_batch(self, first: int, count: int) -> torch.Tensor:
        """Return held-out sequences, in the corpus's order, from the start again past the end.

        Returns:
            int64 ids, shape [count, T].
        """
        indices = [int(self._held_out[i % self.num_held_out]) for i in range(first, first + count)]
        return self._rows(indices)

    def position(self, consumed: int) -> Position:
        """Describe the state after ``consumed`` sequences, for a checkpoint."""
        return Position(
            consumed=consumed, seed=self._seed, seq_len=self.seq_len, digest=self._corpus.digest
        )

    def consumed_at(self, state: dict[str, Any]) -> int:
        """Return the number of sequences consumed at a saved position.

        Raises:
            DataError: the position is one of other data, another seed or sequence length, so
                that going on from it would repeat some sequences and miss others.
        """
        saved = Position(**state)
        here = self.position(saved.consumed)
        for name, option in (
            ("digest", "--data and --tokenizer"),
            ("seq_len", "--seq-len"),
            ("seed", "--seed"),
        ):
            was, now = getattr(saved, name), getattr(here, name)
            if was != now:
                raise DataError(
                    f"the checkpoint was made with other data: {name} was {was} and is {now}; "
                    f"give {option} as in the first run"
                )
        return saved.consumed

    def _sequence_at(self, index: int) -> int:
        epoch, offset = divmod(index, self.num_train)
        if epoch != self._epoch:
            # RandomState, not Generator: numpy promises that its stream never changes, so a
            # checkpoint finds the same order under a later numpy.
            order = np.random.RandomState([self._seed, epoch]).permutation(self.num_train)
            self._order, self._epoch = self._train[order], epoch
        return int(self._order[offset])

    def _rows(self, indices: list[int]) -> torch.Tensor:
        rows = np.empty((len(indices), self.seq_len), dtype=np.int64)
        for row, index in enumerate(indices):
            start = index * self.seq_len
            rows[row] = self._corpus.tokens[start : start + self.seq_len]
        return torch.from_numpy(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How the sequences of a step are shared out over micro-batches and ranks."""

    micro_batch: int
    """Sequences a rank computes at once; with ``sizes``, those of an evaluation."""
    accumulation: int
    """Micro-batches a rank computes in a step; 1 with ``sizes``."""
    world_size: int
    """Number of ranks."""
    sizes: tuple[int, ...] | None = None
    """Sequences that each rank computes in a step, where `hytrain plan` decided that."""
    micro_sizes: tuple[int, ...] | None = None
    """Of them at once; with ``sizes``."""

    @property
    def global_batch(self) -> int:
        """Sequences in a step, all ranks together."""
        if self.sizes is not None:
            return sum(self.sizes)
        return self.micro_batch * self.accumulation * self.world_size

    def first(self, consumed: int, micro_step: int, rank: int) -> int:
        """Return the position of the first sequence of one of equal micro-batches of a rank.

        Args:
            consumed: sequences consumed before this step.
            micro_step: index of the micro-batch in the step.
            rank: the rank.
        """
        return consumed + (micro_step * self.world_size + rank) * self.micro_batch

    def pieces(self, consumed: int, rank: int) -> list[tuple[int, int]]:
        """Return a rank's micro-batches of a step: position of the first sequence, and how many.

        Args:
            consumed: sequences consumed before this step.
            rank: the rank.
        """
        if self.sizes is None or self.micro_sizes is None:
            steps = range(self.accumulation)
            return [(self.first(consumed, step, rank), self.micro_batch) for step in steps]
        own, most = self.sizes[rank], self.micro_sizes[rank]
        begin = consumed + sum(self.sizes[:rank])
        return [(begin + at, min(most, own - at)) for at in range(0, own, max(1, most))]


def to_device(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a batch [B, T] to ``device``; to a GPU from pinned memory, without waiting."""
    if device.type != "cuda":
        return ids.to(device)
    return ids.pin_memory().to(device, non_blocking=True)


def evaluation_rounds(sequences: int, plan: BatchPlan) -> int:
    """Return how many micro-batches every rank evaluates for about ``sequences`` in total.

    At least one, and the same number on each rank: a forward pass may contain collectives.
    """
    return max(1, sequences // (plan.micro_batch * plan.world_size))
