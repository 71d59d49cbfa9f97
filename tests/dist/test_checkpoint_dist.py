"""Checkpoints on two ranks: written by both, resumed on any number of ranks and any shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankPools, on_ranks
from support.comparisons import assert_close_states, assert_same_bits
from support.engines import from_all_ranks
from support.resume import (
    Run,
    Snapshot,
    assert_same,
    assert_same_state,
    engine_of,
    save_and_go_on,
    snapshot,
    train,
)

from hytrain.checkpoint import file_writers
from hytrain.comm import exchange
from hytrain.errors import CheckpointError

RUNS = [
    Run(gpu_fraction=0.3),
    Run(bf16=False, accumulation=2, groups=True, schedule="torch", fractions=(0.7, 0.3)),
    Run(fractions=(0.1, 0.9), stage=1, accumulation=2, gpu_fraction=1.0, schedule="none"),
    Run(clipping=0.0, check_overflow=False, fractions=(0.6, 0.4), groups=True),
    Run(fractions=(0.7, 0.3), stage=3, accumulation=2, groups=True),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
@on_ranks(2)
def test_resumed_equals_uninterrupted(run: Run, tmp_path: Path) -> None:
    middle, end = 3 * run.accumulation, 6 * run.accumulation
    expected = save_and_go_on(run, tmp_path, (middle, end))
    assert bool(expected["saved"].state) is (dist.get_rank() == 0)
    with engine_of(run.another()) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), expected["saved"])
        assert train(engine, middle, end) == expected["losses"]
        assert_same(snapshot(engine), expected["end"])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 3)])
def test_resumed_at_another_stage(
    ranks: RankPools, tmp_path: Path, before: int, after: int
) -> None:
    """Bit for bit: of two ranks' gradients the sum has no order, however they are cut."""
    run = Run(fractions=(0.8, 0.2), stage=before)
    saved, end = ranks(2).run(_train_and_save, run, tmp_path, 3, 6)[0]
    other = Run(fractions=(0.3, 0.7), stage=after, gpu_fraction=0.2)
    # Placements differ: one kernel of the two would do for all that is compared.
    loaded, resumed = ranks(2).run(_load_and_go_on, other, tmp_path, 3, 6)[0]
    assert_same(loaded, saved)
    assert_same(resumed, end)


@on_ranks(2)
def test_weights_alone_into_shards(tmp_path: Path) -> None:
    """The module's weights alone, by torch's own loading and by a function of the user's."""
    with engine_of(Run(fractions=(0.7, 0.3), stage=3)) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
        assert engine.save_16bit_model(str(tmp_path)) is False

    def load(src: Any, dst: Any) -> None:
        dst.load_state_dict(src)

    for loader in (None, load):
        run = Run(fractions=(0.2, 0.8), stage=3).another()
        with engine_of(run) as engine:
            train(engine, 30, 31)
            engine.load_checkpoint(
                tmp_path,
                load_optimizer_states=False,
                load_module_only=loader is None,
                custom_load_fn=loader,
            )
            now = snapshot(engine)
            assert now.weights.keys() == saved.weights.keys()
            for name, tensor in saved.weights.items():
                assert torch.equal(now.weights[name], tensor), name
            train(engine, 31, 32)


def _train_and_save(run: Run, folder: Path, steps: int, more: int) -> tuple[Snapshot, Snapshot]:
    with engine_of(run) as engine:
        train(engine, 0, steps)
        engine.save_checkpoint(folder)
        saved = snapshot(engine)
        train(engine, steps, more)
        return saved, snapshot(engine)


def _load_and_go_on(run: Run, folder: Path, steps: int, more: int) -> tuple[Snapshot, Snapshot]:
    with engine_of(run.another()) as engine:
        train(engine, 30, 31)
        engine.load_checkpoint(folder)
        loaded = snapshot(engine)
        train(engine, steps, more)
        return loaded, snapshot(engine)


@pytest.mark.usefixtures("process_group")
def test_resumes_at_another_number_of_ranks(ranks: RankPools, tmp_path: Path) -> None:
    run = Run(bf16=False, groups=True, schedule="torch", fractions=(0.7, 0.3))
    alone = Run(bf16=False, groups=True, schedule="torch", gpu_fraction=0.0, chunk_elements=4096)
    two = ranks(2)
    saved, end = two.run(_train_and_save, run, tmp_path / "2", 3, 6)[0]
    # From two ranks to one ...
    loaded, resumed = _load_and_go_on(alone, tmp_path / "2", 3, 6)
    assert_same(loaded, saved)
    assert_close_states(resumed.state, end.state, rtol=1e-4, atol=1e-6)
    # ... from one to two, with other shards and another placement ...
    saved, end = _train_and_save(alone, tmp_path / "1", 3, 6)
    other = Run(bf16=False, groups=True, schedule="torch", gpu_fraction=1.0, stage=1)
    loaded, resumed = two.run(_load_and_go_on, other, tmp_path / "1", 3, 6)[0]
    assert_same(loaded, saved)
    assert_close_states(resumed.state, end.state, rtol=1e-4, atol=1e-6)
    # ... and on two ranks with other shards, where bf16 rounds what is reduced the same way.
    saved, _ = two.run(_train_and_save, Run(fractions=(0.8, 0.2)), tmp_path / "3", 3, 4)[0]
    loaded, _ = two.run(_load_and_go_on, Run(fractions=(0.3, 0.7)), tmp_path / "3", 3, 4)[0]
    assert_same(loaded, saved)


