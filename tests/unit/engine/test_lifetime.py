"""Engines come and go: no thread, no pinned memory, no hang is left."""

from __future__ import annotations

import atexit
import gc
import logging
import subprocess
import sys
import textwrap
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from support.models import make_batch, make_model
from support.processes import num_threads
from support.scripts import run_script
from support.shadow import Shadow
from torch.utils.data import DataLoader, Dataset
from training import FRACTIONS, backward, inputs, make_steps

import hytrain
from hytrain.engine.engine import HyTrainEngine
from hytrain.errors import EngineClosedError

pytestmark = pytest.mark.timeout(280)

TESTS = Path(__file__).parents[2]
EXIT_SECONDS = 5.0
"""What the end of a process may take beyond that of one which has torch alone."""
ATTEMPTS = 4
"""On a machine that is busy, of which the quickest counts."""


@pytest.mark.cpu
def test_a_thread_counts_until_it_was_joined() -> None:
    with built(make_model("mlp"), make_config()) as engine:
        backward(engine, 0)
        engine.step()
        engine.synchronize()
    before = num_threads()
    with built(make_model("mlp"), make_config()) as engine:
        worker = 1 + 2  # and a copy lane each way, which stand in for a GPU's
        assert num_threads() == before + worker
    assert num_threads() == before


def _finish(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
@pytest.mark.parametrize("when", ["unused", "in_backward", "after_backward", "after_step"])
def test_destroy_leaves_no_thread_and_no_pinned_memory(when: str, gpu_fraction: float) -> None:
    with built(make_model("mlp"), make_config()) as engine:
        backward(engine, 0)  # threads that torch keeps are there from here on
        engine.step()
        engine.synchronize()
    before = num_threads()
    model = make_model("mlp")
    with environment("HYTRAIN_DELAYS", "7:2000"):
        engine, *_ = hytrain.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=make_config(gpu_fraction=gpu_fraction, clipping=1e-3),
        )
    assert num_threads() > before
    arenas = engine.optimizer.pipeline.cpu.pinned._arenas
    assert arenas
    for number in range(0 if when == "unused" else 3):
        loss = engine(**inputs(number))
        if when == "in_backward" and number == 2:
            model.blocks[0].up.weight.register_hook(lambda _grad: engine.destroy())
            with pytest.raises(EngineClosedError):
                _finish(engine, loss)
            break
        engine.backward(loss)
        if not (when == "after_backward" and number == 2):
            engine.step()
    engine.destroy()
    engine.destroy()  # twice is once
    assert num_threads() == before
    assert all(arena._mapping is None for arena in arenas)


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_use_after_destroy_is_refused(gpu_fraction: float) -> None:
    with built(make_model("mlp"), make_config(gpu_fraction=gpu_fraction)) as engine:
        loss = engine(**inputs(0))
        engine.destroy()
        uses = [
            lambda: engine(**inputs(1)),
            lambda: engine.backward(loss),
            engine.step,
            engine.synchronize,
            engine.optimizer.flush,
            engine.eval,
        ]
        for use in uses:
            with pytest.raises(EngineClosedError, match="after destroy"):
                use()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_a_reference_to_a_destroyed_engine_keeps_no_state(gpu_fraction: float) -> None:
    with built(make_model("mlp"), make_config(gpu_fraction=gpu_fraction)) as engine:
        backward(engine, 0)
        engine.step()
        state = weakref.ref(engine.optimizer.layer_states[0].exp_avg)
        assert state() is not None
    gc.collect()
    assert state() is None


