"""What is said about decisions: the steps that count, the numbers in tables, the picture."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from support.placement_runs import (
    NUM_LAYERS,
    costs,
    decision,
    step_line,
    text_of,
    typical_run,
)

from hytrain.config import HyTrainConfig
from hytrain.cost.step import StepCosts
from hytrain.errors import ConfigError, PlacementError
from hytrain.formats.record import checked
from hytrain.placement.costs import LayerBytes
from hytrain.placement.first_decision import StateSizes
from hytrain.placement.records import Decision
from hytrain.tools.explain.candidates import candidate_rows, closed_form_layers
from hytrain.tools.explain.config_words import config_words
from hytrain.tools.explain.history import read_history
from hytrain.tools.explain.model_report import (
    ModelSizes,
    first_decision,
    model_text,
    verdict_of,
)
from hytrain.tools.explain.report import costs_text, explained, layer_groups, run_json, run_text
from hytrain.tools.explain.training_form import read_form

GIB = 1024**3


# -- reading -----------------------------------------------------------------------------------


def test_the_first_steps_after_a_change_do_not_count() -> None:
    history = read_history(text_of(typical_run()))
    assert [s.step for s in history.steps if not s.is_steady] == [1, 2, 3, 11, 12, 13]
    first, second = history.measured_after(0), history.measured_after(1)
    assert first is not None
    assert second is not None
    assert (first.seconds, first.num_steps) == (0.55, 7)
    assert (second.seconds, second.num_steps) == (0.35, 7)
    assert history.measured_at(5) is None


def test_a_decision_to_stay_does_not_end_the_steps_of_the_one_before() -> None:
    records = typical_run()
    records.insert(-3, decision(18, 13, 13, measured=costs()).metrics_record())
    history = read_history(text_of(records))
    moved = history.measured_after(1)
    assert moved is not None
    assert moved.num_steps == 7


def test_steps_with_another_k_do_not_count() -> None:
    records = [decision(0, 0, 13, measured=costs()).metrics_record()]
    records += [step_line(n, 5.0, 6) for n in range(1, 9)]  # the move takes its time
    records += [step_line(n, 0.35, 13) for n in range(9, 14)]
    measured = read_history(text_of(records)).measured_after(0)
    assert measured is not None
    assert (measured.seconds, measured.num_steps) == (0.35, 2)


def test_steps_without_k_have_the_decisions() -> None:
    records = typical_run()
    for record in records:
        record.pop("k", None)
    history = read_history(text_of(records))
    assert {s.gpu_layers for s in history.steps if s.step <= 10} == {0}
    assert {s.gpu_layers for s in history.steps if s.step > 10} == {13}


def test_half_a_line_at_the_end_is_ignored() -> None:
    text = text_of(typical_run())
    whole = read_history(text)
    half = read_history(text + text.splitlines()[1][:40])
    assert half == whole
    assert read_history(text + text.splitlines()[1][:40] + "\n") == whole


def test_half_a_line_elsewhere_is_an_error_with_its_number() -> None:
    parts = text_of(typical_run()).splitlines(keepends=True)
    with pytest.raises(PlacementError, match="line 3 is not JSON"):
        read_history("".join([*parts[:2], '{"step": 2, "lo\n', *parts[2:]]))


def test_a_resumed_run_replaces_the_steps_that_it_repeats() -> None:
    records = typical_run()
    records.append(decision(10, 0, 15, measured=costs()).metrics_record())
    records += [step_line(n, 0.36, 15) for n in range(11, 16)]
    history = read_history(text_of(records))
    assert [d.gpu_layers_target for d in history.decisions] == [0, 15]
    assert [s.step for s in history.steps] == list(range(1, 16))
    assert history.measured_at(13) is None


def test_ranks_are_kept_apart() -> None:
    records = typical_run()
    records.insert(1, {**decision(0, 0, 2).metrics_record(), "rank": 1})
    records.insert(12, {**decision(10, 2, 20, measured=costs()).metrics_record(), "rank": 1})
    first, second = read_history(text_of(records)), read_history(text_of(records), 1)
    assert first.ranks == second.ranks == (0, 1)
    assert first.decisions[-1].gpu_layers_target == 13
    assert second.decisions[-1].gpu_layers_target == 20
    measured = second.measured_at(20)  # rank 0's step times, not its k
    assert measured is not None
    assert measured.num_steps == 7
    assert "Rank 1 of the 2" in run_text(second)
    alone = text_of([record for record in records if record.get("rank") == 1])
    assert read_history(alone).rank == 1, "the only one in the file"
    with pytest.raises(PlacementError, match=r"no decision of rank 2.*rank 0, 1"):
        read_history(text_of(records), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text_of([step_line(1, 0.5, 0)]), "no placement decision .*1 of them"),
        ("", "no placement decision"),
        ('{"loss": 1}\n{"loss": 2}\n', 'line 1 is not an object with a whole number "step"'),
        ('{"step": 1, "placement": 5}\n', r'"placement", .*should be a dictionary'),
        ('{"step": 1, "placement": {"step": 1}}\n', '"placement", gpu_layers_before: Field'),
        ('{"step": 1, "rank": "a", "placement": null}\n', '"rank" must be a whole number'),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        read_history(text)


# -- a run -------------------------------------------------------------------------------------


def test_rows_hold_prediction_measurement_and_error() -> None:
    history = read_history(text_of(typical_run()))
    newest = explained(history)
    rows = candidate_rows(newest, history.measured_at)
    assert [row.gpu_layers for row in rows] == list(range(NUM_LAYERS + 1))
    chosen = rows[13]
    assert "chosen" in chosen.marks
    assert sum("chosen" in row.marks for row in rows) == 1
    assert chosen.predicted_seconds == pytest.approx(newest.predicted_seconds)
    assert chosen.error == pytest.approx(chosen.predicted_seconds / 0.35 - 1.0)
    assert rows[0].measured is not None
    assert (rows[0].measured.seconds, rows[1].measured) == (0.55, None)
    assert [row.fits for row in rows] == [newest.bounds.allow(row.gpu_layers) for row in rows]
    assert not rows[-1].fits
    closed = closed_form_layers(newest)
    assert [row.gpu_layers for row in rows if "closed form" in row.marks] == [closed]


@pytest.mark.parametrize(
    ("decider", "mark"), [("user", "fixed"), ("start", "first step"), ("training", "chosen")]
)
def test_who_decided_whatever_the_reason_says(decider: Any, mark: str) -> None:
    made = replace(decision(0, 20, 20), decider=decider, reason="gpu_fraction is no reason")
    assert candidate_rows(made, lambda _: None)[20].marks == (mark,)


def test_equal_neighbours_are_one_group() -> None:
    groups = layer_groups(costs())
    assert [(count, mean.parameters) for count, mean in groups] == [
        (1, 98_000_000),
        (24, 113_000_000),
        (1, 99_000_000),
    ]
    assert groups[1][1].backward == pytest.approx(0.0089)


def test_clipped_passes_are_shown_where_steps_are_clipped() -> None:
    assert "preview" not in costs_text(costs())
    assert "preview" in costs_text(costs(0.25))
    assert "25.0%" in costs_text(costs(0.25))


def test_reports_threads_where_they_are_known() -> None:
    known = replace(costs(), update_threads=12)
    total = f"CPU update of all layers: {known.cpu_seconds:.3f} s"
    assert f"{total} (12 threads)\n" in costs_text(known)
    assert f"{total}\n" in costs_text(costs())
    # Records of earlier versions have none.
    old = {name: value for name, value in asdict(costs()).items() if name != "update_threads"}
    assert checked(StepCosts, old, "costs") == costs()


def test_the_text_has_the_decision_its_outcome_and_all_tables() -> None:
    text = run_text(read_history(text_of(typical_run())))
    assert "13 of 26 layers on the GPU (k = 0.5): " in text
    (moved,) = [line for line in text.splitlines() if line.split()[:3] == ["10", "0", "13"]]
    assert moved.split()[4:6] == ["0.350", "7"]
    assert "24 x 113.0 M: forward 4.4 ms, backward 8.9 ms, CPU update 22.6 ms" in text
    for words in ("t_B", "t_U", "alpha", "clipped share", "<- chosen", "<- closed form"):
        assert words in text
    assert "host: waiting gradients, pinned" in text


def test_a_run_that_has_measured_nothing_yet() -> None:
    history = read_history(text_of([decision(0, 0, 0).metrics_record()]))
    text = run_text(history)
    assert "0 of 26 layers on the GPU (k = 0): nothing measured yet" in text
    assert "Measured\n" not in text
    assert "predicted s" not in text.split("Candidates")[1].split("Decisions")[0]
    assert run_json(history)["sums"] is None
    assert run_json(history)["predictions_fit"] is None
    assert "<- first step" in text


def test_a_decisions_own_measurement_stands_in_for_missing_steps() -> None:
    record = decision(10, 0, 13, measured=costs(), measured_seconds=0.4).metrics_record()
    measured = read_history(text_of([record])).measured_after(0)
    assert measured is not None
    assert (measured.seconds, measured.num_steps) == (0.4, 0)


def _run_of(seconds: float, steps: int = 9) -> str:
    """Steps at 13 of 26 layers, for which 0.35 s and a little are predicted."""
    records = [decision(10, 0, 13, measured=costs()).metrics_record()]
    records += [step_line(n, seconds, 13) for n in range(11, 11 + steps)]
    return text_of(records)


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (0.5, False), (1.6, False)])
def test_predictions_that_do_not_fit_are_said_and_no_advice_is_made_of_them(
    factor: float, fits: bool
) -> None:
    predicted = decision(10, 0, 13, measured=costs()).predicted_seconds
    assert predicted is not None
    history = read_history(_run_of(factor * predicted))
    text = run_text(history)
    assert ("The predictions do not fit this run" not in text) == fits
    assert run_json(history)["predictions_fit"] is fits
    head = text.split("\n\n")[0]
    assert ("host-bound" in head) == fits, "the solver's reason"
    if not fits:
        assert f"the shortest step is that of 13 layers, {factor * predicted:.3f} s" in head


def test_four_steps_refute_no_prediction() -> None:
    assert "do not fit" in run_text(read_history(_run_of(0.1, steps=8)))
    assert "do not fit" not in run_text(read_history(_run_of(0.1, steps=5)))


def test_without_a_gpu_that_is_said() -> None:
    record = decision(10, 0, 13, measured=costs()).metrics_record()
    record["placement"]["limits"]["gpu"] = None
    text = run_text(read_history(text_of([record])))
    assert text.startswith('There was no GPU: what is called "GPU" below is the CPU itself. ')


def test_json_has_the_same() -> None:
    history = read_history(text_of(typical_run()))
    result = json.loads(json.dumps(run_json(history), allow_nan=False))
    assert [d["gpu_layers_target"] for d in result["decisions"]] == [0, 13]
    assert result["decisions"][1]["measured"]["seconds"] == 0.35
    assert len(result["candidates"]) == NUM_LAYERS + 1
    assert Decision.from_json(result["decision"]) == history.decisions[-1]
    assert result["closed_form_gpu_layers"] == closed_form_layers(history.decisions[-1])
    assert result["sums"]["backward_seconds"] == pytest.approx(costs().backward_seconds)
    assert result["sums"]["alpha"] == pytest.approx(costs().alpha)


# -- before any run ----------------------------------------------------------------------------


def _words(section: dict[str, object], **rest: object) -> str:
    config = {"hytrain": section, **rest}
    parsed = HyTrainConfig.from_deepspeed(config)
    assert parsed is not None
    return config_words(parsed, read_form(config))


def test_words_tell_what_decides_k() -> None:
    assert "k: fixed by gpu_fraction at 0.5" in _words({"gpu_fraction": 0.5})
    assert "k: solved while training, every step" in _words({})
    closed = _words({"solver": {"method": "closed_form", "alpha": 0.04, "interval": 10}})
    assert '"closed_form"' in closed
    assert "given: 0.04" in closed
    assert "every 10 steps" in closed
    ignored = _words({"gpu_fraction": 0.5, "solver": {"method": "closed_form"}})
    assert "Without effect: solver.method" in ignored


def test_words_tell_with_what_k_it_starts() -> None:
    assert "It starts with" not in _words({})
    assert "numbers of layers on the ranks' GPUs: 5, 0" in _words({"solver": {"start": [5, 0]}})


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({}, 'float32 (neither "bf16" nor "fp16" is enabled)'),
        ({"bf16": {"enabled": True}}, 'bfloat16 ("bf16.enabled" is true)'),
        ({"fp16": {"enabled": True}}, 'float16 ("fp16.enabled" is true)'),
        (
            {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
            'bfloat16 (assumed: "bf16.enabled" is "auto", which the trainer fills in)',
        ),
    ],
)
def test_words_tell_the_dtype_and_what_is_assumed(rest: dict[str, object], words: str) -> None:
    assert f"Weights: {words};" in _words({}, **rest)


def test_words_tell_whether_clipping_is_direct() -> None:
    unchecked = {"enabled": True, "check_grad_overflow": False}
    assert "Clipping: none; no overflow check." in _words({}, bf16=unchecked)
    assert "Clipping: at a gradient norm of 0.5; no overflow check." in _words(
        {}, bf16=unchecked, gradient_clipping=0.5
    )
    assert "Clipping: none; a step with inf or NaN is skipped" in _words({}, bf16={"enabled": True})
    assert "the trainer fills in" in _words({}, gradient_clipping="auto")


def test_words_tell_where_weights_and_state_are() -> None:
    streamed = {"stage": 3, "offload_param": {"device": "cpu"}}
    assert "ZeRO-2: all of them on every rank's GPU" in _words({}, zero_optimization={"stage": 2})
    assert "ZeRO-3: divided among" in _words({}, zero_optimization={"stage": 3})
    assert "ZeRO-3: in host memory" in _words({}, zero_optimization=streamed)
    assert "4 bytes of master weight (fp32) and 8 of moments (fp32)" in _words({})
    small = _words({"moments": "bf16", "master": "split"})
    assert "2 bytes of master weight beside the bf16 weight" in small
    assert "and 4 of moments (bf16)" in small
    assert "Adam state (AdamW)" in _words({}, optimizer={"type": "AdamW"})


def test_words_tell_the_batch() -> None:
    keys = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    told = "Batch: samples of a micro-batch on each rank: 8; micro-batches a step: 2"
    assert f"{told}." in _words({}, **keys)
    assert f"{told}, layer by layer." in _words({"accumulation": "layer_major"}, **keys)
    assert "Batch: left to the trainer." in _words({}, train_micro_batch_size_per_gpu="auto")
    assert "Batch: 5 samples a step, 3, 2 on the ranks." in _words({"batch_sizes": [3, 2]})
    planned = _words({"plan": "plan.json", "batch_sizes": [3, 2]})
    assert "Batch: 5 samples a step, 3, 2 on the ranks, as plan.json says." in planned


@pytest.mark.parametrize(
    ("key", "value"),
    [("bf16", True), ("gradient_clipping", "much"), ("gradient_accumulation_steps", [2])],
)
def test_wrong_values_of_the_configuration_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f'"{key}" must be'):
        read_form({key: value})


def _sizes(num_ranks: int = 1) -> ModelSizes:
    whole = (98_000_000, *[113_000_000] * 24, 98_000_000)
    state = StateSizes(
        layers=tuple(LayerBytes(f"layer {i}", n // num_ranks) for i, n in enumerate(whole)),
        gradients=tuple(2 * n for n in whole),
        staging_bytes=GIB // 4,
        largest_parameter=98_000_000,
        num_ranks=num_ranks,
    )
    return ModelSizes("a model", state, whole, 2 * sum(whole))


def _text(config: HyTrainConfig, gpu_gib: int, host_gib: int) -> str:
    found = first_decision(config, _sizes(), gpu_gib * GIB, host_gib * GIB)
    advice = [] if found.bounds.fits else ["16 GiB of host memory"]
    verdict = verdict_of(config, _sizes(), found, advice)
    return f"{verdict}\n{model_text(config, _sizes(), found, advice)}"


def test_several_ranks_need_room_for_all_gradients_of_the_first_backward() -> None:
    config = HyTrainConfig()
    one, two = (
        first_decision(config, _sizes(n), 139 * GIB, 128 * GIB).limits.gpu_base for n in (1, 2)
    )
    assert two - one == 2 * sum(_sizes().parameters)


def test_a_reserve_is_a_share_of_what_weights_on_the_host_leave() -> None:
    sizes = replace(_sizes(), host_weights=28 * GIB)
    limits = first_decision(HyTrainConfig(), sizes, 139 * GIB, 128 * GIB).limits
    assert (limits.host, limits.host_reserve) == (128 * GIB, 3 * GIB)


@pytest.mark.parametrize(("host_gib", "is_limited"), [(128, False), (30, True)])
def test_a_run_begins_with_the_fewest_layers_that_fit(host_gib: int, is_limited: bool) -> None:
    found = first_decision(HyTrainConfig(), _sizes(), 139 * GIB, host_gib * GIB)
    assert found.limits.gpu_reserve == int(0.04 * 139 * GIB)
    assert found.gpu_layers_target == found.bounds.min_gpu_layers
    assert (found.gpu_layers_target > 0) == is_limited


def test_a_run_begins_with_the_fixed_number() -> None:
    text = _text(HyTrainConfig(gpu_fraction=0.5), 139, 128)
    assert text.startswith("Fits: the fixed k = 0.5 (13 of 26 layers on the GPU): ")
    assert "Activations are not counted" in text


def test_what_fits_nowhere_is_explained() -> None:
    text = _text(HyTrainConfig(), 20, 10)
    assert "A run would be refused" in text
    assert "What would make it fit" in text
    assert "<- chosen" not in text


def test_reports_a_fixed_number_that_does_not_fit() -> None:
    text = _text(HyTrainConfig(gpu_fraction=1.0), 20, 128)
    start = "Does not fit: the fixed k = 1 (26 of 26 layers on the GPU) takes more than the GPU has"
    assert text.startswith(start)
    last = text.split("Candidates")[1].split("Memory\n")[0].strip().splitlines()[-1]
    assert last.split()[0] == "26"
    assert last.split()[4:] == ["no", "<-", "fixed"]
