"""Names with "/": modules may be called so, and folders lie in folders then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, device, make_config
from torch import nn

from hytrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")

WIDTH = 8


class _Adapters(nn.Module):
    """Modules that a ``ModuleDict`` keeps under the given names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = x + part(x)
        return x.square().mean()


NAMES = ("en/de", "en/de/fr", "en", "de", "/")


def _engine(*names: str, seed: int = 0) -> AbstractContextManager[Any]:
    torch.manual_seed(seed)
    return built(_Adapters(*names), make_config(bf16=False))


def _train(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, WIDTH, device=device())))
    engine.step()


def test_saved_and_loaded(tmp_path: Path) -> None:
    with _engine(*NAMES) as engine:
        _train(engine)
        engine.save_checkpoint(tmp_path)
        saved = engine.fp32_state_dict()
    # As DeepSpeed's own converter lays them out, and its engine looks for them.
    assert (tmp_path / "global_step1/zero/parts.en/de/fr.bias/exp_avg.pt").is_file()
    with _engine(*NAMES, seed=1) as engine:
        engine.load_checkpoint(tmp_path)
        now = engine.fp32_state_dict()
    assert_same_states(now, saved)


@pytest.mark.parametrize("name", ["en//de", "de//"])
def test_names_that_are_no_folders_are_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    with _engine("de", name) as engine:
        with pytest.raises(CheckpointError, match=r"'parts\..*' cannot be the path"):
            engine.save_checkpoint(tmp_path / "new")
        assert not (tmp_path / "new").exists()
