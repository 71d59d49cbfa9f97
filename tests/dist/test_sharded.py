"""ZeRO-3 on two to three ranks: ZeRO-2's numbers, bit for bit, with layers gathered for use."""

from __future__ import annotations

import pytest
import rank_batches
import rank_sharded as cases
from harness import RankPools
from rank_batches import Shares
from rank_sharded import Setup

pytestmark = pytest.mark.timeout(240)

EVEN, UNEVEN, THREE = (0.5, 0.5), (0.7, 0.3), (0.2, 0.5, 0.3)
LOOKS_FAR = (("stage3_prefetch_bucket_size", 7000), ("stage3_max_reuse_distance", 9000))
NO_PREFETCH = (("stage3_prefetch_bucket_size", 0),)
LITTLE_ROOM = (*LOOKS_FAR, ("stage3_max_live_parameters", 5000))
SMALL_STAY = (("stage3_param_persistence_threshold", 2000),)

SETUPS = [
    Setup("mlp", EVEN, (0.0, 1.0), evaluates=True),
    Setup("mlp", UNEVEN, (0.5, 0.0), keys=LOOKS_FAR, accumulation=3),
    Setup("mlp", UNEVEN, (1.0, 1.0), 0.0, bf16=False, keys=SMALL_STAY, evaluates=True),
    Setup("mlp", EVEN, (0.0, 0.5), keys=LITTLE_ROOM, delays=3, steps=8),
    Setup("mlp", UNEVEN, keys=LOOKS_FAR, delays=5, accumulation=2, steps=8, evaluates=True),
    Setup("llama", UNEVEN, (0.5, 1.0), evaluates=True),
    Setup("llama-hf", EVEN, keys=LOOKS_FAR),
    Setup("gpt2", UNEVEN, (0.3, 0.0), bf16=False, accumulation=2, keys=LOOKS_FAR),
    Setup("gpt2-hf", EVEN, (0.0, 0.5), 0.0),
    Setup("vit", UNEVEN, keys=SMALL_STAY),
    Setup("t5", UNEVEN, (0.5, 0.5), evaluates=True, keys=LOOKS_FAR),
    Setup("reentrant-1", UNEVEN, evaluates=True),
    Setup("reentrant-2", EVEN, accumulation=2),
    Setup("recomputed-1", UNEVEN, (0.5, 0.5)),
    Setup("recomputed-2", UNEVEN, keys=LOOKS_FAR, accumulation=2),
    Setup("twice", EVEN),
    Setup("root", UNEVEN, evaluates=True),
    Setup("elsewhere", UNEVEN, evaluates=True, accumulation=2),
    Setup("frozen", UNEVEN, (0.5, 0.5), accumulation=2),
    Setup("again", UNEVEN, (0.5, 0.0)),
    Setup("unused", EVEN, (0.0, 0.5)),
    Setup("mlp", UNEVEN, (0.0, 1.0), on_host=True, evaluates=True, keys=SMALL_STAY),
    Setup("llama", EVEN, (0.5, 0.0), 0.0, on_host=True, accumulation=2, delays=7),
    Setup("gpt2-hf", UNEVEN, (0.5, 0.5), bf16=False, on_host=True, keys=LOOKS_FAR),
    Setup("llama", THREE, (0.0, 0.5, 1.0), accumulation=2, keys=LOOKS_FAR),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_as_stage_2(ranks: RankPools, setup: Setup) -> None:
    ranks(len(setup.fractions)).run(cases.equals_stage_2, setup)


# A model of each way to use weights; test-parity has the others.
SHORT = {"mlp", "llama", "reentrant-1", "recomputed-1", "twice", "root", "again", "unused"}
EVERY_SHORT = [x for x in SETUPS if x.accumulation == 1]
SOME_SHORT = list({x.model: x for x in EVERY_SHORT if x.model in SHORT}.values())


@pytest.mark.parametrize(
    "setup",
    [x if x in SOME_SHORT else pytest.param(x, marks=pytest.mark.parity_full) for x in EVERY_SHORT],
    ids=str,
)
def test_as_stage_2_where_the_first_backwards_gradients_do_not_fit(
    ranks: RankPools, setup: Setup
) -> None:
    ranks(len(setup.fractions)).run(cases.equals_stage_2_short_of_memory, setup)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("mlp", [5, 4, 3, 2, 1]),
        ("again", [5, 4, 3, 1]),
        ("elsewhere", [5, 4, 3, 1]),
        ("unused", [5, 4, 2, 1]),
        ("recomputed-2", [5, 4, 3, 2, 1]),
        ("llama", [5, 4, 3, 2]),
    ],
)
def test_the_first_backward_begins_updates_where_gradients_do_not_fit(
    ranks: RankPools, kind: str, layers: list[int]
) -> None:
    """Of those that are complete for certain: not used twice, nor read past their modules, nor
    with a parameter that has got no gradient. The last one ends the backward."""
    assert ranks(2).run(cases.begun_in_the_first_backward, kind) == [layers, layers]


def test_a_gradient_after_its_layers_update_has_begun(ranks: RankPools) -> None:
    ranks(2).run(cases.a_gradient_after_its_layer)


@pytest.mark.parametrize(("keys", "most"), [((), 2), (NO_PREFETCH, 1)], ids=["one", "none"])
def test_layers_that_are_whole_at_once(
    ranks: RankPools, keys: tuple[tuple[str, int], ...], most: int
) -> None:
    assert ranks(2).run(cases.equals_stage_2, Setup(keys=keys, accumulation=2)) == [most, most]


