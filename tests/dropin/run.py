"""DeepSpeed's own unit tests, once with plain DeepSpeed and once with hytrain swapped in.

    make test-dropin DEEPSPEED_TESTS=<DeepSpeed's repository>/tests

"Passes with plain DeepSpeed" must mean "passes with hytrain": the exit status says whether it does
for all tests that are not listed, with reasons, in docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dropin_plugin import OUTCOMES, SAMPLE
from selection import FIRST, HANGS, REST

from hytrain.formats.text_table import align

ROOT = Path(__file__).parents[2]
REASONS = ROOT / "docs" / "compatibility.md"
OUTCOMES_PLUGIN = "dropin_plugin"
ENGINES = ("plain", "hytrain")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a test ended: "passed", "failed" or "skipped", and an error's last words."""

    status: str
    words: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tests with each engine and prints the tables."""
    options = _parser().parse_args(argv)
    if options.tests is None or not (options.tests / "unit").is_dir():
        print(
            "skipped: give the tests folder of DeepSpeed's repository (of the installed release), "
            "DEEPSPEED_TESTS=<dir>"
        )
        return 0
    chosen = {"first": FIRST, "rest": REST, "all": FIRST + REST}[options.tier]
    if options.only:
        chosen = tuple(options.only)
    _build_extensions()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # Out of the checkout: its conftest would put the checkout before the installed package.
        copy = Path(folder) / "tests"
        shutil.copytree(options.tests, copy)
        for engine in options.engines:
            if not options.resume:
                (options.out / f"{engine}.jsonl").unlink(missing_ok=True)
            _run(copy, chosen, engine, options)
    found = {engine: _read(options.out / f"{engine}.jsonl") for engine in ENGINES}
    if options.tier == "rest":
        first = [_pattern(name) for name in FIRST]
        found = {
            engine: {k: v for k, v in tests.items() if not any(p.match(k) for p in first)}
            for engine, tests in found.items()
        }
    return _report(found["plain"], found["hytrain"])


def _build_extensions() -> None:
    """Compiles DeepSpeed's Adams, which plain DeepSpeed uses, before any test has a time limit.

    A test that is killed while it compiles leaves a lock behind, for which all others wait.
    """
    code = (
        "from deepspeed.accelerator import get_accelerator as get\n"
        "for name in ('FusedAdamBuilder', 'CPUAdamBuilder'):\n"
        "    get().create_op_builder(name).load(verbose=False)\n"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("tests", type=Path, nargs="?", help="DeepSpeed's tests folder")
    parser.add_argument("--tier", choices=("first", "rest", "all"), default="first")
    parser.add_argument("--only", nargs="+", help="other tests, as pytest names them")
    parser.add_argument("--seconds", type=int, default=3600, help="for each of the two runs")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=ENGINES,
        help="to run; the outcomes of the other are those in --out",
    )  # fmt: skip
    parser.add_argument("--fp16", action="store_true", help="also the tests that want fp16")
    parser.add_argument("--sample", type=int, default=0, help="variants of each test (0: all)")
    parser.add_argument("--test-seconds", type=int, default=120, help="for each test")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "dropin",
        help="folder of outcomes and logs",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="a test whose outcome is in --out is not run again"
    )
    return parser


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name) + r"($|::|\[)")


def _environment(copy: Path, engine: str, outcomes: Path) -> dict[str, str]:
    environment = {
        **os.environ,
        "DROPIN_ENGINE": engine,
        OUTCOMES: str(outcomes),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "2",  # what DeepSpeed takes for the number of devices
        "OMP_NUM_THREADS": "1",
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        "DS_UNITTEST_TIMEOUT": "3600",  # its own way to end a test can hang: see _follow
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            (str(Path(__file__).parent), str(copy), str(ROOT), os.environ.get("PYTHONPATH", ""))
        ),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return environment


def _run(copy: Path, chosen: Sequence[str], engine: str, options: argparse.Namespace) -> None:
    """Runs the tests, after a hanging one those that remain, until all have an outcome."""
    outcomes = (options.out / f"{engine}.jsonl").resolve()
    left_out = " and ".join(f"not {name}" for name in HANGS)
    there = [name for name in chosen if (copy / name.partition("::")[0]).exists()]
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", OUTCOMES_PLUGIN, "-p", "no:cacheprovider",
        "-k", left_out, *there,
    ]  # fmt: skip
    end = time.monotonic() + options.seconds
    with (options.out / f"{engine}.log").open("a") as log:
        while True:
            environment = _environment(copy, engine, outcomes) | {
                SAMPLE: str(options.sample),
                "DROPIN_FP16": str(int(options.fp16)),
            }
            process = subprocess.Popen(
                command, cwd=copy, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            hanging = _follow(process, outcomes, options.test_seconds, end)
            if hanging is None:
                break
            words = f"did not end within {options.test_seconds} s"
            with outcomes.open("a") as file:
                file.write(json.dumps({"name": hanging, "status": "failed", "words": words}) + "\n")
    if time.monotonic() > end:
        print(f"{engine}: not done within {options.seconds} s", file=sys.stderr)
    if not _read(outcomes):
        raise SystemExit(f"{engine}: no outcomes, see {options.out / engine}.log")


def _follow(
    process: subprocess.Popen[bytes], outcomes: Path, test_seconds: int, end: float
) -> str | None:
    """Waits for a run's end; kills it if a test hangs, and returns that test's name.

    DeepSpeed's harness waits for ranks at a barrier after a test has failed on one of them, without
    a limit.
    """
    number, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.5)
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        if len(lines) != number:
            number, since = len(lines), time.monotonic()
        is_over = time.monotonic() > end
        if is_over or (lines and time.monotonic() - since > test_seconds):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the ranks too
            process.wait()
            last = json.loads(lines[-1]) if lines else None
            return last["name"] if last and last["status"] is None and not is_over else None
    return None


def _read(outcomes: Path) -> dict[str, Outcome]:
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    entries = [json.loads(line) for line in lines]
    return {e["name"]: Outcome(e["status"], e["words"]) for e in entries if e["status"]}


def _report(plain: dict[str, Outcome], swapped: dict[str, Outcome]) -> int:
    rows: dict[str, list[int]] = {}
    lost: list[tuple[str, Outcome]] = []
    for name, outcome in plain.items():
        if outcome.status != "passed":
            continue
        row = rows.setdefault(name.partition("::")[0], [0, 0])
        row[0] += 1
        other = swapped.get(name, Outcome("missing"))
        if other.status == "passed":
            row[1] += 1
        else:
            lost.append((name, other))
    total = [sum(row[i] for row in rows.values()) for i in (0, 1)]
    table = [[name, str(a), str(b)] for name, (a, b) in rows.items()]
    table.append(["all", *map(str, total)])
    heading = ["tests that pass with", "plain DeepSpeed", "of these, hytrain"]
    print(*align([heading, *table]), sep="\n")
    reasons = REASONS.read_text() if REASONS.exists() else ""
    unknown = 0
    for name, outcome in lost:
        short = name.partition("[")[0].rpartition("/")[2]
        is_known = short.split("::", 1)[1].replace("::", ".") in reasons
        unknown += not is_known
        print(f"{'known' if is_known else 'NEW'}  {name}\n    {outcome.words or outcome.status}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
