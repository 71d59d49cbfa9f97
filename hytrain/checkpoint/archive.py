"""The files that ``torch.save`` writes: archives of records, read from checked bytes.

<root>/data.pkl     the objects, pickled; where a tensor's elements are is said by a record's key
<root>/data/<key>   the elements
<root>/byteorder    "little" or "big"

torch's own reader looks at no checksum, and returns elements that were never checked.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hytrain.checkpoint.checked_file import CheckedFile, CheckedStream
from hytrain.checkpoint.inert import check_records
from hytrain.checkpoint.sums import BLOCK_BYTES
from hytrain.errors import CheckpointError

_PICKLE = "data.pkl"
_HEADER = struct.Struct("<4s22xHH")  # of a record: magic, ..., lengths of its name and of the rest


@dataclass(frozen=True, slots=True)
class Record:
    """``[begin, end)`` of a record's bytes in its file."""

    begin: int
    end: int


class Archive:
    """The records of a file."""

    def __init__(self, file: CheckedFile) -> None:
        """
        Raises:
            CheckpointError: it is not what ``torch.save`` writes, or has changed.
            OSError: it cannot be read.
        """
        self.file = file
        try:
            self._zip = zipfile.ZipFile(io.BufferedReader(CheckedStream(file), 4096))
            check_records(self._zip.infolist(), file.num_bytes)
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # what zipfile makes of a damaged directory is manifold
            raise _unreadable(file.path, error) from error
        self._infos = {info.filename: info for info in self._zip.infolist()}
        pickles = [name for name in self._infos if name.endswith(f"/{_PICKLE}")]
        if not pickles:
            raise _unreadable(file.path, f"it has no {_PICKLE}")
        self._root = min(pickles, key=len).removesuffix(_PICKLE)
        data = self._root + "data/"
        self.record_bytes = {
            name.removeprefix(data): info.file_size
            for name, info in self._infos.items()
            if name.startswith(data)
        }
        """Key of a storage -> bytes of its elements."""
        order = self._root + "byteorder"
        if order in self._infos and self._bytes(order).decode("latin-1") != sys.byteorder:
            raise _unreadable(file.path, "its numbers are in another machine's byte order")

    def pickled(self) -> bytes:
        """The objects, with what says where tensors' elements are."""
        return self._bytes(self._root + _PICKLE)

    def elements(self, key: str) -> Record:
        """Where a storage's elements are."""
        return self._record(f"{self._root}data/{key}")

    def bad_records(self) -> list[str]:
        """Records that are not what was written by their own checksums: keys, or other names.

        Returns:
            ``"data/<key>"`` for elements. Empty where all are right, or none has a checksum.
        """
        if not any(info.CRC for info in self._infos.values()):
            return []  # torch.serialization.set_crc32_options(False)
        return [name.removeprefix(self._root) for name in self._infos if not self._is_right(name)]

    def _is_right(self, name: str) -> bool:
        try:
            with self._zip.open(name) as record:
                while record.read(BLOCK_BYTES):
                    pass
        except OSError:
            raise
        except Exception:  # what zipfile makes of damaged headers is manifold
            return False
        return True

    def _bytes(self, name: str) -> bytes:
        record = self._record(name)
        content = bytearray(record.end - record.begin)
        self.file.read_into(record.begin, memoryview(content))
        return bytes(content)

    def _record(self, name: str) -> Record:
        info = self._infos.get(name)
        if info is None:
            raise _unreadable(self.file.path, f"it has no record {name}")
        header = bytearray(_HEADER.size)
        self.file.read_into(info.header_offset, memoryview(header))
        magic, name_bytes, more_bytes = _HEADER.unpack(header)
        begin = info.header_offset + _HEADER.size + name_bytes + more_bytes
        end = begin + info.file_size
        if magic != b"PK\x03\x04" or end > self.file.num_bytes:
            raise _unreadable(self.file.path, f"its record {name} is not where it should be")
        return Record(begin, end)


def _unreadable(path: Path, why: object) -> CheckpointError:
    text = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
    return CheckpointError(
        f"{path} cannot be read ({text}): the file is damaged or not torch's; load another tag"
    )
