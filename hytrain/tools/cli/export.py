"""`hytrain export`: a checkpoint's weights as files that need no hytrain."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hytrain.errors import ConfigError
from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import check_folders

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DTYPES = ("fp32", "bf16", "fp16")


def add(export: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    export.description = "Writes a checkpoint's weights: no GPU and no ranks are needed."
    export.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder that checkpoints were saved in, or a Trainer's output folder",
    )
    export.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the weights"
    )
    export.add_argument("--tag", help="which checkpoint (default: the latest)")
    export.add_argument(
        "--format",
        choices=("safetensors", "fp32"),
        default="safetensors",
        help="safetensors: as Hugging Face lays them out, for from_pretrained (default); fp32: "
        "pytorch_model.bin with the master weights, for torch.load",
    )
    export.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="dtype of the weights in safetensors (default: the training copy's)",
    )
    export.add_argument(
        "--max-shard-size",
        type=_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="largest size of a file of safetensors, as in 500MB (default: 5GB)",
    )
    export.add_argument(
        "--exclude-frozen", action="store_true", help="leave out parameters that were not trained"
    )
    export.set_defaults(run=_export)


def _size(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B|)\s*", text.upper())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return max(1, int(float(found[1]) * _UNITS[found[2]]))


def _export(arguments: argparse.Namespace) -> int:
    check_folders(arguments.folder)
    from hytrain.checkpoint.inspection import one_checkpoint
    from hytrain.tools.checkpoints.export import export_weights

    if arguments.format == "fp32" and arguments.dtype not in (None, "fp32"):
        raise ConfigError(
            f"--dtype {arguments.dtype} is of --format safetensors; --format fp32 writes master "
            "weights as they are: leave one of them out"
        )
    lines = export_weights(
        *one_checkpoint(arguments.folder, arguments.tag),
        arguments.out,
        one_file=arguments.format == "fp32",
        dtype="fp32" if arguments.format == "fp32" else arguments.dtype,
        max_shard_bytes=arguments.max_shard_size,
        with_frozen=not arguments.exclude_frozen,
    )
    for line in lines:
        print(fold(line))
    return 0
