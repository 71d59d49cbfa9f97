"""Cases read from files: what is wrong is named, with its file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hytrain.errors import PlanError
from hytrain.tools.hybrid.case_files import read_case
from hytrain.tools.hybrid.search import plan

LAYERS = 3
ARGS: dict[str, Any] = {
    "num_layers": LAYERS,
    "gbs": 4,
    "hidden_size": 8,
    "sequence_length": 4,
    "vocab_size": 16,
    "max_profiled_tp_degree": 2,
    "max_profiled_batch_size": 4,
    "profile_dir": "profiles",
    "constants_profile": "A_tp1_bs1",
}


def _profile(pace: float) -> dict[str, Any]:
    times = [pace, 4 * pace, pace]
    return {
        "model": {
            "num_layers": LAYERS,
            "parameters": {"parameters_per_layer_bytes": [100, 200, 100]},
        },
        "execution_time": {
            "forward_backward_time_ms": sum(times) + 0.5,
            "batch_generator_time_ms": 0.1,
            "optimizer_time_ms": 2.0,
            "layer_compute_total_ms": times,
        },
        "execution_memory": {"layer_memory_total_mb": [10, 20, 10]},
    }


@pytest.fixture
def case(tmp_path: Path) -> Path:
    """Two nodes of two GPUs, of types A and B."""
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    for device, pace in (("A", 1.0), ("B", 2.0)):
        for tp in (1, 2):
            for size in (1, 2, 4):
                name = f"DeviceType.{device}_tp{tp}_bs{size}.json"
                (profiles / name).write_text(json.dumps(_profile(pace * size / tp**0.5)))
    (tmp_path / "args.json").write_text(json.dumps(ARGS))
    (tmp_path / "hostfile").write_text("10.0.0.1 slots=2\n\n# comment\n10.0.0.2 slots=2\n")
    node = {"inter_bandwidth": 10, "intra_bandwidth": 50, "memory": 16}
    cluster = {"10.0.0.1": {**node, "instance_type": "B"}}
    cluster["10.0.0.2"] = {**node, "instance_type": "A"}
    (tmp_path / "clusterfile.json").write_text(json.dumps(cluster))
    return tmp_path


def test_a_case_is_read_and_planned(case: Path) -> None:
    problem = read_case(case)
    assert [device.name for device in problem.devices] == ["A", "B"]
    assert problem.num_gpus == 4
    assert problem.constants.optimizer_ms == 4.0
    assert problem.samples["B", 2, 4].fb_sync == pytest.approx(0.5)
    assert plan(problem).is_optimal


def _set(name: str, path: tuple[str, ...], value: Any) -> Callable[[Path], None]:
    """Changes a field of a file; None takes it out."""

    def change(case: Path) -> None:
        file = case / name
        values = json.loads(file.read_text())
        part = values
        for key in path[:-1]:
            part = part[key]
        if value is None:
            del part[path[-1]]
        else:
            part[path[-1]] = value
        file.write_text(json.dumps(values))

    return change


A1 = "profiles/DeviceType.A_tp1_bs1.json"
TIMES = ("execution_time", "layer_compute_total_ms")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("args.json", ("gbs",), None), r"args\.json, gbs: Field required"),
        (_set("args.json", ("gbs",), 0), r"args\.json, gbs: Input should be greater than 0"),
        (_set("args.json", ("gbs",), 1.5), r"args\.json, gbs: Input should be a valid integer"),
        (
            _set("args.json", ("mem_coef",), -1),
            "mem_coef: Input should be greater than 0",
        ),
        (_set("args.json", ("profile_dir",), "no"), "cannot read the profiles of .*no"),
        (_set("args.json", ("num_layers",), 4), r"layer_compute_total_ms: must have 4 numbers"),
        (_set("args.json", ("constants_profile",), "C_tp1_bs1"), r"C_tp1_bs1\.json"),
        (
            _set("clusterfile.json", ("10.0.0.1",), None),
            r"clusterfile\.json has no entry for 10\.0\.0\.1",
        ),
        (
            _set("clusterfile.json", ("10.0.0.1", "memory"), "16"),
            r"10\.0\.0\.1\.memory: Input should be a valid number",
        ),
        (
            _set("clusterfile.json", ("10.0.0.1", "instance_type"), "C"),
            r"no profile DeviceType\.C_tp\*_bs\*\.json of these nodes",
        ),
        (
            lambda case: _two_of_a_type(case),
            "another node of type A has other memory or bandwidths",
        ),
        (
            _set(A1, TIMES, [1, 2]),
            r"A_tp1_bs1\.json, .*must have 3 numbers, one for each layer, not 2",
        ),
        (_set(A1, TIMES, [1, -2, 1]), r"layer_compute_total_ms\.1: Input should be greater"),
        (_set(A1, ("execution_memory",), None), "execution_memory: Field required"),
        (
            _set(A1, ("execution_time", "forward_backward_time_ms"), 1.0),
            "forward_backward_time_ms: must be at least the sum",
        ),
        (
            _set(A1, ("model", "num_layers"), 4),
            r"model\.num_layers: must be 3, as in args\.json, not 4",
        ),
        (lambda case: (case / "hostfile").write_text("10.0.0.1 2\n"), "hostfile, line 1: must be"),
        (lambda case: (case / "hostfile").write_text("\n"), "hostfile names no node"),
        (
            lambda case: (case / "hostfile").write_text(f"10.0.0.1 slots={'9' * 5000}\n"),
            "hostfile, line 1: must be",
        ),
        (
            lambda case: (case / "hostfile").write_text("10.0.0.1 slots=900000\n"),
            "900000 GPUs: plans are made for 65536 at most",
        ),
        (
            lambda case: (case / "args.json").write_text(json.dumps(ARGS | {"gbs": 10**12})),
            r"samples of a step \(gbs\): plans are made for 65536 at most",
        ),
        (lambda case: (case / "args.json").write_text("["), "is not JSON"),
        (
            lambda case: (case / "clusterfile.json").write_text("[]"),
            "the whole: Input should be a valid dictionary",
        ),
        (lambda case: (case / "hostfile").unlink(), "cannot read the hostfile"),
    ],
)
def test_what_is_wrong_is_named(case: Path, change: Callable[[Path], object], words: str) -> None:
    change(case)
    with pytest.raises(PlanError, match=words):
        read_case(case)


def _two_of_a_type(case: Path) -> None:
    file = case / "clusterfile.json"
    values = json.loads(file.read_text())
    values["10.0.0.1"].update(instance_type="A", memory=32)
    file.write_text(json.dumps(values))
