"""The comparison of Trainers: its workloads, and the table."""

from __future__ import annotations

import pytest

from experiments.common.records import Json
from experiments.hf_trainer.run import rows
from experiments.hf_trainer.systems import SYSTEMS, Workload


def test_workloads() -> None:
    assert Workload.of("2.9B/8x1024") == Workload("2.9B", 8, 1024)
    assert str(Workload.of("toy/2x16")) == "toy/2x16"
    with pytest.raises(SystemExit, match=r"is not MODEL/BATCHxTOKENS"):
        Workload.of("toy")


def test_systems_differ_in_the_section_alone() -> None:
    ours, plain = SYSTEMS["hytrain"].config, SYSTEMS["zero2_offload"].config
    assert ours is not None
    assert plain is not None
    assert ours == plain | {"hytrain": {}}


def test_rows() -> None:
    def run(system: str, result: Json) -> Json:
        return {"workload": "toy/2x16", "system": system, "result": result}

    ours = {"seconds": 0.1, "fastest": 0.09, "gpu_gib": 2.0, "gpu_layers": "3 of 6"}
    plain = {"seconds": 0.3, "fastest": 0.28, "gpu_gib": None, "gpu_layers": None}
    found = rows(
        [run("hytrain", ours), run("zero2_offload", plain), run("other", {"failed": "it hung"})]
    )
    assert found[0] == ["toy/2x16", "hytrain", "100.0", "90.0", "1.00", "2.0", "3 of 6"]
    assert found[1][2:5] == ["300.0", "280.0", "3.00"]
    assert found[2][2] == "it hung"
