"""Ranks that share sequences, beside one process with the whole of each: every element.

DeepSpeed's own: Ulysses attention by its mpu, or by a mesh of the JSON, its loader, and its tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_ranks
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from harness import on_ranks
from support.beside_torch import training_beside_torch
from support.comparisons import assert_same_states
from support.engines import built, from_all_ranks, make_config
from support.plain_deepspeed import plain_engine, plain_state
from support.sequences import (
    KINDS,
    TILES,
    Sample,
    Tiles,
    make_model,
    make_sample,
    part_of,
    sequence_ranks_of,
    training_shared,
)
from torch import nn

from hytrain.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full
STEPS = 3
TWO: dict[str, Any] = {"gradient_accumulation_steps": 2}


def train(kind: str, stage: int, way: str, **more: Any) -> None:
    """Micro-batches of as many sequences at once as there are groups of ranks."""
    degree = more.get("degree") or dist.get_world_size()
    section = {"gpu_fraction": 0.5}
    with training_shared(
        make_model(kind, degree), stage, way=way, section=section, top=TWO, **more
    ) as on:
        engine, data = on.beside.engine, dist.get_world_size() // degree
        assert engine.train_batch_size() == 2 * data
        assert (engine.dp_world_size, engine.sequence_parallel_size) == (data, degree)
        for number in range(STEPS):
            (on.train_batch if number == 1 else on.step)(number)
        assert engine.global_samples == STEPS * 2 * data
        if data > 1:
            with pytest.raises(ConfigError, match=f"a multiple of {data}"):
                engine.set_train_batch_size(data + 1)
        engine.set_train_batch_size(3 * data)
        assert engine.gradient_accumulation_steps() == 3
        on.step(STEPS)


EVERYDAY = {
    (2, "llama", 2, "mpu"), (2, "lora", 3, "key"), (3, "mixture", 3, "mpu"),
    (3, "qwen3", 1, "keys"),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=() if case in EVERYDAY else full)
    for kind in KINDS
    for case in [
        (ranks_used, kind, stage, way)
        for ranks_used in (2, 3)
        for stage in (1, 2, 3)
        for way in ("mpu", "key", "keys", "mpu and key")
    ]
]


@pytest.mark.parametrize(("ranks_used", "kind", "stage", "way"), CASES)
@on_ranks(lambda ranks_used: ranks_used)
def test_every_element(ranks_used: int, kind: str, stage: int, way: str) -> None:
    assert dist.get_world_size() == ranks_used
    train(kind, stage, way)


@full
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", ["mpu", "keys"])
@on_ranks(4)
def test_two_sequences_at_once(stage: int, way: str) -> None:
    train("llama", stage, way, degree=2)


# -- what is recomputed, and where it waits --------------------------------------------------------


def _checkpoint_by_deepspeed(model: Any) -> None:
    """With the checkpoints in host memory, where the device has another."""
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=torch.cuda.is_available())
    for layer in model.model.layers:

        def checkpointed(x: torch.Tensor, plain: Any = layer.forward, **named: Any) -> torch.Tensor:
            return deepspeed.checkpointing.checkpoint(lambda y: plain(y, **named), x)

        layer.forward = checkpointed


def tile(kind: str, stage: int, k: float, recompute: str, **more: Any) -> None:
    """A number of tiles that changes, in blocks that are recomputed as a whole or not."""
    tiles = Tiles(kind)

    def prepare(model: Any) -> None:
        tiles.prepare(model)
        if recompute == "deepspeed":
            _checkpoint_by_deepspeed(model)
        elif recompute != "none":
            keywords = {"use_reentrant": "reentrant" in recompute}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keywords)

    offload = torch.autograd.graph.save_on_cpu if "offload" in recompute else nullcontext
    section: dict[str, Any] = {"gpu_fraction": k}
    model = make_model("llama", dist.get_world_size())
    with training_shared(model, stage, section=section, prepare=prepare, **more) as on:
        on.beside.engine.train()
        if kind == "fused":
            on.loss, tiles.group = tiles.part_loss, on.ranks.group
            tiles.steps = on.beside.engine.gradient_accumulation_steps()
        for number, tiles.count in enumerate(TILES):
            with offload():
                on.step(number)


EVERYDAY_TILES = {
    (2, "mlp", 2, 0.5, "none"), (3, "mlp", 3, 0.0, "reentrant offload"),
    (2, "compute", 3, 1.0, "not"), (2, "loss", 2, 1.0, "deepspeed"),
    (3, "fused", 2, 0.5, "none"), (2, "fused", 3, 0.5, "reentrant"), (3, "fused", 3, 1.0, "not"),
    (2, "liger", 2, 0.5, "none"), (2, "liger", 3, 1.0, "not"),
}  # fmt: skip
RECOMPUTE = ("none", "reentrant", "not", "reentrant offload", "not offload", "deepspeed")
TILED = [
    (ranks_used, kind, stage, k, recompute)
    for kind in ("mlp", "compute", "loss", "fused", "liger")
    for ranks_used in (2, 3)
    for stage in ((1, 2, 3) if kind == "fused" else (2, 3))
    for number, recompute in enumerate(RECOMPUTE)
    for k in ((0.0, 0.5, 1.0) if number < 2 else (number % 3 / 2,))
]
assert set(TILED) >= EVERYDAY_TILES


@pytest.mark.parametrize(
    ("ranks_used", "kind", "stage", "k", "recompute"),
    [pytest.param(*case, marks=() if case in EVERYDAY_TILES else full) for case in TILED],
)
@on_ranks(lambda ranks_used: ranks_used)
def test_tiles(ranks_used: int, kind: str, stage: int, k: float, recompute: str) -> None:
    assert dist.get_world_size() == ranks_used
    tile(kind, stage, k, recompute)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["mlp", "fused"])
def test_tiles_of_one_rank(kind: str) -> None:
    tile(kind, 2, 0.5, "none")
    tile(kind, 3, 0.0, "reentrant", zero={"offload_param": {"device": "cpu"}})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("degree", [1, 2])
@on_ranks(2)
def test_a_fused_loss_of_several_micro_batches(stage: int, degree: int) -> None:
    tile("fused", stage, 0.5, "not", degree=degree, top=TWO)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_that_fails_behind_a_fused_loss(stage: int) -> None:
    """It may be repeated: what it has left of the head's gradient is dropped."""
    tiles = Tiles("fused")
    tiles.count = 3
    with training_shared(make_model("llama", 2), stage, prepare=tiles.prepare) as on:
        on.loss, engine = tiles.part_loss, on.beside.engine
        for number in range(STEPS):
            failing = engine.module.lm_head.register_forward_hook(_fail_second())
            with pytest.raises(KeyError, match="of the user's own"):
                engine(**on.own_parts(number)[0])
            failing.remove()
            on.step(number)


