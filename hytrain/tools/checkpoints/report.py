"""The text that `hytrain checkpoint` prints."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from hytrain.checkpoint.inspection import CheckpointFacts, Kind, Verdict
from hytrain.errors import size_text
from hytrain.formats.text_table import align, fold

_KINDS: dict[Kind, str] = {
    "hytrain": "hytrain (universal)",
    "universal": "universal, no manifest",
    "deepspeed": "plain DeepSpeed",
    "unfinished": "broken off, never loaded",
    "damaged": "damaged",
}


def folder_text(
    folder: Path, facts: Sequence[CheckpointFacts], inside: Sequence[str] | None = None
) -> str:
    """A table of a folder's checkpoints, and how to use them elsewhere.

    ``inside``: each checkpoint's folder in it, if it is a Trainer's output folder.
    """
    rows = [("tag", "kind", "step", "ranks", "parameters", "dtype", "size", "saved")]
    for fact in facts:
        tag = f"{fact.tag} (latest)" if fact.is_latest else fact.tag
        numbers = (fact.step, fact.num_ranks, fact.parameters)
        step, ranks, parameters = ("-" if number is None else f"{number:,}" for number in numbers)
        size = size_text(fact.num_bytes)
        dtype = (fact.dtype or "-").replace("bfloat16", "bf16").replace("float32", "fp32")
        row = (tag, _KINDS[fact.kind], step, ranks, parameters, dtype, size, _date(fact.saved_at))
        rows.append(row)
    if inside is not None:
        rows = [(name, *row) for name, row in zip(("folder", *inside), rows, strict=True)]
    shift = int(inside is not None)
    lines = align(rows, left=(0, *(column + shift for column in (0, 1, 5, 7))))
    lines += [fold(f"{fact.tag}: {fact.problem}") for fact in facts if fact.problem is not None]
    lines += [fold(line) for line in _advice(folder, {fact.kind for fact in facts})]
    return "\n".join(lines)


def _date(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _advice(folder: Path, kinds: set[Kind]) -> list[str]:
    lines: list[str] = []
    if kinds & {"hytrain", "universal"}:
        lines += [
            "Weights for other programs: hytrain export " + str(folder) + " --out DIR",
            'Resume in plain DeepSpeed with "checkpoint": {"load_universal": true} in its JSON; '
            "they are universal already, ds_to_universal is not needed and cannot read them.",
        ]
    if "deepspeed" in kinds:
        lines.append(
            "Plain DeepSpeed's load here as they are, and are converted then; large ones before: "
            f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder}/TAG "
            f"--output_folder {folder}/TAG_universal --inject_missing_state"
        )
    if "unfinished" in kinds:
        lines.append("What broken-off saves have left is removed by the next save.")
    return lines


def verdict_text(verdict: Verdict) -> str:
    """The result of verifying: a line, and one more for each problem."""
    if verdict.problems:
        lines = [f"{verdict.folder}: DAMAGED:", *(f"  {each}" for each in verdict.problems)]
        return "\n".join(map(fold, lines))
    against = (
        "every byte is what was saved"
        if verdict.has_manifest
        else "all files agree with their own checksums (there is no manifest: files of another "
        "save would not be noticed)"
    )
    read = f"{verdict.num_files} files, {size_text(verdict.num_bytes)}"
    return fold(f"{verdict.folder}: whole: {against}; {read}")
