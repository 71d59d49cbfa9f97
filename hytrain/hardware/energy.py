"""Power and energy of a GPU and of the host's processors, by NVML and the kernel's RAPL counters.

Both are optional. If one is missing or not permitted, :attr:`EnergyMeter.missing` says why, and its
numbers are None.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

RAPL = Path("/sys/class/powercap")
"""One folder per zone: ``intel-rapl:0`` is a processor's package, ``intel-rapl:0:0`` a part."""


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Energy used since some point in the past, in joules; None if it cannot be told."""

    gpu_joules: float | None
    cpu_joules: float | None

    def since(self, earlier: EnergyReading) -> EnergyReading:
        """Energy used since an earlier reading of the same meter."""
        return EnergyReading(
            _difference(self.gpu_joules, earlier.gpu_joules),
            _difference(self.cpu_joules, earlier.cpu_joules),
        )

    @property
    def joules(self) -> float | None:
        """The sum for GPU and processors, of what is known; None if nothing is."""
        known = [value for value in (self.gpu_joules, self.cpu_joules) if value is not None]
        return sum(known) if known else None


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


class EnergyMeter:
    """Reads the counters of one GPU and of all processor packages of the host.

    Every rank on a host reads its packages as a whole: one of these ranks' readings is enough.
    """

    def __init__(self, device: torch.device, *, rapl: Path = RAPL) -> None:
        """``device``: the rank's device; ``rapl``: the kernel's folder of zones."""
        self.missing: list[str] = []
        """What cannot be read, and why, in words."""
        self._gpu: _Gpu | None = None
        if device.type == "cuda":
            self._gpu = self._open_gpu(device)
        self._packages = self._open_packages(rapl)

    @property
    def has_gpu(self) -> bool:
        """Whether the GPU's power and energy can be read."""
        return self._gpu is not None

    def _open_gpu(self, device: torch.device) -> _Gpu | None:
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self._say("the GPU's power is not measured: pip install nvidia-ml-py")
            return None
        try:
            gpu = _Gpu(nvml, device)
            gpu.watts()
            return gpu
        except nvml.NVMLError as error:  # no library, no such device, or not permitted
            self._say(f"the GPU's power is not measured: {error}")
            return None

    def _open_packages(self, rapl: Path) -> list[_Package]:
        folders = sorted(path for path in rapl.glob("*-rapl:*") if path.name.count(":") == 1)
        if not folders:
            self._say(f"the processors' power is not measured: {rapl} has no zone")
            return []
        try:
            return [_Package(folder) for folder in folders if _is_package(folder)]
        except (OSError, ValueError) as error:
            self._say(
                f"the processors' power is not measured: {error} (the kernel lets root read it; "
                f"`chmod a+r {rapl}/*/energy_uj` lets everybody)"
            )
            return []

    def gpu_watts(self) -> float | None:
        """The GPU's power now, in watts; None if it cannot be told."""
        return self._of_gpu(_Gpu.watts)

    def read(self) -> EnergyReading:
        """The counters now. Takes some microseconds, the GPU's up to a millisecond."""
        return EnergyReading(self._of_gpu(_Gpu.joules), self._cpu_joules())

    def _of_gpu(self, read: Callable[[_Gpu], float]) -> float | None:
        gpu = self._gpu  # another thread may lose it meanwhile
        if gpu is None:
            return None
        try:
            return read(gpu)
        except gpu.error as error:
            # Training must not end because power cannot be read any more.
            self._gpu = None
            self._say(f"the GPU's power is not measured any more: {error}")
            return None

    def _cpu_joules(self) -> float | None:
        if not self._packages:
            return None
        try:
            return sum(package.joules() for package in self._packages)
        except (OSError, ValueError) as error:
            self._packages = []
            self._say(f"the processors' power is not measured any more: {error}")
            return None

    def _say(self, words: str) -> None:
        self.missing.append(words)
        logger.info("%s", words)


class _Gpu:
    """One GPU's power and energy by NVML."""

    def __init__(self, nvml: Any, device: torch.device) -> None:
        self._nvml = nvml
        self.error: type[Exception] = nvml.NVMLError
        nvml.nvmlInit()
        properties: Any = torch.cuda.get_device_properties(device)
        # NVML numbers all GPUs of the machine; the process may see some of them only.
        self._handle = nvml.nvmlDeviceGetHandleByUUID(_uuid(properties))
        self._last: tuple[float, float] | None = None
        self._joules = 0.0
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self._counts = True
        except nvml.NVMLError:  # before Volta
            self._counts = False

    def watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def joules(self) -> float:
        if self._counts:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        # Without a counter: the mean of the power at two readings, for the time between them.
        now, watts = time.monotonic(), self.watts()
        if self._last is not None:
            then, before = self._last
            self._joules += (now - then) * (watts + before) / 2
        self._last = now, watts
        return self._joules


def _uuid(properties: Any) -> str:
    text = str(properties.uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def _is_package(folder: Path) -> bool:
    # "psys" is the whole platform, of which the packages are a part.
    return (folder / "name").read_text().strip().startswith("package")


class _Package:
    """One processor package's counter, which wraps around at its largest value."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())
        self._total = 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        step = now - self._last
        self._total += step if step >= 0 else step + self._range
        self._last = now
        return self._total / 1e6
