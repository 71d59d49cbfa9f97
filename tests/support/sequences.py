"""Ranks that share sequences (DeepSpeed's Ulysses), compared with one that has whole sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_ranks
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    TiledFusedLogitsLoss,
    TiledMLP,
    UlyssesSPAttentionHF,
    sequence_tiled_compute,
)
from deepspeed.utils import groups
from torch import nn

from support.beside_torch import BesideTorch, training_beside_torch
from support.frozen import lora

LENGTH = 12
VOCABULARY = 64
HEADS = 6
EPS = 1e-3
"""Large compared with the differences of elements' gradients between one process and several."""
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "head_dim": 4, "max_position_embeddings": 64,
    "attn_implementation": "sdpa", "use_cache": False,
}  # fmt: skip
Sample = dict[str, torch.Tensor]
KINDS = ("llama", "qwen3", "mixture", "lora")


def make_model(kind: str, key_heads: int) -> Any:
    """One of KINDS; ``key_heads`` is a multiple of the ranks of a sequence, or a divisor."""
    import transformers as hf

    shape = {**_SHAPE, "num_key_value_heads": key_heads}
    torch.manual_seed(0)
    if kind == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**shape))
    if kind == "mixture":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**shape, **experts))
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape))
    if kind == "lora":
        lora(model)
    return model


