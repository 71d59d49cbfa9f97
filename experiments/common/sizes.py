"""Model sizes, and how many operations a step of them takes. No torch here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a Llama model with untied embeddings and full multi-head attention."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int

    @property
    def num_matmul(self) -> int:
        """Parameters that enter a matrix product: all but the input embedding and the norms."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate
        return self.layers * block + self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters: those of the matrix products, the input embedding and the norms."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.num_matmul + self.vocab * self.hidden + norms

    def num_cpu_parameters(self, gpu_fraction: float) -> int:
        """Parameters whose optimizer state hytrain keeps on the host.

        The embedding is the first layer, the last norm and the head are the last, and the first
        round(gpu_fraction * number of layers) layers belong to the GPU.
        """
        embedding = self.vocab * self.hidden
        head = embedding + self.hidden
        block = (self.num_parameters - embedding - head) // self.layers
        layers = [embedding, *[block] * self.layers, head]
        return sum(layers[round(gpu_fraction * len(layers)) :])


SIZES = {
    "toy": Size(layers=2, hidden=64, intermediate=128, heads=4, vocab=256),
    "llama-100m": Size(layers=12, hidden=640, intermediate=1728, heads=10, vocab=32000),
    "llama-0.4b": Size(layers=24, hidden=1024, intermediate=2816, heads=8, vocab=32000),
    "llama-1b": Size(layers=16, hidden=2048, intermediate=5632, heads=16, vocab=32000),
    "llama-3b": Size(layers=24, hidden=3072, intermediate=8192, heads=24, vocab=32000),
}

LARGE = {
    # Llama 7B: part others gives it fewer or more blocks, of 0.2 B parameters each.
    "llama-7b": Size(layers=32, hidden=4096, intermediate=11008, heads=32, vocab=32000),
    # The published setting: Llama 2 cut to 30 layers.
    "llama-10b": Size(layers=30, hidden=5120, intermediate=13824, heads=40, vocab=32000),
    "llama-15b": Size(layers=33, hidden=6144, intermediate=16384, heads=48, vocab=32000),
    # The blocks of Llama 65B; 0.8 B parameters each.
    "llama-41b": Size(layers=50, hidden=8192, intermediate=22016, heads=64, vocab=32000),
}

MODELS = (*SIZES, *LARGE)


def size_of(model: str) -> Size:
    """The size called `model`."""
    if model not in SIZES:
        raise ValueError(f"--model {model!r} is unknown: choose one of {', '.join(SIZES)}")
    return SIZES[model]


def size_with(model: str, layers: int | None = None) -> Size:
    """The size called `model`, if need be with another number of blocks."""
    size = LARGE[model] if model in LARGE else size_of(model)
    return size if layers is None else dataclasses.replace(size, layers=layers)


def register(model: str, layers: int | None = None) -> Size:
    """Makes a model known to the functions that look sizes up by name.

    For measuring processes alone: it changes what the name means for everyone.
    """
    SIZES[model] = size_with(model, layers)
    return SIZES[model]


def model_flops(size: Size, batch: int, seq: int) -> float:
    """Floating-point operations of one forward and backward pass.

    A matrix product takes 2 operations a parameter and token in forward and 4 in backward.
    Attention adds two products of (seq x head) matrices a head: 4 * seq^2 * hidden a sequence
    and layer in forward, three times that with backward, and half of it under a causal mask.
    """
    products = 6.0 * size.num_matmul * batch * seq
    attention = 0.5 * 12.0 * seq**2 * size.hidden * size.layers * batch
    return products + attention


def plain_flops(num_parameters: int, batch: int, seq: int) -> float:
    """6 N D: six operations for each parameter and token, recomputation not counted."""
    return 6.0 * num_parameters * batch * seq
