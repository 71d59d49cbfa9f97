"""On a GPU, ZeRO-3 and weights streamed from the host are ZeRO-2, bit for bit.

Gathers, releases and streamed weights run on other streams than compute here, which no CPU test
sees. Everything is made deterministic; that it is, the first test shows with ZeRO-2 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from test_parity_gpu import stream_delays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("process_group", "deterministic"),
    pytest.mark.timeout(300),
]

STEPS = 8


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def llama() -> torch.nn.Module:
    """0.2 B parameters: large enough that copies take longer than a layer's launch."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        # Attention written out: the fused kernels add up in any order.
        return AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.bfloat16
        ).train()


def train(
    stage: int, gpu_fraction: float, *, streamed: bool = False, delays: int | None = None
) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    """Losses, and the state at the end."""
    config = make_config(
        gpu_fraction=gpu_fraction,
        stage=stage,
        offload={"chunk_elements": 2**20, "cpu_threads": 8},
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
    )
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if streamed:
        zero["offload_param"] = {"device": "cpu"}
    config["zero_optimization"] = zero
    disturb = None if delays is None else stream_delays(delays)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(8192, (4, 512), generator=generator).cuda() for _ in range(4)]
    losses: list[torch.Tensor] = []
    injected = nullcontext() if delays is None else environment("HYTRAIN_DELAYS", f"{delays}:300")
    with injected, built(llama(), config) as engine:
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


def assert_same(
    ours: tuple[list[float], dict[str, dict[str, torch.Tensor]]],
    theirs: tuple[list[float], dict[str, dict[str, torch.Tensor]]],
) -> None:
    differing = [
        f"{name}.{part}: {int((tensor != theirs[1][name][part]).sum())} of {tensor.numel()}"
        for name, parts in ours[1].items()
        for part, tensor in parts.items()
        if not torch.equal(tensor, theirs[1][name][part])
    ]
    assert ours[0] == theirs[0], f"{ours[0]} {theirs[0]} {differing[:6]} ({len(differing)})"
    assert not differing, f"{differing[:6]} ({len(differing)} in all)"


@pytest.fixture(scope="module")
def stage2(process_group: None) -> dict[float, Any]:
    """ZeRO-2 by gpu_fraction, trained when first asked for."""
    del process_group
    return {}


def reference(stage2: dict[float, Any], gpu_fraction: float) -> Any:
    if gpu_fraction not in stage2:
        stage2[gpu_fraction] = train(2, gpu_fraction)
    return stage2[gpu_fraction]


def test_zero2_repeats_itself(stage2: dict[float, Any]) -> None:
    assert_same(train(2, 0.0), reference(stage2, 0.0))


@pytest.mark.parametrize("delays", [None, 1, 2])
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
@pytest.mark.parametrize("streamed", [False, True], ids=["sharded", "streamed"])
def test_zero3_is_zero2(
    stage2: dict[float, Any], streamed: bool, gpu_fraction: float, delays: int | None
) -> None:
    ours = train(3, gpu_fraction, streamed=streamed, delays=delays)
    assert_same(ours, reference(stage2, gpu_fraction))
