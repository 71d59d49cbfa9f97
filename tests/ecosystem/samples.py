"""Small models from configurations and data made here: nothing is downloaded."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]


def tokenizer() -> Any:
    """A tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(number: int, length: int, seed: int = 0) -> list[str]:
    """Random words."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 61, (number, length), generator=generator).tolist()
    return [" ".join(f"w{each}" for each in line) for line in numbers]


def sentences(folder: Path, number: int = 24) -> list[dict[str, Any]]:
    """A GLUE-style TSV, written and read: random sentences, labelled by their first word."""
    path = folder / "train.tsv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(["sentence", "label"])
        rows.writerows([text, int(text.split()[0][1:]) % 2] for text in texts(number, 8))
    encode = tokenizer()
    with path.open(newline="") as file:
        return [
            {**encode(row["sentence"], return_token_type_ids=False), "labels": int(row["label"])}
            for row in csv.DictReader(file, delimiter="\t")
        ]


def images(number: int = 24) -> list[dict[str, Any]]:
    """Random images of ten classes."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(3, 16, 16, generator=generator),
            "labels": int(torch.randint(0, 10, (), generator=generator)),
        }
        for _ in range(number)
    ]


def llama() -> Any:
    """A causal language model over the words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes))


def bert() -> Any:
    """A text classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, pad_token_id=0,
        )
    )  # fmt: skip
