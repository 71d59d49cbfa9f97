"""A hybrid plan's stages as layers of DeepSpeed's ``PipelineModule``.

    layers = [LayerSpec(Embedding, ...), LayerSpec(Block, ...), ..., LayerSpec(Head, ...)]
    values = json.loads(Path("export/pipeline.json").read_text())
    model = PipelineModule(
        stage_layers(layers, values["boundaries"]),
        num_stages=values["num_stages"],
        partition_method="uniform",
        loss_fn=loss,
    )

``PipelineModule`` cuts by numbers of layers or parameters, not at given layers. If each of its
layers is a whole stage, a uniform cut is the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from hytrain.errors import PlanError


class StageLayers(torch.nn.Sequential):
    """The layers of one stage, built where it runs.

    Args:
        layers: modules, functions of a tensor or a tuple of them, or ``LayerSpec``.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        built = [layer.build() if hasattr(layer, "build") else layer for layer in layers]
        super().__init__(
            *(one if isinstance(one, torch.nn.Module) else _Function(one) for one in built)
        )


class _Function(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: Any) -> Any:
        return self._function(inputs)


def stage_layers(layers: Sequence[Any], boundaries: Sequence[int]) -> list[Any]:
    """Returns one ``LayerSpec`` per stage.

    Args:
        layers: as for ``PipelineModule``: ``LayerSpec``, modules or functions.
        boundaries: first layer of each stage, then the number of layers.

    Raises:
        PlanError: the number of layers is not the planned one, or a layer is tied.
    """
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if boundaries[-1] != len(layers):
        raise PlanError(f"the plan is for {boundaries[-1]} layers, the model has {len(layers)}")
    tied = [layer.key for layer in layers if isinstance(layer, TiedLayerSpec)]
    if tied:
        raise PlanError(
            f"TiedLayerSpec {tied[0]!r}: PipelineModule ties layers that it is given one by one, "
            "not those within a planned stage: untie them"
        )
    return [
        LayerSpec(StageLayers, list(layers[start:stop])) for start, stop in pairwise(boundaries)
    ]
