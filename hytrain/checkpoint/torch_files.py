"""Files of ``torch.save``, read without running code that they name (``inert.py``)."""

from __future__ import annotations

import pickle
import threading
import zipfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from hytrain.checkpoint.inert import Unpickler
from hytrain.errors import CheckpointError, DamagedCheckpointError
from hytrain.kernels.host_limits import describe_free_memory
from hytrain.kernels.host_memory import is_out_of_host_memory


def load(path: str | Path, *, mmap: bool = True, trusted: bool = False) -> Any:
    """Calls ``torch.load`` on the CPU; ``trusted``: makes objects of all classes, which runs code.

    ``mmap``: tensors' elements are mapped, and read when they are used.

    Raises:
        CheckpointError: it is not what ``torch.save`` writes, is damaged, or cannot be read.
    """
    try:
        module: Any = pickle
        if not trusted:
            own = {"record_bytes": _record_bytes(Path(path))}
            kind = type("Unpickler", (Unpickler,), own)
            module = SimpleNamespace(Unpickler=kind, __name__=__name__)
        return torch.serialization.load(
            path, map_location="cpu", pickle_module=module, weights_only=False, mmap=mmap
        )
    except Exception as error:  # a file may raise anything
        raise unreadable(path, error) from error


def load_states(path: Path, *, trusted: bool = False) -> Mapping[str, Any]:
    """Does :func:`load` for a file whose contents have names.

    Raises:
        DamagedCheckpointError: they have none.
        CheckpointError: it cannot be read.
    """
    stored = load(path, trusted=trusted)
    if not isinstance(stored, Mapping):
        raise DamagedCheckpointError(
            f"{path} holds an object of type {type(stored).__name__} where a checkpoint has a "
            "mapping of names: load another tag"
        )
    return cast("Mapping[str, Any]", stored)


IS_MISSING = "is missing: the checkpoint is incomplete or another tool's; load another tag"


def unreadable(path: object, error: Exception) -> CheckpointError:
    """The error for a file that is missing, not what ``torch.save`` writes, or unreadable."""
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path} {IS_MISSING}")
    why = "the file is damaged or not torch's; load another tag"
    if is_out_of_host_memory(error):
        why = (
            f"the host has no memory for it; {describe_free_memory()}: free some, or use more "
            "ranks or hosts"
        )
    elif isinstance(error, OSError):
        why = "mend the file system, or load another tag"
    return CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}): {why}")


def _record_bytes(path: Path) -> dict[str, int]:
    """Key of a storage -> its bytes in the file. torch's reader trusts the pickle's number."""
    num_bytes = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
    # torch's reader ignores the case of names.
    names = {info.filename.lower() for info in infos}
    if len(names) < len(infos):
        raise zipfile.BadZipFile("it has two records of one name")
    check_records(infos, num_bytes)
    return {info.filename.partition("/data/")[2]: info.file_size for info in infos}


def check_records(infos: Iterable[zipfile.ZipInfo], num_bytes: int) -> None:
    """Raises BadZipFile if records lack objects, are compressed or share the file's bytes."""
    infos = list(infos)
    if not any(info.filename.endswith("/data.pkl") for info in infos):
        raise zipfile.BadZipFile("it has no data.pkl")
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise zipfile.BadZipFile("its records are compressed")
    if sum(info.file_size for info in infos) > num_bytes:
        raise zipfile.BadZipFile("its records have more bytes than the file")


@contextmanager
def in_place_of_torch_load() -> Generator[None]:
    """Replaces ``torch.load`` by :func:`load` in this thread, for the length of the block."""
    original, thread = torch.load, threading.get_ident()

    def read(file: Any, *arguments: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return original(file, *arguments, **named)
        return load(file, mmap=bool(named.get("mmap")))

    torch.load = read
    try:
        yield
    finally:
        torch.load = original
