"""Packed training sequences: shuffled, shared out over ranks, resumable at any position.

The corpus is cut into sequences of ``seq_len`` tokens that do not overlap. A few, evenly spaced,
are held out for evaluation: they come from the same mixture as the rest, and may be parts of
documents whose other parts are trained on. The rest is visited in an order that depends on the
seed and the epoch alone, so "how many sequences were consumed" is the whole state of the data,
and the sequences of a step do not depend on the number of ranks.

Shapes: B = micro-batch (sequences), T = seq_len (tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from corpus import Corpus, DataError

_HELD_OUT_FRACTION = 0.02
_MAX_HELD_OUT = 4096


class PackedSequences:
    """Sequences of a corpus in training order, and the held-out ones."""

    def __init__(self, corpus: Corpus, *, seq_len: int, seed: int) -> None:
        """Cuts ``corpus`` into sequences of ``seq_len`` tokens, ordered by ``seed``.

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
        self.held_out = np.unique(held_out)
        """Sequences that are only evaluated."""
        self.train = np.setdiff1d(np.arange(total, dtype=np.int64), self.held_out)
        """Sequences that are trained on in an epoch."""
        self._epoch = -1
        self._order = self.train

    def train_batch(self, first: int, count: int) -> torch.Tensor:
        """Returns training sequences ``first`` to ``first + count`` of the endless order.

        Args:
            first: position in the order, in sequences since the start of the run.
            count: B.

        Returns:
            int64 ids, shape [B, T].
        """
        return self._rows([self._sequence_at(i) for i in range(first, first + count)])

    def held_out_batch(self, first: int, count: int) -> torch.Tensor:
        """Returns held-out sequences, in the corpus's order, from the start again past the end.

        Returns:
            int64 ids, shape [count, T].
        """
        number = len(self.held_out)
        return self._rows([int(self.held_out[i % number]) for i in range(first, first + count)])

    def position(self, consumed: int) -> dict[str, Any]:
        """The state after ``consumed`` sequences, for a checkpoint's client state."""
        about = {"seed": self._seed, "seq_len": self.seq_len, "digest": self._corpus.digest}
        return {"consumed": consumed, **about}

    def consumed_at(self, saved: dict[str, Any]) -> int:
        """Returns the number of sequences consumed at a saved position.

        Raises:
            DataError: the position is of other data, another seed or sequence length, so that
                going on from it would repeat some sequences and miss others.
        """
        here = self.position(saved["consumed"])
        for name, option in (
            ("digest", "--data and --tokenizer"),
            ("seq_len", "--seq-len"),
            ("seed", "--seed"),
        ):
            if saved[name] != here[name]:
                raise DataError(
                    f"the checkpoint was made with other data: {name} was {saved[name]} and is "
                    f"{here[name]}; give {option} as in the first run"
                )
        return saved["consumed"]

    def _sequence_at(self, index: int) -> int:
        epoch, offset = divmod(index, len(self.train))
        if epoch != self._epoch:
            # RandomState, not Generator: numpy promises that its stream never changes, so a
            # checkpoint finds the same order under a later numpy.
            order = np.random.RandomState([self._seed, epoch]).permutation(len(self.train))
            self._order, self._epoch = self.train[order], epoch
        return int(self._order[offset])

    def _rows(self, indices: list[int]) -> torch.Tensor:
        tokens, length = self._corpus.tokens, self.seq_len
        rows = [tokens[i * length : (i + 1) * length].astype(np.int64) for i in indices]
        return torch.from_numpy(np.stack(rows))


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
    """Sequences that each rank computes in a step, if `hytrain plan` decided that."""
    micro_sizes: tuple[int, ...] = ()
    """How many of them each rank computes at once; with ``sizes``."""

    @property
    def global_batch(self) -> int:
        """Sequences in a step, all ranks together."""
        if self.sizes is not None:
            return sum(self.sizes)
        return self.micro_batch * self.accumulation * self.world_size

    def pieces(self, consumed: int, rank: int) -> list[tuple[int, int]]:
        """Returns a rank's micro-batches of a step: position of the first sequence, and how many.

        Args:
            consumed: sequences consumed before this step.
            rank: the rank.
        """
        if self.sizes is None:
            at = range(rank, self.accumulation * self.world_size, self.world_size)
            return [(consumed + n * self.micro_batch, self.micro_batch) for n in at]
        own, most = self.sizes[rank], self.micro_sizes[rank]
        begin = consumed + sum(self.sizes[:rank])
        return [(begin + at, min(most, own - at)) for at in range(0, own, max(1, most))]


def to_device(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a batch [B, T] to ``device``; to a GPU from pinned memory, without waiting."""
    if device.type != "cuda":
        return ids.to(device)
    return ids.pin_memory().to(device, non_blocking=True)
