"""What lies where in a checkpoint: what plain DeepSpeed's load_universal looks for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.resume import WIDTH, Run, engine_of, snapshot, train

from hytrain.checkpoint.gather import Piece, plan_rounds
from hytrain.checkpoint.universal import MODEL_STATES_OF_ZERO3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> dict[str, Any]:
    """A checkpoint after two steps: "folder", "state", "engine" facts."""
    folder = tmp_path_factory.mktemp("saved")
    with engine_of(Run(groups=True, schedule="torch")) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(folder, client_state={"epoch": 3})
        names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
        return {"folder": folder, "now": snapshot(engine), "names": names}


def test_tree(saved: dict[str, Any]) -> None:
    folder: Path = saved["folder"]
    assert (folder / "latest").read_text() == "global_step2"
    assert (folder / "latest_universal").read_text() == "global_step2"
    tag = folder / "global_step2"
    assert {p.name for p in tag.iterdir()} == {
        "mp_rank_00_model_states.pt",
        MODEL_STATES_OF_ZERO3,
        "zero",
    }
    zero = tag / "zero"
    others = {"optimizer_state.pt", "hytrain_manifest.json"}
    assert {p.name for p in zero.iterdir()} == {*saved["names"], *others}
    for name in saved["names"]:
        files = {p.name for p in (zero / name).iterdir()}
        assert files == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}


def test_state_files_hold_whole_fp32_tensors_and_nothing_else(saved: dict[str, Any]) -> None:
    zero = saved["folder"] / "global_step2/zero"
    assert "embed.weight" in saved["names"]  # tied: under its first name only
    assert "head.weight" not in saved["names"]
    for name, tensors in saved["now"].state.items():
        for kind, tensor in tensors.items():
            path = zero / name / f"{kind}.pt"
            stored = torch.load(path, weights_only=True)
            assert stored.keys() == {"param", "cat_dim"}
            assert stored["param"].dtype == torch.float32
            assert torch.equal(stored["param"], tensor)
            # A view would have dragged the whole layer along.
            assert path.stat().st_size < 4 * tensor.numel() + 4096
        assert torch.load(zero / name / "step.pt") == 2


def test_optimizer_state(saved: dict[str, Any]) -> None:
    stored = torch.load(saved["folder"] / "global_step2/zero/optimizer_state.pt", weights_only=True)
    groups = stored["param_groups"]
    assert [group["betas"] for group in groups] == [(0.8, 0.9), (0.9, 0.999), (0.9, 0.999)]
    assert [group["params"] for group in groups] == [
        list(range(12)),
        [12],
        [13, 14],
    ]
    assert all("initial_lr" in group for group in groups)
    assert stored["ds_version"]
    assert stored["clip_grad"] == 0.5
    assert stored["hytrain"]["group_steps"] == [2, 2, 2]
    assert stored["hytrain"]["group_parameters"][1:] == [
        ["embed.weight"],
        ["norm.bias", "norm.weight"],
    ]


def test_model_states(saved: dict[str, Any]) -> None:
    path = saved["folder"] / "global_step2/mp_rank_00_model_states.pt"
    stored = torch.load(path, weights_only=False)
    assert stored["universal_checkpoint_info"]["universal_checkpoint_version"] == 0.4
    assert stored["epoch"] == 3
    assert (stored["global_steps"], stored["skipped_steps"], stored["dp_world_size"]) == (2, 0, 1)
    assert stored["module"].keys() == saved["now"].weights.keys()
    assert all(torch.equal(t, stored["module"][n]) for n, t in saved["now"].weights.items())
    assert stored["buffer_names"] == ["calls"]
    assert set(stored["frozen_param_shapes"]) == {"frozen.weight", "frozen.bias"}
    assert stored["shared_params"] == {"head.weight": "embed.weight"}
    shapes = stored["param_shapes"]
    assert [len(group) for group in shapes] == [12, 1, 2]
    assert shapes[2]["norm.weight"] == torch.Size([WIDTH])
    assert stored["lr_scheduler"]["last_epoch"] == 2


def _place(name: str, owned: list[int]) -> Any:
    """A parameter of which ranks own so many elements."""
    pieces = [
        Piece(rank, sum(owned[:rank]), sum(owned[: rank + 1]))
        for rank, size in enumerate(owned)
        if size
    ]
    return SimpleNamespace(name=name, numel=sum(owned), pieces=pieces, kinds=("fp32",))


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 1000), min_size=n, max_size=n), max_size=30)
    )
)
def test_writers_are_balanced(owned: list[list[int]]) -> None:
    num_ranks = len(owned[0]) if owned else 3
    places = [_place(str(index), parts) for index, parts in enumerate(owned)]
    rounds = plan_rounds(places, num_ranks)
    loads = [0] * num_ranks
    for deliveries in rounds:
        ranks = [delivery.destination for delivery in deliveries]
        assert len(set(ranks)) == len(ranks)
        for delivery in deliveries:
            loads[delivery.destination] += delivery.place.numel
    sizes = [place.numel for place in places]
    assert sorted(d.place.name for deliveries in rounds for d in deliveries) == sorted(
        place.name for place in places
    )
    assert max(loads, default=0) <= sum(sizes) / num_ranks + max(sizes, default=0)


def test_writers_prefer_what_they_own() -> None:
    places = [_place(str(at), owned) for at, owned in enumerate([[9, 1], [1, 9], [1, 9], [9, 1]])]
    found = {
        d.place.name: d.destination for deliveries in plan_rounds(places, 2) for d in deliveries
    }
    assert found == {"0": 0, "1": 1, "2": 1, "3": 0}
