"""What is done once before anything is timed: DeepSpeed's compiled Adam, and host memory.

    python -m experiments.common.prepare adam | memory GIB

Both may run at the same time: compiling uses little memory, and filling memory few cores.
"""

from __future__ import annotations

import sys
import time

import torch

from experiments.common.records import GIB


def build_adam() -> None:
    """Compile DeepSpeedCPUAdam, or load what an earlier run has compiled."""
    # Imported here, so that the memory can be filled while another process imports it.
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])


def fill_memory(gib: int) -> None:
    """Touch host memory: a virtual machine may be given its memory only as it is used."""
    torch.ones(gib * GIB, dtype=torch.uint8)


def main(arguments: list[str]) -> None:
    """Run one preparation and say how long it took."""
    begin = time.perf_counter()
    if arguments[0] == "adam":
        build_adam()
    elif arguments[0] == "memory":
        fill_memory(int(arguments[1]))
    else:
        raise SystemExit(f"unknown preparation {arguments[0]!r}: choose adam or memory GIB")
    print(f"{arguments[0]}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
