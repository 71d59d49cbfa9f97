"""What a case consists of. Everything here is plain data, drawn from one seed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

Pairs = tuple[tuple[str, Any], ...]
"""Keys and values of a section."""


@dataclass(frozen=True)
class ModelSpec:
    """A small model; see :class:`~fuzz.models.FuzzModel`.

    Attributes:
        inner: inner width of each block.
        stack: how blocks are held: "list", "sequential", "dict" or "attributes".
        embed: "none", "linear", "table" (of whole numbers) or "sparse" (with sparse gradients).
        head: "none", "linear" or "tied" (to the embedding).
        norm: in blocks: "none", "layer" or "rms".
        root: the root owns a vector; ``scalar``: a block owns a 0-dimensional parameter;
            ``single``: the root owns one of one element.
        unused: what no forward uses: "none", a parameter of "root" or "block", or a "module".
        frozen: "none", "some", "blocks", "embed" or "head".
        twice: blocks that are called twice.
        recompute: "none", "reentrant" or "not_reentrant".
        outside: a weight's use outside of its module: "none", "penalty", "linear", "transpose",
            "product".
        outside_of: owner of that weight: "embed", "head" or "block".
        shared: the last block is the first one again.
        strided: the root owns a weight that is not contiguous.
        dropout: before the blocks.
        tiled: how blocks checkpoint their own MLP in pieces: "none", "reentrant", "not_reentrant".
        tower: there is a module that a step may use or not.
    """

    seed: int
    width: int
    inner: tuple[int, ...]
    stack: str
    embed: str
    head: str
    norm: str
    bias: bool
    root: bool
    scalar: bool
    single: bool
    unused: str
    frozen: str
    twice: tuple[int, ...]
    recompute: str
    outside: str
    outside_of: str
    shared: bool = False
    strided: bool = False
    dropout: bool = False
    tiled: str = "none"
    tower: bool = False

    @property
    def takes_tokens(self) -> bool:
        """Whether its inputs are tokens (whole numbers)."""
        return self.embed in ("table", "sparse")


@dataclass(frozen=True)
class Build:
    """How one engine is built: what may change when a checkpoint is loaded into another one.

    Attributes:
        gpu: each rank's "gpu_fraction".
        fractions: "shard_fractions"; None: equal shares.
        zero: further keys of "zero_optimization".
        section: further keys of "hytrain"; ``offload``: of its "offload".
        top: further keys at the top level.
        zero_init: the model is built under deepspeed.zero.Init (ZeRO-3, before a checkpoint is
            loaded).
    """

    stage: int
    gpu: tuple[float | str, ...]
    fractions: tuple[float, ...] | None
    zero: Pairs
    section: Pairs
    offload: Pairs
    top: Pairs
    zero_init: bool = False


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer and its hyper-parameters.

    Attributes:
        kind: "AdamW" or "Adam"; ``client``: an object of torch's, not the JSON's section.
        groups: each parameter group's (lr, beta1, beta2, eps, weight decay).
        schedule: "constant", "hand" (set before every step), "lambda" (torch's), "warmup"
            (DeepSpeed's).
        share: the share of the trainable parameters that the optimizer is given.
        bias_correction: that of the JSON's section; None: left out.
        muon: half of the matrices are Muon's, in a group of their own.
    """

    kind: str
    client: bool
    groups: tuple[tuple[float, float, float, float, float], ...]
    schedule: str
    bias_correction: bool | None = None
    adam_w_mode: bool | None = None
    share: float = 1.0
    muon: bool = False


