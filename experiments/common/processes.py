"""Starts processes and says how they ended. No torch here."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from experiments.common import records
from experiments.common.records import Entry, Job, Json

REPOSITORY = Path(__file__).resolve().parents[2]

LOG_LINES = 40
"""Last lines of a process's log that are kept in its record."""


def free_port() -> int:
    """A TCP port that no process listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def environment(job: Job) -> dict[str, str]:
    """The process's environment: one rank, its own port, this repository first on the path."""
    env = dict(os.environ)
    paths = [str(REPOSITORY), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env.update(
        PYTHONPATH=os.pathsep.join(paths),
        PYTHONUNBUFFERED="1",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        TORCH_EXTENSIONS_DIR=extensions_dir(),
    )
    threads = job.entry.options.get("threads")
    if threads:
        # The OpenMP run-time makes its pool once; the process lowers the count from here.
        env["OMP_NUM_THREADS"] = str(max(threads))
    if job.workload.device == "cpu":
        env.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    return env


def extensions_dir() -> str:
    """Where DeepSpeed's compiled extensions are kept: the same folder in every process."""
    default = Path(tempfile.gettempdir()) / f"offload_step_extensions_{os.getuid()}"
    return os.environ.get("TORCH_EXTENSIONS_DIR", str(default))


def tail(log: Path, lines: int = LOG_LINES) -> list[str]:
    """The last lines of a log."""
    if not log.exists():
        return []
    return log.read_text(errors="replace").splitlines()[-lines:]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that this module started, with the children in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_process(command: list[str], env: dict[str, str], log: Path, limit: float) -> int | None:
    """Run in a session of its own, output to `log`; the exit status, or None past the limit."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            stop(process)
            return None
        except BaseException:
            # An interrupt of the command must not leave a process on the GPU.
            stop(process)
            raise


def status_of(code: int | None, result: Json | None, lines: list[str]) -> str:
    """How a measuring process ended."""
    if result is not None:
        return result["status"]
    if code is None:
        return records.TIMED_OUT
    text = "\n".join(lines).lower()
    # The kernel ends a process with SIGKILL when the host's memory is used up.
    if code == -signal.SIGKILL or "out of memory" in text or "cannot allocate memory" in text:
        return records.OUT_OF_MEMORY
    return records.FAILED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a measuring process ended, and what it left."""

    code: int | None
    """Its exit status; None where it was ended at its limit."""
    result: Json | None
    lines: list[str]
    """The end of its log."""
    wall_seconds: float


def run_worker(module: str, job: Job, folder: Path, limit: float) -> Ended:
    """Run `python -m module JOB RESULT` for one entry; never raises for what happens there."""
    job_path, result_path, log = folder / "job.json", folder / "result.json", folder / "log"
    records.write_json(job_path, job.to_json())
    result_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, str(job_path), str(result_path)]
    begin = time.monotonic()
    code = run_process(command, environment(job), log, limit)
    return Ended(
        code=code,
        result=records.read_json(result_path) if result_path.exists() else None,
        lines=tail(log),
        wall_seconds=time.monotonic() - begin,
    )


def end(code: int) -> NoReturn:
    """Ends this process as it is.

    Tearing down an interpreter with tens of GiB of page-locked memory can take longer than the
    measurement, and threads or process groups that other packages leave can keep it from ending.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def needs_adam(entries: list[Entry]) -> bool:
    """Whether DeepSpeed's CPU Adam has to be compiled before anything is timed."""
    return any(entry.system.startswith("deepspeed_") for entry in entries)


def prepare(job: Job, entries: list[Entry], prefault_gib: int, limit: float) -> Json:
    """Compile DeepSpeed's Adam and fill the host's memory, side by side; failures are recorded."""
    commands = []
    if needs_adam(entries):
        commands.append(["adam"])
    if prefault_gib:
        commands.append(["memory", str(prefault_gib)])
    module = [sys.executable, "-m", "experiments.common.prepare"]
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            [*module, *command],
            cwd=REPOSITORY,
            env=environment(job),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command in commands
    ]
    report: Json = {}
    for command, process in zip(commands, processes, strict=True):
        try:
            output, _ = process.communicate(timeout=max(1.0, limit - (time.monotonic() - begin)))
            lines = output.decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            stop(process)
            lines = ["timed out"]
        report[command[0]] = {"exit_status": process.returncode, "log": lines[-5:]}
        print(f"prepare {command[0]}: {lines[-1] if lines else 'no output'}", flush=True)
    report["seconds"] = time.monotonic() - begin
    return report
