"""Tables of a result, whole or not. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.common.records import GIB, Json
from experiments.common.tables import markdown


def tables(cases: Json) -> Iterator[str]:
    """Memory, saves beside training, rates, states that leave."""
    yield _contract(cases)
    yield _stall(cases)
    yield _rates(cases)
    yield _states(cases)


def _share(measured: int, said: int) -> str:
    return f"{measured / GIB:.3f} of {said / GIB:.3f} ({100 * measured / said:.1f} %)"


def _contract(cases: Json) -> str:
    rows: list[list[str]] = []
    for name, case in cases.items():
        contract = case.get("contract", {})
        for phase, peak in contract.get("measured", {}).items():
            said = contract["said"][phase]
            gpu = "-"
            if said["gpu"] is not None:
                # One goes as the other comes.
                beside = max(contract["activations"].get(phase) or 0, said.get("in_flight", 0))
                gpu = _share(peak["gpu_bytes"], said["gpu"] + beside)
            pinned = "-"
            if said["pinned"] and peak["gpu_bytes"] is not None:
                pinned = _share(peak["pinned_bytes"], said["pinned"])
            resident = said["host"] + said["pinned"]
            seconds = f"{peak['seconds']:.1f}"
            rows.append([name, phase, seconds, _share(peak["rss_bytes"], resident), pinned, gpu])
    return markdown(("case", "phase", "s", "resident GiB", "pinned GiB", "GPU GiB"), rows)


def _stall(cases: Json) -> str:
    rows: list[list[str]] = []
    for name, case in cases.items():
        found = case.get("async", {})
        for number, save in enumerate(found.get("saves", [])):
            usual, writing = save["step_seconds"], save["step_while_writing"]
            rows.append(
                [
                    f"{name}, k {found['gpu_layers']} of {found['layers']}, save {number}",
                    f"{1e3 * usual:.1f}",
                    f"{1e3 * save['call_seconds']:.2f}",
                    f"{1e3 * save['blocked_seconds']:.2f}",
                    f"{100 * save['stall_of_a_step']:.1f} %",
                    f"{save['copy_seconds']:.2f} ({save['copying_steps']})",
                    f"{100 * save['extra_while_copying'] / usual:.0f} %",
                    "-" if writing is None else f"{writing / usual:.3f} ({save['writing_steps']})",
                    f"{save['saved_seconds']:.1f}" + ("" if save["ended_in_time"] else "+"),
                    f"{save['without_room_bytes'] / 1e9:.1f}",
                ]
            )
    header = (
        "case", "step ms", "call ms", "blocked ms", "stall of a step", "copying s (steps)",
        "slower by, of a step", "step while writing (steps)", "saved in s", "no room GB",
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


def _states(cases: Json) -> str:
    rows: list[list[str]] = []
    for name, case in cases.items():
        found, cycles = case.get("states", {}), case.get("cycles")
        if not found and not cycles:
            continue
        row = [name]
        for way in ("offload", "reload"):
            rate = found.get(way)
            row.append(
                "-"
                if rate is None
                else f"{rate['rate'] / 1e9:.1f} of {rate['copy_rate'] / 1e9:.1f} "
                f"({100 * rate['share']:.0f} %)"
            )
        for key in ("full_bytes", "left_bytes", "growth_bytes"):
            row.append(f"{found[key] / 2**20:.2f}" if key in found else "-")
        row.append(f"{1e3 * found['freeing_seconds']:.1f}" if "freeing_seconds" in found else "-")
        growth = (
            [cycles[f"{kind}_growth_bytes"] / 2**20 for kind in ("rss", "gpu")] if cycles else []
        )
        row.append(", ".join(f"{mib:.1f}" for mib in growth) or "-")
        rows.append(row)
    header = (
        "case", "offload GB/s", "reload GB/s", "MiB before", "MiB left", "MiB more afterwards",
        "ms freeing", "growth of cycles, MiB: host, GPU",
    )  # fmt: skip
    return markdown(header, rows)
