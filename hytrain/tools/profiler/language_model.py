"""Language models from a transformers configuration, made on torch's default device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import nn

from hytrain.errors import ConfigError
from hytrain.formats.record import parse_json
from hytrain.tools.model_path import read_model_file

# A configuration does not tell which head is trained: the likeliest is tried first.
_HEADS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")

MOST_LAYERS = 1_000
"""Eight times the deepest model of transformers. The work grows with the square of it: `hytrain
explain` takes half a minute with this many."""
_DEPTHS = ("layers", "n_layer", "depth")
MOST_PARAMETERS = 10**13
"""Several times the largest existing model. The work grows with it: layers of 2^30 parameters, each
of chunks."""
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
"""What configurations call the width of a token."""


def hidden_size(config: Any) -> int | None:
    """The width of a token in a transformers configuration; None if it has none."""
    found = next((getattr(config, key, None) for key in HIDDEN if hasattr(config, key)), None)
    return found if isinstance(found, int) else None


def read_config(path: Path) -> Any:
    """Reads the transformers configuration in a file.

    Args:
        path: a transformers ``config.json``, or the folder that holds one.

    Raises:
        ConfigError: there is none in it, or transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"--model needs transformers, which cannot be imported ({error}): "
            "pip install hytrain[train]"
        ) from error
    file, text = read_model_file(path)
    try:
        fields: dict[str, Any] = parse_json(text, f"--model {file}", ConfigError)
        _refuse_too_deep(fields, file)  # transformers makes lists of this length
        return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises many kinds of errors
        why = str(error).partition(" Should contain one of ")[0]  # some 7 kB of names
        raise ConfigError(
            f"--model {file} is not a transformers config ({type(error).__name__}: {why}): it "
            'must be a JSON object with a "model_type" that transformers knows'
        ) from error


def _refuse_too_deep(fields: dict[str, Any], file: Path) -> None:
    for key, value in fields.items():
        if isinstance(value, dict):
            _refuse_too_deep(cast("dict[str, Any]", value), file)
        elif key.endswith(_DEPTHS) and isinstance(value, (int, float)) and value > MOST_LAYERS:
            raise ConfigError(
                f'--model {file}: "{key}" is {value:,}: give the number of layers, {MOST_LAYERS:,} '
                "at most"
            )


def check_length(config: Any, source: Path, seq_len: int, option: str = "--seq-len") -> None:
    """Refuses samples that are longer than a model's positions.

    Raises:
        ConfigError: they are.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq_len > longest:
        raise ConfigError(
            f"{option} {seq_len}: {source} has max_position_embeddings {longest}: give at most that"
        )


def build_language_model(config: Any, source: Path) -> nn.Module:
    """The model that a configuration describes, randomly initialized.

    Raises:
        ConfigError: it is no language model, or larger than any.
    """
    import transformers

    refusals: list[str] = []
    for name in _HEADS:
        try:
            model: nn.Module = getattr(transformers, name).from_config(config)
            break
        except Exception as error:  # models raise many kinds of errors
            first = (str(error).splitlines() or [type(error).__name__])[0]
            refusals.append(f"{name}: {first[:200]}")
    else:
        raise ConfigError(
            f"--model {source} describes no language model that transformers can build: "
            + "; ".join(refusals)
        )
    if (parameters := sum(each.numel() for each in model.parameters())) > MOST_PARAMETERS:
        raise ConfigError(
            f"--model {source} has {parameters:.1e} parameters, of at most "
            f"{MOST_PARAMETERS:.0e}: correct its sizes"
        )
    return model
