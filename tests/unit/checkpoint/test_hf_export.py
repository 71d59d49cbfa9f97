"""An exported checkpoint in transformers: ``from_pretrained`` gives the same logits, bitwise."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import built, device, make_config
from support.models import make_batch
from torch import nn

from hytrain.tools import cli

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(120)]

SIZES: dict[str, Any] = {
    "llama": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    },
    "gpt2": {
        "vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4,
        "bos_token_id": 0, "eos_token_id": 0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def _model(kind: str, *, tied: bool, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **SIZES[kind], tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config)


@dataclass
class Saved:
    """A checkpoint beside its model's configuration, and logits of what was saved."""

    folder: Path
    kind: str
    tied: bool
    bf16: bool
    logits: torch.Tensor
    masters: dict[str, torch.Tensor]

    def logits_of(self, made: nn.Module) -> torch.Tensor:
        return _logits(made.to(device()))

    def rounded(self, dtype: torch.dtype) -> torch.Tensor:
        """Logits of a model that has the master weights, cast."""
        model = _model(self.kind, tied=self.tied, seed=5)
        missing, unexpected = model.load_state_dict(self.masters, strict=False)
        assert not unexpected
        assert missing == (["lm_head.weight"] if self.tied else [])
        # Not buffers: transformers keeps those of RoPE in fp32.
        for parameter in model.parameters():
            parameter.data = parameter.to(dtype)
        return _logits(model.to(device()))


def _logits(model: nn.Module) -> torch.Tensor:
    training = model.training
    model.eval()
    with torch.no_grad():
        tokens = make_batch("llama", 77, device())["input_ids"]
        logits = model(input_ids=tokens).logits.cpu()
    model.train(training)
    return logits


CASES = [
    ("llama", False, 2, True),
    ("llama", True, 3, True),
    ("gpt2", True, 2, True),
    ("gpt2", False, 3, True),
    ("llama", True, 2, False),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, process_group: None
) -> Saved:
    kind, tied, stage, bf16 = request.param
    folder = tmp_path_factory.mktemp("saved")
    model = _model(kind, tied=tied)
    with built(model, make_config(gpu_fraction=0.5, stage=stage, bf16=bf16)) as engine:
        for number in range(3):
            engine.backward(engine(**make_batch("llama", number, device())).loss)
            engine.step()
        engine.save_checkpoint(folder)
        with engine.gathered_parameters():
            logits = _logits(engine.module)
        masters = {name: dict(kinds)["fp32"] for name, kinds in engine.fp32_state_dict().items()}
        # As transformers' Trainer does; the configuration is that of the model as it was built.
        _model(kind, tied=tied).config.save_pretrained(folder)
    return Saved(folder, kind, tied, bf16, logits, masters)


def _exported(saved: Saved, out: Path, *options: str) -> nn.Module:
    """What a user gets who names the folder and nothing else."""
    assert cli.main(["export", str(saved.folder), "--out", str(out), *options]) == 0
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    return model


@pytest.mark.parametrize("shards", [(), ("--max-shard-size", "10KB")], ids=["whole", "shards"])
def test_the_training_copy(shards: tuple[str, ...], saved: Saved, tmp_path: Path) -> None:
    model = _exported(saved, tmp_path, *shards)
    assert len(list(tmp_path.glob("*.safetensors"))) > (2 if shards else 0)
    assert next(model.parameters()).dtype == (torch.bfloat16 if saved.bf16 else torch.float32)
    assert torch.equal(saved.logits_of(model), saved.logits)


def test_the_master_weights(saved: Saved, tmp_path: Path) -> None:
    model = _exported(saved, tmp_path, "--format", "fp32")
    assert next(model.parameters()).dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved.masters[name]), name
    assert torch.equal(saved.logits_of(model), saved.rounded(torch.float32))


def test_tied_embeddings_are_there_once_and_stay_tied(saved: Saved, tmp_path: Path) -> None:
    model: Any = _exported(saved, tmp_path)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) is saved.tied
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["tie_word_embeddings"] is saved.tied


@pytest.mark.parametrize("said", ["float32", "bfloat16"])
def test_the_configuration_says_the_dtype_that_was_written(
    said: str, saved: Saved, tmp_path: Path
) -> None:
    """from_pretrained would cast to what the configuration had: fp32 weights to bf16, silently."""
    config = json.loads((saved.folder / "config.json").read_text())
    folder = tmp_path / "saves"
    shutil.copytree(saved.folder, folder)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": said}))
    saved = replace(saved, folder=folder)
    for dtype, made in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = _exported(saved, tmp_path / dtype, "--dtype", dtype)
        assert next(model.parameters()).dtype == made
        assert torch.equal(saved.logits_of(model), saved.rounded(made))
    assert json.loads((folder / "config.json").read_text())["dtype"] == said
