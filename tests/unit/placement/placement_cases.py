"""Costs that tests of placement share: small ones made by hand, random ones, a measured model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from hytrain.cost.step import LayerCosts, StepCosts

BLANK = LayerCosts(
    name="layer",
    parameters=4,
    forward=0.0,
    backward=0.0,
    to_host=0.0,
    cpu_update=0.0,
    cpu_commit=0.0,
    cpu_preview=0.0,
    to_device=0.0,
    gpu_update=0.0,
)


def layer(**times: float) -> LayerCosts:
    """A layer of 4 parameters; what is not given takes no time."""
    return replace(BLANK, **times)  # pyright: ignore[reportArgumentType]


def step(*layers: LayerCosts, **rest: float) -> StepCosts:
    return StepCosts(layers, **rest)  # pyright: ignore[reportArgumentType]


def equal_layers(num_layers: int, **times: float) -> StepCosts:
    return step(*[layer(**times)] * num_layers)


TIMES = (
    "forward",
    "backward",
    "to_host",
    "cpu_update",
    "cpu_commit",
    "cpu_preview",
    "to_device",
    "gpu_update",
    "cpu_late",
)


@st.composite
def random_costs(
    draw: st.DrawFn,
    times: st.SearchStrategy[float],
    shares: Sequence[float] = (0.0, 0.3, 1.0),
    *,
    late: bool = False,
) -> StepCosts:
    """Up to 9 layers of 4 parameters; chunks are a quarter, a half, all or twice a layer.

    ``late``: some layers may be updated late.
    """
    fixed = st.fixed_dictionaries({name: times for name in TIMES})
    layers = draw(st.lists(fixed, min_size=1, max_size=9))
    number = len(layers) + 1
    first = st.lists(st.integers(0, len(layers)), min_size=number, max_size=number)
    return StepCosts(
        layers=tuple(layer(**values) for values in layers),
        late_from=tuple(draw(first)) if late else (),
        between=draw(times),
        tail=draw(times),
        clipped_share=draw(st.sampled_from(shares)),
        chunk_elements=draw(st.sampled_from((1, 2, 4, 8))),
    )


# No clock measures less than a nanosecond.
any_seconds = st.just(0.0) | st.floats(min_value=1e-9, max_value=10.0)
# Sums of small whole numbers are exact: whatever is added up in another order stays the same.
whole_seconds = st.integers(min_value=0, max_value=6).map(float)


def measured_model(clipped_share: float = 0.0) -> StepCosts:
    """A Llama-shaped model of 2.91 B parameters in 26 layers, from runs on one H200.

    Forward 0.107 s and backward 0.216 s in all, the embedding without any, the head 4 % of them;
    the worker's passes 0.497, 0.44 and 0.28 s; GPU update 150 G parameters/s; 55 GB/s of PCIe.
    """
    sizes = [98_000_000, *[113_000_000] * 24, 98_000_000]
    shares = [0.0, *[0.96 / 24] * 24, 0.04]
    total = sum(sizes)
    layers = [
        LayerCosts(
            name=f"layer {number}",
            parameters=size,
            forward=0.107 * share,
            backward=0.216 * share,
            to_host=2 * size / 55e9,
            cpu_update=0.497 * size / total,
            cpu_commit=0.44 * size / total,
            cpu_preview=0.28 * size / total,
            to_device=2 * size / 55e9,
            gpu_update=size / 150e9,
        )
        for number, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]
    return StepCosts(tuple(layers), clipped_share=clipped_share)
