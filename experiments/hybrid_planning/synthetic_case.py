"""A cluster of 1,024 GPUs of four types and a model of 80 layers, made up."""

from __future__ import annotations

from hytrain.tools.hybrid.problem import (
    Constants,
    DeviceType,
    Node,
    Options,
    Problem,
    Samples,
)

# Relative speed, GB of memory, GB/s within a node and between nodes.
TYPES = {
    "A100": (1.0, 80, 300.0, 25.0),
    "H100": (2.2, 80, 450.0, 50.0),
    "L40": (0.55, 48, 32.0, 12.0),
    "V100": (0.4, 32, 150.0, 12.0),
}
_BLOCK_MS = 6.0
"""Time of forward and backward of one sample through a block on an A100."""

_BLOCK_MB = 2400.0
_HIDDEN, _SEQUENCE, _VOCABULARY = 8192, 2048, 51200


def problem(
    gpus: int = 1024,
    layers: int = 80,
    gbs: int = 1024,
    *,
    variance: float = 1.0,
    options: Options | None = None,
) -> Problem:
    """A planning problem with equally many GPUs of each type, eight to a node.

    Args:
        gpus: GPUs of the cluster, a multiple of 32.
        layers: number of layers, embedding and head included.
        gbs: samples of a step.
        variance: factor of the least group size.
        options: options of the cost model.
    """
    each = gpus // len(TYPES)
    sizes = [2**k for k in range(8)]
    return Problem(
        nodes=tuple(Node(f"{name}-{i}", name, 8) for name in TYPES for i in range(each // 8)),
        devices=tuple(
            DeviceType(name, memory * 1024.0, intra, inter)
            for name, (_, memory, intra, inter) in sorted(TYPES.items())
        ),
        samples={
            (name, tp, size): _samples(TYPES[name][0], tp, size, layers)
            for name in TYPES
            for tp in sizes
            for size in sizes
        },
        constants=Constants(
            optimizer_ms=900.0,
            batch_generator_ms=0.5,
            parameter_bytes=(1.7e9, *[3.2e9] * (layers - 2), 1.7e9),
        ),
        gbs=gbs,
        hidden_size=_HIDDEN,
        sequence_length=_SEQUENCE,
        vocab_size=_VOCABULARY,
        max_tp=sizes[-1],
        max_batch=sizes[-1],
        variance=variance,
        mem_coef=5.0,
        options=options or Options(),
    )


def _samples(speed: float, tp: int, size: int, layers: int) -> Samples:
    """A made-up profile: each doubling of tp is 80 % efficient; kernel launches stay as long."""
    block = _BLOCK_MS * size / speed / tp * 1.25 ** (tp.bit_length() - 1) + 0.3
    ends = (0.1 * block, *[block] * (layers - 2), 0.4 * block)
    memory = _BLOCK_MB * (0.6 + 0.4 * size) / tp + 100.0
    return Samples(ends, (1.5 * memory, *[memory] * (layers - 2), 1.5 * memory), 0.05 * block)
