"""Every config of ds_configs/ is one that DeepSpeed and hytrain accept as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
CONFIGS = sorted(FOLDER.glob("*.json"))
LIBRARIES = sorted(FOLDER.glob("libraries/*.json"))
"""With "auto", which a library fills in: `make test-ecosystem` trains with them."""


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def test_there_are_configs() -> None:
    expected = {"zero2_solve.json", "zero2_cpu_offload.json", "zero2_fixed_k.json", "fp32_cpu.json"}
    expected |= {"zero3.json", "zero3_offload_param.json"}
    assert expected <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
class TestShippedConfig:
    def test_accepted_by_deepspeed(self, path: Path) -> None:
        config = DeepSpeedConfig(str(path))
        assert config.zero_optimization_stage in (1, 2, 3)
        assert config.zero_config.offload_optimizer is not None
        assert config.zero_config.offload_optimizer.device == "cpu"
        assert config.optimizer_name == "adamw"
        assert config.train_micro_batch_size_per_gpu > 0


@pytest.mark.parametrize("path", CONFIGS + LIBRARIES, ids=lambda path: path.name)
class TestAnyConfig:
    def test_accepted_by_hytrain(self, path: Path) -> None:
        config = pytest.importorskip("hytrain.config").HyTrainConfig
        section = config.from_deepspeed(_read(path))
        assert section is not None
        assert section.gpu_fraction == "solve" or 0.0 <= section.gpu_fraction <= 1.0

    def test_does_not_force_the_cpu_optimizer_of_deepspeed(self, path: Path) -> None:
        assert _read(path)["zero_force_ds_cpu_optimizer"] is False

    def test_section_never_says_auto(self, path: Path) -> None:
        # accelerate refuses the word in a section that it does not know.
        assert "auto" not in _strings(_read(path)["hytrain"])

    def test_listed_in_the_readme(self, path: Path) -> None:
        name = str(path.relative_to(FOLDER))
        assert f"`{name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_solved_and_fixed_differ_in_k_alone() -> None:
    solved, fixed = (_read(FOLDER / f"zero2_{name}.json") for name in ("solve", "fixed_k"))
    assert solved.pop("hytrain") == {"gpu_fraction": "solve"}
    assert fixed.pop("hytrain") == {"gpu_fraction": 0.7}
    assert solved == fixed
