"""Text on disk -> one cached array of token ids.

A source is a file of text, or of JSON lines with the text in one field (C4's shards), plain or
gzipped. Documents are read one at a time, tokenised, and appended to a file that training maps
into memory, so a corpus may be far larger than the host's memory. The same files and tokenizer
give the same array, in a fixed order, on every machine.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_TEXT = (".txt", ".md", ".rst", ".py", ".txt.gz")
_FORMAT_VERSION = 1


class DataError(ValueError):
    """``--data``, ``--tokenizer`` or the data's position cannot be used."""


class Tokenizer(Protocol):
    """What the cache needs of a tokenizer."""

    vocab_size: int
    """Number of different ids: every id is smaller."""
    end_of_document: int
    """The id that is put after each document."""
    identity: str
    """Changes whenever the ids of some text would; part of the cache's name."""

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return the ids of ``text``, without special ones; shape [num_tokens]."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8, and id 256 after each document; nothing to download."""

    vocab_size = 257
    end_of_document = 256
    identity = "bytes-1"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return the bytes of ``text``; shape [num_bytes]."""
        # A lone surrogate, which JSON may hold, has no UTF-8 form: it becomes "?".
        data = text.encode("utf-8", errors="replace")
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)


class HFTokenizer:
    """A tokenizer of transformers from a local folder; its end-of-text id ends documents."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        if not path.is_dir():
            raise DataError(
                f"--tokenizer {path} is not a folder: give the folder that holds a "
                "tokenizer.json, or leave the option out for one token a byte"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(f"--tokenizer {path} cannot be loaded: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f'--tokenizer {path} has no end-of-text token: set "eos_token" in its '
                "tokenizer_config.json"
            )
        self.vocab_size: int = len(self._tokenizer)
        self.end_of_document: int = self._tokenizer.eos_token_id
        digest = hashlib.sha256()
        for file in sorted(path.iterdir()):
            if file.suffix in {".json", ".txt", ".model"}:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        self.identity = f"hf-{digest.hexdigest()}"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Return the ids of ``text`` without special ones; shape [num_tokens]."""
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)


def make_tokenizer(path: Path | None) -> Tokenizer:
    """Load the tokenizer of a folder; None is one token a byte."""
    return ByteTokenizer() if path is None else HFTokenizer(path)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The tokens of all documents, one after the other."""

    tokens: TokenArray
    """Shape [num_tokens], mapped from the cache's file, read only."""
    digest: str
    """SHA-256 of the tokens: two corpora with the same digest are the same."""


def standard_library() -> list[Path]:
    """List the source files of this Python's standard library, its own tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    return [
        file
        for file in sorted(root.rglob("*.py"))
        if skipped.isdisjoint(file.relative_to(root).parts)
    ]


def find_sources(data: Sequence[Path]) -> list[Path]:
    """List the files that ``--data`` names, folders searched, in a fixed order.

    Args:
        data: files, and folders that are searched for text and JSON lines; none means the
            standard library's own source files.

    Raises:
        DataError: a path that is not there, or a folder without a usable file.
    """
    if not data:
        files = standard_library()
        if not files:
            raise DataError(
                f"no source files in {sysconfig.get_paths()['stdlib']}, the standard library's "
                "folder: give text files with --data"
            )
        return files
    files = []
    for path in data:
        if path.is_dir():
            known = (*_TEXT, *_JSON_LINES)
            found = sorted(f for f in path.rglob("*") if f.is_file() and f.name.endswith(known))
            if not found:
                raise DataError(
                    f"--data {path} holds no file that ends in {', '.join(known)}: name the "
                    "files themselves, any other name is read as text"
                )
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"--data {path} does not exist")
    return files


def read_documents(path: Path, text_field: str = "text") -> Iterator[str]:
    """Yield the documents of one file: each JSON line's text, or the whole of a text file.

    Raises:
        DataError: a line that is not a JSON object with a string in ``text_field``, or a
            broken gzip file.
    """
    try:
        with _open_text(path) as file:
            if path.name.endswith(_JSON_LINES):
                yield from _json_lines(file, path, text_field)
            else:
                yield file.read()
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error


def _open_text(path: Path) -> IO[str]:
    # A stray byte in gigabytes of crawled text must not end a job, so it becomes U+FFFD.
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _json_lines(file: IO[str], path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number} is not JSON ({error}): each line must be one object"
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
            seen = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f'{path}, line {number} has no string in its field "{text_field}" (seen: '
                f"{seen}): name the field with --text-field"
            )
        yield record[text_field]


def load_corpus(
    sources: Sequence[Path], tokenizer: Tokenizer, cache_dir: Path, *, text_field: str = "text"
) -> Corpus:
    """Map the tokens of ``sources`` from the cache, filling it first if it lacks them.

    The cache's entry is named by each file's path, size and time of change, the tokenizer and
    the field. Two processes may fill the same entry at once: the first to finish is kept.
    """
    entry = cache_dir / _cache_key(sources, tokenizer, text_field)
    if not entry.is_dir():
        _fill_cache(entry, sources, tokenizer, text_field)
    meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    tokens: TokenArray = np.memmap(entry / "tokens.bin", dtype=meta["dtype"], mode="r")
    return Corpus(tokens=tokens, digest=meta["sha256"])


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank tells the others of its corpus: its digest, or what went wrong."""

    digest: str | None = None
    failure: str | None = None


def load_together(
    load: Callable[[], Corpus],
    ask_all: Callable[[LoadReport], Sequence[LoadReport]],
    *,
    is_first: bool,
) -> Corpus:
    """Load on all ranks: first those that fill a cache, then the others.

    Args:
        load: this rank's corpus.
        ask_all: gives every rank's report, in rank order; a collective.
        is_first: whether this rank is one of those that fill a cache.

    Raises:
        DataError: some rank could not load, or the ranks' texts differ; raised on all.
    """
    found: Corpus | None = None
    for turn in (True, False):
        report = LoadReport(found.digest if found else None)
        if is_first is turn:
            try:
                found = load()
                report = LoadReport(found.digest)
            except DataError as error:
                # The others wait to hear of it.
                report = LoadReport(failure=str(error))
        reports = ask_all(report)
        for rank, one in enumerate(reports):
            if one.failure is not None:
                raise DataError(f"{f'rank {rank}: ' if rank else ''}{one.failure}")
    digests = [one.digest for one in reports]
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise DataError(
            f"ranks 0 and {other} have different texts or tokenizers, although --data is the same: "
            "hosts must have the same files (the default, Python's library, differs between "
            "versions); give --data on a folder that they share"
        )
    assert found is not None
    return found


def _cache_key(sources: Sequence[Path], tokenizer: Tokenizer, text_field: str) -> str:
    digest = hashlib.sha256(f"{_FORMAT_VERSION}\0{tokenizer.identity}\0{text_field}".encode())
    for path in sources:
        stat = path.stat()
        digest.update(f"\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def _fill_cache(
    entry: Path, sources: Sequence[Path], tokenizer: Tokenizer, text_field: str
) -> None:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    end = np.asarray([tokenizer.end_of_document], dtype=dtype).tobytes()
    entry.parent.mkdir(parents=True, exist_ok=True)
    logger.info("tokenising %d files into %s", len(sources), entry)
    # Renamed when whole, so that a killed job leaves nothing that looks like a corpus.
    partial = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    try:
        digest = hashlib.sha256()
        num_bytes = 0
        with (partial / "tokens.bin").open("wb") as file:
            for path in sources:
                for text in read_documents(path, text_field):
                    data = tokenizer.encode(text).astype(dtype).tobytes() + end
                    num_bytes += file.write(data)
                    digest.update(data)
        if num_bytes == 0:
            raise DataError(f"the {len(sources)} files of --data hold no document")
        meta = {"dtype": np.dtype(dtype).name, "sha256": digest.hexdigest()}
        (partial / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        partial.rename(entry)
    except OSError:
        if not entry.is_dir():  # a rename fails where another process was first, which is fine
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def default_cache_dir() -> Path:
    """Return the user's cache folder for tokenised corpora; ``XDG_CACHE_HOME`` moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hytrain" / "train_lm"
