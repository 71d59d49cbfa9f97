"""Ranks that share sequences: what the keys, a mesh and an mpu say together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hytrain.engine.sequence_groups import mesh_of, sequence_degree_of
from hytrain.errors import ConfigError, UnsupportedError


def _mpu(degree: int, **more: int) -> Any:
    sizes = {"get_sequence_parallel_world_size": degree, **more}
    return SimpleNamespace(**{name: lambda size=size: size for name, size in sizes.items()})


def _keys(sequence: Any = None, data: Any = None) -> dict[str, Any]:
    return {"sequence_parallel_size": sequence, "data_parallel_size": data}


@pytest.mark.parametrize(
    ("config", "mpu", "mesh", "expected"),
    [
        ({}, None, None, None),
        (_keys(2), None, None, (3, 2)),
        (_keys(2, 3), None, None, (3, 2)),
        (_keys(1), None, None, (6, 1)),
        ({}, None, (2, 3), (2, 3)),
        ({}, _mpu(3), None, None),
        (_keys(3), _mpu(3), None, None),
        ({"data_parallel_size": 5}, None, None, None),  # alone DeepSpeed does not look at it
    ],
)
def test_the_mesh(config: Any, mpu: Any, mesh: Any, expected: Any) -> None:
    assert mesh_of(config, mpu, mesh, 6) == expected


@pytest.mark.parametrize(
    ("config", "mpu", "mesh", "match"),
    [
        (_keys(4), None, None, "4 ranks for each sequence, and 1 sequences at once, make 4"),
        (_keys(2, 2), None, None, "make 4, but the job has 6 ranks"),
        (_keys(12), None, None, "make 12, but the job has 6 ranks"),
        ({}, None, (2, 2), "must be the number of ranks"),
        (_keys(0), None, None, '"sequence_parallel_size" is 0'),
        (_keys(True), None, None, '"sequence_parallel_size" is True'),
        (_keys(2, "auto"), None, None, "\"data_parallel_size\" is 'auto'"),
        (_keys(2), _mpu(3), None, "is 2, but 3 ranks share each sequence by the mpu"),
        (_keys(2), _mpu(1), None, "is 2, but 1 ranks share each sequence by the mpu"),
    ],
)
def test_contradictions(config: Any, mpu: Any, mesh: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        mesh_of(config, mpu, mesh, 6)


def test_ranks_that_share_tensors() -> None:
    mpu = _mpu(2, get_tensor_model_parallel_world_size=2)
    with pytest.raises(UnsupportedError, match="the mpu spreads tensors over 2 ranks"):
        mesh_of({}, mpu, None, 4)
    assert mesh_of({}, _mpu(2, get_tensor_model_parallel_world_size=1), None, 4) is None


def test_an_mpu_of_data_ranks_alone() -> None:
    assert sequence_degree_of(SimpleNamespace(get_data_parallel_group=lambda: None)) == 1
    assert sequence_degree_of(None) == 1
