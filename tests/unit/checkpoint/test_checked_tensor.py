"""Tensors of a file: what copies them fills its target with bytes that were checked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.damage import damaged, flip

from hytrain.checkpoint.archive import Archive
from hytrain.checkpoint.checked_file import CheckedFile
from hytrain.checkpoint.file_checks import CheckpointFiles
from hytrain.checkpoint.pickles import load_archive
from hytrain.checkpoint.sums import BLOCK_BYTES
from hytrain.checkpoint.universal import CheckpointPaths, pack_tensor
from hytrain.checkpoint.writer import write_file
from hytrain.errors import CheckpointError

ELEMENTS = 9 * BLOCK_BYTES // 4 + 77


def test_a_copy_is_what_was_written_and_damage_is_found(tmp_path: Path) -> None:
    """Of many blocks, which several threads read; straight to the target, and over a copy."""
    whole = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "fp32.pt"
    sums = write_file(path, pack_tensor(whole))

    def stored() -> torch.Tensor:
        return load_archive(Archive(CheckedFile(path, sums)))["param"]

    target = torch.zeros(ELEMENTS + 2)
    part = target[1:-1]
    version = part._version
    assert part.copy_(stored()) is part
    assert type(part) is torch.Tensor
    assert torch.equal(part, whole)
    assert not target[0]
    assert not target[-1]
    assert part._version > version  # autograd and saves beside training see that it was written
    assert torch.equal(torch.zeros(1001).copy_(stored()[5:1006]), whole[5:1006])
    assert torch.equal(torch.zeros(ELEMENTS).half().copy_(stored()), whole.half())
    with pytest.raises(RuntimeError, match="leaf Variable"):
        torch.zeros(ELEMENTS, requires_grad=True).copy_(stored())
    left = stored()
    with path.open("r+b") as file:
        file.seek(5 * BLOCK_BYTES + 3)
        file.write(b"\x55\xaa\x55\xaa")
    with pytest.raises(CheckpointError, match=f"bytes {5 * BLOCK_BYTES} to {6 * BLOCK_BYTES}"):
        torch.zeros(ELEMENTS).copy_(left)


def test_any_range_of_a_file_is_right_or_refused(tmp_path: Path) -> None:
    """Bitwise, at random places; a flipped bit is refused by exactly what reads its block."""
    draw = random.Random(3)
    content = draw.randbytes(5 * BLOCK_BYTES + 1234)
    path = tmp_path / "file"
    sums = write_file(path, content)
    file = CheckedFile(path, sums)
    ranges = [sorted(draw.sample(range(len(content) + 1), 2)) for _ in range(40)]
    edges = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES, len(content)]
    ranges += [[a, b] for a in edges for b in edges if a <= b]
    for begin, end in ranges:
        assert file.read(begin, end - begin).numpy().tobytes() == content[begin:end]
        if draw.random() < 0.3:
            file.set_aside()
    with pytest.raises(CheckpointError, match="ends before byte"):
        file.read(1, len(content))
    for _ in range(4):
        bit = draw.randrange(8 * len(content))
        block = bit // 8 // BLOCK_BYTES
        with damaged(path, flip(bit)):
            for begin, end in ranges:
                has_block = (
                    begin < end and begin // BLOCK_BYTES <= block <= (end - 1) // BLOCK_BYTES
                )
                file.set_aside()  # what it has read and checked before stays right
                if has_block:
                    with pytest.raises(CheckpointError, match=f"bytes {block * BLOCK_BYTES} to"):
                        file.read(begin, end - begin)
                else:
                    file.read(begin, end - begin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
def test_a_copy_by_pieces_is_torchs(dtype: torch.dtype, tmp_path: Path) -> None:
    """To another dtype, of a part that begins anywhere; damage in the last piece is refused."""
    whole = torch.randn(3 * BLOCK_BYTES, generator=torch.Generator().manual_seed(1))
    path = tmp_path / "fp32.pt"
    sums = write_file(path, pack_tensor(whole))
    files = CheckpointFiles(CheckpointPaths(tmp_path), {path.name: sums})
    assert files.prepare(path)["param"].shape == whole.shape
    stored = files.take(path)["param"]
    for begin, end in (
        (0, len(whole)),
        (1, len(whole) - 1),
        (777, 778),
        (BLOCK_BYTES, 2 * BLOCK_BYTES),
    ):
        target = torch.full((end - begin + 2,), 7.0, dtype=dtype)
        version = target._version
        target[1:-1].copy_(stored[begin:end])
        assert torch.equal(target[1:-1], whole[begin:end].to(dtype))
        assert target[0] == target[-1] == 7
        assert target._version > version
    with damaged(path, flip(8 * (12 * BLOCK_BYTES - 9))), pytest.raises(CheckpointError):
        torch.zeros(len(whole), dtype=dtype).copy_(files.load(path)["param"])
