"""Files that are summed as they are written, and archives in them, against zlib and zipfile."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import random
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.file_limits import largest_file

from hytrain import _C
from hytrain.checkpoint import archive_writer
from hytrain.checkpoint.archive_writer import ArchiveWriter, LaterTensor, PickledObjects
from hytrain.checkpoint.sums import BLOCK_BYTES, FileSums, SummingFile, sum_file
from hytrain.checkpoint.writer import write_file

MIB = 2**20
BUFFER = 2 * MIB


def test_sums_are_zlibs() -> None:
    chance = random.Random(3)
    content = chance.randbytes(100_000)
    memory = ctypes.create_string_buffer(content, len(content))
    begin = ctypes.addressof(memory)
    lengths = [*range(300), *(chance.randint(0, 90_000) for _ in range(500))]
    for length in lengths:
        at, before = chance.randint(0, 9000), chance.getrandbits(32)
        expected = zlib.crc32(content[at : at + length], before)
        assert _C.crc32(before, begin + at, length) == expected
        assert _C.crc32_portable(before, begin + at, length) == expected
        alone = zlib.crc32(content[at : at + length])
        assert _C.crc32_joined(before, alone, length) == expected


def test_sums_of_long_runs_are_joined() -> None:
    """So many zeros that a length in bits is beyond 32 of them."""
    zeros = bytes(2**25 + 3)
    half = alone = zlib.crc32(zeros)
    for _ in range(40):
        half = zlib.crc32(zeros, half)
    for _ in range(19):
        alone = zlib.crc32(zeros, alone)
    rest = zlib.crc32(zeros)
    for _ in range(20):
        rest = zlib.crc32(zeros, rest)
    assert _C.crc32_joined(alone, rest, 21 * len(zeros)) == half


def _sums(content: bytes) -> FileSums:
    blocks = range(0, len(content), BLOCK_BYTES)
    return FileSums(
        len(content), tuple(zlib.crc32(content[at : at + BLOCK_BYTES]) for at in blocks)
    )


@pytest.mark.parametrize(
    "size",
    [0, 1, 4096, MIB, MIB + 1, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER, 3 * BUFFER + 300_001],
)
def test_a_file_is_what_was_written(size: int, tmp_path: Path) -> None:
    chance = random.Random(size)
    content = chance.randbytes(size)
    with SummingFile(tmp_path / "file") as file:
        at, unsummed = 0, memoryview(content)
        while at < size:
            length = min(size - at, chance.choice([1, 63, 5000, 700_001, 3 * MIB]))
            assert file.append(unsummed[at : at + length]) == zlib.crc32(content[at : at + length])
            at += length
            assert file.tell() == at
        assert file.sums == _sums(content)
        file.sync()
        assert (tmp_path / "file").read_bytes() == content
    assert file.sums == sum_file(tmp_path / "file") == _sums(content)


def test_a_file_goes_on_behind_a_sync(tmp_path: Path) -> None:
    """Where it was synced no direct write can begin."""
    parts = [random.Random(size).randbytes(size) for size in (BUFFER + 999, 2 * BUFFER, 5)]
    with SummingFile(tmp_path / "file") as file:
        for part in parts:
            file.write(part)
            file.sync()
    content = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == content
    assert file.sums == _sums(content)


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
        assert FileSums(file.num_bytes, tuple(file.sums())) == _sums(content)
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
        file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.write(b"x")


def test_large_files_stay_out_of_the_page_cache(tmp_path: Path) -> None:
    """Where the file system has direct writes."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    path = tmp_path / "file"
    with SummingFile(path) as file:
        file.write(bytes(8 * BUFFER + 700))
        file.sync()
    found = subprocess.run(["fincore", "-bno", "res", str(path)], capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip("there is no fincore")
    assert int(found.stdout) <= 64 * 1024


class _Expected:
    """The same records by the standard library, which cannot go back in its stream either."""

    def __init__(self) -> None:
        self.stream = _Stream()
        self._zip = zipfile.ZipFile(self.stream, "w", zipfile.ZIP_STORED)

    def write(self, name: str, content: bytes) -> None:
        info = zipfile.ZipInfo(f"archive/{name}")
        info.file_size = len(content)
        pad = -(len(self.stream.content) + 30 + len(info.filename.encode()) + 20 + 4) % 64
        info.extra = struct.pack("<HH", 0x4246, pad) + b"Z" * pad
        with self._zip.open(info, "w", force_zip64=True) as record:
            record.write(content)

    def close(self) -> bytes:
        self._zip.close()
        return bytes(self.stream.content)


class _Stream(io.RawIOBase):
    def __init__(self) -> None:
        super().__init__()
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.content += data
        return len(data)


def test_an_archive_is_the_standard_librarys(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "blöcke": torch.arange(70_000), "none": torch.empty(0)}
    later = {key: LaterTensor(key, tuple(t.shape), t.dtype) for key, t in tensors.items()}
    pickled = PickledObjects(later)
    expected = _Expected()
    with SummingFile(tmp_path / "file.pt") as file:
        archive = ArchiveWriter(file)
        archive.write_objects(pickled.content)
        for name, content in (
            ("data.pkl", pickled.content),
            ("byteorder", sys.byteorder.encode()),
        ):
            expected.write(name, content)
        for key, tensor in tensors.items():
            archive.write_elements(key, tensor)
            expected.write(f"data/{key}", tensor.numpy().tobytes())
        archive.close()
        expected.write("version", b"3\n")
    assert (tmp_path / "file.pt").read_bytes() == expected.close()
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "file.pt", mmap=mmap)
        assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())