def _run_script(body: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs a training script in a process of its own; (result, seconds after its main ended)."""
    script = f"""
        import os, sys, time
        sys.path.insert(0, {str(TESTS)!r})
        from support.engines import join_process_group, make_config
        from support.models import make_model, make_batch
        join_process_group()
        import torch, hytrain
        model = make_model("mlp")
        engine, *_ = hytrain.initialize(
            model=model, model_parameters=model.parameters(), config=make_config())
        for number in range(3):
            engine.backward(engine(**make_batch("mlp", number)))
            engine.step()
    """
    script = textwrap.dedent(script) + textwrap.dedent(body)
    script += "\nprint('END', time.time(), flush=True)\n"
    return _run(script, **variables)


def _run(script: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], float]:
    result = run_script(script, timeout=200.0, is_finalized=True, **variables)
    ended = time.time()
    marks = [line for line in result.stdout.splitlines() if line.startswith("END")]
    assert marks, result.stderr
    return result, ended - float(marks[-1].split()[1])


_TORCH_ALONE = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
print("END", time.time(), flush=True)
"""


def _assert_prompt(body: str, status: int = 0, **variables: str) -> None:
    """A script with an engine ends as promptly as one without; the quickest of each counts."""
    ours: list[float] = []
    alone: list[float] = []
    for _ in range(ATTEMPTS):
        result, seconds = _run_script(body, **variables)
        assert result.returncode == status, result.stderr
        ours.append(seconds)
        if seconds < EXIT_SECONDS:  # torch alone cannot take less than nothing
            return
        alone.append(_run(_TORCH_ALONE)[1])
        if min(ours) < min(alone) + EXIT_SECONDS:
            break
    print(f"ends after {min(ours):.2f} s, torch alone after {min(alone):.2f} s")
    assert min(ours) < min(alone) + EXIT_SECONDS, (ours, alone)


def test_the_interpreter_ends_without_destroy() -> None:
    """In the middle of a step, with copies on their way; an error at its end is not hidden."""
    body = """
        engine.backward(engine(**make_batch("mlp", 9)))
        print('END', time.time(), flush=True)
        raise SystemExit(3)
    """
    _assert_prompt(body, status=3, HYTRAIN_DELAYS="3:3000")


def test_the_interpreter_ends_with_a_save_that_is_being_written(tmp_path: Path) -> None:
    """It waits for that, and for nothing else."""
    body = f"""
        from support.resume import Run, engine_of
        context = engine_of(Run(asynchronous=True))  # kept: it would destroy the engine
        engine = context.__enter__()
        engine.save_checkpoint({str(tmp_path)!r})
    """
    _assert_prompt(body)
    assert (tmp_path / "latest").is_file()


def test_a_forked_child_ends_by_itself() -> None:
    """It has the engine but none of its threads."""
    body = """
        child = os.fork()
        if child == 0:
            import gc
            engine.destroy()
            del engine, model
            gc.collect()
            os._exit(0)  # not sys.exit: gloo's own group does not survive that
        deadline = time.time() + 60
        while time.time() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.05)
        else:
            os.kill(child, 9)
            raise SystemExit("the child hangs")
        assert status == 0, status
        engine.backward(engine(**make_batch("mlp", 9)))
        engine.step()
        engine.synchronize()
        engine.destroy()
    """
    _assert_prompt(body)


class Batches(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return make_batch("mlp", index)["inputs"]


def test_data_loader_workers_forked_in_the_middle_of_training() -> None:
    with built(make_model("mlp"), make_config()) as engine:
        shadow = Shadow(engine)
        for _epoch in range(2):
            loader = DataLoader(
                Batches(), batch_size=None, num_workers=2, multiprocessing_context="fork"
            )
            for batch in loader:
                engine.backward(engine(inputs=batch))
                shadow.step()
        shadow.check()


def _traces() -> dict[str, int]:
    """What of earlier engines a process could keep, as numbers."""
    gc.collect()
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return {
        "exit functions": atexit._ncallbacks(),
        "logging handlers": sum(len(getattr(logger, "handlers", ())) for logger in loggers),
        "threads": num_threads(),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "objects": len(gc.get_objects()),
        "exception hook": id(sys.excepthook),
    }


@pytest.mark.parametrize("kind", ["ZeRO-2", "ZeRO-3", "a build that fails at its very end"])
def test_engines_leave_nothing_in_the_process(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many are built in one process by notebooks, searches over hyper-parameters, and tests."""
    caplog.set_level(logging.WARNING, "hytrain.run")  # pytest keeps every record

    class Refused(Exception):
        pass

    def refuse(*_: Any) -> None:
        raise Refused

    def build() -> None:
        config = make_config(gpu_fraction=0.5, stage=3 if kind == "ZeRO-3" else 2)
        with suppress(Refused), built(make_model("mlp"), config) as engine:
            make_steps(engine, range(1))

    if kind not in ("ZeRO-2", "ZeRO-3"):
        monkeypatch.setattr(HyTrainEngine, "_unblock_throughput_timer", refuse)
    for _ in range(3):
        build()
    before = _traces()
    engines = 8
    for _ in range(engines):
        build()
    after = _traces()
    # Less than one of anything for each engine, and nothing of what only engines add to.
    assert after.pop("exception hook") == before.pop("exception hook")
    for name, number in after.items():
        # The allocator and the interpreter have mappings and objects of their own.
        most = engines - 1 if name in ("mappings", "objects") else 0
        assert number - before[name] <= most, f"{number - before[name]} {name} more"


def test_memory_of_many_engines_is_bounded() -> None:
    """Nothing large lies between what a process keeps of them until the collector comes.

    Objects of an engine (half a megabyte of this model's) are in cycles. A large buffer that was
    taken from the heap while one was built leaves a hole that the next ones' small objects nibble
    at: each build then takes new memory.
    """
    body = """
        import gc, logging
        from pathlib import Path

        def resident():
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGESIZE") / 2**20

        def build():
            model = make_model("mlp")
            engine, *_ = hytrain.initialize(
                model=model, model_parameters=model.parameters(), config=make_config())
            engine.backward(engine(**make_batch("mlp", 0)))
            engine.step()
            engine.destroy()

        logging.disable(logging.WARNING)
        engine.destroy()
        for _ in range(2):
            build()
        gc.collect()
        gc.disable()
        before = resident()
        for _ in range(12):
            build()
        print("PER ENGINE", (resident() - before) / 12)
    """
    result, _ = _run_script(body)
    assert result.returncode == 0, result.stderr
    line = next(x for x in result.stdout.splitlines() if x.startswith("PER ENGINE"))
    assert float(line.split()[-1]) < 2.0, "MiB an engine"
