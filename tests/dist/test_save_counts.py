"""What a save costs as ranks and models grow: files, calls to the file system, messages, counted.

``HYTRAIN_ALL_COUNTS=1 pytest -s tests/dist/test_save_counts.py`` prints those of docs/limits.md.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from harness import RankPools
from support.resume import Run, engine_of, train
from transformers import AutoModelForCausalLM, LlamaConfig

from hytrain.checkpoint.gather import ParameterPlace, list_parameters, plan_rounds
from hytrain.config import HyTrainConfig
from hytrain.optimizer.model_cut import cut_model

pytestmark = pytest.mark.timeout(240)

SHAPES = {"8 B": (32, 4096, 14336), "70 B": (80, 8192, 28672), "400 B": (126, 16384, 53248)}
"""Blocks, width and inner width of Llama 3."""
COUNTED = [("8 B", 8), ("8 B", 256), ("70 B", 8), ("70 B", 256), ("400 B", 256)]
if "HYTRAIN_ALL_COUNTS" in os.environ:  # some minutes
    COUNTED = [(shape, ranks) for shape in SHAPES for ranks in (8, 64, 256, 512, 4096)]
FIXED_FILES = 8
"""Of a checkpoint, whatever the model."""
CALLS = ("mkdir", "open", "fsync", "stat", "rename", "replace", "unlink", "scandir", "rmdir")


def _places(shape: str, ranks: int) -> tuple[list[ParameterPlace], int]:
    blocks, width, inner = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=128256, hidden_size=width, intermediate_size=inner, num_hidden_layers=blocks,
        num_attention_heads=width // 128, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    groups = {id(parameter): 0 for parameter in model.parameters()}
    layers = cut_model(model, groups, HyTrainConfig(), ranks, None)
    kinds = SimpleNamespace(kinds=("fp32", "exp_avg", "exp_avg_sq"))
    trained = [
        SimpleNamespace(layout=part.layout, sizes=part.sizes, form=kinds)
        for layer in layers
        for part in layer.trained
    ]
    return list_parameters(cast(Any, trained)), len(trained)


@dataclass(frozen=True)
class Counts:
    """Of a save.

    Attributes:
        parameters, files: of the model, and of its checkpoint.
        layers: whose state each rank has a piece of; large blocks are several.
        messages: between ranks, of all of them.
        of_a_rank: that the busiest one sends.
        peers: other ranks that one sends to, at most.
        rounds: after which all have got what they write.
    """

    parameters: int
    files: int
    layers: int
    messages: int
    of_a_rank: int
    peers: int
    rounds: int


def count_save(shape: str, ranks: int) -> Counts:
    places, layers = _places(shape, ranks)
    sent: Counter[int] = Counter()
    peers: dict[int, set[int]] = {}
    rounds = plan_rounds(places, ranks)
    for deliveries in rounds:
        for delivery in deliveries:
            for piece in delivery.place.pieces:
                # Three state tensors to who writes them, the training copy to rank 0.
                for destination, number in ((delivery.destination, 3), (0, 1)):
                    if destination != piece.rank and (number == 3 or delivery.destination != 0):
                        sent[piece.rank] += number
                        peers.setdefault(piece.rank, set()).add(destination)
    return Counts(
        len(places), 4 * len(places) + FIXED_FILES, layers, sum(sent.values()), max(sent.values()),
        max(map(len, peers.values())), len(rounds),
    )  # fmt: skip


def test_messages_grow_with_ranks() -> None:
    """Each rank has a piece of every layer: of so many, and no more, messages a save is made."""
    print("\nmodel, ranks: parameters, files, messages, most of a rank, its peers, rounds")
    for shape, ranks in COUNTED:
        found = count_save(shape, ranks)
        print(f"{shape}, {ranks}: {found}")
        assert found.messages <= 4 * (found.layers * ranks + found.parameters)
        assert found.of_a_rank <= 4 * (found.layers + found.parameters)
        assert found.peers <= min(ranks, found.layers + found.parameters)
    assert count_save("70 B", 256).files < 3000


@contextmanager
def _counted(folder: Path) -> Iterator[Counter[str]]:
    """Calls to the file system that name something in the folder, or a file that is open."""
    asked: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:

            def counted(*arguments: Any, _name: str = name, **named: Any) -> Any:
                where = arguments[0] if arguments else named.get("path", "")
                if isinstance(where, int) or str(folder) in os.fspath(where):
                    asked[_name] += 1
                return original[_name](*arguments, **named)

            patch.setattr(os, name, counted)
        yield asked


original = {name: getattr(os, name) for name in CALLS}


@dataclass(frozen=True)
class Asked:
    """Of one rank: calls to the file system by name, and collectives."""

    calls: dict[str, int]
    collectives: int


def _measure(folder: str, blocks: int) -> tuple[int, int, dict[str, Asked]]:
    """Trained parameters, files of the checkpoint, and what a step, a save and a load ask for."""
    found: dict[str, Asked] = {}
    with engine_of(Run(stage=3, num_blocks=blocks)) as engine:
        train(engine, 0, 2)
        for name, act in (
            ("step", lambda: train(engine, 2, 3)),
            ("save", lambda: engine.save_checkpoint(folder, tag="it")),
            ("load", lambda: engine.load_checkpoint(folder, tag="it")),
        ):
            watch = engine.optimizer.collectives.watch
            before = 0 if watch is None else watch._history.issued
            with _counted(Path(folder)) as asked:
                act()
            after = 0 if watch is None else watch._history.issued
            found[name] = Asked(dict(asked), after - before)
        trained = sum(p.requires_grad for p in engine.module.parameters())
        files = sum(len(names) for _, _, names in os.walk(Path(folder) / "it"))
        return trained, files, found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_files_and_calls_grow_with_parameters(
    num_ranks: int, ranks: RankPools, tmp_path: Path
) -> None:
    """And not with ranks; but each rank opens the files that it loads from."""
    saved: list[tuple[int, int, int]] = []
    for blocks in (2, 6):
        per_rank = ranks(num_ranks).run(_measure, str(tmp_path / str(blocks)), blocks)
        parameters, files, asked = per_rank[0]
        print(f"\n{num_ranks} ranks, {parameters} parameters, {files} files")
        print(f"rank 0: {asked}; the last one's {per_rank[-1][2]}")
        saves = [sum(found["save"].calls.values()) for _, _, found in per_rank]
        loads = [sum(found["load"].calls.values()) for _, _, found in per_rank]
        saved.append((parameters, files, sum(saves)))
        assert max(loads) <= 30 * parameters + 60
        assert max(found["save"].collectives for _, _, found in per_rank) <= 8 * parameters + 20
        assert asked["load"].collectives <= 4 * blocks + 24
        assert asked["step"].collectives <= 12 * blocks + 24
        assert not asked["step"].calls
    (few, files_few, calls_few), (many, files_many, calls_many) = saved
    assert files_many - files_few == 4 * (many - few)
    assert files_few <= 4 * few + FIXED_FILES
    assert calls_many - calls_few <= 20 * (many - few)
    assert calls_few <= 20 * few + 40 + 20 * num_ranks
