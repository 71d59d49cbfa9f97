"""Rows, claims and their table, the same way for every experiment. Plain data, no torch.

An experiment's run.py has ``rows(result)``, a flat dict for each thing that was measured, and
``claims(rows)``, what is decided from them. A report is made from a result or from the rows that
are kept of it (results.json).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from experiments.common import records
from experiments.common.records import GIB, Json

Rows = Callable[[Json], list[Json]]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A measured value and its limit.

    Attributes:
        text: what is claimed.
        value: what was measured; None if it was not.
        limit: None if the value is only reported.
        at_least: whether the limit is the least allowed value; else it is the most.
        ceiling: for a ratio to another system: what a step without any update would reach.
    """

    text: str
    value: float | None
    limit: float | None = None
    at_least: bool = False
    ceiling: float | None = None

    @property
    def verdict(self) -> str:
        """reached, missed (also: a limit that no update at all could reach), reported or not
        measured."""
        if self.value is None:
            return "not measured"
        if self.limit is None:
            return "reported"
        good = self.value >= self.limit if self.at_least else self.value <= self.limit
        if not good and self.ceiling is not None and self.ceiling < self.limit:
            return "missed: above the ceiling"
        return "reached" if good else "missed"


Claims = Callable[[Sequence[Json]], list[Claim]]


def no_claims(rows: Sequence[Json]) -> list[Claim]:
    """No claims, for an experiment whose rows say everything."""
    del rows
    return []


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns above / below; None if either is None."""
    return None if above is None or below is None else above / below


def worst(values: Iterable[float | None], *, at_least: bool = False) -> float | None:
    """The measured value that is furthest from the claim; None if nothing was measured."""
    known = [value for value in values if value is not None]
    return (min(known) if at_least else max(known)) if known else None


# -- numbers of rows ---------------------------------------------------------------------------


def short(value: float | None, digits: int = 4) -> float | None:
    """Rounds to this many significant digits."""
    return None if value is None else float(f"{value:.{digits}g}")


def gib(num_bytes: float | None) -> float | None:
    """Converts bytes to GiB, with four significant digits."""
    return None if num_bytes is None else short(num_bytes / GIB)


def peak_gib(measured: Sequence[Json]) -> float | None:
    """The largest peak of the GPU's memory."""
    return gib(worst(one["gpu"].get("peak_allocated_bytes") for one in measured))


def slowest(ranks: Sequence[Json]) -> tuple[float, list[float]]:
    """Seconds of a step and of each window: the slowest rank's are the job's."""
    windows = zip(*(rank["window_seconds"] for rank in ranks), strict=True)
    return max(rank["step_seconds"] for rank in ranks), [max(each) for each in windows]


def failure(record: Json) -> Json:
    """Status of a job that did not finish, and the first line of its error or its last log line."""
    errors = [rank["error"] for rank in record["ranks"] if "error" in rank]
    last = (errors or record["log"][-1:] or [""])[0].splitlines()
    return {"status": record["status"]} | ({"words": last[0][:120]} if last else {})


def timed_row(record: Json) -> Json:
    """The fields of every timed job (bench.py); of one that failed, those of `failure`."""
    if record["status"] != records.OK:
        return failure(record)
    ranks = record["ranks"]
    seconds, windows = slowest(ranks)
    return {
        "step_s": short(seconds, 5),
        "window_s": [short(one) for one in windows],
        "tflops": short(sum(rank["tflops"] for rank in ranks) / len(ranks)),
        "peak_gpu_gib": peak_gib(ranks),
        "host_gib": gib(sum(rank["host_bytes"] for rank in ranks)),
    }


# -- text --------------------------------------------------------------------------------------


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return "; ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    return f"{value:g}" if isinstance(value, float) else str(value).replace("|", "/")


def markdown(rows: Sequence[Json]) -> str:
    """A table whose columns are the rows' keys, in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def machine_of(result: Json) -> Json:
    """The machine and versions, which all runs of one table must share."""
    found = result.get("hardware") or result["machine"]
    versions = {"python": found["python"], **found["versions"]}
    if found.get("cuda"):
        versions["cuda"] = found["cuda"]
    return {"gpu": found.get("gpu"), "cpu": found["cpu"], "versions": versions}


def summary(rows: Rows, results: dict[str, Json]) -> Json:
    """All runs' rows and their origin: the content of an experiment's results.json.

    Args:
        rows: makes the experiment's rows of a result.
        results: a run's name -> the result that it wrote.

    Raises:
        ValueError: runs of different machines or versions; a summary has one.
    """
    machines = [machine_of(result) for result in results.values()]
    if any(machine != machines[0] for machine in machines):
        raise ValueError(f"runs of different machines or versions: {machines}")
    runs: list[Json] = []
    for name, result in results.items():
        found = result.get("hardware") or result["machine"]
        run = {"run": name, "date": found["date"], "commit": found.get("commit")}
        command = result.get("command") or found.get("command")
        runs.append({**run, "cores": found["cores"], "command": command})
    lines = [{"run": name, **row} for name, result in results.items() for row in rows(result)]
    return {"machine": machines[0], "runs": runs, "rows": lines}


def text_of(found: Json, claims: Claims = no_claims) -> str:
    """A summary, or the content of a results.json, as readable text."""
    runs, rows = found["runs"], found["rows"]
    lines: list[str] = []
    if (machine := found.get("machine")) is not None:
        versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
        lines.append(f"{machine['gpu'] or machine['cpu']}; {versions}")
    for run in runs:
        name = run.get("run") or f"part {run['part']}"
        lines.append(f"- {name}: {run.get('date', '')} {run.get('commit')}: `{run.get('command')}`")
    text = "\n".join(lines) + "\n\n" + markdown(rows)
    decided = [
        {
            "claim": claim.text,
            "measured": None if claim.value is None else f"{claim.value:#.3g}",
            "limit": None
            if claim.limit is None
            else f"{'>=' if claim.at_least else '<='} {claim.limit:g}",
            "ceiling": None if claim.ceiling is None else f"{claim.ceiling:#.3g}",
            "verdict": claim.verdict,
        }
        for claim in claims(rows)
    ]
    return text + ("\n" + markdown(decided) if decided else "")


def of_result(rows: Rows, claims: Claims = no_claims) -> Callable[[Json], str]:
    """Returns the function that makes the text which a command prints after measuring."""
    return lambda result: text_of(summary(rows, {"now": result}), claims)