@dataclass(frozen=True)
class Event:
    """Something between or inside steps that all ranks do; see `Player._do_<kind>`, `between.py`.

    Attributes:
        states: what leaves the device; None: all that can.
    """

    kind: str
    number: int = 0
    value: float = 0.0
    build: Build | None = None
    states: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        factor: factor of the loss.
        skip: the blocks that each rank leaves out in each micro-batch.
        style: of a micro-batch: "plain", "retain" (its graph), "past" (loss.backward()), "module"
            (engine.module(...) and loss.backward()); "two" (two forwards, then two backwards),
            "sum" (two forwards, one backward), "no_sync" (two, the first under it), "no_sync_last"
            (the last), "penalty" (of the input's gradient), "dropped" (two forwards, the backward
            of the last).
        forwards: number of forwards in the styles "two" and "sum".
        idle: ranks that make no backward.
        poison: (rank, micro-batch, value) of a gradient's element that is overwritten.
        fault: ("forward" or "backward", whether step() is called after it) before the step.
        inside: events after the backward of a micro-batch, by its number.
        after: events after the step.
        micros: micro-batches of each rank; 0: all.
        tower: ranks that use the model's tower.
        pieces: number of pieces in which tiled blocks recompute; 0: without recomputation.
        cut: the block before which the forward is detached.
    """

    factor: float
    skip: tuple[tuple[tuple[int, ...], ...], ...]
    style: str = "plain"
    idle: tuple[int, ...] = ()
    poison: tuple[int, int, float] | None = None
    fault: tuple[str, bool] | None = None
    inside: tuple[tuple[int, Event], ...] = ()
    after: tuple[Event, ...] = ()
    forwards: int = 2
    micros: int = 0
    tower: tuple[int, ...] = ()
    pieces: int = 1
    cut: int | None = None

    @property
    def num_forwards(self) -> int:
        """The number of forwards of a micro-batch."""
        if self.style in ("two", "sum"):
            return self.forwards
        return 2 if self.style in ("no_sync", "no_sync_last", "dropped") else 1


@dataclass(frozen=True)
class Case:
    """A training, from its beginning to the comparison at its end.

    Attributes:
        micro_samples: samples of each micro-batch of each rank.
        batch_keys: "deepspeed" (a number of equal micro-batches) or "hytrain" ("batch_sizes").
        mode: "hand" (forward, backward, step) or "train_batch".
        delays: HYTRAIN_DELAYS; "": none.
        refusal: (path of a key, value, what the message says): refused by design.
        then: another job, on other ranks, that continues from the end of this one.
        follows: this is such a job.
        moments: "hytrain.moments".
        master: "hytrain.master".
        late: share of layers, the last ones, whose master weights are split on the CPU, too, as
            if host memory were short.
        precision: that of a case not in bf16, see `precision.py`.
        async_saves: "hytrain.checkpoint.async".
        traced: "hytrain.trace.steps"; None: no trace.
        short: with several ranks, no device holds all gradients to the end of a first backward.
        gradients: how gradients are taken over, see `support/gradient_ways.py`.
        sequences: the ranks share each sequence, by an mpu, if :attr:`has_sequence_group`.
        accumulation: the configuration's micro-batches a step; 0: all.
        hooked: hooks that are put on before the build.
        before: events before the first step.
    """

    seed: int
    ranks: int
    model: ModelSpec
    bf16: bool
    clipping: float
    check_overflow: bool | None
    op: str | None
    accum_dtype: str | None
    mode: str
    batch_keys: str
    micro_samples: tuple[tuple[int, ...], ...]
    micro_sizes: tuple[int, ...]
    build: Build
    optimizer: OptimizerSpec
    steps: tuple[Step, ...]
    delays: str
    refusal: tuple[str, Any, str] | None = None
    then: Case | None = None
    follows: bool = False
    moments: str = "fp32"
    master: str = "fp32"
    late: float = 0.0
    precision: str = ""
    async_saves: bool = False
    traced: tuple[int, int] | None = None
    short: bool = False
    gradients: str = "joined"
    sequences: bool = False
    accumulation: int = 0
    hooked: tuple[Event, ...] = ()
    before: tuple[Event, ...] = ()

    @property
    def has_sequence_group(self) -> bool:
        """Whether all ranks share each sequence; not if one may be dealt more than another."""
        is_possible = self.ranks > 1 and self.batch_keys == "deepspeed" and self.refusal is None
        return self.sequences and is_possible

    @property
    def checks_overflow(self) -> bool:
        """Whether a step with an inf or NaN is skipped."""
        return True if not self.bf16 else self.check_overflow is not False

    @property
    def is_direct(self) -> bool:
        """Whether updates are committed the moment a gradient arrives."""
        return self.clipping == 0.0 and not self.checks_overflow

    @property
    def num_micro_batches(self) -> int:
        """The largest number of micro-batches of any rank."""
        return max(len(own) for own in self.micro_samples)

    def samples_of(self, step: Step, rank: int) -> tuple[int, ...]:
        """The samples of a rank's micro-batches in a step."""
        return self.micro_samples[rank][: step.micros or None]

    def __str__(self) -> str:
        return f"seed {self.seed}: " + _words(self)


_USUAL = (None, (), "", "none", False)


def _words(value: Any) -> str:
    """A value on one line, without fields that have a usual value."""
    if isinstance(value, (Case, ModelSpec, Build, OptimizerSpec, Event, Step)):
        parts = [
            f"{field.name}={_words(getattr(value, field.name))}"
            for field in fields(value)
            if field.name != "seed" and getattr(value, field.name) not in _USUAL
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_words, value)) + ")"
    return repr(value)
