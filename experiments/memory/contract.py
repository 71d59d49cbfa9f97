"""Peaks of build, step, evaluation, save and load beside what was said; rates of the last two."""

from __future__ import annotations

import gc
from typing import Any

import torch

from experiments.memory.case import Case, said
from experiments.memory.meters import PhaseMeter, PinnedBytes, disk_rates, forget_cached

STEPS = 6


def build_and_step(case: Case, pinned: PinnedBytes) -> tuple[Any, PhaseMeter]:
    """Part "contract": the engine that the other parts go on with, and the meter."""
    model = case.model(case.job["model"])
    case.say("the model is there")
    activations = _activations(case, model)
    gc.collect()
    meter = PhaseMeter(case.job["device"], pinned)
    held: list[Any] = []

    def build() -> None:
        held.append(case.build(model))
        # Memory for copies of the state is touched beside the first steps.
        held[0]._saver._memory.wait_touched()

    seconds = meter.measure("build", build)
    case.say(f"the engine is built, {seconds:.1f} s")
    engine = held[0]
    parameters = sum(
        slot.numel for layer in engine.optimizer.weights.layers for slot in layer.slots
    )
    case.result["contract"] = {
        "parameters": parameters,
        "measured": meter.peaks,
        "activations": activations,
        "said": said(engine),
    }
    case.keep()

    def steps() -> None:
        for _ in range(STEPS):
            case.step(engine)
        engine.synchronize()

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            engine(**case.batch(), use_cache=False)
        engine.train()

    for name, action in (("step", steps), ("evaluation", evaluate)):
        seconds = meter.measure(name, action)
        case.say(f"peaks of {name} measured, {seconds:.1f} s")
        case.keep()
    return engine, meter


def _activations(case: Case, model: torch.nn.Module) -> dict[str, int | None]:
    """Bytes of the GPU that forward, loss and backward of the bare model take for a moment.

    They are the model's own, and not in what is said. Gradients go as they come.
    """
    if not case.is_cuda:
        return {"step": None, "evaluation": None}
    handles = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters()]
    found: dict[str, int | None] = {}
    for name, grad in (("step", True), ("evaluation", False)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(grad):
            loss = model(**case.batch(), use_cache=False).loss
            if grad:
                loss.backward()
        del loss
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() - before
    for handle in handles:
        handle.remove()
    return found


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def save_and_load(case: Case, engine: Any, meter: PhaseMeter) -> None:
    """Part "rates": a synchronous save, a load, and the disk with files of their sizes."""
    engine.wait_for_checkpoint()
    seconds = meter.measure("save", lambda: case.save_now(engine))
    files = [path for path in (case.folder / "now").rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    rates = case.result["rates"]
    rates.update(files=len(files), bytes=sum(sizes), save=sum(sizes) / seconds)
    case.say(f"saved {sum(sizes) / 1e9:.2f} GB in {seconds:.1f} s")
    case.keep()
    forget_cached(files)
    case.part("load", lambda: _load(case, engine, meter, sum(sizes)), 1.0 + seconds / 2)
    most = case.job["probe_bytes"]
    share = min(1.0, most / sum(sizes))

    def probe() -> None:
        rates["disk"] = disk_rates(case.folder.with_name("disk"), sizes, most)

    case.part("the disk's own rates", probe, 3 * share * seconds)


def _load(case: Case, engine: Any, meter: PhaseMeter, num_bytes: int) -> None:
    seconds = meter.measure("load", lambda: engine.load_checkpoint(str(case.folder), tag="now"))
    case.result["rates"]["load"] = num_bytes / seconds
