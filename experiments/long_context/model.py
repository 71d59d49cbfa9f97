"""A Llama whose memory grows little with the sequence length, made the same way for every system.

MLPs and the loss are computed in DeepSpeed's tiles. Blocks are recomputed in backward; the inputs
of the first ones are kept in page-locked host memory, as many as fit, those of others on the GPU.
Attention is causal, by torch's kernels whose memory does not grow with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers.models.llama.modeling_llama as llama
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from experiments.common.records import GIB

BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
LOGITS_BYTES = GIB
"""Size of the fp32 logits of a tile of the loss."""


class HostInputs:
    """Page-locked host memory for the inputs of blocks, reused in every step."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.blocks = 0
        self._at = 0
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        if torch.cuda.is_available() and num_bytes:
            # Not by torch's allocator: it takes the next power of two.
            error = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)
            if int(error):
                raise MemoryError(f"{num_bytes / GIB:.1f} GiB could not be page-locked: {error}")

    def begin(self, input_bytes: int, layers: int) -> None:
        """Begins a step with `input_bytes` for each block's input: the first blocks' come here."""
        self._at = 0
        self.blocks = min(layers, self.num_bytes // input_bytes)

    def saving(self, shape: torch.Size) -> Any:
        """A context in which tensors of this shape that autograd saves come here."""

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.shape != shape:
                return tensor
            end = self._at + tensor.numel() * tensor.element_size()
            slot = self._memory[self._at : end].view(tensor.dtype).view(shape)
            self._at = end
            return tensor.device, slot.copy_(tensor.detach())

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            device, slot = packed
            return slot.to(device, copy=True)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class Attention:
    """Causal attention of the whole sequence, or of windows: as much memory, less time."""

    def __init__(self) -> None:
        self.window = 0

    def __call__(
        self, _module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **_more: Any
    ) -> tuple[torch.Tensor, None]:
        shape, window = q.shape, self.window
        if window and shape[2] > window and shape[2] % window == 0:  # of one sequence: only views
            q, k, v = (t[0].unflatten(1, (-1, window)).transpose(0, 1) for t in (q, k, v))
        if not q.is_cuda:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            if q.dtype == torch.float32:  # fp32's kernel needs as many heads of keys as of queries
                k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
            with sdpa_kernel(BACKENDS):
                out = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1]
                )
        return out.transpose(1, 2).reshape(shape[0], shape[2], shape[1], shape[3]), None


def adapt(
    model: Any, inputs: Callable[[], HostInputs | None], attention: Attention, first: int
) -> None:
    """Changes a Llama for causal language modelling in place.

    Args:
        model: its attention is "sdpa".
        inputs: gives the memory for blocks' inputs; None: all stay on the device.
        attention: takes the place of "sdpa" in this process.
        first: number of parts of the sequence before this rank's.
    """
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    llama.create_causal_mask = lambda *_, **__: None  # never of length x length
    for number, layer in enumerate(model.model.layers):
        _tile(layer.mlp, model.config.hidden_size)
        _recompute(layer, number, inputs)
    model.forward = _loss_in_tiles(model, first)


def _tile(mlp: Any, width: int) -> None:
    plain, weights = mlp.forward, list(mlp.parameters())

    def forward(x: torch.Tensor) -> torch.Tensor:
        tiles = math.ceil(x.shape[1] / width)
        return TiledMLP.apply(lambda _, part: plain(part), mlp, x, tiles, weights)

    mlp.forward = forward


def _recompute(layer: Any, number: int, inputs: Callable[[], HostInputs | None]) -> None:
    plain = layer.forward

    def forward(x: torch.Tensor, **named: Any) -> Any:
        def run(y: torch.Tensor) -> Any:
            return plain(y, **named)

        memory = inputs()
        if memory is None or number >= memory.blocks:
            return checkpoint(run, x, use_reentrant=False)
        with memory.saving(x.shape):
            return checkpoint(run, x, use_reentrant=False)

    layer.forward = forward


def _loss_in_tiles(model: Any, first: int) -> Callable[..., CausalLMOutput]:
    def forward(input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> CausalLMOutput:
        length = input_ids.shape[1]
        places = torch.arange(first * length, (first + 1) * length, device=input_ids.device)
        found = model.model(input_ids=input_ids, position_ids=places[None], use_cache=False)
        tiles = math.ceil(labels.numel() * model.config.vocab_size * 4 / LOGITS_BYTES)

        def part(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = model.lm_head(x).float().flatten(0, -2)
            return functional.cross_entropy(logits, y.flatten(), reduction="sum") / length

        loss = TiledFusedLogitsLoss.apply(
            part, model, found.last_hidden_state, labels, None, tiles, [model.lm_head.weight], "sum"
        )
        return CausalLMOutput(loss=loss)

    return forward
