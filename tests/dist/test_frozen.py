"""ZeRO-3 with parameters that are not trained, on one to three ranks.

They are sharded as trained ones are; the numbers are those of ZeRO-2, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_frozen as cases
import rank_sharded as sharded
from harness import RankPools
from rank_sharded import Setup

pytestmark = pytest.mark.timeout(240)

EVEN, UNEVEN, THREE = (0.5, 0.5), (0.7, 0.3), (0.98, 0.01, 0.01)
LOOKS_FAR = (("stage3_prefetch_bucket_size", 7000), ("stage3_max_reuse_distance", 9000))
LITTLE_ROOM = (*LOOKS_FAR, ("stage3_max_live_parameters", 5000))
SMALL_STAY = (("stage3_param_persistence_threshold", 2000),)  # an adapter's layer, not its block

SETUPS = [
    Setup("mlp+lora", UNEVEN, (0.5, 0.0), evaluates=True, keys=SMALL_STAY),
    Setup("mlp+lora", EVEN, (0.0, 1.0), keys=LOOKS_FAR, delays=3, steps=6, accumulation=2),
    Setup("mlp+last", UNEVEN, evaluates=True, accumulation=2),
    Setup("mlp+embeddings", UNEVEN, (1.0, 0.0), keys=LITTLE_ROOM, evaluates=True),
    Setup("mlp+alternating", EVEN, (0.0, 0.5), 0.0, bf16=False, accumulation=2),
    Setup("mlp+only_embeddings", UNEVEN, (0.5, 0.5), keys=LOOKS_FAR, evaluates=True),
    Setup("mlp+some_lora", UNEVEN, on_host=True, keys=SMALL_STAY, evaluates=True, delays=5),
    Setup("llama-hf+lora", UNEVEN, (0.5, 0.0), evaluates=True),
    Setup("gpt2+lora", EVEN, (0.0, 0.5), bf16=False, on_host=True, keys=LOOKS_FAR),
    Setup("root+lora", UNEVEN, evaluates=True),
    Setup("elsewhere+embeddings", UNEVEN, evaluates=True, accumulation=2),
    Setup("recomputed-2+last", UNEVEN, keys=LOOKS_FAR),
]
LONG = [
    Setup(f"{model}+{frozen}", fractions, (0.5, 0.0, 1.0), 0.5, 2, bf16, keys, 3, True, on_host)
    for fractions, bf16, keys, on_host in (
        (UNEVEN, True, SMALL_STAY, False),
        (THREE, False, LOOKS_FAR, True),
    )
    for model in ("mlp", "llama", "gpt2", "vit", "t5", "twice", "reentrant-1", "llama-hf")
    for frozen in sharded.FROZEN
    # A reentrant checkpoint gives no gradients where its inputs have none.
    if not (model in ("twice", "reentrant-1") and "lora" in frozen)
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_as_stage_2(ranks: RankPools, setup: Setup) -> None:
    ranks(len(setup.fractions)).run(sharded.equals_stage_2, setup)


@pytest.mark.parity_full
@pytest.mark.parametrize("setup", LONG, ids=str)
def test_as_stage_2_in_all_combinations(ranks: RankPools, setup: Setup) -> None:
    ranks(len(setup.fractions)).run(sharded.equals_stage_2, setup)


ALONE = [
    Setup("mlp+lora", (1.0,), (0.5,), on_host=True, evaluates=True, delays=3, steps=6),
    Setup("llama+alternating", (1.0,), (1.0,), bf16=False, on_host=True, keys=LOOKS_FAR),
]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("setup", ALONE, ids=str)
def test_one_rank_with_its_weights_on_the_host(setup: Setup) -> None:
    sharded.equals_stage_2(setup)


@pytest.mark.usefixtures("process_group")
def test_memory_of_one_rank() -> None:
    cases.memory_is_shared("mlp+lora", True, {})


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("mlp+lora", {}), ("mlp+lora", dict(LOOKS_FAR)), ("mlp+last", {})],
    ids=["adapters", "adapters-far", "last"],
)
def test_memory(ranks: RankPools, kind: str, keys: dict[str, int]) -> None:
    ranks(2).run(cases.memory_is_shared, kind, False, keys)


@pytest.mark.parametrize("stages", [(2, 3), (3, 2), (3, 3)], ids=str)
def test_checkpoints(ranks: RankPools, tmp_path: Path, stages: tuple[int, int]) -> None:
    kind = "gpt2+lora" if stages == (3, 3) else "mlp+last"
    ranks(2).run(cases.checkpoint_of_another_stage, kind, stages, str(tmp_path))


def test_reading_and_writing(ranks: RankPools) -> None:
    ranks(2).run(cases.reading_and_writing, "mlp+lora")


def test_a_module_called_outside_of_forward(ranks: RankPools) -> None:
    ranks(2).run(cases.a_frozen_module_is_called_alone, "mlp+last")


def test_adapters_of_a_block_called_outside_of_forward(ranks: RankPools) -> None:
    ranks(2).run(cases.adapters_are_waited_for)


@pytest.mark.parametrize("kind", ["mlp+lora", "mlp+last"])
def test_a_model_built_under_zero_init(ranks: RankPools, kind: str) -> None:
    ranks(2).run(sharded.built_under_zero_init, kind, kind == "mlp+last")


# Block 1 has 4096 parameters that are trained and stay; blocks 0 and 2 have 4192 that are frozen.
NEARLY_ALL_STAY = (("stage3_param_persistence_threshold", 4150),)


@pytest.mark.parametrize(
    ("kind", "keys", "at_first"),
    [
        ("mlp+lora", SMALL_STAY, False),
        ("mlp+lora", SMALL_STAY, True),
        ("mlp+alternating", NEARLY_ALL_STAY, False),
        ("mlp+alternating", NEARLY_ALL_STAY, True),
    ],
    ids=str,
)
def test_a_block_that_is_left_out(
    ranks: RankPools, kind: str, keys: tuple[tuple[str, int], ...], at_first: bool
) -> None:
    ranks(2).run(cases.a_block_is_left_out, kind, dict(keys), at_first)


BATCHES = [
    ("mlp+lora", (4, 2), "layer_major", False),
    ("mlp+last", (3, 0), "layer_major", True),
    ("llama+alternating", (1, 3), "layer_major", False),
    ("mlp+only_embeddings", (2, 3), "layer_major", False),
    ("mlp+last", (0, 3), "micro_batch_major", False),
    ("llama+lora", (3, 1), "micro_batch_major", True),
    ("mlp+lora", (3, 1), "persistent", False),
]


@pytest.mark.parametrize(("kind", "sizes", "mode", "on_host"), BATCHES, ids=str)
def test_global_batches(
    ranks: RankPools, kind: str, sizes: tuple[int, ...], mode: str, on_host: bool
) -> None:
    ranks(2).run(cases.train_batches, kind, sizes, mode, on_host)


@pytest.mark.parity_full
@pytest.mark.parametrize("mode", ["layer_major", "micro_batch_major"])
@pytest.mark.parametrize("sizes", [(4, 2), (3, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("frozen", sharded.FROZEN)
@pytest.mark.parametrize("kind", ["llama", "vit", "mlp"])
def test_global_batches_in_all_combinations(
    ranks: RankPools, kind: str, frozen: str, sizes: tuple[int, ...], mode: str
) -> None:
    ranks(2).run(cases.train_batches, f"{kind}+{frozen}", sizes, mode, sizes == (4, 2))


# The last: another number of ranks takes new processes.
@pytest.mark.parametrize("frozen", ["lora", "last"])
def test_three_ranks_one_of_which_has_nearly_all(ranks: RankPools, frozen: str) -> None:
    setup = Setup(f"mlp+{frozen}", THREE, (0.0, 0.5, 1.0), keys=LOOKS_FAR)
    ranks(3).run(sharded.equals_stage_2, setup)