def _fail_second() -> Any:
    calls = iter(range(9))

    def hook(*_: object) -> None:
        if next(calls) == 1:
            raise KeyError("of the user's own")

    return hook


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_fused_loss_without_clipping(stage: int) -> None:
    """Updates are committed as gradients come: the same elements as where they wait."""
    ends: list[Any] = []
    for direct in (True, False):
        tiles, model = Tiles("fused"), make_model("llama", 2)
        tiles.prepare(model)
        keywords = {"direct": True} if direct else {"clipping": 1e9}
        with built(model.bfloat16(), make_config(stage=stage, **keywords)) as engine:
            for number, tiles.count in enumerate(TILES):
                engine.backward(engine(**part_of(make_sample(number), 0, 1)).loss)
                engine.step()
            ends.append(engine.fp32_state_dict())
    if dist.get_rank() == 0:
        assert_same_states(ends[0], ends[1])


@pytest.mark.parametrize("stage", [pytest.param(2, marks=full), 3])
@on_ranks(2)
def test_a_fused_loss_around_the_forward(stage: int) -> None:
    """Of what a part of the model returns, each rank with samples of its own."""
    tiles = Tiles("fused")
    with training_shared(make_model("llama", 2), stage, degree=1) as on:
        on.loss = lambda engine, part, _group: tiles.loss_of(engine.module, **part)
        for number, tiles.count in enumerate(TILES[:STEPS]):
            on.step(number)


@pytest.mark.usefixtures("process_group")
def test_a_factor_behind_the_fused_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Its weights' gradients would not have it."""
    tiles, model = Tiles("fused"), make_model("llama", 2)
    tiles.prepare(model)
    part = {**make_sample(0)}
    part["shift_labels"] = part["labels"]
    with built(model, make_config(bf16=False, accumulation=2)) as engine:
        engine.backward(engine(**part).loss, scale_wrt_gas=False)
        assert "TiledFusedLogitsLoss" not in caplog.text
        for _ in range(2):
            engine.backward(engine(**part).loss)
        assert caplog.text.count("TiledFusedLogitsLoss was multiplied by 0.5 behind it") == 1


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=full)])
@on_ranks(2)
def test_layer_major(stage: int) -> None:
    """Layer by layer, with the activations between layers in host memory."""
    section = {"accumulation": "layer_major", "activations": "offload"}
    with training_shared(make_model("llama", 2), stage, section=section, top=TWO) as on:
        for number in range(STEPS):
            on.train_batch(number)
        assert on.beside.engine.batch_training.accumulation.refusal is None


@full
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_packed_samples_and_unequal_shards(stage: int) -> None:
    section = {"shard_fractions": [0.7, 0.3]}
    with training_shared(make_model("llama", 2), stage, section=section) as on:
        on.packed = True
        for number in range(STEPS):
            on.step(number)


@on_ranks(2)
def test_deepspeeds_loader() -> None:
    """Each rank loads whole samples; all ranks compute each of them."""
    with training_shared(make_model("llama", 2), 3, top=TWO) as on:
        rank = dist.get_rank()

        def load() -> Iterator[Sample]:
            for number in range(STEPS):
                yield make_sample(100 * number + rank)

        loader: Any = UlyssesSPDataLoaderAdapter(
            load(),  # pyright: ignore[reportArgumentType]
            rank, on.ranks.group, 2, torch.device("cpu"),
        )  # fmt: skip
        on.own_parts = lambda _number: [next(loader), next(loader)]
        for number in range(STEPS):
            on.train_batch(number)


