"""All findings of this machine, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hytrain import _C
from hytrain.formats.text_table import align
from hytrain.hardware.compile_locks import find_locks
from hytrain.hardware.host_tree import HostTree, ProcessLimits
from hytrain.hardware.machine import package_version
from hytrain.tools.doctor.findings import (
    Finding,
    core_findings,
    lock_findings,
    memory_findings,
    numa_findings,
    rate_findings,
    version_findings,
)
from hytrain.tools.doctor.measure import measure_rates, numa_facts

_WORDS = {"good": "", "note": "note", "bad": "BAD"}
_MEANINGS = {
    "instruction set": "of the kernels that update",
    "compile lock": "held while DeepSpeed compiles: starts wait for it",
    "huge pages": "of the state's memory: updates miss the TLB less",
    "memory bandwidth": "what limits updates",
    "GPU to host": "how gradients go",
    "host to GPU": "how weights come back",
    "fsync": "until a small file is on the disk: a checkpoint has thousands",
}
"""What lines without advice mean."""


def examine(folder: Path, ranks: int, elements: int | None) -> list[Finding]:
    """Looks at this machine and measures it, in some seconds.

    Args:
        folder: where checkpoints will be saved; files are written there and removed.
        ranks: number of ranks that will train on this host.
        elements: see :func:`measure_rates`.

    Raises:
        OSError: the folder cannot be written.
        HostMemoryError: there is no memory to measure with.
    """
    tree, limits = HostTree(), ProcessLimits.of_this_process()
    versions = {name: package_version(name) for name in ("hytrain", "torch", "deepspeed")}
    rates = measure_rates(folder, max(1, len(limits.usable_cores) // ranks), elements)
    return [
        *version_findings(versions, _C.active_isa()),
        *lock_findings(find_locks()),
        *core_findings(tree, limits, ranks),
        *numa_findings(tree, limits, numa_facts(tree, limits.usable_cores)),
        *memory_findings(tree, limits, ranks),
        *rate_findings(rates),
    ]


def report_text(findings: Sequence[Finding]) -> str:
    """How many findings are bad, and a table: what was looked at, what was found, the verdict, and
    what to do, or what it means."""
    rows = [("", "seen", "verdict", "what to do, or what it is")]
    rows += [
        (f.name, f.seen, _WORDS[f.verdict], f.advice or _MEANINGS.get(f.name, "")) for f in findings
    ]
    lines = align(rows, left=(0, 1, 2, 3))
    bad = sum(finding.verdict == "bad" for finding in findings)
    notes = sum(finding.verdict == "note" for finding in findings)
    verdict = f"{bad} bad, {notes} to note, {len(findings) - bad - notes} as they should be"
    table = [line.rstrip() for text in lines for line in text.splitlines()]
    return "\n".join([verdict, "", *table])
