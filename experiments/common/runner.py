"""Runs jobs, each in processes of its own, one a rank, and keeps what they measured. No torch here.

A job is plain data: "label"; "worker", the module that measures (see worker.py); "device"; "ranks"
(1 unless given; with "separate" each is a world of its own); "cores", the number for its one rank
(all unless given); "seconds", about how long it takes; "group" and "group_ends": once a job of the
group has ended so ("ok" or "failed"), the group's later ones are left out; and whatever the worker
reads. A job that fails, hangs or runs out of memory is recorded, and the next one begins in
processes of its own, where nothing of the failed one is left.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.common import records
from experiments.common.hardware import REPOSITORY, describe
from experiments.common.records import Json
from experiments.common.sizes import MODELS

LIMIT_FACTOR = 2.5
"""A job may take this many times its expected seconds before it counts as hung."""
WORTH_A_TRY = 0.4
"""A job starts only if this share of its expected seconds is left; they are generous estimates."""
CLOSING_SECONDS = 5.0
"""Seconds kept free at the end of a command's time."""
GRACE_SECONDS = 5.0
"""Seconds for other ranks after one failed: one that waits in a collective never ends by itself."""
LOG_LINES = 30
WORST_FIRST = (
    records.OUT_OF_MEMORY,
    records.HOST_MEMORY_LOW,
    records.FAILED,
    records.REFUSED,
    records.TIMED_OUT,
)
"""The status that explains a job comes first: its other ranks only wait until they are ended."""


# -- one job -----------------------------------------------------------------------------------


def free_port() -> int:
    """A TCP port that no process listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def divide_cores(cores: Sequence[int], shares: int) -> list[list[int]]:
    """Neighbouring cores for each share; all cores for each if there are fewer than shares."""
    each = len(cores) // shares
    if each == 0:
        return [list(cores)] * shares
    return [list(cores[i * each : (i + 1) * each]) for i in range(shares)]


def environment(
    device: str, *, rank: int = 0, size: int = 1, port: int | None = None, local: int = 0
) -> Json:
    """A rank's environment as a launcher sets it, with this repository first on the path."""
    env = dict(os.environ)
    paths = [str(REPOSITORY), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    extensions = Path(tempfile.gettempdir()) / f"hytrain_experiments_{os.getuid()}"
    env |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        # DeepSpeed's compiled extensions: the same folder in every process.
        "TORCH_EXTENSIONS_DIR": env.get("TORCH_EXTENSIONS_DIR", str(extensions)),
    }
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        # Else glibc would keep freed gradients in its heap; with a GPU they are not on the host.
        env.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    elif not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(env):
        # A plan fills a GPU to within a GiB: that must not be lost to fragmentation.
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return env


def start(
    command: Sequence[str], env: Json, log: Path, cores: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, on these cores from its start: torch and OpenMP
    size their thread pools by the cores that they may use."""
    pin = functools.partial(os.sched_setaffinity, 0, cores) if cores else None
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=pin,
        )


def end_on_sigterm() -> None:
    """Turns SIGTERM into an exception: cleanup then ends the processes, each in its own session."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that :func:`start` has started, with the children in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def tail(log: Path, lines: int = LOG_LINES) -> list[str]:
    """The last lines of a log."""
    return log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> list[int | None]:
    """Exit codes; None for processes still running at the limit, or some time after one failed."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return codes
        if any(codes):
            until = min(until, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.1)
    return [process.poll() for process in processes]


def status_of(code: int | None, result: Json, log: Sequence[str]) -> str:
    """How a rank ended: as its result says, unless the rank was ended before it could say."""
    status = result.get("status", records.RUNNING)
    if status != records.RUNNING:
        return status
    if code is None:
        return records.TIMED_OUT
    text = "\n".join(log).lower()
    # The kernel ends a process with SIGKILL when the host's memory is used up.
    if code == -signal.SIGKILL or "out of memory" in text or "cannot allocate memory" in text:
        return records.OUT_OF_MEMORY
    return records.FAILED


def _commands(
    job: Json, names: Sequence[Path], shares: int | None
) -> list[tuple[list[str], Json, Path, list[int]]]:
    """The arguments of :func:`start` for each rank; `names` are its files' paths without suffix."""
    size, port = len(names), free_port()
    cores = divide_cores(sorted(os.sched_getaffinity(0)), max(shares or 0, size))
    if "cores" in job:
        cores[0] = cores[0][: job["cores"]]
    found: list[tuple[list[str], Json, Path, list[int]]] = []
    for rank, name in enumerate(names):
        command = [sys.executable, "-m", "experiments.common.worker"]
        command += [str(name.with_name("job.json")), str(name.with_suffix(".json"))]
        world: Json = {"rank": rank, "size": size, "port": port}
        if job.get("separate", False):
            world = {}
        env = environment(job["device"], local=rank, **world)
        env["OMP_NUM_THREADS"] = str(max(job.get("threads") or [max(1, len(cores[rank]) - 1)]))
        found.append((command, env, name.with_suffix(".log"), cores[rank]))
    return found


def run_job(job: Json, folder: Path, limit: float, *, shares: int | None = None) -> Json:
    """Runs a job's ranks; never raises for what happens there.

    Args:
        job: see the module's docstring.
        folder: for the processes' files: job.json, rank<i>.json as it grows, rank<i>.log.
        limit: seconds after which all ranks are ended.
        shares: ranks by which the machine's cores are divided; the job's own unless given.

    Returns:
        {"label", "status" (the worst rank's), "wall_seconds", "ranks": what each has measured,
        "log": the end of the log of the rank that explains a failure}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*"):
        old.unlink()
    given = {**job, "folder": str(folder.resolve()), "until": time.time() + limit}
    records.write_json(folder / "job.json", given)
    begin = time.monotonic()
    names = [folder.resolve() / f"rank{rank}" for rank in range(job.get("ranks", 1))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in _commands(job, names, shares):
            processes.append(start(*command))
        codes = _wait(processes, limit)
    finally:
        # An interrupt of the command must not leave a process on the GPU either.
        for process in processes:
            stop(process)
    found: list[Json] = []
    for code, name in zip(codes, names, strict=True):
        path = name.with_suffix(".json")
        result = records.read_json(path) if path.exists() else {}
        log = tail(name.with_suffix(".log"))
        found.append({**result, "status": status_of(code, result, log), "log": log})
    rank = min(found, key=lambda one: (*WORST_FIRST, records.OK).index(one["status"]))
    logs = [one.pop("log") for one in found]
    return {
        "label": job["label"],
        "status": rank["status"],
        "wall_seconds": round(time.monotonic() - begin, 1),
        "ranks": found,
        "log": [] if rank["status"] == records.OK else logs[found.index(rank)],
    }


# -- a command's jobs --------------------------------------------------------------------------


def numbers(text: str) -> tuple[float, ...]:
    """`0.3,0.5` as numbers."""
    return tuple(float(word) for word in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """`1,2,4` as whole numbers."""
    return tuple(int(word) for word in text.split(","))


def fraction(text: str) -> float | str:
    """`0.5` or `solve`."""
    return text if text == "solve" else float(text)


def parser(
    text: str | None, *, model: str | None = "llama-3b", batch: int = 8, seq: int = 1024,
    budget: float = 550.0,
) -> argparse.ArgumentParser:  # fmt: skip
    """The options that all experiments share."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--out", type=Path, default=Path("out"), help="folder for result.json and the jobs' files")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--model", default=model, choices=MODELS, help="default: %(default)s")
    add("--batch", default=batch, type=int, help="sequences of a rank's micro-batch (%(default)s)")
    add("--seq", default=seq, type=int, help="tokens a sequence (%(default)s)")
    add("--only", nargs="+", default=[], metavar="LABEL", help="these jobs of --list")
    add("--list", action="store_true", help="show the jobs and stop")
    add("--budget-seconds", default=budget, type=float, help="for everything (%(default)s)")
    return made


