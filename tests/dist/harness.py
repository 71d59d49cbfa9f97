"""Runs a function on several ranks, as processes on this machine that talk over gloo.

What a rank imports (torch, DeepSpeed, transformers) takes it ten seconds on a busy machine. So
ranks are forked from one process that has imported all that and done nothing else, and a pool keeps
its processes and runs one case after another in them:

    def train(case: str) -> list[float]:          # at module level: it is pickled by name
        rank = torch.distributed.get_rank()
        ...
        return losses                              # pickled; one result a rank comes back

    def test_train(ranks: RankPools) -> None:      # fixture of tests/conftest.py
        losses_of_rank_0, losses_of_rank_1 = ranks(2).run(train, "tied", timeout=60)

    @pytest.mark.parametrize("stage", [1, 2])
    @on_ranks(2)
    def test_sum(stage: int) -> None:              # where there is nothing else to be seen
        ...                                        # runs on each rank

- In a case, the process group exists (gloo, all ranks), torch uses one thread, and RANK,
  LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE are set. A case destroys the engines that it builds.
- An exception on any rank fails the call with that rank's traceback (a rank's own exception comes
  before those that it caused on others); the other ranks are killed, and the next call starts new
  ones. A rank that dies is reported with its exit code.
- A call that is not over within ``timeout`` seconds fails with the stack of every rank's threads.
- ``run_each(function, [arguments of rank 0, arguments of rank 1, ...])`` gives each rank its own.

On a machine with a GPU, or with variables of a pool's own, each rank imports for itself: a process
that has looked at a GPU cannot be forked, and variables are read by what is imported. With
``on_gpu`` each rank has a GPU of its own, and they talk over NCCL.

Outside pytest, or for a process that is meant to die: ``with RankPool(2) as pool: pool.run(...)``.
Nothing here needs a free port to be guessed: the parent holds the store that the ranks meet at.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
"""Most seconds for the start of the processes, on a busy machine."""
SETTLE_SECONDS = 6.0
"""How long other ranks may take to report their own exception after the first one, as a rule."""


_IMPORTED = (
    "hytrain.engine.engine",
    "hytrain.engine.build_optimizer",
    # DeepSpeed's first engine imports it, and torch's compiler with it: three seconds a rank.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
)
"""What ranks find imported; importing starts no thread, so that forking is safe."""
_SETTINGS = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of every rank; read by what it imports."""


class RankError(AssertionError):
    """A case failed on a rank, a rank died, or the time was up."""