@on_ranks(2)
def test_every_rank_has_all_of_the_training_copy(tmp_path: Path) -> None:
    """What the checkpoint's module holds is rounded; each rank has cast its own shard only."""
    with engine_of(Run(fractions=(0.7, 0.3))) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
    with engine_of(Run(bf16=False, fractions=(0.2, 0.8)).another()) as engine:
        engine.load_checkpoint(tmp_path)
        now = snapshot(engine)
        masters = from_all_ranks(now.state)[0]
        assert len(masters) == 15
        assert all(torch.equal(now.weights[name], t["fp32"]) for name, t in masters.items())


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=1, fractions=(0.8, 0.2), gpu_fraction=1.0),
        Run(stage=2, bf16=False, gpu_fraction=0.0),
        Run(stage=3, fractions=(0.3, 0.7), clipping=0.0, check_overflow=False),
    ],
    ids=str,
)
@on_ranks(2)
def test_what_a_checkpoint_has_not_keeps_weights_and_moments(run: Run, tmp_path: Path) -> None:
    with engine_of(run) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
    fractions = None if run.fractions is None else run.fractions[::-1]
    with engine_of(run.another(num_blocks=4, fractions=fractions)) as engine:
        train(engine, 10, 13)
        before = snapshot(engine)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        now = snapshot(engine)
        for name, weights in now.weights.items():
            expected = saved if name in saved.weights else before
            assert torch.equal(weights, expected.weights[name]), name
        for name, tensors in now.state.items():
            expected = before if name.startswith("blocks.3.") else saved
            for kind, tensor in tensors.items():
                assert tensor.any()
                assert_same_bits(f"{kind} of {name}", tensor, expected.state[name][kind])
        assert now.steps == [2]
        train(engine, 2, 4)


@on_ranks(2)
def test_what_one_rank_alone_comes_across_is_refused_by_both(tmp_path: Path) -> None:
    """Damage, and a folder that only the first host has."""
    folder = tmp_path
    with engine_of(Run()) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(folder, tag="good")
        train(engine, 1, 2)
        _refuse_together(engine, folder)


def _refuse_together(engine: Any, folder: Path) -> None:
    before = snapshot(engine)
    names = sorted(path for path in (folder / "good/zero").iterdir() if path.is_dir())
    for path in names[:2] + names[-2:]:
        content = (path / "fp32.pt").read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            (path / "fp32.pt").write_bytes(content[:-100] + bytes(100))
        dist.barrier()
        with pytest.raises(CheckpointError, match=r"on rank [01]: .*fp32\.pt .* is damaged"):
            engine.load_checkpoint(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            (path / "fp32.pt").write_bytes(content)
        dist.barrier()
    assert_same_state(snapshot(engine), before)
    with pytest.raises(CheckpointError, match="no checkpoint 'x'"):
        engine.load_checkpoint(folder, tag="x")
    for tag in ("good", None):  # a folder that only the first host has
        seen = folder if dist.get_rank() == 0 else folder / "of another host"
        with pytest.raises(CheckpointError, match=r"on rank 1: .*is not there for this rank: load"):
            engine.load_checkpoint(seen, tag=tag)
    assert_same_state(snapshot(engine), before)
    assert engine.load_checkpoint(folder / "nothing") == (None, None)


@on_ranks(2)
def test_both_ranks_write_about_half_in_messages_of_any_length(tmp_path: Path) -> None:
    written: list[int] = []
    begin_file = file_writers.begin_file

    def count(path: Path, stored: object) -> Any:
        file = begin_file(path, stored)
        if path.parent.parent.name == "zero":
            written.append(file.sums.num_bytes)
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_writers, "begin_file", count)
        patch.setattr(exchange, "BLOCK_ELEMENTS", 100)
        with engine_of(Run(fractions=(0.9, 0.1), num_blocks=6)) as engine:
            train(engine, 0, 1)
            engine.save_checkpoint(tmp_path)
            saved = snapshot(engine)
            engine.load_checkpoint(tmp_path)
            assert_same(snapshot(engine), saved)
    shares = from_all_ranks(sum(written))
    assert min(shares) > 0.4 * sum(shares)
