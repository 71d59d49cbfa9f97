"""Documents are tokenised once; sequences have an order, are shared out, and found again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import corpus
import data
import numpy as np
import pytest
import torch

RECORDS = [{"text": "first", "url": "x"}, {"text": "zweite \u00e4", "url": "y"}]
SEQ_LEN = 8


def _json_lines(path: Path, lines: list[str]) -> Path:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["s.jsonl", "c4-train.00000-of-01024.json.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = _json_lines(tmp_path / name, [json.dumps(r) for r in RECORDS] + [""])
    assert list(corpus.read_documents(path)) == ["first", "zweite \u00e4"]
    assert list(corpus.read_documents(path, "url")) == ["x", "y"]


@pytest.mark.parametrize("line", ["{", "3", '{"text": null}', '{"Text": "x"}'])
def test_bad_line_is_named_and_leaves_no_entry_in_the_cache(tmp_path: Path, line: str) -> None:
    path = _json_lines(tmp_path / "s.jsonl", ['{"text": "ok"}', line])
    with pytest.raises(corpus.DataError, match="line 2"):
        corpus.load_corpus([path], corpus.ByteTokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_cut_off_gzip(tmp_path: Path) -> None:
    path = _json_lines(tmp_path / "s.jsonl.gz", [json.dumps(RECORDS[0])] * 50)
    for broken in (path.read_bytes()[:-12], b"plain text"):
        path.write_bytes(broken)
        with pytest.raises(corpus.DataError, match="not a whole gzip file"):
            list(corpus.read_documents(path))


def test_sources(tmp_path: Path, text_files: list[Path]) -> None:
    (tmp_path / "text" / "ignored.bin").write_bytes(b"\0")
    assert corpus.find_sources([tmp_path / "text"]) == text_files
    assert corpus.find_sources([text_files[1], text_files[0]]) == [text_files[1], text_files[0]]
    names = {path.name for path in corpus.find_sources([])}
    assert "argparse.py" in names, "the standard library"
    assert "test_argparse.py" not in names
    with pytest.raises(corpus.DataError, match="does not exist"):
        corpus.find_sources([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(corpus.DataError, match=r"holds no file that ends in \.txt"):
        corpus.find_sources([tmp_path / "empty"])


def test_tokens_are_documents_and_their_ends(tmp_path: Path, text_files: list[Path]) -> None:
    cache, tokenizer = tmp_path / "cache", corpus.ByteTokenizer()
    first = corpus.load_corpus(text_files, tokenizer, cache)
    assert first.tokens.dtype == np.uint16
    expected = b"".join(path.read_bytes() + b"\0" for path in text_files)
    tokens = np.where(first.tokens == 256, 0, first.tokens).astype(np.uint8)
    assert tokens.tobytes() == expected
    assert corpus.load_corpus(text_files, tokenizer, cache).digest == first.digest
    assert len(list(cache.iterdir())) == 1, "no partial entry is left, none made twice"
    text_files[0].write_text("other")
    assert corpus.load_corpus(text_files, tokenizer, cache).digest != first.digest
    assert tokenizer.encode("\ud800").tolist() == [ord("?")]


def test_second_writer_of_an_entry_keeps_the_first(tmp_path: Path, text_files: list[Path]) -> None:
    cache, tokenizer = tmp_path / "cache", corpus.ByteTokenizer()
    first = corpus.load_corpus(text_files, tokenizer, cache)
    (entry,) = cache.iterdir()
    corpus._fill_cache(entry, text_files, tokenizer, "text")
    assert list(cache.iterdir()) == [entry]
    assert corpus.load_corpus(text_files, tokenizer, cache).digest == first.digest


def test_hf_tokenizer_from_a_folder(tmp_path: Path, text_files: list[Path]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"line": 0, "of": 1, "<unk>": 2, "<end>": 70_000}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    fast.save_pretrained(folder)
    tokenizer = corpus.make_tokenizer(folder)
    assert tokenizer.encode("line of x").tolist() == [0, 1, 2]
    tokenizer.vocab_size = 70_001
    tokens = corpus.load_corpus(text_files, tokenizer, tmp_path / "cache").tokens
    assert tokens.dtype == np.uint32
    assert np.count_nonzero(tokens == 70_000) == 3
    with pytest.raises(corpus.DataError, match="cannot be loaded"):
        corpus.make_tokenizer(tmp_path / "none")


# -- sequences ---------------------------------------------------------------------------------


def _sequences(
    num_sequences: int = 100, *, seed: int = 0, seq_len: int = SEQ_LEN, digest: str = "d"
) -> data.PackedSequences:
    # Token t of the corpus is t itself, so a row tells which sequence it is.
    tokens = np.arange(num_sequences * SEQ_LEN + 3, dtype=np.uint32)
    return data.PackedSequences(corpus.Corpus(tokens, digest), seq_len=seq_len, seed=seed)


def _numbers(batch: torch.Tensor) -> list[int]:
    assert batch.dtype == torch.int64
    starts = batch[:, :1]
    assert torch.equal(batch, starts + torch.arange(batch.shape[1])), "a row is one sequence"
    return (starts.flatten() // SEQ_LEN).tolist()


def test_an_epoch_visits_every_training_sequence_once() -> None:
    sequences = _sequences()
    held_out = _numbers(sequences.held_out_batch(0, 2))
    first, second = (_numbers(sequences.train_batch(i * 98, 98)) for i in range(2))
    assert sorted(first + held_out) == list(range(100))
    assert first != sorted(first) == sorted(second)
    assert first != second
    assert _numbers(sequences.train_batch(96, 4)) == first[-2:] + second[:2]
    assert _numbers(sequences.held_out_batch(0, 3)) == [*held_out, held_out[0]]


def test_order_is_frozen() -> None:
    """A checkpoint of an older version must find its place: these numbers may never change."""
    assert _numbers(_sequences(seed=5).train_batch(0, 6)) == [11, 31, 54, 97, 42, 99]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_has_the_same_sequences_on_any_number_of_ranks(world_size: int) -> None:
    plan = data.BatchPlan(micro_batch=2, accumulation=8 // world_size, world_size=world_size)
    assert plan.global_batch == 16
    seen = [
        first + offset
        for rank in range(world_size)
        for first, count in plan.pieces(32, rank)
        for offset in range(count)
    ]
    assert sorted(seen) == list(range(32, 48))


def test_a_plan_deals_every_sequence_once() -> None:
    plan = data.BatchPlan(
        micro_batch=1, accumulation=1, world_size=3, sizes=(5, 0, 2), micro_sizes=(2, 0, 2)
    )
    assert plan.global_batch == 7
    pieces = [plan.pieces(14, rank) for rank in range(3)]
    assert pieces == [[(14, 2), (16, 2), (18, 1)], [], [(19, 2)]]


@pytest.mark.parametrize(
    ("change", "option"),
    [({"seed": 5}, "--seed"), ({"seq_len": 4}, "--seq-len"), ({"digest": "e"}, "--data")],
)
def test_position_of_other_data_is_refused(change: dict[str, int], option: str) -> None:
    state = _sequences(seed=4).position(48)
    assert _sequences(seed=4).consumed_at(state) == 48
    with pytest.raises(data.DataError, match=option):
        _sequences(**{"seed": 4, **change}).consumed_at(state)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(data.DataError, match="1 sequences of --seq-len 8"):
        _sequences(1)
    with pytest.raises(data.DataError, match="--seed"):
        _sequences(seed=-1)