@dataclass(slots=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    stacks: Path


class RankPool:
    """A fixed number of ranks, started at the first call and kept until :meth:`close`."""

    def __init__(
        self,
        num_ranks: int,
        environment: dict[str, str] | None = None,
        *,
        with_deepspeed: bool = True,
        settle_seconds: float = SETTLE_SECONDS,
        on_gpu: bool = False,
    ) -> None:
        """
        Args:
            num_ranks: processes; all on this machine.
            environment: further environment variables of the ranks.
            with_deepspeed: False: cases need torch only, which starts faster.
            settle_seconds: see :data:`SETTLE_SECONDS`.
            on_gpu: rank N computes on GPU N.
        """
        self.num_ranks = num_ranks
        self._with_deepspeed = with_deepspeed
        self._on_gpu = on_gpu
        self._settle_seconds = settle_seconds
        self._environment = {
            **({"DS_ACCELERATOR": "cuda"} if on_gpu else {}),
            **(environment or {}),
        }
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0
    ) -> list[Any]:
        """Calls ``function(*arguments)`` on every rank.

        Args:
            function: a module-level function of an importable module.
            arguments: picklable; the same for all ranks.
            timeout: seconds, the start of the processes not counted.

        Returns:
            The ranks' results, in rank order.

        Raises:
            RankError: see the module's description.
        """
        return self.run_each(function, [arguments] * self.num_ranks, timeout=timeout)

    def run_each(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Sequence[Any]],
        *,
        timeout: float = 120.0,
    ) -> list[Any]:
        """As :meth:`run` with each rank's own arguments."""
        if len(arguments) != self.num_ranks:
            raise ValueError(f"{len(arguments)} argument lists for {self.num_ranks} ranks")
        if not self._ranks:
            self._start()
        for rank, values in zip(self._ranks, arguments, strict=True):
            rank.pipe.send((function, tuple(values), timeout))
        return self._collect(timeout)

    def close(self) -> None:
        """Ends the processes. May be called twice."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.pipe.close()  # an idle rank ends by itself
        for rank in self._ranks:
            rank.process.join(timeout=5)
        self._kill()

    # -- the parent's side ---------------------------------------------------------------------

    def _start(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            use_libuv=False,  # which Debian's torch is built without
        )
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        context = process_context(bool(self._environment))
        for number in range(self.num_ranks):
            ours, theirs = context.Pipe()
            stacks = Path(self._folder.name) / f"rank{number}.txt"
            environment = {**_rank_environment(number, self.num_ranks), **self._environment}
            process = context.Process(
                target=_serve,
                args=(
                    theirs,
                    environment,
                    self._store.port,
                    str(stacks),
                    (self._with_deepspeed, self._on_gpu),
                ),
                daemon=True,
                name=f"rank {number}",
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stacks))
        self._collect(START_SECONDS)

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: list[str] = []
        is_ending = False
        number_of = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        while len(results) < self.num_ranks:
            waiting = [p for p, number in number_of.items() if number not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number = number_of[pipe]
                failure, results[number], ends = self._receive(number)
                if failure and not failures:
                    deadline = min(deadline, time.monotonic() + self._settle_seconds)
                failures.extend([failure] if failure else [])
                is_ending = is_ending or ends
        if not failures and len(results) < self.num_ranks:
            failures.append(self._describe_hang(timeout, set(results)))
        if failures:
            self._kill()
            raise RankError("\n".join(failures))
        if is_ending:
            self._kill()
        return [results[number] for number in range(self.num_ranks)]

    def _receive(self, number: int) -> tuple[str, Any, bool]:
        """(what went wrong or "", result, whether it must end) of a rank that says something."""
        rank = self._ranks[number]
        try:
            failure, result, ends = pickle.loads(rank.pipe.recv_bytes())
        except (EOFError, OSError):
            rank.process.join(timeout=5)
            code = rank.process.exitcode
            return f"rank {number} died with exit code {code}{_read(rank.stacks)}", None, True
        return (f"rank {number} failed:\n{failure}" if failure else ""), result, ends

    def _describe_hang(self, timeout: float, finished: set[int]) -> str:
        # The ranks write their stacks when their own time is up, which is a bit later.
        left = [rank for number, rank in enumerate(self._ranks) if number not in finished]
        until = time.monotonic() + 20.0
        while not all(_read(rank.stacks) for rank in left) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.5)  # to the end
        parts = [f"the time of {timeout:g} s is up; finished ranks: {sorted(finished)}"]
        for number, rank in enumerate(self._ranks):
            if number not in finished:
                parts.append(f"rank {number} is here:{_read(rank.stacks)}")
        return "\n".join(parts)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join(timeout=10)
            with contextlib.suppress(OSError):
                rank.pipe.close()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class RankPools:
    """One pool a number of ranks. Idle ranks take no time, and a hundred megabytes each.

    On a machine with a GPU only one pool is alive at a time: each of its ranks holds GPU memory.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._pools: dict[int, RankPool] = {}
        self._on_gpu = on_gpu

    def __call__(self, num_ranks: int) -> RankPool:
        """The pool of that many ranks."""
        if num_ranks not in self._pools:
            if _has_gpu():
                self.close()
            self._pools[num_ranks] = RankPool(num_ranks, on_gpu=self._on_gpu)
        return self._pools[num_ranks]

    def close(self) -> None:
        """Ends the processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@dataclass(frozen=True, slots=True)
class _Body:
    """What a test does on each rank, by name: the name itself stands for the whole test."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> None:
        vars(importlib.import_module(self.module))[self.name].__wrapped__(*arguments)


