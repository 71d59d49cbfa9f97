"""Windows of steps, the systems' configurations, and sizes of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.common import systems
from experiments.common.records import Json
from experiments.common.sizes import SIZES, size_of
from experiments.common.timing import Stepper, measure, warm_up

JOB: Json = {"system": "hytrain", "model": "toy", "batch": 2, "seq": 16, "device": "cpu"}


class Settling:
    """A system whose numbers of a step settle when it is drained."""

    thread_candidates = ()

    def __init__(self) -> None:
        self.steps = 0
        self.batches: list[int] = []
        self.is_drained = False

    def step(self, batches: Any) -> torch.Tensor:
        self.steps += 1
        self.batches.append(len(batches))
        return torch.tensor(float(self.steps))

    def observe(self) -> Json:
        return {"step": self.steps, "update_seconds": 1.0 if self.is_drained else 0.5}

    def drain(self) -> None:
        self.is_drained = True


def test_windows_have_their_own_steps_and_the_last_observation_of_each() -> None:
    system = Settling()
    stepper = Stepper(system, [{}, {}], "cpu", accumulation=3)
    warm_up(stepper, 2)
    found = measure(stepper, windows=2, steps=2)
    assert system.batches == [3] * 6
    assert len(found["window_seconds"]) == 2
    assert [row["step"] for row in found["observations"]] == [3, 4, 5, 6]
    assert found["observations"][-1]["update_seconds"] == 1.0, "settled after the drain"
    assert found["losses"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_what_a_job_says_is_in_its_configuration() -> None:
    plain = systems.ds_config({**JOB, "clip": 1.0, "gpu_fraction": 0.5})
    assert plain["hytrain"] == {"gpu_fraction": 0.5}
    assert plain["gradient_clipping"] == 1.0
    assert "check_grad_overflow" not in plain["bf16"]
    options = {"direct": True, "streamed": True, "section": {"moments": "8bit"}}
    direct = systems.ds_config({**JOB, "clip": None, **options})
    assert (direct["gradient_clipping"], direct["bf16"]["check_grad_overflow"]) == (0.0, False)
    assert direct["zero_optimization"]["stage"] == 3
    assert direct["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert direct["hytrain"] == {"gpu_fraction": "solve", "moments": "8bit"}
    theirs = systems.ds_config({**JOB, "system": "deepspeed_zero2_offload"})
    assert "hytrain" not in theirs
    theirs["zero_optimization"]["stage"] = 1  # an engine writes into what it is given
    assert systems.ZERO["deepspeed_zero2_offload"]["stage"] == 2
    with pytest.raises(ValueError, match="'adam' is unknown"):
        systems.build({**JOB, "system": "adam"}, lambda _: None)


@pytest.mark.parametrize("name", [name for name in SIZES if name.endswith("B")])
def test_a_model_has_as_many_parameters_as_its_name_says(name: str) -> None:
    digits = len(name.removesuffix("B").partition(".")[2])
    assert f"{size_of(name).num_parameters / 1e9:.{digits}f}B" == name
