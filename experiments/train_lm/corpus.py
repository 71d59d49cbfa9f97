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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

_JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_TEXT = (".txt", ".md", ".rst", ".py", ".txt.gz")
_FORMAT_VERSION = 1


class DataError(ValueError):
    """``--data``, ``--tokenizer`` or the data's position cannot be used."""


class ByteTokenizer:
    """One token a byte of UTF-8, and id 256 after each document; nothing to download."""

    vocab_size = 257
    """Number of different ids: every id is smaller."""
    end_of_document = 256
    identity = "bytes-1"
    """Part of the cache's name; changes whenever the ids of some text would."""

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Returns the bytes of ``text``; shape [num_bytes]."""
        # A lone surrogate, which JSON may hold, has no UTF-8 form: it becomes "?".
        data = text.encode("utf-8", errors="replace")
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)


class HFTokenizer(ByteTokenizer):
    """A tokenizer of transformers from a local folder; its end-of-text id ends documents."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                f"--tokenizer {path} cannot be loaded: {error}; give the folder that holds a "
                "tokenizer.json, or leave the option out for one token a byte"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f'--tokenizer {path} has no end-of-text token: set "eos_token" in its '
                "tokenizer_config.json"
            )
        self.vocab_size = len(self._tokenizer)
        self.end_of_document = self._tokenizer.eos_token_id
        digest = hashlib.sha256()
        for file in sorted(path.iterdir()):
            if file.suffix in {".json", ".txt", ".model"}:
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        self.identity = f"hf-{digest.hexdigest()}"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Returns the ids of ``text`` without special ones; shape [num_tokens]."""
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)


def make_tokenizer(path: Path | None) -> ByteTokenizer:
    """Loads the tokenizer of a folder; None: one token a byte."""
    return ByteTokenizer() if path is None else HFTokenizer(path)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The tokens of all documents, one after the other."""

    tokens: npt.NDArray[Any]
    """uint16 or uint32, shape [num_tokens], mapped from the cache's file, read only."""
    digest: str
    """SHA-256 of the tokens: two corpora with the same digest are the same."""


def _standard_library() -> list[Path]:
    """The source files of this Python's standard library, its own tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = sorted(root.rglob("*.py"))
    return [file for file in files if skipped.isdisjoint(file.relative_to(root).parts)]


def find_sources(data: Sequence[Path]) -> list[Path]:
    """Lists the files that ``--data`` names, and those in its folders, in a fixed order.

    Args:
        data: files, and folders that are searched for text and JSON lines; none means the
            standard library's own source files.

    Raises:
        DataError: a path does not exist, or there is no usable file.
    """
    known = (*_TEXT, *_JSON_LINES)
    files = [] if data else _standard_library()
    for path in data:
        if not path.exists():
            raise DataError(f"--data {path} does not exist")
        inside = sorted(path.rglob("*")) if path.is_dir() else []
        found = [f for f in inside if f.is_file() and f.name.endswith(known)]
        if path.is_dir() and not found:
            raise DataError(
                f"--data {path} holds no file that ends in {', '.join(known)}: name the "
                "files themselves, any other name is read as text"
            )
        files += found or [path]
    if not files:
        raise DataError("Python's standard library has no source files here: give --data")
    return files


def read_documents(path: Path, text_field: str = "text") -> Iterator[str]:
    """Yields the documents of one file: each JSON line's text, or the whole of a text file.

    Raises:
        DataError: a line that is not a JSON object with a string in ``text_field``, or a
            broken gzip file.
    """
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        # A stray byte in gigabytes of crawled text must not end a job, so it becomes U+FFFD.
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:
            if not path.name.endswith(_JSON_LINES):
                yield file.read()
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(line, f"{path}, line {number}", text_field)
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error


def _text_of(line: str, where: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error}): each line must be one object") from error
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        seen = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise DataError(
            f'{where} has no string in its field "{text_field}" (seen: {seen}): name the field '
            "with --text-field"
        )
    return text


def load_corpus(
    sources: Sequence[Path],
    tokenizer: ByteTokenizer,
    cache_dir: Path | None,
    *,
    text_field: str = "text",
) -> Corpus:
    """Maps the tokens of ``sources`` from the cache, filling it first if it lacks them.

    The cache's entry is named by each file's path, size and modification time, the tokenizer and
    the field. Two processes may fill the same entry at once: the first to finish is kept.

    Args:
        sources: files.
        tokenizer: tokenises their text.
        cache_dir: None is the user's cache folder, which ``XDG_CACHE_HOME`` moves.
        text_field: field of a JSON line that holds the text.

    Raises:
        DataError: a file that cannot be read, or no document.
    """
    if cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache_dir = Path(base) / "hytrain" / "train_lm"
    key = hashlib.sha256(f"{_FORMAT_VERSION}\0{tokenizer.identity}\0{text_field}".encode())
    for path in sources:
        stat = path.stat()
        key.update(f"\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    entry = cache_dir / key.hexdigest()[:32]
    if not entry.is_dir():
        _fill_cache(entry, sources, tokenizer, text_field)
    meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    tokens = np.memmap(entry / "tokens.bin", dtype=meta["dtype"], mode="r")
    return Corpus(tokens=tokens, digest=meta["sha256"])


def _fill_cache(
    entry: Path, sources: Sequence[Path], tokenizer: ByteTokenizer, text_field: str
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
        if not entry.is_dir():  # a rename fails if another process was first, which is fine
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
