"""Ranks that share sequences: how many share each one, and what follows for the batch.

State is sharded over all ranks; batches belong to groups of ranks, each of which has one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hytrain.config import SECTION, HyTrainConfig
from hytrain.errors import ConfigError, UnsupportedError

KEY = "sequence_parallel_size"
_DATA_KEY = "data_parallel_size"
SHARED_DTYPE = "seq_parallel_communication_data_type"
"""DeepSpeed's key for the dtype that gradients are reduced in if ranks share sequences."""


def sequence_degree_of(mpu: Any) -> int:
    """Returns how many ranks share each sequence by an ``mpu``; 1: none do."""
    size: Callable[[], int] | None = getattr(mpu, "get_sequence_parallel_world_size", None)
    return 1 if size is None else int(size())


def mesh_of(config: Mapping[str, Any], mpu: Any, mesh: Any, ranks: int) -> Any:
    """Returns the (data, sequence) ranks of the mesh that DeepSpeed is to make; None: no mesh.

    Args:
        config: may have the keys "sequence_parallel_size" and "data_parallel_size".
        mpu: that of ``initialize``; its groups take precedence over a mesh.
        mesh: ``mesh_param`` of ``initialize``, which takes precedence over the keys.
        ranks: the number of ranks of the job.

    Raises:
        ConfigError: the numbers contradict each other or the job.
        UnsupportedError: ranks share tensors, too.
    """
    _refuse_tensor_ranks(mpu)
    keys = {key: config[key] for key in (KEY, _DATA_KEY) if config.get(key) is not None}
    for key, value in keys.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f'"{key}" is {value!r}: give a whole number above 0, or remove it')
    degree = keys.get(KEY, 1)
    if mpu is not None:
        found = sequence_degree_of(mpu)
        if KEY in keys and degree != found:
            raise ConfigError(
                f'"{KEY}" is {degree}, but {found} ranks share each sequence by the mpu: make '
                "them equal, or remove the key"
            )
        return None
    if mesh is not None:
        data, degree = mesh
    elif KEY not in keys:
        return None
    else:
        data = keys.get(_DATA_KEY, max(1, ranks // degree))
    if data * degree != ranks:
        raise ConfigError(
            f"{degree} ranks for each sequence, and {data} sequences at once, make "
            f'{data * degree}, but the job has {ranks} ranks: "{KEY}" times "{_DATA_KEY}" (or the '
            "two numbers of mesh_param) must be the number of ranks"
        )
    return data, degree


def refuse_dealt_batches(section: HyTrainConfig, degree: int) -> None:
    """Raises an UnsupportedError if samples are dealt to single ranks while ranks share them."""
    for key, value in (("plan", section.plan), ("batch_sizes", section.batch_sizes)):
        if value is not None and degree > 1:
            raise UnsupportedError(
                f'"{SECTION}.{key}" deals samples to single ranks, but {degree} ranks share each '
                "sequence and have equal parts of it: remove it, and give DeepSpeed's batch keys "
                f'("{SECTION}.shard_fractions" may be unequal)'
            )


def _refuse_tensor_ranks(mpu: Any) -> None:
    """Raises an UnsupportedError if an ``mpu``'s ranks share tensors."""
    size: Callable[[], int] | None = getattr(mpu, "get_tensor_model_parallel_world_size", None)
    if size is not None and size() > 1:
        raise UnsupportedError(
            f"the mpu spreads tensors over {size()} ranks: tensor parallelism is not supported, "
            "also not beside sequence parallelism; use data and sequence ranks only"
        )
