#!/usr/bin/env python
"""Turns this folder's checkpoints into weights: `python zero_to_fp32.py . OUTPUT_DIR`.

It is beside every checkpoint under the name that users of DeepSpeed know, takes the same arguments
and calls `hytrain export`, which has more of them. To resume in plain DeepSpeed nothing is to be
converted: its JSON needs "checkpoint": {"load_universal": true}.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys


def main() -> int:
    """Returns the exit status of `hytrain export`; 2 where hytrain is not installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir", help="folder with the file 'latest'")
    parser.add_argument("output_dir", help="folder for the weights; made where missing")
    parser.add_argument("--max_shard_size", default="5GB", help="of safetensors (5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint (default: the latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="no effect")
    given = parser.parse_args()
    command = ["export", given.checkpoint_dir, "--out", given.output_dir]
    if given.safe_serialization:
        shards = ["--max-shard-size", given.max_shard_size]
        command += ["--format", "safetensors", "--dtype", "fp32", *shards]
    else:
        command += ["--format", "fp32"]
    if given.tag:
        command += ["--tag", given.tag]
    if given.exclude_frozen_parameters:
        command += ["--exclude-frozen"]
    if importlib.util.find_spec("hytrain") is None:
        print(
            "These checkpoints are hytrain's, which is not installed here. Install it, then run\n"
            f"    hytrain {' '.join(command)}",
            file=sys.stderr,
        )
        return 2
    return subprocess.call([sys.executable, "-m", "hytrain", *command])


if __name__ == "__main__":
    sys.exit(main())