def make_sample(number: int, *, packed: bool = False) -> Sample:
    """A whole sequence, whose first labels are ignored; ``packed``: of two documents."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)
    labels, places = tokens.clone(), torch.arange(LENGTH)
    labels[0, : number % 5 + 1] = -100
    if packed:
        places[LENGTH // 2 + 1 :] -= LENGTH // 2 + 1
        labels[0, LENGTH // 2 + 1] = -100
    return {"input_ids": tokens, "labels": labels, "position_ids": places[None]}


def part_of(sample: Sample, rank: int, degree: int) -> Sample:
    """A rank's part of a sequence, with labels that are already shifted."""
    labels = nn.functional.pad(sample["labels"], (0, 1), value=-100)[..., 1:]
    whole = {**sample, "labels": labels, "shift_labels": labels}
    own = slice(LENGTH // degree * rank, LENGTH // degree * (rank + 1))
    return {name: tensor[:, own].contiguous() for name, tensor in whole.items()}


def shared_loss(model: Any, part: Sample, group: Any) -> torch.Tensor:
    """The mean over a sequence's valid tokens; this rank computes a part, without a group all.

    As in Trainer and accelerate, every rank has the whole loss and runs backward from it.
    """
    if group is None:
        return model(**part).loss
    valid = (part["shift_labels"] != -100).sum()
    total = valid.clone()
    dist.all_reduce(total, group=group)
    mean = model(**part).loss
    # Not all_gather: with gloo its backward mistakes a group's ranks for the job's.
    own = torch.where(valid > 0, mean, 0.0) * valid / total
    return torch.distributed.nn.functional.all_reduce(own, group=group)


class SequenceRanks:
    """The ranks that share a sequence, and attention among them until the block's end."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.group: Any = None
        """The group of this rank's sequence, once it is known."""

    @property
    def rank(self) -> int:
        """This rank's number in its sequence."""
        return dist.get_rank() % self.degree

    @property
    def data_rank(self) -> int:
        """The number of the sequence of which this rank has a part."""
        return dist.get_rank() // self.degree

    def attend(self, config: Any, group: Any) -> None:
        """Makes attention run among the group's ranks from now on."""
        self.group = group
        ulysses = UlyssesSPAttentionHF(
            _attention()["sdpa"], 1, HEADS, config.head_dim, config.num_key_value_heads,
            config.num_hidden_layers, group, seq_length_is_variable=True,
        )  # fmt: skip
        # As in register_with_transformers: a mask would be that of a part.
        _attention()["sdpa"] = lambda module, q, k, v, _mask, *rest, **more: ulysses(
            module, q, k, v, None, *rest, **more
        )


@contextmanager
def sequence_ranks_of(degree: int) -> Iterator[SequenceRanks]:
    """Ranks that share sequences in the block; all of it is undone at the end."""
    plain = _attention()["sdpa"]
    try:
        yield SequenceRanks(degree)
    finally:
        _attention()["sdpa"] = plain
        sequence_ranks._release_sequence_parallel_groups()
        groups.mpu = groups.mesh_device = None


@contextmanager
def whole_attention(plain: Callable[..., Any]) -> Iterator[None]:
    """Uses one process's own attention in the block; without a mask it is causal."""
    ours = _attention()["sdpa"]
    _attention()["sdpa"] = lambda module, q, k, v, _mask, *rest, **more: plain(
        module, q, k, v, None, *rest, **more
    )
    try:
        yield
    finally:
        _attention()["sdpa"] = ours


def _attention() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


class SharedTraining:
    """An engine whose ranks share sequences, compared with torch, which has them whole."""

    def __init__(self, beside: BesideTorch, ranks: SequenceRanks, plain: Any) -> None:
        self.beside, self.ranks, self._plain = beside, ranks, plain
        self.packed = False
        self.loss = shared_loss

    def samples(self, number: int) -> list[list[Sample]]:
        """A step's samples: by micro-batch, then by data rank."""
        steps = int(self.beside.engine.gradient_accumulation_steps())
        data = int(self.beside.engine.dp_world_size)
        first = 100 * number
        return [
            [make_sample(first + data * micro + each, packed=self.packed) for each in range(data)]
            for micro in range(steps)
        ]

    def own_parts(self, number: int) -> list[Sample]:
        """This rank's parts of a step's micro-batches."""
        ranks = self.ranks
        return [
            part_of(micro[ranks.data_rank], ranks.rank, ranks.degree)
            for micro in self.samples(number)
        ]

    def step(self, number: int) -> None:
        """Makes a step as a script does; all micro-batches count alike, whatever their tokens."""
        engine, losses = self.beside.engine, []
        for part in self.own_parts(number):
            loss = self.loss(engine, part, self.ranks.group)
            engine.backward(loss, scale_wrt_gas=self.loss is shared_loss)
            engine.step()
            losses.append(loss.detach())
        own, every = self._whole(number)
        mine = torch.stack(losses).mean()
        if self.loss is not shared_loss:  # each is its part of the step's loss, ready for backward
            mine = torch.stack(losses).sum()
            if self.ranks.degree > 1:
                dist.all_reduce(mine, group=self.ranks.group)
                mine /= self.ranks.degree
        self._follow(mine, own, every)

    def skip(self, number: int) -> None:
        """Makes only torch's part of a step."""
        own, every = self._whole(number)
        self.beside.follow(own, own, every)

    def _whole(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Torch's losses of a step: of this rank's sequences, and of all."""
        with whole_attention(self._plain):
            losses = [
                [self.beside.plain(**sample).loss for sample in micro]
                for micro in self.samples(number)
            ]
        mine = [micro[self.ranks.data_rank] for micro in losses]
        return torch.stack(mine).mean(), torch.stack([loss for m in losses for loss in m]).mean()

    def train_batch(self, number: int) -> None:
        """Makes a step by ``engine.train_batch``: all valid tokens count alike."""
        parts = [{**part} for part in self.own_parts(number)]
        for part in parts:
            part.pop("labels", None)  # as UlyssesSPDataLoaderAdapter gives it
        mine = self.beside.engine.train_batch(iter(parts))
        with whole_attention(self._plain):
            every = [sample for micro in self.samples(number) for sample in micro]
            counts = [(sample["labels"][:, 1:] != -100).sum() for sample in every]
            losses = [self.beside.plain(**sample).loss for sample in every]
            total = sum(loss * count for loss, count in zip(losses, counts, strict=True))
            loss = total / torch.stack(counts).sum()
            self._follow(mine, loss, loss)

    def _follow(self, mine: torch.Tensor, expected: torch.Tensor, loss: torch.Tensor) -> None:
        self.beside.follow(mine, expected, loss)
        # Clipping hides a common factor of all gradients.
        found = float(self.beside.engine.get_global_grad_norm())
        assert abs(found - self.beside.norm) < 1e-5 * self.beside.norm, (found, self.beside.norm)


@contextmanager
def training_shared(
    model: Any,
    stage: int,
    *,
    way: str = "mpu",
    degree: int | None = None,
    top: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] | None = None,
    **keywords: Any,
) -> Iterator[SharedTraining]:
    """A training with shared sequences; every element is compared at the end.

    Args:
        model: from :func:`make_model`.
        stage: ZeRO's.
        way: "mpu", or "key" or "keys" of the JSON, or both "mpu and key".
        degree: ranks of a sequence; default: all.
        top: further keys of the configuration.
        prepare: called with the engine's model, not with torch's.
        keywords: further arguments of training_beside_torch.
    """
    degree = degree or dist.get_world_size()
    top = dict(top or {})
    plain = _attention()["sdpa"]
    with sequence_ranks_of(degree) as ranks:
        if "key" in way and degree > 1:
            top["sequence_parallel_size"] = degree
        if way == "keys":
            top["data_parallel_size"] = dist.get_world_size() // degree
        if "mpu" in way:
            keywords["mpu"] = UlyssesSPAttentionHF.register_with_transformers(
                model, "sdpa", degree, 1
            )
            if degree > 1:
                ranks.group = sequence_ranks.get_sequence_parallel_group()
        with training_beside_torch(
            model, stage, top=top, prepare=prepare, eps=EPS, **keywords
        ) as beside:
            if degree > 1 and "mpu" not in way:
                ranks.attend(model.config, beside.engine.get_sequence_parallel_group())
            yield SharedTraining(beside, ranks, plain)


TILES = (3, 4, 2, 6, 1)
"""Tiles in the forward of each step: the number of recomputed parts changes."""


class FusedLinearLoss(torch.autograd.Function):
    """The sum over tokens like Liger's fused loss, whose kernels need a GPU.

    It takes the head's weight without calling the module, and computes all gradients in forward, a
    chunk of tokens at a time; backward multiplies them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunks: int
    ) -> torch.Tensor:
        total, of_weight, of_hidden = hidden.new_zeros(()), torch.zeros_like(weight), []
        for part, wanted in zip(hidden.chunk(chunks), labels.chunk(chunks), strict=True):
            scores, valid = (part @ weight.t()).log_softmax(-1), wanted != -100
            chosen = nn.functional.one_hot(wanted.clamp(min=0), len(weight)) * valid[:, None]
            total -= (scores * chosen).sum()
            gradient = scores.exp() * valid[:, None] - chosen
            of_hidden.append(gradient @ weight)
            of_weight += gradient.t() @ part
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradients[0], of_weight * gradients[0], None, None


class Tiles:
    """Replaces a model's MLPs, or its loss, by tiled ones: DeepSpeed's, or like Liger's."""

    def __init__(self, kind: str) -> None:
        """``kind``: "mlp", "compute", "loss", "fused" or "liger"."""
        self.kind = kind
        self.count = 1
        """Tiles of a sequence."""
        self.group: Any = None
        """For "fused": the group that shares a sequence; None if each rank has its own."""
        self.steps = 1
        """For "fused": micro-batches of a step."""

    def prepare(self, model: Any) -> None:
        """Replaces them in a Llama."""
        if self.kind in ("mlp", "compute"):
            for layer in model.model.layers:
                self._tile_mlp(layer.mlp)
        else:
            model.forward = functools.partial(self._loss, model)

    def _tile_mlp(self, mlp: Any) -> None:
        plain, weights = mlp.forward, list(mlp.parameters())

        def tiled(x: torch.Tensor) -> torch.Tensor:
            if self.kind == "mlp":
                return TiledMLP.apply(lambda _, part: plain(part), mlp, x, self.count, weights)
            return sequence_tiled_compute(
                plain, x.shape[1], self.count, {"x": x}, {}, "x", weights, output_reduction=None
            )

        mlp.forward = tiled

    def part_loss(self, model: Any, part: Sample, _group: Any) -> torch.Tensor:
        """The loss of "fused", which makes gradients in forward: nothing may come after it."""
        return model(**part).loss

    def loss_of(self, model: Any, **part: torch.Tensor) -> torch.Tensor:
        """The loss of a model that was not prepared: its own forward is not called."""
        return self._loss(model, **part).loss

    def _loss(
        self, model: Any, labels: torch.Tensor, shift_labels: torch.Tensor, **inputs: Any
    ) -> Any:
        del labels
        hidden = model.model(**inputs).last_hidden_state
        count = (shift_labels != -100).sum().float()
        weights = [model.lm_head.weight]

        def summed(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = model.lm_head(hidden).flatten(0, -2)
            return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")

        if self.kind == "loss":
            parts = {"hidden": hidden, "labels": shift_labels}
            total = sequence_tiled_compute(
                summed, hidden.shape[1], self.count, parts, {}, "hidden", weights, 0, "sum"
            )
            return SimpleNamespace(loss=total / count)
        if self.kind == "liger":
            total = FusedLinearLoss.apply(
                hidden.flatten(0, -2), model.lm_head.weight, shift_labels.flatten(), self.count
            )
            return SimpleNamespace(loss=total / count.clamp(min=1))
        count *= self.steps
        if self.group is not None:
            dist.all_reduce(count, group=self.group)
            count /= dist.get_world_size(self.group)
        loss = TiledFusedLogitsLoss.apply(
            lambda _, hidden, labels: summed(hidden, labels) / count,
            model, hidden, shift_labels, None, self.count, weights, "sum",
        )  # fmt: skip
        return SimpleNamespace(loss=loss)
