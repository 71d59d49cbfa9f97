"""Cycles an element of the CPU kernel's loops, by llvm-mca's model of a processor.

Usage: kernel_model.py OBJECT MCPU [MCPU ...], with OBJECT a compiled adam_<isa>.cpp. Needs objdump
for its architecture (OBJDUMP, default objdump) and llvm-mca of LLVM 17 or later (LLVM_MCA). Models
have every load in the first cache and every jump predicted: this is arithmetic alone. Gradients and
the outgoing copy are in bf16.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

LOOPS = {"commit": "commit_loop", "preview": "preview_loop", "commit_then_preview": "both_loop"}
MOMENTS = {"fp32": "Fp32Moments", "bf16": "Bf16Moments", "8bit": "EightBitMoments"}
TYPES = ("In<(hytrain::DType)1>", "Out<(hytrain::DType)1, false>")
LANES = {"avx512": 16, "avx2": 8, "neon": 4}
ITERATIONS = 200

Code = list[tuple[int, str]]


def functions(path: str) -> dict[str, Code]:
    """Of each function of an object file: address and text of its instructions."""
    command = [os.environ.get("OBJDUMP", "objdump"), "-d", "--no-show-raw-insn", "-C", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, Code] = {}
    body: Code = []
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            body = found.setdefault(head[1], [])
        elif code := re.match(r"\s+([0-9a-f]+):\s+(.*)$", line):
            body.append((int(code[1], 16), re.sub(r"\s+(?://|# |<).*", "", code[2]).strip()))
    return found


def target(instruction: str) -> int | None:
    """Where a jump goes; None: it is none."""
    jump = re.match(r"(?:j\w+|b|b\.\w+|cbn?z \w+,|tbn?z \w+, #\d+,)\s+([0-9a-f]+)$", instruction)
    return int(jump[1], 16) if jump else None


def count_divisions(loop: list[str]) -> int:
    """Division instructions: one for each register of elements."""
    return sum("div" in instruction.split()[0] for instruction in loop)


def main_loop(body: Code) -> list[str]:
    """The smallest loop that has the most divisions."""
    loops = [
        [code for at, code in body if to <= at <= address]
        for address, instruction in body
        if (to := target(instruction)) is not None and to < address
    ]
    return max(loops, key=lambda loop: (count_divisions(loop), -len(loop)))


def cycles(loop: list[str], isa: str, processor: str) -> float:
    """Of one iteration."""
    straight = [
        code
        for code in loop
        if not re.match(r"(j\w+|b|b\.\w+|[ct]bn?z|nop\w*|call|bl|ret)\b", code)
    ]
    command = [os.environ.get("LLVM_MCA", "llvm-mca"), f"-mcpu={processor}"]
    command += ["-march=aarch64" if isa == "neon" else "-march=x86-64", f"-iterations={ITERATIONS}"]
    text = "\n".join(straight)
    out = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    total = re.search(r"Total Cycles:\s+(\d+)", out)
    assert total is not None, out[:1000]
    return int(total[1]) / ITERATIONS


def main() -> None:
    """Prints a table."""
    path, *processors = sys.argv[1:]
    isa = next(name for name in LANES if f"adam_{name}" in path)
    found = functions(path)
    print(f"{'cycles an element':25}", *(f"{name:>12}" for name in processors))
    for moments, kind in MOMENTS.items():
        for name, loop_name in LOOPS.items():
            parts = (loop_name, f"{kind}>(", *TYPES)
            body = next(code for where, code in found.items() if all(p in where for p in parts))
            loop = main_loop(body)
            elements = count_divisions(loop) * LANES[isa] / (2 if loop_name == "both_loop" else 1)
            values = (cycles(loop, isa, processor) / elements for processor in processors)
            print(f"{name:20} {moments:4}", *(f"{value:12.2f}" for value in values))


if __name__ == "__main__":
    main()
