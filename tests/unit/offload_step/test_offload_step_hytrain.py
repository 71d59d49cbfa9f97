"""How the harness uses hytrain: the config it writes, and the statistics it reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import hytrain
from experiments.common.records import Job, Measurement, Workload
from experiments.common.systems import load
from experiments.common.systems.hytrain import config_of
from experiments.common.timing import Stepper, measure
from experiments.offload_step.parts import Settings, entries_of
from experiments.offload_step.worker import busy_share

UPDATE_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Statistics:
    step: int
    update_seconds: float


class Engine(torch.nn.Module):
    """Stands in for the engine: one weight, and statistics that settle after the step."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.steps = 0
        self.calls: list[str] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        @dataclasses.dataclass
        class Output:
            loss: torch.Tensor

        return Output(loss=self.weight * input_ids.float().mean())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.steps += 1

    def step_statistics(self) -> Statistics:
        settled = "synchronize" in self.calls
        return Statistics(self.steps, UPDATE_SECONDS if settled else UPDATE_SECONDS / 2)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def destroy(self) -> None:
        self.calls.append("destroy")


def job_of(label: str) -> Job:
    settings = Settings(gpu_fractions=(0.0,), clip=1.0, threads=(1,), section={"offload": {}})
    entries = [e for part in "AC" for e in entries_of(part, settings)]
    return Job(
        entry=next(entry for entry in entries if entry.label == label),
        workload=Workload(model="toy", batch=2, seq=4, device="cpu"),
        measurement=Measurement(windows=2, steps=2, warmup=0),
    )


@pytest.mark.parametrize(
    ("label", "clipping", "checked"),
    [("hytrain 0.7", 1.0, True), ("hytrain 0.7 direct", 0.0, False)],
)
def test_config(label: str, clipping: float, checked: bool) -> None:
    config = config_of(job_of(label))
    assert config["gradient_clipping"] == clipping
    assert config["bf16"].get("check_grad_overflow", True) is checked
    assert config["hytrain"] == {"gpu_fraction": 0.7, "offload": {}}
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_statistics_of_the_timed_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = []

    def initialize(*, config: dict[str, Any], **_: Any) -> tuple[Engine, None, None, None]:
        engines.append(Engine(config))
        return engines[0], None, None, None

    monkeypatch.setattr(hytrain, "initialize", initialize, raising=False)
    job = job_of("hytrain 0")
    system = load("hytrain")(lambda dtype: torch.nn.Linear(1, 1, dtype=dtype), job)
    tokens = torch.ones(2, 4, dtype=torch.long)
    stepper = Stepper(system, [{"input_ids": tokens, "labels": tokens}], "cpu")
    stepper.step()
    timing = measure(stepper, job.measurement, [])
    assert [row["step"] for row in timing.observations] == [2, 3, 4, 5]
    # The last step's numbers are read again after the drain.
    seconds = [row["update_seconds"] for row in timing.observations]
    assert seconds == [UPDATE_SECONDS / 2] * 3 + [UPDATE_SECONDS]
    share = busy_share(timing)
    assert share is not None
    assert share == pytest.approx(sum(seconds) / timing.total_seconds)
    system.close()
    assert engines[0].calls == ["synchronize", "destroy"]