def workload(options: argparse.Namespace) -> Json:
    """The shared options that a job takes."""
    return {name: getattr(options, name) for name in ("model", "batch", "seq", "device")}


def chosen(jobs: Iterable[Json], only: Sequence[str]) -> list[Json]:
    """The jobs that `--only` names; all without it.

    Raises:
        SystemExit: a label that no job has.
    """
    every = list(jobs)
    labels = [job["label"] for job in every]
    if unknown := set(only) - set(labels):
        raise SystemExit(f"--only names {sorted(unknown)}: there are {labels}")
    return [job for job in every if not only or job["label"] in only]


def _left_out(job: Json, before: Sequence[tuple[Json, Json]]) -> str | None:
    """The label of an earlier job of the group that makes this one needless; None if none does."""
    for earlier, record in before:
        if job.get("group") is not None and earlier.get("group") == job["group"]:
            is_ok = record["status"] == records.OK
            if record["status"] != records.SKIPPED and is_ok == (job["group_ends"] == "ok"):
                return earlier["label"]
    return None


def measure(
    options: argparse.Namespace, jobs: Sequence[Json], *, shares: int | None = None
) -> Json:
    """Runs one job after another, and writes OUT/result.json after each.

    Returns:
        {"command", "hardware", "jobs": each job with what :func:`run_job` returns}.
    """
    end_on_sigterm()
    begin = time.monotonic()
    script = os.path.relpath(sys.argv[0], REPOSITORY)
    command = shlex.join(["python", script, *sys.argv[1:]])
    result: Json = {"command": command, "hardware": describe(options.device), "jobs": []}
    before: list[tuple[Json, Json]] = []
    for job in jobs:
        if (label := _left_out(job, before)) is not None:
            print(f"{job['label']}: left out after {label}", flush=True)
            continue
        left = options.budget_seconds - CLOSING_SECONDS - (time.monotonic() - begin)
        expected = job.get("seconds", 0.0)
        if left < max(WORTH_A_TRY * expected, 1.0):
            log = [f"{left:.0f} s left, about {expected:.0f} s needed"]
            record: Json = {
                "label": job["label"],
                "status": records.SKIPPED,
                "ranks": [],
                "log": log,
            }
        else:
            limit = min(left, LIMIT_FACTOR * expected) if expected else left
            name = job["label"].replace(" ", "_").replace("/", "_").replace(",", "")
            record = run_job(job, options.out / name, limit, shares=shares)
        before.append((job, record))
        result["jobs"].append({"job": job, **record})
        result["seconds"] = round(time.monotonic() - begin, 1)
        records.write_json(options.out / "result.json", result)
        last = f": {record['log'][-1]}" if record["log"] else ""
        took = record.get("wall_seconds", 0.0)
        print(f"{job['label']}: {record['status']}, {took:.0f} s{last}", flush=True)
    return result


def main(
    options: argparse.Namespace,
    jobs: Iterable[Json],
    report: Callable[[Json], str],
    *,
    shares: int | None = None,
) -> int:
    """Runs a whole command: --list, or the jobs and then their report.

    Returns:
        0, even if a job failed: that is a result, and the report says so.
    """
    some = chosen(jobs, options.only)
    if options.list:
        print("\n".join(f"{j['label']:24s} about {j.get('seconds', 0.0):.0f} s" for j in some))
        return 0
    print(report(measure(options, some, shares=shares)))
    return 0