ALONE = [
    Setup("mlp", (1.0,), on_host=True, evaluates=True, delays=3, steps=8),
    Setup("llama", (1.0,), (0.5,), on_host=True, accumulation=2, keys=LOOKS_FAR),
    Setup("gpt2-hf", (1.0,), (1.0,), bf16=False, on_host=True, keys=SMALL_STAY),
    Setup("recomputed-2", (1.0,), (0.5,), 0.0, on_host=True),
]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("setup", ALONE, ids=str)
def test_one_rank_with_its_weights_on_the_host(setup: Setup) -> None:
    cases.equals_stage_2(setup)


@pytest.mark.parametrize("kind", ["mlp", "llama", "reentrant-1"])
def test_whole_gradients_that_are_there_at_once(ranks: RankPools, kind: str) -> None:
    assert {1, 2} >= set(ranks(2).run(cases.whole_gradients, kind))


def test_memory_is_given_back(ranks: RankPools) -> None:
    ranks(2).run(cases.memory_is_given_back)


def test_reading_the_weights(ranks: RankPools) -> None:
    ranks(2).run(cases.weights_can_be_read)


def test_gathered_parameters_of_deepspeed(ranks: RankPools) -> None:
    ranks(2).run(cases.deepspeed_gathers_parameters)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("threshold", [0, 2000, 100_000])
def test_weights_that_are_written_where_gathered(
    ranks: RankPools, threshold: int, frozen: bool
) -> None:
    ranks(2).run(cases.written_where_gathered, threshold, frozen)


@pytest.mark.parametrize("fractions", [EVEN, UNEVEN], ids=str)
def test_a_layer_that_one_rank_leaves_out(ranks: RankPools, fractions: tuple[float, ...]) -> None:
    ranks(2).run(cases.layer_left_out_later, fractions)


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
def test_an_evaluation_between_backward_and_step(ranks: RankPools, gpu_fraction: float) -> None:
    ranks(2).run(cases.evaluation_before_step, gpu_fraction)


def test_ranks_that_differ_in_the_first_pass(ranks: RankPools) -> None:
    ranks(2).run(cases.first_pass_differs)


def test_a_layer_that_the_first_pass_did_not_use(ranks: RankPools) -> None:
    ranks(2).run(cases.used_more_often_later)


def test_a_module_called_outside_of_forward(ranks: RankPools) -> None:
    ranks(2).run(cases.a_module_is_called_alone)


LAYER_MAJOR = [
    Shares((4, 2), (2, 1), (0.7, 0.3), 3, 0.5, (0.0, 0.5), "layer_major"),
    Shares((3, 3), (1, 1), (0.5, 0.5), 3, 0.0, (1.0, 0.0), "layer_major", "offload"),
    Shares((4, 2), (1, 1), (0.7, 0.3), 3, 0.5, (0.0, 0.5), "layer_major"),
    Shares((1, 5), (1, 2), (0.5, 0.5), 3, 0.05, (0.5, 0.0), "layer_major", "offload"),
    # The idle rank keeps what others compute with.
    Shares((4, 0), (1, 1), (0.3, 0.7), 3, 0.5, (0.0, 0.5), "layer_major"),
    Shares((0, 3), (1, 2), (0.5, 0.5), 3, 0.0, (0.0, 0.0), "layer_major", "offload"),
    Shares((3, 0, 2), (1, 1, 2), (0.2, 0.5, 0.3), 3, 0.05, (0.0, 1.0, 0.5), "layer_major"),
    Shares((4, 0), (1, 1), (0.3, 0.7), 3, 0.5, (0.0, 0.5), "layer_major", gathers="kept"),
    Shares((4, 2), (2, 1), (0.5, 0.5), 3, 0.5, (0.5, 0.0), "layer_major", gathers="defaults"),
]


@pytest.mark.parametrize("case", LAYER_MAJOR, ids=str)
def test_layer_by_layer(ranks: RankPools, case: Shares) -> None:
    pool = ranks(len(case.sizes))
    pool.run(rank_batches.gradients_are_the_whole_batch, case)
    pool.run(rank_batches.train_and_compare, case)


ONE_RANK_IDLE = Shares((1, 0), (1, 1), (0.3, 0.7), 3, 0.5, (0.0, 0.5))


@pytest.mark.parametrize(
    "case",
    [
        *LAYER_MAJOR[:2],
        LAYER_MAJOR[6],
        ONE_RANK_IDLE,
        *(pytest.param(case, marks=pytest.mark.parity_full) for case in LAYER_MAJOR[2:6]),
        *(pytest.param(case, marks=pytest.mark.parity_full) for case in LAYER_MAJOR[7:]),
    ],
    ids=str,
)
def test_a_batch_of_all_ranks_where_the_first_backwards_gradients_do_not_fit(
    ranks: RankPools, case: Shares
) -> None:
    ranks(len(case.sizes)).run(cases.batches_short_of_memory, case)


@pytest.mark.parametrize(
    ("kind", "on_host"), [("mlp", False), ("llama", True), ("frozen", False), ("gpt2", False)]
)
def test_a_model_built_under_zero_init(ranks: RankPools, kind: str, on_host: bool) -> None:
    ranks(2).run(cases.built_under_zero_init, kind, on_host)


def test_zero_init_below_stage_3_is_refused(ranks: RankPools) -> None:
    ranks(2).run(cases.zero_init_below_stage_3)
