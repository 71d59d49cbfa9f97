"""Tensors of a file: what copies them fills its target with bytes that were checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hytrain.checkpoint.archive import Archive
from hytrain.checkpoint.checked_file import CheckedFile
from hytrain.checkpoint.pickles import load_archive
from hytrain.checkpoint.sums import BLOCK_BYTES
from hytrain.checkpoint.universal import pack_tensor
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
