"""Documents are read from each kind of file, and tokenised once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import corpus
import numpy as np
import pytest

RECORDS = [{"text": "first", "url": "x"}, {"text": "zweite \u00e4", "url": "y"}]


def _json_lines(path: Path, lines: list[str]) -> Path:
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz", "c4-train.00000-of-01024.json.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = _json_lines(tmp_path / name, [json.dumps(r) for r in RECORDS] + [""])
    assert list(corpus.read_documents(path)) == ["first", "zweite \u00e4"]
    assert list(corpus.read_documents(path, "url")) == ["x", "y"]


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"text": null}', '{"Text": "x"}'])
def test_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = _json_lines(tmp_path / "s.jsonl", ['{"text": "ok"}', line])
    with pytest.raises(corpus.DataError, match="line 2"):
        list(corpus.read_documents(path))


def test_missing_field_says_what_is_there(tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "s.jsonl", ['{"body": "x", "id": 1}'])
    with pytest.raises(corpus.DataError, match=r"\['body', 'id'\].*--text-field"):
        list(corpus.read_documents(path))


def test_cut_off_gzip(tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "s.jsonl.gz", [json.dumps(RECORDS[0])] * 50)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(corpus.DataError, match="not a whole gzip file"):
        list(corpus.read_documents(path))
    path.write_bytes(b"plain text")
    with pytest.raises(corpus.DataError, match="not a whole gzip file"):
        list(corpus.read_documents(path))


def test_text_file_is_one_document(text_files: list[Path]) -> None:
    (document,) = corpus.read_documents(text_files[0])
    assert document == text_files[0].read_text()


def test_bytes_round_trip() -> None:
    tokenizer = corpus.ByteTokenizer()
    ids = tokenizer.encode("na\u00efve")
    assert bytes(ids.tolist()).decode() == "na\u00efve"
    assert tokenizer.encode("\ud800").tolist() == [ord("?")]


def test_folder_is_searched_in_order(tmp_path: Path, text_files: list[Path]) -> None:
    (tmp_path / "text" / "ignored.bin").write_bytes(b"\0")
    assert corpus.find_sources([tmp_path / "text"]) == text_files
    assert corpus.find_sources([text_files[1], text_files[0]]) == [text_files[1], text_files[0]]


def test_missing_or_empty_data(tmp_path: Path) -> None:
    with pytest.raises(corpus.DataError, match="does not exist"):
        corpus.find_sources([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(corpus.DataError, match=r"holds no file that ends in \.txt"):
        corpus.find_sources([tmp_path / "empty"])


def test_default_is_the_standard_library() -> None:
    names = {path.name for path in corpus.find_sources([])}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert "test_argparse.py" not in names


def test_tokens_are_documents_and_their_ends(tmp_path: Path, text_files: list[Path]) -> None:
    tokens = corpus.load_corpus(text_files, corpus.ByteTokenizer(), tmp_path / "cache").tokens
    assert tokens.dtype == np.uint16
    expected = b"".join(path.read_bytes() + b"\0" for path in text_files)
    ends = np.flatnonzero(tokens == 256)
    assert len(ends) == 3
    assert np.where(tokens == 256, 0, tokens).astype(np.uint8).tobytes() == expected


def test_cache_is_used_and_renewed(tmp_path: Path, text_files: list[Path]) -> None:
    cache, tokenizer = tmp_path / "cache", corpus.ByteTokenizer()
    first = corpus.load_corpus(text_files, tokenizer, cache)
    again = corpus.load_corpus(text_files, tokenizer, cache)
    assert first.digest == again.digest
    assert len(list(cache.iterdir())) == 1, "no partial entry is left, none made twice"
    text_files[0].write_text("other")
    changed = corpus.load_corpus(text_files, tokenizer, cache)
    assert changed.digest != first.digest
    assert len(list(cache.iterdir())) == 2


def test_failed_tokenising_leaves_no_entry(tmp_path: Path) -> None:
    good = _json_lines(tmp_path / "a.jsonl", ['{"text": "x"}'])
    bad = _json_lines(tmp_path / "b.jsonl", ["{"])
    with pytest.raises(corpus.DataError):
        corpus.load_corpus([good, bad], corpus.ByteTokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_second_writer_of_an_entry_keeps_the_first(
    tmp_path: Path, text_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokenizer = tmp_path / "cache", corpus.ByteTokenizer()
    first = corpus.load_corpus(text_files, tokenizer, cache)
    with monkeypatch.context() as context:
        context.setattr(Path, "is_dir", _false_once(cache))
        second = corpus.load_corpus(text_files, tokenizer, cache)
    assert second.digest == first.digest
    assert len(list(cache.iterdir())) == 1


def _false_once(cache: Path) -> object:
    """Path.is_dir that does not see the entry at first, as where another process makes it."""
    calls: list[Path] = []

    def is_dir(path: Path) -> bool:
        calls.append(path)
        return not (path.parent == cache and len(calls) == 1)

    return is_dir


def test_large_vocabulary_needs_32_bits(tmp_path: Path, text_files: list[Path]) -> None:
    class Wide(corpus.ByteTokenizer):
        vocab_size = 70_000
        end_of_document = 69_999
        identity = "wide"

    tokens = corpus.load_corpus(text_files, Wide(), tmp_path / "cache").tokens
    assert tokens.dtype == np.uint32
    assert int(tokens.max()) == 69_999


def test_hf_tokenizer_from_a_folder(tmp_path: Path, text_files: list[Path]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"line": 0, "of": 1, "<unk>": 2, "<end>": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    fast.save_pretrained(folder)
    tokenizer = corpus.make_tokenizer(folder)
    assert tokenizer.encode("line of x").tolist() == [0, 1, 2]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (4, 3)
    tokens = corpus.load_corpus(text_files, tokenizer, tmp_path / "cache").tokens
    assert np.count_nonzero(tokens == 3) == 3


def test_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(corpus.DataError, match="not a folder"):
        corpus.make_tokenizer(tmp_path / "none")
    with pytest.raises(corpus.DataError, match="cannot be loaded"):
        corpus.make_tokenizer(tmp_path)


# -- several ranks -----------------------------------------------------------------------------


def _load_on(ranks: list[tuple[bool, Callable[[], corpus.Corpus]]]) -> list[corpus.Corpus | str]:
    """What each rank got, or its error; (is_first, load) of each."""
    reports: list[corpus.LoadReport] = [corpus.LoadReport()] * len(ranks)
    barrier = Barrier(len(ranks), timeout=100)

    def one(rank: int) -> corpus.Corpus | str:
        def ask_all(mine: corpus.LoadReport) -> list[corpus.LoadReport]:
            reports[rank] = mine
            barrier.wait()
            everywhere = list(reports)
            barrier.wait()
            return everywhere

        try:
            return corpus.load_together(ranks[rank][1], ask_all, is_first=ranks[rank][0])
        except corpus.DataError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def _corpus(digest: str = "x") -> corpus.Corpus:
    return corpus.Corpus(tokens=np.zeros(4, dtype=np.uint16), digest=digest)


def test_the_first_of_each_host_loads_before_the_others() -> None:
    order: list[bool] = []

    def load(is_first: bool) -> corpus.Corpus:
        order.append(is_first)
        return _corpus()

    # LOCAL_RANK 0 need not be the lowest rank of its host.
    flags = [True, False, True, False, False]
    found = _load_on([(flag, lambda flag=flag: load(flag)) for flag in flags])
    assert all(isinstance(one, corpus.Corpus) for one in found)
    assert order == [True, True, False, False, False]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_cannot_load_ends_all_of_them(failing: int) -> None:
    def fail() -> corpus.Corpus:
        raise corpus.DataError("--data x does not exist")

    found = _load_on([(rank != 1, fail if rank == failing else _corpus) for rank in range(3)])
    where = f"rank {failing}: " if failing else ""
    assert found == [f"{where}--data x does not exist"] * 3


def test_hosts_with_different_texts_are_refused() -> None:
    found = _load_on([(True, _corpus), (False, _corpus), (True, lambda: _corpus("y"))])
    assert all("ranks 0 and 2 have different texts" in str(message) for message in found)
