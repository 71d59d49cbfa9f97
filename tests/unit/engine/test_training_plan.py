"""Training by a plan, and the watch that holds its steps against it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.frozen import lora
from support.models import make_batch, make_model
from support.plans import a_plan, write_a_plan
from training import untouched

from hytrain.engine.plan_watch import PlanReport, PlanWatch, RankMeasured
from hytrain.errors import ConfigError, HyTrainError, PlanError
from hytrain.formats.plan_file import PlanFile, Predicted
from hytrain.hardware.device_facts import MULTIPROCESSORS_VARIABLE

pytestmark = pytest.mark.cpu  # which the plans are for

# -- training by a plan on one rank ------------------------------------------------------------

STEPS = 14


def _plan(**changes: Any) -> PlanFile:
    return a_plan(make_model("llama"), (4,), (2,), gpu_layers=(2,), **changes)


def _config(plan: str, **hytrain: Any) -> dict[str, Any]:
    config = make_config(bf16=False, hytrain={"plan": plan, **hytrain})
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        del config[key]
    return config


def _batches() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        yield make_batch("llama", number)
        number += 1


def _train(engine: Any, steps: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    batches = _batches()
    for _ in range(steps):
        engine.train_batch(batches)
    return engine.fp32_state_dict()


def _assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value["fp32"], expected[name]["fp32"])


def _adapted() -> torch.nn.Module:
    model = make_model("llama")
    lora(model)
    return model


@pytest.mark.parametrize("make", [lambda: make_model("llama"), _adapted], ids=["all", "lora"])
def test_it_is_the_same_as_the_keys_that_it_stands_for(
    make: Callable[[], torch.nn.Module], tmp_path: Path
) -> None:
    with built(make(), _config(write_a_plan(tmp_path, a_plan(make(), (4,), (2,))))) as engine:
        assert engine.train_batch_size() == 4
        assert engine.hytrain_config.micro_batch_sizes == (2,)
        planned = _train(engine)
    keys = {"batch_sizes": [4], "micro_batch_sizes": [2]}
    with built(make(), make_config(bf16=False, hytrain=keys)) as engine:
        assert_same_states(planned, _train(engine))


def test_what_is_not_trained_is_part_of_the_model(tmp_path: Path) -> None:
    plan = a_plan(_adapted(), (4,), (2,))
    assert plan.model.frozen > plan.model.parameters
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"frozen": 0})})
    config = _config(write_a_plan(tmp_path, plan))
    with pytest.raises(PlanError, match="not trained: planned for 0, found") as refused:
        built(_adapted(), config).__enter__()
    assert "Nothing was touched" in str(refused.value)


def test_the_plan_says_where_k_begins_and_a_number_wins(tmp_path: Path) -> None:
    path = write_a_plan(tmp_path, _plan())
    config = _config(path, gpu_fraction="solve")
    with built(make_model("llama"), config) as engine:
        first = engine.placement_decisions()[0]
        assert (first.gpu_layers_target, first.num_layers) == (2, 6)
        assert "solver.start is 2, which is 2 of 6" in first.reason
    with built(make_model("llama"), _config(path, gpu_fraction=1.0)) as engine:
        assert engine.placement_decisions()[0].gpu_layers_target == 6


def test_it_lies_beside_the_configuration_or_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, current = tmp_path / "configs", tmp_path / "here"
    beside.mkdir()
    current.mkdir()
    monkeypatch.chdir(current)
    file = beside / "ds_config.json"
    file.write_text(json.dumps(_config("plan.json")))
    with pytest.raises(PlanError, match=r"no file .*configs/plan\.json and .*here/plan\.json"):
        _initialize(str(file))
    write_a_plan(current, _plan())
    assert _initialize(str(file)) == str(current / "plan.json")
    write_a_plan(beside, _plan())
    assert _initialize(str(file)) == str(beside / "plan.json")
    # A configuration that is no file has no folder.
    assert _initialize(_config("plan.json")) == str(current / "plan.json")


def _initialize(config: Any) -> str:
    with built(make_model("llama"), config) as engine:
        found: str = engine.hytrain_config.plan
        return found


@pytest.mark.parametrize(
    ("hytrain", "named"),
    [
        ({"batch_sizes": [4]}, "hytrain.batch_sizes"),
        ({"shard_fractions": [1.0]}, "hytrain.shard_fractions"),
        ({"solver": {"start": [3]}}, "hytrain.solver.start"),
    ],
)
def test_keys_that_the_plan_decides_are_refused_beside_it(
    tmp_path: Path, hytrain: dict[str, Any], named: str
) -> None:
    config = _config(write_a_plan(tmp_path, _plan()), **hytrain)
    with pytest.raises(ConfigError, match="leave these out") as refused:
        _initialize(config)
    assert named in str(refused.value)


def test_batch_keys_that_are_not_used_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(write_a_plan(tmp_path, _plan()))
    for micro, accumulation, said in ((1, 1, ""), (8, 1, "per_gpu"), (1, 3, "accumulation_steps")):
        caplog.clear()
        keys = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
        }
        with caplog.at_level(logging.WARNING, "hytrain.api"):
            _initialize({**config, **keys})
        lines = [r.getMessage() for r in caplog.records if r.name == "hytrain.api"]
        assert [said in line and "not used" in line for line in lines] == [True] * bool(said)


def test_null_decides_nothing(tmp_path: Path) -> None:
    _initialize(_config(write_a_plan(tmp_path, _plan()), batch_sizes=None, shard_fractions=None))


def _refusal(tmp_path: Path, plan: PlanFile, **config: Any) -> str:
    model = make_model("llama")
    whole = {**_config(write_a_plan(tmp_path, plan)), **config}
    with untouched(model, PlanError, r"\w") as refused, built(model, whole):
        pass
    return str(refused.value)


def test_plans_for_another_job_are_refused_with_the_difference(tmp_path: Path) -> None:
    plan = _plan()
    other = plan.model.model_copy(update={"num_layers": 5, "parameters": 7})
    text = _refusal(tmp_path, plan.model_copy(update={"model": other}))
    assert "layers: planned for 5, found 4" in text
    assert "parameters: planned for 7, found" in text
    assert "Nothing was touched" in text
    assert "samples in the global batch: planned for 4, found 8" in _refusal(
        tmp_path, plan, train_batch_size=8
    )
    assert "dtype: planned for fp32, found bf16" in _refusal(tmp_path, plan, bf16={"enabled": True})
    assert "ZeRO stage: planned for 1, found 2" in _refusal(
        tmp_path, plan.model_copy(update={"stage": 1})
    )
    two = a_plan(make_model("llama"), (2, 2), (2, 2))
    assert "ranks: planned for 2, found 1" in _refusal(tmp_path, two)


def _sharded(offload: str | None) -> PlanFile:
    rank = _plan().ranks[0].model_copy(update={"activations": "keep"})
    return _plan(stage=3, offload_param=offload, ranks=(rank,))


def _stage_3(*, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    zero["stage3_param_persistence_threshold"] = 0
    return {**zero, "offload_param": {"device": "cpu" if offload else "none"}}


def test_weights_are_where_the_plan_has_them_or_it_is_refused(tmp_path: Path) -> None:
    offloaded, resident = _sharded("cpu"), _sharded(None)
    text = _refusal(tmp_path, offloaded, zero_optimization=_stage_3(offload=False))
    assert 'set "zero_optimization.offload_param": {"device": "cpu"}' in text
    text = _refusal(tmp_path, resident, zero_optimization=_stage_3(offload=True))
    assert 'found "zero_optimization.offload_param": remove it' in text
    results = []
    for plan, is_offloaded in ((offloaded, True), (resident, False)):
        config = _config(write_a_plan(tmp_path, plan))
        config["zero_optimization"] = _stage_3(offload=is_offloaded)
        with built(make_model("llama"), config) as engine:
            storages = [layer.storage for layer in engine.optimizer.layer_states]
            # One rank has all of every layer anyway, unless the host has.
            assert any(storage.is_sharded for storage in storages) == is_offloaded
            assert engine.hytrain_config.accumulation == "layer_major"
            results.append(_train(engine))
    assert_same_states(*results)


def test_a_plan_for_another_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan()
    (rank,) = plan.ranks

    def with_rank(**changes: Any) -> PlanFile:
        return plan.model_copy(update={"ranks": (rank.model_copy(update=changes),)})

    assert "rank 0: planned for NVIDIA L4, found CPU" in _refusal(
        tmp_path, with_rank(device="NVIDIA L4")
    )
    assert "planned with" in _refusal(tmp_path, with_rank(memory_bytes=2 * rank.memory_bytes))
    monkeypatch.setenv(MULTIPROCESSORS_VARIABLE, "66")
    text = _refusal(tmp_path, plan)
    assert f"planned with {rank.multiprocessors} multiprocessors, found 66" in text
    monkeypatch.setenv(MULTIPROCESSORS_VARIABLE, "many")
    assert MULTIPROCESSORS_VARIABLE in _refusal(tmp_path, plan)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        _initialize(_config(str(path)))


def test_recomputation_that_was_planned_is_turned_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = _plan()
    again = plan.ranks[0].model_copy(update={"activations": "recompute"})
    path = write_a_plan(tmp_path, plan.model_copy(update={"ranks": (again,)}))
    model: Any = make_model("llama")
    with built(model, _config(path)) as engine:
        assert model.is_gradient_checkpointing
        recomputed = _train(engine)
    with built(make_model("llama"), _config(write_a_plan(tmp_path, plan))) as engine:
        _assert_close(_train(engine), recomputed)
    # The other way around nothing is switched off, but the prediction will not hold.
    model = make_model("llama")
    model.gradient_checkpointing_enable()
    with caplog.at_level(logging.WARNING), built(model, _config(path)):
        pass
    assert "computes activations again" in caplog.text


def test_layer_by_layer_where_that_was_planned(tmp_path: Path) -> None:
    plan = _plan()
    offloaded = plan.ranks[0].model_copy(update={"activations": "offload"})
    path = write_a_plan(tmp_path, plan.model_copy(update={"ranks": (offloaded,)}))
    with built(make_model("llama"), _config(path)) as engine:
        assert engine.hytrain_config.accumulation == "layer_major"
        assert engine.hytrain_config.activations == "offload"
        by_layer = _train(engine)
    with built(make_model("llama"), _config(write_a_plan(tmp_path, plan))) as engine:
        assert engine.hytrain_config.accumulation == "micro_batch_major"
        _assert_close(_train(engine), by_layer)


def test_host_memory_has_weights_and_activations_that_are_there(tmp_path: Path) -> None:
    plan = _plan(stage=3, offload_param="cpu")
    offloaded = plan.ranks[0].model_copy(update={"activations": "offload"})
    config = _config(write_a_plan(tmp_path, plan.model_copy(update={"ranks": (offloaded,)})))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
    config["zero_optimization"] |= zero
    with built(make_model("llama"), config) as engine:
        _train(engine, 5)
        (rank,) = engine.plan_report().ranks
        layers = engine.optimizer.layer_states
        weights = sum(part.nbytes for layer in layers for _, part in layer.storage.parts)
        inputs = make_batch("llama", 0)["input_ids"]
        # Inputs of the four blocks but the first, of both micro-batches.
        activations = 2 * 3 * inputs.numel() * engine.module.config.hidden_size * 4
        there = rank.host_bytes - engine.optimizer.placement.host_bytes
        assert weights + activations <= there <= 2 * (weights + activations)


def test_predicted_stands_beside_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(write_a_plan(tmp_path, _plan()))
    with built(make_model("llama"), config) as engine:
        batches = _batches()
        with pytest.raises(HyTrainError, match="make some more"):
            engine.plan_report()
        for step in range(STEPS):
            engine.train_batch(batches)
            if step == 5:
                engine.plan_report()  # does not replace the one that is printed
        printed = capsys.readouterr().out
        assert printed.count("predicted -> measured") == 1
        assert "median of steps 4 to 13" in printed
        assert "step 250.0 -> " in printed
        report = engine.plan_report()
        assert (report.first_step, report.last_step) == (5, 14)
        assert report.is_settled
        record = report.to_json()
        # A plan of the first days, which knows no clipped steps.
        assert record["predicted_seconds"] == 0.25
        assert record["measured_seconds"] > 0.0
        assert record["error"] == pytest.approx(record["measured_seconds"] / 0.25 - 1.0)
        (rank,) = record["ranks"]
        assert rank["gpu_bytes"] is None
        assert rank["host_bytes"] > 12 * 10_000
        assert rank["batch_size"] == 4


@pytest.mark.parametrize(("clipping", "expected"), [(1e-6, 1.0), (1e6, 0.0), (0.0, 0.0)])
def test_the_report_knows_which_steps_were_clipped(
    tmp_path: Path, clipping: float, expected: float
) -> None:
    both = Predicted(
        step_seconds=0.5, unclipped_seconds=0.25, clipped_seconds=0.5, lower_bound=0.25, gap=0.0
    )
    config = _config(write_a_plan(tmp_path, _plan(predicted=both)))
    config["gradient_clipping"] = clipping
    with built(make_model("llama"), config) as engine:
        _train(engine, 5)
        record = engine.plan_report().to_json()
        assert record["clipped_share"] == expected
        assert record["predicted_seconds"] == 0.25 + 0.25 * expected


def test_without_a_plan_there_is_no_report() -> None:
    with (
        built(make_model("llama"), make_config(bf16=False)) as engine,
        pytest.raises(HyTrainError, match="no plan"),
    ):
        engine.plan_report()


# -- predicted beside measured -----------------------------------------------------------------

BOTH = Predicted(
    step_seconds=0.5, unclipped_seconds=0.25, clipped_seconds=0.5, lower_bound=0.25, gap=0.0
)


def watch(predicted: Predicted) -> PlanWatch:
    plan = a_plan(make_model("mlp"), (4,), (2,), predicted=predicted)
    alone: Any = SimpleNamespace(rank=0, world_size=1, gather_objects=lambda own, _: [own])
    return PlanWatch(plan, alone, torch.device("cpu"))


def state(*, clipped: bool, seconds: float = 0.4) -> RankMeasured:
    return RankMeasured(
        step_seconds=seconds,
        clipped_share=float(clipped),
        gpu_bytes=None,
        host_bytes=1,
        gpu_layers=2,
        num_layers=4,
        is_settled=True,
    )


def report(predicted: Predicted, clipped: str) -> PlanReport:
    """After steps that were clipped ("c") or not ("-")."""
    made = watch(predicted)
    for letter in clipped:
        made.after_step(state(clipped=letter == "c"))
    return made.report()


@pytest.mark.parametrize(
    ("clipped", "share"),
    [
        ("----", 0.0),
        ("cccc", 1.0),
        # A step feels the decision before it: step 4 that of step 3, and step 4's nobody yet.
        ("--c-", 1.0),
        ("cc-c", 0.0),
        ("ccc-c-c", 0.5),
        # Of many steps the last ten count.
        ("ccccccc" + "-" * 10, 0.1),
        ("c" * 6 + "-" * 11, 0.0),
    ],
)
def test_the_prediction_is_that_of_as_many_clipped_steps(clipped: str, share: float) -> None:
    found = report(BOTH, clipped)
    assert found.last_step == len(clipped)
    assert found.first_step == max(4, len(clipped) - 9)
    assert found.clipped_share == pytest.approx(share)
    assert found.predicted_seconds == pytest.approx(0.25 + 0.25 * share)
    assert found.error == pytest.approx(0.4 / found.predicted_seconds - 1.0)
    record = found.to_json()
    assert record["clipped_share"] == found.clipped_share
    assert record["predicted_seconds"] == found.predicted_seconds
    assert record["error"] == found.error
    words = found.table().splitlines()[0]
    assert f"step {1e3 * found.predicted_seconds:.1f} -> 400.0 ms" in words
    assert f"{share:.0%} of the steps clipped" in words


def test_the_steps_of_warming_up_are_not_measured() -> None:
    made = watch(BOTH)
    for seconds in (9.0, 9.0, 9.0):
        made.after_step(state(clipped=True, seconds=seconds))
    with pytest.raises(HyTrainError, match="make some more"):
        made.report()
    made.after_step(state(clipped=False))
    found = made.report()
    assert (found.first_step, found.last_step) == (4, 4)
    assert found.measured_seconds == 0.4
