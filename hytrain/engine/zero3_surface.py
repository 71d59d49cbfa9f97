"""What libraries look for on parameters and the optimizer where DeepSpeed's ZeRO-3 is in use."""

from __future__ import annotations

from torch import nn

from hytrain.engine.gathered_parameters import GatheringParameters
from hytrain.engine.parameter_attributes import ParameterAttributes
from hytrain.engine.parameter_offload import ParameterOffload
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer


def offer_zero3(optimizer: HyTrainZeroOptimizer, model: nn.Module) -> None:
    """Parameters get their ``ds_*`` attributes, the optimizer its ``parameter_offload``."""
    weights = optimizer.weights
    gathering = GatheringParameters(weights, optimizer.kept)
    attributes = ParameterAttributes(
        model,
        weights,
        optimizer.collectives,
        {"all_gather": gathering.gather, "partition": gathering.part},
    )
    weights.when_closed(attributes.detach)
    offload = optimizer.parameter_offload = ParameterOffload(model, weights)
    weights.when_closed(offload.detach)
