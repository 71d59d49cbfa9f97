"""Energy of a GPU and of processors, from a false NVML and a false folder of the kernel's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hytrain.hardware import energy
from hytrain.hardware.energy import EnergyMeter, EnergyReading

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class NVMLError(Exception):
    """As pynvml's."""


class Nvml(ModuleType):
    """The calls of pynvml that are made; a GPU of 250 W with a counter, or without one."""

    NVMLError = NVMLError

    def __init__(self, *, counts: bool = True, permitted: bool = True) -> None:
        super().__init__("pynvml")
        self.millijoules, self.milliwatts = 5_000_000, 250_000
        self.counts, self.permitted = counts, permitted
        self.uuid = ""

    def nvmlInit(self) -> None:
        """Nothing."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuid = uuid
        return "handle"

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        assert handle == "handle"
        if not self.permitted:
            raise NVMLError("Insufficient Permissions")
        return self.milliwatts

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.counts:
            raise NVMLError("Not Supported")
        return self.millijoules


Meters = Callable[[Nvml | None], EnergyMeter]


@pytest.fixture
def meter_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Meters:
    """The meter of a GPU where ``import pynvml`` finds this; None: nothing."""

    def made(nvml: Nvml | None) -> EnergyMeter:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
        properties = SimpleNamespace(uuid="1234-5678")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        return EnergyMeter(GPU, rapl=tmp_path / "none")

    return made


def make_zone(root: Path, zone: str, name: str, used: int, most: int = 1_000_000_000) -> Path:
    """A zone as the kernel shows it; its counter in microjoules."""
    folder = root / zone
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    (folder / "energy_uj").write_text(f"{used}\n")
    return folder / "energy_uj"


def test_the_gpus_counter(meter_of: Meters) -> None:
    nvml = Nvml()
    meter = meter_of(nvml)
    assert nvml.uuid == "GPU-1234-5678"  # not a number, which CUDA_VISIBLE_DEVICES changes
    assert meter.has_gpu
    assert meter.gpu_watts() == 250.0
    before = meter.read()
    nvml.millijoules += 12_500
    assert meter.read().since(before) == EnergyReading(12.5, None)


def test_a_gpu_without_a_counter(monkeypatch: pytest.MonkeyPatch, meter_of: Meters) -> None:
    nvml = Nvml(counts=False)
    monkeypatch.setattr(energy.time, "monotonic", iter([10.0, 12.0, 13.0]).__next__)
    meter = meter_of(nvml)
    before = meter.read()
    assert meter.read().since(before).gpu_joules == 500.0
    nvml.milliwatts = 350_000
    assert meter.read().since(before).gpu_joules == 800.0


@pytest.mark.parametrize(
    ("nvml", "why"),
    [(None, "pip install nvidia-ml-py"), (Nvml(permitted=False), "Insufficient Permissions")],
    ids=["absent", "not permitted"],
)
def test_without_nvml_it_is_said(meter_of: Meters, nvml: Nvml | None, why: str) -> None:
    meter = meter_of(nvml)
    assert not meter.has_gpu
    assert meter.gpu_watts() is None
    assert meter.read().joules is None
    assert any(why in words for words in meter.missing)


def test_a_gpu_that_is_lost_meanwhile(meter_of: Meters) -> None:
    nvml = Nvml()
    meter = meter_of(nvml)
    nvml.counts = False
    assert meter.read().gpu_joules is None
    assert "Not Supported" in meter.missing[-1]
    assert meter.gpu_watts() is None  # nor is anything else asked for


def test_processor_packages(tmp_path: Path) -> None:
    first = make_zone(tmp_path, "intel-rapl:0", "package-0", 400_000_000)
    second = make_zone(tmp_path, "intel-rapl:1", "package-1", 999_000_000)
    make_zone(tmp_path, "intel-rapl:0:0", "core", 1)  # a part of the first package
    make_zone(tmp_path, "intel-rapl:2", "psys", 1)  # the packages and more
    meter = EnergyMeter(CPU, rapl=tmp_path)
    before = meter.read()
    first.write_text("403000000\n")
    second.write_text("1500000\n")  # it has begun anew at its largest value, 1000 J
    used = meter.read().since(before)
    assert used == EnergyReading(None, 5.5)
    assert used.joules == 5.5


def test_counters_that_only_root_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = make_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    real = Path.read_text

    def refused(path: Path, *arguments: Any, **named: Any) -> str:
        if path == counter:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", refused)
    meter = EnergyMeter(CPU, rapl=tmp_path)
    assert "Permission denied" in meter.missing[0]
    assert "chmod a+r" in meter.missing[0]
    assert meter.read() == EnergyReading(None, None)


def test_both_together() -> None:
    assert EnergyReading(10.0, 4.0).since(EnergyReading(7.0, 1.0)).joules == 6.0
    assert EnergyReading(10.0, None).joules == 10.0
