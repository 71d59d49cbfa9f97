"""One size and stage: predicted and measured memory, saves beside training, rates, states that
leave the GPU."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from experiments.common.copies import copy_rates
from experiments.common.memory import host_memory
from experiments.common.model import build_batches, build_model
from experiments.common.records import Json
from experiments.common.systems import HyTrain, loss_of
from experiments.common.timing import Stepper, synchronize
from experiments.common.worker import Recorder
from experiments.memory import stall
from experiments.memory.meters import PhaseMeter, PinnedBytes, disk_rates, forget_cached

STEPS = 6
ROUNDS = 9
"""How often states leave and come back."""
FIRST_CYCLES = 20
"""Cycles after which memory may not grow."""


def run(job: Json, recorder: Recorder) -> None:
    """Measures all parts, the memory contract first."""
    folder, parts = Path(job["checkpoints"]), job["parts"]
    pinned = PinnedBytes()
    _warm_up({**job, "model": "toy"}, folder)
    model = build_model(job, torch.bfloat16)
    batches = build_batches(job)
    activations = _activations(model, batches[0], job["device"])
    gc.collect()
    meter = PhaseMeter(job["device"], pinned)
    held: list[HyTrain] = []

    def build() -> None:
        held.append(HyTrain(model, job))
        # Memory for copies of the state would else be touched during the first steps.
        held[0].engine._saver._memory.wait_touched()

    meter.measure("build", build)
    (system,) = held
    stepper = Stepper(system, batches, job["device"])
    _phases(stepper, meter, batches[0])
    said = {name: asdict(peak) for name, peak in system.engine.memory_peaks().items()}
    recorder.put(said=said, measured=meter.peaks, activations=activations)
    recorder.reached("contract")
    if "stall" in parts:
        stall.measure(stepper, recorder, folder, job["saves"])
    if "rates" in parts:
        recorder.put(rates=_rates(system.engine, meter, folder), measured=meter.peaks)
        recorder.reached("rates")
    if "states" in parts:
        # Last: the pinned memory that this part keeps would count as a save's.
        recorder.put(states=_states(system.engine, job["device"]))
        recorder.reached("states")
    system.close()
    if "cycles" in parts:
        recorder.put(cycles=_cycles({**job, "model": "toy"}))


def _save_now(engine: Any, folder: Path) -> None:
    """Saves synchronously with an engine whose other saves are asynchronous."""
    saver, engine._saver = engine._saver, None
    try:
        engine.save_checkpoint(str(folder), tag="now")
    finally:
        engine._saver = saver


def _warm_up(job: Json, folder: Path) -> None:
    """Has a small engine take what libraries, allocators and threads take only once."""
    system = HyTrain(build_model(job, torch.bfloat16), job)
    stepper = Stepper(system, build_batches(job), job["device"])
    for _ in range(3):
        stepper.step()
    _save_now(system.engine, folder)
    system.engine.load_checkpoint(str(folder), tag="now")
    system.close()


def _activations(model: Any, batch: Json, device: str) -> Json:
    """Peak GPU bytes of forward, loss and backward of the bare model, beyond those before.

    They are the model's own, and not predicted. Gradients are dropped as soon as they are final.
    """
    if device != "cuda":
        return {}

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters()]
    found: Json = {}
    for name, grad in (("step", True), ("evaluation", False)):
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(grad):
            loss = loss_of(model, batch)
            if grad:
                loss.backward()
        del loss
        synchronize(device)
        found[name] = torch.cuda.max_memory_allocated() - before
    for handle in handles:
        handle.remove()
    return found


def _phases(stepper: Stepper, meter: PhaseMeter, batch: Json) -> None:
    engine = stepper.system.engine

    def steps() -> None:
        for _ in range(STEPS):
            stepper.step()
        engine.synchronize()

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            loss_of(engine, batch)
        engine.train()

    meter.measure("step", steps)
    meter.measure("evaluation", evaluate)


def _rates(engine: Any, meter: PhaseMeter, folder: Path) -> Json:
    """Bytes a second of a synchronous save, of a load, and of plain files of the same sizes."""
    engine.wait_for_checkpoint()
    saved = meter.measure("save", lambda: _save_now(engine, folder))
    files = [path for path in (folder / "now").rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    forget_cached(files)
    loaded = meter.measure("load", lambda: engine.load_checkpoint(str(folder), tag="now"))
    disk = folder / "disk"
    found = {"files": len(files), "save": sum(sizes) / saved, "load": sum(sizes) / loaded}
    found |= disk_rates(disk, sizes)
    shutil.rmtree(disk)
    return found


def _requested(device: str) -> int:
    """Bytes that tensors asked the GPU's allocator for, before it rounds up."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"] if device == "cuda" else 0


def _states(engine: Any, device: str) -> Json:
    """Median bytes a second of offload_states and reload_states, beside those of one copy."""
    if device != "cuda":
        engine.offload_states()
        engine.reload_states()
        return {}
    engine.synchronize()
    gc.collect()
    # These workspaces are no part of the engine.
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
    torch.cuda.empty_cache()
    full = left = _requested(device)
    seconds: dict[str, list[float]] = {"offload": [], "reload": []}
    for _ in range(ROUNDS):
        for name, call in (("offload", engine.offload_states), ("reload", engine.reload_states)):
            synchronize(device)
            begin = time.perf_counter()
            call()
            synchronize(device)
            seconds[name].append(time.perf_counter() - begin)
            left = min(left, _requested(device))
    moved = full - left
    rates = {name: moved / statistics.median(times[1:]) for name, times in seconds.items()}
    copies = copy_rates(moved, torch.device("cuda"))
    found = rates | {f"{name}_copy": rate for name, rate in copies.items()}
    more = _requested(device) - full
    return found | {"before_gib": full, "left_gib": left, "more_afterwards_gib": more}


def _cycles(job: Json) -> Json:
    """Growth of memory from the 20th to the last cycle of a small model's states."""
    system = HyTrain(build_model(job, torch.bfloat16), job)
    stepper = Stepper(system, build_batches(job), job["device"])
    for _ in range(3):
        stepper.step()
    seen: list[tuple[int, int]] = []
    for number in range(job["cycles"]):
        include = [None, ["optim_states"], ["lp_params"]][number % 3]
        system.engine.offload_states(include=include)
        system.engine.reload_states()
        if number in (FIRST_CYCLES - 1, job["cycles"] - 1):
            gc.collect()
            seen.append((host_memory().rss_bytes, _requested(job["device"])))
    stepper.step()
    system.close()
    growth = [last - first for first, last in zip(seen[0], seen[-1], strict=True)]
    return dict(zip(("host_growth_bytes", "gpu_growth_bytes"), growth, strict=True))
