"""Model sizes, and how many operations a step of them takes. No torch here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a Llama model; by default untied embeddings and full multi-head attention.

    Attributes:
        kv_heads: heads of keys and values; 0: as many as of queries.
        qwen3: a Qwen 3 model: 128 channels a head, norms of queries and keys, tied embeddings.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int = 32000
    kv_heads: int = 0
    qwen3: bool = False

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return 128 if self.qwen3 else self.hidden // self.heads

    @property
    def num_matmul(self) -> int:
        """Parameters that enter a matrix product: all but the input embedding and the norms."""
        queries = self.heads * self.head_dim
        keys = (self.kv_heads or self.heads) * self.head_dim
        block = self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate)
        return self.layers * block + self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters: those of the matrix products, the input embedding and the norms."""
        norms = (2 * self.layers + 1) * self.hidden
        if self.qwen3:
            return self.num_matmul + norms + 2 * self.layers * self.head_dim
        return self.num_matmul + self.vocab * self.hidden + norms

    def num_cpu_parameters(self, gpu_fraction: float) -> int:
        """Parameters whose optimizer state hytrain keeps on the host.

        The embedding is the first layer, the last norm and the head are the last, and the first
        round(gpu_fraction * number of layers) layers belong to the GPU.
        """
        embedding = self.vocab * self.hidden
        head = self.hidden + (0 if self.qwen3 else embedding)
        block = (self.num_parameters - embedding - head) // self.layers
        layers = [embedding, *[block] * self.layers, head]
        return sum(layers[round(gpu_fraction * len(layers)) :])


SIZES = {
    "toy": Size(layers=2, hidden=64, intermediate=128, heads=4, vocab=256),
    "llama-100m": Size(layers=12, hidden=640, intermediate=1728, heads=10),
    "0.1B": Size(layers=12, hidden=768, intermediate=2048, heads=6),
    "llama-0.4b": Size(layers=24, hidden=1024, intermediate=2816, heads=8),
    "llama-1b": Size(layers=16, hidden=2048, intermediate=5632, heads=16),
    "2.7B": Size(layers=32, hidden=2560, intermediate=6912, heads=20),
    "llama-3b": Size(layers=24, hidden=3072, intermediate=8192, heads=24),
    # Llama 7B: solve_k's part "others" gives it fewer or more blocks, of 0.2 B parameters each.
    "llama-7b": Size(layers=32, hidden=4096, intermediate=11008, heads=32),
    # Llama 3.1 8B.
    "llama-8b": Size(
        layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocab=128256
    ),
    # The published setting: Llama 2 cut to 30 layers.
    "llama-10b": Size(layers=30, hidden=5120, intermediate=13824, heads=40),
    "llama-15b": Size(layers=33, hidden=6144, intermediate=16384, heads=48),
    "qwen3-1.7b": Size(
        layers=28, hidden=2048, intermediate=6144, heads=16, kv_heads=8, vocab=151936, qwen3=True
    ),
    "qwen3-4b": Size(
        layers=36, hidden=2560, intermediate=9728, heads=32, kv_heads=8, vocab=151936, qwen3=True
    ),
    "llama-70b": Size(
        layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, vocab=128256
    ),
    # The blocks of Llama 65B; 0.8 B parameters each.
    "llama-41b": Size(layers=50, hidden=8192, intermediate=22016, heads=64),
}
# Names by number of parameters, which cells of regimes.py and workloads of hf_trainer use.
SIZES |= {
    "0.37B": SIZES["llama-0.4b"],
    "0.95B": SIZES["llama-1b"],
    "2.9B": SIZES["llama-3b"],
    "9.8B": SIZES["llama-10b"],
}
MODELS = tuple(SIZES)


def size_of(model: str, layers: int | None = None) -> Size:
    """The size called `model`, with this number of blocks if `layers` is given."""
    if model not in SIZES:
        raise ValueError(f"model {model!r} is unknown: choose one of {', '.join(SIZES)}")
    size = SIZES[model]
    return size if layers is None else dataclasses.replace(size, layers=layers)


def model_flops(size: Size, batch: int, seq: int) -> float:
    """Floating-point operations of one forward and backward pass.

    A matrix product takes 2 operations a parameter and token in forward and 4 in backward.
    Attention adds two products of (seq x head) matrices a head: 4 * seq^2 * channels a sequence
    and layer in forward, three times that with backward, and half of it under a causal mask.
    """
    products = 6.0 * size.num_matmul * batch * seq
    attention = 0.5 * 12.0 * seq**2 * size.heads * size.head_dim * size.layers * batch
    return products + attention
