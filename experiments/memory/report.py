"""Tables of a result. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.common.records import GIB, Json
from experiments.common.tables import markdown


def tables(cases: Json) -> Iterator[str]:
    """Memory, phases, saves beside training, rates."""
    yield _contract(cases)
    yield _cycles(cases)
    yield _async(cases)
    yield _rates(cases)


def _share(measured: int, said: int) -> str:
    return f"{measured / GIB:.3f} of {said / GIB:.3f} ({100 * measured / said:.1f} %)"


def _contract(cases: Json) -> str:
    rows: list[list[str]] = []
    for name, case in cases.items():
        contract = case.get("contract", {})
        for phase, peak in contract.get("measured", {}).items():
            said = contract.get("said", contract["said_at_build"])[phase]
            gpu = "-"
            if said["gpu"] is not None:
                gpu = _share(peak["gpu_bytes"], said["gpu"])
            pinned = "-"
            if said["pinned"] and peak["gpu_bytes"] is not None:
                pinned = _share(peak["pinned_bytes"], said["pinned"])
            resident = said["host"] + said["pinned"]
            rows.append([name, phase, _share(peak["rss_bytes"], resident), pinned, gpu])
    return markdown(("case", "phase", "resident GiB", "pinned GiB", "GPU GiB"), rows)


def _cycles(cases: Json) -> str:
    rows: list[list[str]] = []
    for name, case in cases.items():
        found = case.get("cycles")
        if not found:
            continue
        growth = f"{found['rss_growth_bytes'] / 2**20:.1f}, {found['gpu_growth_bytes'] / 2**20:.1f}"
        row = [name, str(found["cycles"]), growth]
        for way in ("offload", "reload"):
            rate = found.get(way)
            row.append(
                "-"
                if rate is None
                else f"{rate['rate'] / 1e9:.1f} of {rate['copy_rate'] / 1e9:.1f} "
                f"({100 * rate['share']:.0f} %)"
            )
        rows.append(row)
    header = ("case", "cycles", "growth MiB: host, GPU", "offload GB/s", "reload GB/s")
    return markdown(header, rows)


def _async(cases: Json) -> str:
    rows: list[list[str]] = []
    for name, case in cases.items():
        for fraction, found in case.get("async", {}).items():
            writing = found["step_while_writing"]
            rows.append(
                [
                    f"{name}, k {fraction} ({found['gpu_layers']} of {found['layers']})",
                    f"{1e3 * found['step_seconds']:.1f}",
                    f"{1e3 * found['call_seconds']:.1f}",
                    f"{1e3 * found['blocked_seconds']:.1f}",
                    f"{found['copy_seconds']:.2f} ({found['copying_steps']})",
                    f"{100 * found['stall_of_a_step']:.1f} %",
                    "-" if writing is None else f"{writing / found['step_seconds']:.3f}",
                    f"{found['saved_seconds']:.1f}",
                ]
            )
    header = (
        "case", "step ms", "call ms", "blocked ms", "copying s (steps)", "stall of a step",
        "step while writing", "saved in s",
    )  # fmt: skip
    return markdown(header, rows)


def _rates(cases: Json) -> str:
    rows: list[list[str]] = []
    for name, case in cases.items():
        found = case.get("rates")
        if not found:
            continue
        disk = found.get("disk", {})
        rows.append(
            [name, f"{found['bytes'] / 1e9:.1f}, {found['files']}"]
            + [f"{found[way] / 1e9:.2f}" if way in found else "-" for way in ("save", "load")]
            + [
                f"{disk[f'{way}_1'] / 1e9:.2f}, {disk[f'{way}_8'] / 1e9:.2f}" if disk else "-"
                for way in ("write", "read")
            ]
        )
    header = (
        "case", "GB, files", "save GB/s", "load GB/s", "disk writes: 1, 8 threads",
        "disk reads: 1, 8 threads",
    )  # fmt: skip
    return markdown(header, rows)
