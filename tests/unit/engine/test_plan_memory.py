"""What a plan says of weights in memory, against what is built and what a step gathers (ZeRO-3)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.covering import everyday
from support.engines import built, make_config
from support.frozen import FROZEN
from support.models import make_batch
from support.plan_profiles import a_device, a_host
from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.formats.profile_file import ProfiledModel, ProfileFile
from hytrain.kernels.host_memory import PAGE
from hytrain.optimizer import model_cut
from hytrain.tools.explain.model_report import first_decision
from hytrain.tools.explain.training_form import TrainingForm, read_form
from hytrain.tools.planner.cost_model import Collectives, Workload, gpu_bytes, host_bytes, workload
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from
from hytrain.tools.profiler.language_model import build_language_model, read_config
from hytrain.tools.profiler.measured_model import MeasuredModel, read_model_shape
from hytrain.tools.profiler.model_sizes import read_model_sizes
from hytrain.zero3.plan import gather_settings, most_live

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "tie_word_embeddings": False,
}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
# A block has 41 088 parameters, the embedding 6 208: what stays there at the turn, what is ahead.
KEYS: list[dict[str, int]] = [
    {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0},
    {"stage3_prefetch_bucket_size": 100_000, "stage3_max_live_parameters": 130_000},
]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def _problem(
    model: ProfiledModel, keys: dict[str, int], *, num_ranks: int, offload: bool
) -> PlanProblem:
    devices = [a_device("one", "GPU")] * num_ranks
    profile = ProfileFile(model=model, devices=(devices[0],), hosts=(a_host("one", *devices),))
    settings = gather_settings(keys)

    def live(sizes: Sequence[int]) -> int:
        return most_live(sizes, set(range(len(sizes))), settings)

    options = PlanOptions(
        batch=4,
        gpu_reserve=lambda _: 0,
        host_reserve=lambda _: 0,
        stage=3,
        offload_param=offload,
        live_parameters=live,
        activations=("keep",),
        interconnect=1e12,
    )
    return problem_from(profile, options)


def _idle(problem: PlanProblem) -> Workload:
    gpu = problem.cluster.ranks[0][1]
    return workload(problem, gpu, Collectives(0.0, 0.0), 0, 0, "keep")


@everyday({"number": range(len(KEYS)), "num_ranks": (1, 2, 3), "offload": (False, True)})
def test_weights_are_where_a_run_will_have_them(
    config_file: Path, number: int, num_ranks: int, offload: bool
) -> None:
    keys = KEYS[number]
    model = read_model_shape(config_file, seq_len=8, dtype="bf16").model
    problem = _problem(model, keys, num_ranks=num_ranks, offload=offload)
    fractions = {1: (1.0,), 2: (0.25, 0.75), 3: (0.5, 0.2, 0.3)}[num_ranks]
    form = TrainingForm(
        dtype="bfloat16",
        dtype_from='"bf16.enabled" is true',
        gradient_dtype=None,
        clipping=1.0,
        check_overflow=True,
        accumulation=1,
        shards_weights=True,
        weights_on_host=offload,
        gather_keys={**keys, "stage3_param_persistence_threshold": 0},
    )
    config = HyTrainConfig(shard_fractions=fractions if num_ranks > 1 else None)
    work, gpu = _idle(problem), problem.cluster.ranks[0][1]
    for rank, fraction in enumerate(fractions):
        sizes = read_model_sizes(config_file, config, form, num_ranks=num_ranks, rank=rank)
        there = read_model_sizes(
            config_file,
            config,
            replace(form, weights_on_host=False),
            num_ranks=num_ranks,
            rank=rank,
        )
        shard = fraction * model.parameters
        # Of a CPU-placed shard: without the gradient that micro-batches add to, or ranks keep.
        kept = 0 if offload and num_ranks == 1 else problem.gradient_bytes
        zeros = problem.gradient_bytes * model.parameters / model.num_layers
        on_gpu = gpu_bytes(problem, gpu, work, 0.0, shard) - kept * shard
        on_gpu -= zeros if num_ranks > 1 else 0.0
        assert on_gpu == pytest.approx(sizes.training_copy_bytes, rel=0.01)
        # The host's weights, beside what staging takes with or without them.
        weights = host_bytes(problem, 0.0, shard, work.offloaded) - problem.host_state_bytes * shard
        actual = sizes.state.staging_bytes - there.state.staging_bytes
        assert weights == pytest.approx(actual, rel=0.01)


@pytest.mark.usefixtures("process_group")
def test_explain_counts_the_pieces_that_a_run_has(config_file: Path) -> None:
    form = TrainingForm(
        dtype="bfloat16",
        dtype_from='"bf16.enabled" is true',
        gradient_dtype=None,
        clipping=1.0,
        check_overflow=True,
        accumulation=1,
        shards_weights=False,
        weights_on_host=False,
        gather_keys={},
    )
    model = build_language_model(read_config(config_file), config_file).bfloat16()
    with patch.object(model_cut, "MOST_ELEMENTS", 30_000), built(model, make_config()) as engine:
        sizes = read_model_sizes(config_file, HyTrainConfig(), form, num_ranks=1, rank=0)
        states = [(state.name, state.shard_size) for state in engine.optimizer.layer_states]
    assert [(layer.name, layer.parameters) for layer in sizes.state.layers] == states
    assert len(states) > LLAMA["num_hidden_layers"] + 2
    assert max(size for _, size in states) <= 30_000


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("clipping", "section", "others"),
    [
        (0.0, {}, MUON),
        (1.0, {"moments": "bf16"}, MUON),
        (1.0, {"moments": "8bit"}, MUON),
        (1.0, {"gpu_fraction": 0.5}, {}),
        (1.0, {"gpu_fraction": 0.5, "solver": {"host_memory_reserve_bytes": 1 << 50}}, {}),
        (1.0, {"gpu_fraction": 0.5, "solver": {"start": [1, 2]}}, {}),
        (0.0, {"moments": "bf16", "solver": {"start": [3]}}, {"gradient_accumulation_steps": 2}),
        (1.0, {"accumulation": "layer_major"}, {"gradient_accumulation_steps": 2}),
        (1.0, {"master": "split"}, {}),
        (1.0, {"master": "split", "gpu_fraction": 0.0}, {"gradient_accumulation_steps": 2}),
    ],
)
@pytest.mark.cpu  # a GPU has limits, which explain is not told
def test_explain_shows_what_a_run_begins_with(
    config_file: Path, clipping: float, section: dict[str, Any], others: dict[str, Any]
) -> None:
    config = make_config(clipping=clipping, hytrain=section) | others
    model = build_language_model(read_config(config_file), config_file).bfloat16()
    with built(model, config) as engine:
        decision = engine.optimizer.placement.decisions[0]
        terms = engine.optimizer.placement._peak_inputs(0)
    own = HyTrainConfig.from_deepspeed(config)
    assert own is not None
    sizes = read_model_sizes(config_file, own, read_form(config), num_ranks=1, rank=0)
    told = first_decision(own, sizes, None, decision.limits.host)
    # A GPU that there is not has weights in explain; a number that is given is not bounded.
    limits = replace(told.limits, gpu_base=0)
    assert replace(told, limits=limits) == decision
    state = sizes.state
    assert (state.gradients, state.kept_gradients) == (terms.gradients, terms.kept_gradients)
    assert state.largest_parameter == terms.largest_parameter
    streamed = [layer for layer in decision.layer_bytes if layer.is_streamed]
    assert len(streamed) == (LLAMA["num_hidden_layers"] if others is MUON else 0)
    assert all(layer.piece_bytes and layer.work_bytes for layer in streamed)


def _shape(config_file: Path, kind: str) -> ProfiledModel:
    """The model as `hytrain profile` counts it."""

    def build(num_layers: int | None, seq_len: int) -> Any:
        return _build(config_file, kind), dict

    sizes = MeasuredModel("small", build, seq_len=8, dtype=torch.float32).sizes()
    return sizes.model_copy(update={"boundary_bytes": 4 * 8 * 64})


def _build(config_file: Path, kind: str) -> nn.Module:
    model = build_language_model(read_config(config_file), config_file).train()
    if kind != "all":
        FROZEN[kind](model)
    return model


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["all", "lora", "embeddings"])
@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_weights_are_where_a_step_has_them(
    config_file: Path, keys: dict[str, int], kind: str
) -> None:
    """One rank, its weights streamed: the arena that is built, and the most that is gathered."""
    shape = _shape(config_file, kind)
    problem = _problem(shape, keys, num_ranks=1, offload=True)
    work, gpu = _idle(problem), problem.cluster.ranks[0][1]
    whole = float(shape.parameters)
    config = make_config(bf16=False, stage=3)
    zero = {**keys, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
    config["zero_optimization"] = {**config["zero_optimization"], **zero}
    most = 0
    with built(_build(config_file, kind), config) as engine:
        weights = engine.optimizer.weights
        storages = [part.storage for layer in weights.layers for part in layer.sharded]
        assert all(storage.is_sharded and storage.on_host for storage in storages)
        planned = host_bytes(problem, 0.0, whole, work.offloaded) - problem.host_state_bytes * whole
        parts = sum(part.nbytes for storage in storages for _, part in storage.parts)
        assert planned == pytest.approx(parts, rel=0.01)
        assert 0 <= weights._home.num_bytes - parts < len(storages) * PAGE
        gather = weights.gatherer.gather

        def watch(layer: Any, **keywords: Any) -> None:
            nonlocal most
            gather(layer, **keywords)
            most = max(most, sum(storage.gathered_bytes for storage in storages))

        weights.gatherer.gather = watch
        for number in range(3):
            most = 0
            loss = engine(**make_batch("llama", number)).loss
            engine.backward(loss)
            engine.step()
    live = gpu_bytes(problem, gpu, work, 0.0, whole)
    # The embedding, a twentieth of what is there, is not needed again in backward.
    assert 0.99 * live <= most * 1.05
    assert most <= 1.01 * live
