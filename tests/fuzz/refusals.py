"""Keys that are refused by design, before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refusal:
    """A key that is refused by design, before anything is touched.

    Attributes:
        path: the key's path.
        value: the refused value; "remove": the key is missing.
        says: a part of the message.
        stages: the ZeRO stages in which it is refused.
    """

    path: str
    value: Any
    says: str
    stages: tuple[int, ...] = (1, 2, 3)


REFUSALS = (
    Refusal("zero_optimization.stage", 0, "ZeRO stages 1 to 3"),
    Refusal("zero_optimization.offload_optimizer.device", "nvme", "offload_optimizer.device"),
    Refusal("zero_optimization.offload_optimizer", "remove", "offload_optimizer.device"),
    Refusal("zero_optimization.offload_optimizer.ratio", 0.5, "hytrain.gpu_fraction"),
    Refusal("zero_optimization.offload_param", {"device": "cpu"}, "stage 3 streams", (1, 2)),
    Refusal("zero_optimization.offload_param", {"device": "nvme"}, "offload_param.device"),
    Refusal("zero_optimization.mics_shard_size", 2, "MiCS"),
    Refusal("zero_optimization.zero_hpz_partition_size", 2, "ZeRO++"),
    Refusal("gradient_predivide_factor", 2.0, "gradient_predivide_factor"),
    Refusal("prescale_gradients", True, "prescale_gradients"),
    Refusal("communication_data_type", "int8", "communication_data_type"),
    Refusal("fp16", {"fp16_master_weights_and_grads": True}, "fp16"),
    Refusal("hytrain.gpu_fraction", 1.5, "hytrain.gpu_fraction"),
    Refusal("hytrain.shard_fractions", [0.5, 0.2], "sum to 1"),
    Refusal("hytrain.shard_fractions", [0.25] * 4, "fractions"),
    Refusal("hytrain.batch_sizes", [1] * 4, "batch_sizes"),
    Refusal("hytrain.micro_batch_sizes", [1, 1], "micro_batch_sizes"),
    Refusal("hytrain.offload.chunk_elements", 1030, "multiple of 64"),
    Refusal("hytrain.offload.cpu_threads", 0, "cpu_threads"),
    Refusal("hytrain.solver.alpha", 0.0, "alpha"),
    Refusal("hytrain.layers.class", "Blok", "no module of that class"),
    Refusal("hytrain.gpu_fractoin", 0.5, "unknown key"),
    Refusal("hytrain.activations", "offload", "layer_major"),
)
