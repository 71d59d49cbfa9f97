"""One model trained with ZeRO-2, ZeRO-3 and streamed weights, on GPUs: all must give the same bits.

It is no toy: it is so large that copies take longer than a layer's launch, and its kernels are
deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from support.engines import OFFLOAD_AT_SCALE, built, device, environment, make_config
from support.frozen import FROZEN
from support.streams import stream_delays

STEPS = 8
VOCABULARY = 8192
Trained = tuple[list[float], dict[str, dict[str, torch.Tensor]]]
"""Losses, and the state at the end: whole on rank 0, empty elsewhere."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes torch choose kernels that repeat their bits."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def llama(
    hidden: int = 1536, layers: int = 8, where: torch.device | None = None
) -> torch.nn.Module:
    """A model of 0.2 B parameters, the same on every rank, by default where it is trained."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        use_cache=False,
    )
    torch.manual_seed(0)
    with where or device():
        # Eager attention: the fused kernels add up in any order.
        return AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.bfloat16
        ).train()


def train(
    stage: int,
    gpu_fraction: float,
    *,
    streamed: bool = False,
    delays: int | None = None,
    shard_fractions: tuple[float, ...] | None = None,
    rank: int = 0,
    frozen: str | None = None,
    wait_in_stream: bool = True,
) -> Trained:
    """Trains eight steps; each rank has batches of its own. ``frozen``: a key of FROZEN."""
    section: dict[str, Any] = {"wait_in_stream": wait_in_stream}
    if shard_fractions:
        section["shard_fractions"] = list(shard_fractions)
    config = make_config(
        gpu_fraction=gpu_fraction,
        stage=stage,
        offload=OFFLOAD_AT_SCALE,
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        hytrain=section,
    )
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if streamed:
        zero["offload_param"] = {"device": "cpu"}
    if frozen is not None:
        zero["stage3_param_persistence_threshold"] = 200_000  # adapters stay on the device
    config["zero_optimization"] = zero
    disturb = None if delays is None else stream_delays(delays)
    generator = torch.Generator().manual_seed(1 + rank)
    batches = [torch.randint(VOCABULARY, (4, 512), generator=generator) for _ in range(4)]
    batches = [batch.to(device()) for batch in batches]
    losses: list[torch.Tensor] = []
    injected = nullcontext() if delays is None else environment("HYTRAIN_DELAYS", f"{delays}:300")
    model = llama()
    if frozen is not None:
        FROZEN[frozen](model)
    with injected, built(model, config) as engine:
        for step in range(STEPS):
            tokens = batches[step % len(batches)]
            if disturb is not None:
                disturb(engine)
            loss = engine(input_ids=tokens, labels=tokens).loss
            if disturb is not None:
                disturb(engine)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses], engine.fp32_state_dict()


def train_adapters(
    *, streamed: bool, hidden: int = 1536, layers: int = 24
) -> tuple[list[float], int]:
    """Trains adapters of a model of 0.7 B parameters, built on the host, with small batches.

    Returns:
        Losses, and the bytes of the frozen weights.
    """
    model = llama(hidden, layers, torch.device("cpu"))
    FROZEN["lora"](model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    config = make_config(stage=3 if streamed else 2)
    if streamed:
        # DeepSpeed's defaults would keep as many layers as this model has.
        config["zero_optimization"].update(
            offload_param={"device": "cpu"},
            stage3_prefetch_bucket_size=10**6,
            stage3_max_reuse_distance=0,
        )
    tokens = torch.randint(VOCABULARY, (1, 128), generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    with built(model, config) as engine:
        for _ in range(4):
            loss = engine(input_ids=tokens.to(device()), labels=tokens.to(device())).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses, weights


def assert_same(ours: Trained, theirs: Trained) -> None:
    """Asserts that losses and every element of the state are the same, bit for bit."""
    differing = [
        f"{name}.{part}: {int((tensor != theirs[1][name][part]).sum())} of {tensor.numel()}"
        for name, parts in ours[1].items()
        for part, tensor in parts.items()
        if not torch.equal(tensor, theirs[1][name][part])
    ]
    assert ours[0] == theirs[0], f"{ours[0]} {theirs[0]} {differing[:6]} ({len(differing)})"
    assert not differing, f"{differing[:6]} ({len(differing)} in all)"
