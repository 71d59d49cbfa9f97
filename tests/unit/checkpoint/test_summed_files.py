"""Files that are summed as they are written, and archives in them, against zlib and torch."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import subprocess
import zipfile
import zlib
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.damage import sums_of
from support.file_limits import largest_file

from hytrain import _C
from hytrain.checkpoint.archive_writer import ArchiveWriter, LaterTensor, PickledObjects
from hytrain.checkpoint.summed_files import FileSums, SummingFile, write_file

MIB = 2**20
BUFFER = 2 * MIB


@pytest.mark.parametrize(
    "size",
    [0, 1, 4096, MIB, MIB + 1, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER, 3 * BUFFER + 300_001],
)
def test_a_file_is_what_was_written(size: int, tmp_path: Path) -> None:
    chance = random.Random(size)
    content = chance.randbytes(size)
    with closing(SummingFile(tmp_path / "file")) as file:
        at, unsummed = 0, memoryview(content)
        while at < size:
            length = min(size - at, chance.choice([1, 63, 5000, 700_001, 3 * MIB]))
            file.write(unsummed[at : at + length])
            at += length
        file.sync()
        assert (tmp_path / "file").read_bytes() == content
    assert file.sums == sums_of(content)


def test_without_direct_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory file takes none of them, nor may it be asked to write back."""
    content = random.Random(1).randbytes(70 * MIB + 17)
    descriptor = os.memfd_create("file")
    try:
        file = _C.SummedFile(descriptor)
        memory = ctypes.create_string_buffer(content, len(content))
        assert file.write(ctypes.addressof(memory), len(content)) == zlib.crc32(content)
        file.flush()
        assert os.pread(descriptor, len(content), 0) == content
        assert FileSums(file.num_bytes, tuple(file.sums())) == sums_of(content)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("limit", [100, BUFFER, 2 * BUFFER + 5000])
def test_what_does_not_fit_is_said(limit: int, tmp_path: Path) -> None:
    """At the limit a write is cut short, and the next one refused."""
    tensor = torch.zeros(3 * BUFFER, dtype=torch.uint8)
    with largest_file(limit), pytest.raises(OSError, match="File too large") as raised:
        write_file(tmp_path / "a.pt", {"param": tensor})
    assert raised.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())
    write_file(tmp_path / "a.pt", {"param": tensor})
    assert torch.load(tmp_path / "a.pt")["param"].numel() == tensor.numel()


def test_a_failed_end_is_said(tmp_path: Path) -> None:
    file = SummingFile(tmp_path / "file")
    file.write(b"x" * 200)
    with largest_file(100), pytest.raises(OSError, match="File too large"):
        file.end()
    file.close()
    closed = SummingFile(tmp_path / "other")
    closed.close()
    closed.write(b"x")  # as the destructor of torch's writer does
    with pytest.raises(ValueError, match="is closed"):
        closed.check()


def test_large_files_stay_out_of_the_page_cache(tmp_path: Path) -> None:
    """Where the file system has direct writes."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    path = tmp_path / "file"
    with closing(SummingFile(path)) as file:
        file.write(bytes(8 * BUFFER + 700))
        file.sync()
    if shutil.which("fincore") is None:
        pytest.skip("there is no fincore")
    command = ["fincore", "-bno", "res", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) <= 64 * 1024


def test_elements_may_follow_in_any_order(tmp_path: Path) -> None:
    """Views, tensors without elements, several of one storage; later changes are not seen."""
    base = torch.randn(6, 7)
    tensors = {
        **{"0": torch.randn(3, 5), "blöcke": torch.arange(70_000), "none": torch.empty(0)},
        **{"view": base[1:3], "turned": base.t(), "b": torch.ones(3, dtype=torch.bfloat16)},
    }
    later = {key: LaterTensor(key, tuple(t.shape), t.dtype) for key, t in tensors.items()}
    objects = {**later, "tied": later["0"], "rest": (1, {2}), "here": [base, base[2:]]}
    pickled = PickledObjects(objects)
    with closing(SummingFile(tmp_path / "file.pt")) as file:
        archive = ArchiveWriter(file, pickled.content)
        for key, tensor in reversed([*tensors.items(), *pickled.storages.items()]):
            archive.write_elements(key, tensor)
        base.zero_()
        archive.close()
        file.end()
    assert file.sums == sums_of((tmp_path / "file.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "file.pt") as found:
        assert found.testzip() is None
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "file.pt", mmap=mmap)
        assert loaded["rest"] == (1, {2})
        one, other = loaded["here"]
        assert one.any()
        assert other.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
        assert loaded["tied"].data_ptr() == loaded["0"].data_ptr()
        for key in ("0", "blöcke", "none", "b"):
            assert torch.equal(loaded[key], tensors[key])