def test_lengths_beyond_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numbers do not fit, which is made to be early, they are where readers look then."""
    monkeypatch.setattr(archive_writer, "_LARGE", 1000)
    tensors = {str(i): torch.randn(100 + 300 * (i % 2)) for i in range(9)}
    write_file(tmp_path / "file.pt", {"a": tensors})
    loaded = torch.load(tmp_path / "file.pt")["a"]
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
    with zipfile.ZipFile(tmp_path / "file.pt") as found:
        assert found.testzip() is None
    # Those are in the directory's extra fields.
    content = (tmp_path / "file.pt").read_bytes()
    assert content.count(struct.pack("<HHQQ", 1, 24, 1600, 1600)) == 4
    assert content.count(b"PK\6\6") == content.count(b"PK\6\7") == 1


def test_tensors_without_memory_know_where_they_are(tmp_path: Path) -> None:
    """A load to the device "meta", for which torch looks the storages' places up."""
    file = tmp_path / "file.pt"
    expected = {"one": torch.arange(5.0), "two": torch.arange(300)}
    write_file(file, expected)
    content = file.read_bytes()
    for name, tensor in torch.load(file, map_location="meta").items():
        assert tensor.is_meta
        begin = tensor.untyped_storage()._checkpoint_offset
        size = expected[name].nbytes
        found = torch.frombuffer(bytearray(content[begin : begin + size]), dtype=tensor.dtype)
        assert torch.equal(found, expected[name])


def test_objects_are_torchs(tmp_path: Path) -> None:
    """Views of one storage, transposed ones, parameters, numbers: as torch.save has them."""
    base = torch.randn(6, 7)
    objects = {
        "views": [base[1:3], base.t(), base],
        "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "rest": (1, "x", {2}, torch.tensor(3.0), torch.Size([2])),
    }
    write_file(tmp_path / "mine.pt", objects)
    torch.save(objects, tmp_path / "torchs.pt")
    mine, torchs = (
        torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in ("mine", "torchs")
    )
    for one, other in zip(mine["views"], torchs["views"], strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.untyped_storage().data_ptr() == mine["views"][0].untyped_storage().data_ptr()
    assert type(mine["parameter"]) is torch.nn.Parameter
    assert torch.equal(mine["parameter"], torchs["parameter"])
    assert mine["rest"] == torchs["rest"]