@pytest.mark.parametrize("way", ["mpu", "mesh"])
@on_ranks(2)
def test_training_data(way: str) -> None:
    """Ranks that share sequences load the same ones."""
    data = [torch.full((1,), float(number)) for number in range(8)]
    with sequence_ranks_of(2):
        keywords: dict[str, Any] = {"mesh_param": (1, 2)}
        if way == "mpu":
            sequence_ranks.initialize_sequence_parallel(2)
            keywords = {"mpu": sequence_ranks}
        with built(nn.Linear(2, 2), make_config(), **keywords) as engine:
            # As of training_data, but ranks of tests may have no processes of their own.
            loader = engine.deepspeed_io(data, batch_size=1, num_local_io_workers=0)
            drawn = [float(batch) for batch in loader]
        assert len(drawn) == len(data) == len(set(drawn))
        assert from_all_ranks(drawn) == [drawn, drawn]


@on_ranks(2)
def test_after_an_engine_with_a_mesh() -> None:
    """DeepSpeed goes on with the data ranks of the last one: here, each rank by itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = make_config(sequence_parallel_size=2)
    with sequence_ranks_of(2):
        with built(nn.Linear(2, 2), config):
            pass
        with training_beside_torch(model, 2) as beside:
            for number in range(2):
                beside.step(
                    lambda each, rank, n=number: each(torch.full((1, 4), n + rank + 1.0)).sum()
                )


# -- checkpoints -----------------------------------------------------------------------------------


def _go_on(folder: Path, stage: int, degree: int, top: dict[str, Any]) -> None:
    """Two steps of the checkpoint, then one that must be torch's third."""
    with training_shared(make_model("llama", 2), stage, degree=degree, top=top) as on:
        on.skip(0)
        on.skip(1)
        path, _ = on.beside.engine.load_checkpoint(folder)
        assert path is not None
        assert on.beside.engine.global_samples == 4
        on.step(2)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=full), 3])
@on_ranks(2)
def test_checkpoints(stage: int, tmp_path: Path) -> None:
    """Of two ranks that share sequences, loaded by two that do not, and by plain DeepSpeed."""
    with training_shared(make_model("llama", 2), stage, top=TWO) as on:
        on.step(0)
        on.step(1)
        on.beside.engine.save_checkpoint(tmp_path / "shared")
        saved = on.beside.engine.fp32_state_dict()
    _go_on(tmp_path / "shared", 5 - stage, 1, {})
    plain = plain_engine(make_model("llama", 2), stage, checkpoint={"load_universal": True})
    plain.load_checkpoint(str(tmp_path / "shared"))
    found = plain_state(plain)
    if dist.get_rank() == 0:
        assert_same_states(found, saved)
    plain.destroy()


@full
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_checkpoints_the_other_way(stage: int, tmp_path: Path) -> None:
    with training_shared(make_model("llama", 2), stage, degree=1) as on:
        on.step(0)
        on.step(1)
        on.beside.engine.save_checkpoint(tmp_path / "single")
    _go_on(tmp_path / "single", 5 - stage, 2, TWO)


@on_ranks(2)
def test_gradients_are_reduced_in_deepspeeds_dtype_for_shared_sequences() -> None:
    for given, dtype in ((None, torch.float32), ("bf16", torch.bfloat16)):
        key = {} if given is None else {"seq_parallel_communication_data_type": given}
        config = make_config(sequence_parallel_size=2, **key)
        with sequence_ranks_of(2), built(nn.Linear(2, 2), config) as engine:
            assert engine.optimizer.passes.settings.communication_dtype == dtype


# -- what is refused -------------------------------------------------------------------------------


@on_ranks(2)
def test_refusals() -> None:
    def refused(error: type[Exception], match: str, config: Any, **keywords: Any) -> None:
        with pytest.raises(error, match=match), built(nn.Linear(2, 2), config, **keywords):
            pass

    shared = make_config(sequence_parallel_size=2)
    for key, value in (("batch_sizes", [2, 1]), ("batch_sizes", [1, 1]), ("plan", "plan.json")):
        config = {**shared, "hytrain": {key: value}}
        refused(UnsupportedError, f'"hytrain.{key}" deals samples to single ranks', config)
    refused(ConfigError, "3 ranks for each sequence", make_config(sequence_parallel_size=3))
    tensors = {**shared, "tensor_parallel": {"autotp_size": 2}}
    refused(UnsupportedError, "tensor parallelism is not supported", tensors)
    with sequence_ranks_of(2):
        sequence_ranks.initialize_sequence_parallel(2)
        four = make_config(sequence_parallel_size=4)
        refused(ConfigError, "but 2 ranks share each sequence by the mpu", four, mpu=sequence_ranks)
        planned = make_config(hytrain={"plan": "plan.json"})  # as Trainer and accelerate give it
        refused(UnsupportedError, '"hytrain.plan" deals samples', planned, mpu=sequence_ranks)