def on_ranks(
    num_ranks: int | Callable[..., int], *, alone: bool = False
) -> Callable[[Callable[..., None]], Any]:
    """Makes a test of a function that runs on each of so many ranks, with its own parameters.

    Args:
        num_ranks: how many; or what tells it of the parameters that it names.
        alone: in processes of its own: what hangs there when it is over is in nobody's way.
    """

    def decorate(body: Callable[..., None]) -> Any:
        own = inspect.signature(body)

        @functools.wraps(body)
        def test(ranks: RankPools, **arguments: Any) -> None:
            number = num_ranks
            if not isinstance(number, int):
                number = number(*(arguments[name] for name in inspect.signature(number).parameters))
            values = [arguments[name] for name in own.parameters]
            on_each = _Body(body.__module__, body.__name__)
            if alone:
                with RankPool(number) as pool:
                    pool.run(on_each, *values)
            else:
                ranks(number).run(on_each, *values)

        fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(test)["__signature__"] = own.replace(parameters=[fixture, *own.parameters.values()])
        return test

    return decorate


def _has_gpu() -> bool:
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return Path("/dev/nvidiactl").exists() and not is_hidden


def process_context(has_own_environment: bool = False) -> Any:
    """Of multiprocessing: new processes find everything imported, where that is possible."""
    if has_own_environment or _has_gpu():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    # The server is started here, by the first pool, and imports with this environment.
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    return {
        **_SETTINGS,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        # The parent holds the store: ranks join it as clients.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    return f"\n{text}" if text else ""


# -- the rank's side ---------------------------------------------------------------------------


def _serve(
    pipe: Connection, environment: dict[str, str], port: int, stacks: str, kind: tuple[bool, bool]
) -> None:
    """A rank: joins the group, then runs cases until the parent closes the pipe."""
    os.environ.update(environment)
    os.environ["MASTER_PORT"] = str(port)
    with open(stacks, "w", encoding="utf-8") as stack_file:
        faulthandler.enable(stack_file)
        pipe.send_bytes(_outcome(_join, kind))
        while True:
            try:
                function, arguments, timeout = pipe.recv()
            except EOFError:
                break
            except Exception:  # the case cannot be unpickled: its module does not import
                pipe.send_bytes(pickle.dumps((traceback.format_exc(), None, False)))
                continue
            faulthandler.dump_traceback_later(timeout + 0.5, file=stack_file)
            try:
                message = _outcome(function, arguments)
            finally:
                faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(message)
    # Leaving without the group's destructors: peers may be gone already.
    os._exit(0)


def _join(with_deepspeed: bool, on_gpu: bool) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    wait = timedelta(seconds=60)
    port = int(os.environ["MASTER_PORT"])
    # By name, torch 2.6 would ask for libuv.
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait, use_libuv=False)
    rank, number = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=number, timeout=wait)
    if not with_deepspeed:
        return
    from deepspeed import comm
    from deepspeed.ops import __compatible_ops__ as compatible_ops

    import hytrain  # noqa: F401 - the import is the costly part of a start

    # DeepSpeed would compile an extension for communication between CPU processes.
    compatible_ops["deepspeed_shm_comm"] = False
    comm.init_distributed(backend, verbose=False)


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(("", function(*arguments), _is_ending()))
    except BaseException:
        return pickle.dumps((traceback.format_exc(), None, True))


def _is_ending() -> bool:
    """Whether a failure that the case has caught is to end this process: not in another case."""
    ending = sys.modules.get("hytrain.comm.process_exit")
    return ending is not None and bool(ending._failures)
