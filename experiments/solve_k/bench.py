"""One model and its engine in the measuring process: what the plans are made of."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Generator
from typing import Any

import torch

from experiments.common.memory import gpu_memory, host_memory, reset_gpu_peak
from experiments.common.model import build_batches, build_model
from experiments.common.records import Job, Json, Measurement, Workload
from experiments.common.sizes import model_flops, plain_flops, register
from experiments.common.systems.forward_backward import ForwardBackward
from experiments.common.systems.hytrain import HyTrain, config_of
from experiments.common.timing import Stepper, Timing, measure, synchronize
from experiments.solve_k.metrics import metrics_lines
from experiments.solve_k.recorder import Recorder
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.placement.costs import StepCosts
from hytrain.placement.prediction import predict
from hytrain.placement.records import Decision

ROW = ("step", "gpu_fraction", "step_seconds", "update_seconds", "exposed_seconds")
"""What is kept of the statistics of every step."""


class Placed(HyTrain):
    """hytrain, with what it says about k."""

    @property
    def num_layers(self) -> int:
        return self.decisions()[0].num_layers

    def gpu_layers(self) -> int:
        """Of the last step."""
        return round(self._engine.step_statistics().gpu_fraction * self.num_layers)

    def decisions(self) -> list[Decision]:
        return self._engine.placement_decisions()

    def place(self, gpu_layers: int) -> None:
        self._engine.set_gpu_fraction(gpu_layers / self.num_layers)

    def costs(self) -> StepCosts | None:
        return self._engine.optimizer.placement.costs()


@contextlib.contextmanager
def dropped_gradients(model: torch.nn.Module) -> Generator[None]:
    """Each gradient is freed as soon as it is final; a model too large would keep them all."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Bench:
    """Builds, steps and times; everything it returns is plain JSON."""

    def __init__(self, job: Job, recorder: Recorder, begin: float) -> None:
        self.job = job
        self.options = job.entry.options
        self.recorder = recorder
        self._end = begin + float(self.options["limit_seconds"])
        self.device = job.workload.device
        self._placed: Placed | None = None
        self._stepper: Stepper | None = None
        self._rows: list[Json] = []
        self._solving_decisions: list[Decision] = []

    def seconds_left(self) -> float:
        """Until the process will be ended from outside."""
        return self._end - time.monotonic()

    @property
    def placed(self) -> Placed:
        """The engine, once it is started."""
        assert self._placed is not None
        return self._placed

    # -- building ------------------------------------------------------------------------------

    def build(self) -> None:
        """The bare model, directly on the device, and its batches."""
        workload = self.job.workload
        size = register(workload.model, self.options.get("layers"))
        self.note_host("before building")
        begin = time.perf_counter()
        self.model = self.make_model(torch.bfloat16)
        self.batches = build_batches(workload)
        synchronize(self.device)
        # zero.Init leaves its parameters empty.
        self.num_parameters = sum(
            vars(p).get("ds_numel", p.numel()) for p in self.model.parameters()
        )
        self._size = size
        self._count_flops(workload)
        self.recorder.put(
            size=dataclasses.asdict(size),
            num_parameters=self.num_parameters,
            model_seconds=time.perf_counter() - begin,
            gpu_total_bytes=self.gpu_total(),
            checkpointing=self.options["checkpointing"] == "on",
        )
        print(f"{self.num_parameters / 1e9:.3f} B parameters", flush=True)

    def make_model(self, dtype: torch.dtype) -> torch.nn.Module:
        """The bare model in this dtype, with checkpointing if the entry asks for it."""
        model = build_model(self.job.workload, dtype)
        if self.options["checkpointing"] == "on":
            checkpoint(model)
        return model

    def _count_flops(self, workload: Workload) -> None:
        tokens = {"batch": workload.batch, "seq": workload.seq}
        self.flops = model_flops(self._size, **tokens)
        self.plain_flops = plain_flops(self.num_parameters, **tokens)

    def checkpoint_activations(self) -> None:
        """From now on blocks are computed again in the backward pass."""
        checkpoint(self.model)
        self.recorder.put(checkpointing=True)

    def start(self) -> None:
        """The engine around the model."""
        self.empty_cache()
        # What the bare model needed is no step of the engine's.
        reset_gpu_peak(self.device)
        begin = time.perf_counter()
        config = config_of(self.job)
        self._placed = Placed(self.model, config)
        synchronize(self.device)
        self._stepper = Stepper(self._placed, self.batches, self.device)
        self.recorder.put(config=config, engine_seconds=time.perf_counter() - begin)
        print(f"engine in {time.perf_counter() - begin:.1f} s", flush=True)
        self.note_host("engine built")

    def close(self) -> None:
        """The engine goes, the bare model stays."""
        self.placed.close()
        self._placed = None
        self._stepper = None
        self.empty_cache()

    # -- memory --------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Gives the device what torch keeps for later."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def gpu_total(self) -> int | None:
        """The GPU's memory."""
        return torch.cuda.mem_get_info()[1] if self.device == "cuda" else None

    def allocator(self) -> Json:
        """Allocations that failed, whether anyone noticed or not."""
        if self.device != "cuda":
            return {}
        stats = torch.cuda.memory_stats()
        return {name: stats.get(name, 0) for name in ("num_ooms", "num_alloc_retries")}

    def note_host(self, moment: str) -> None:
        """Into the record, and printed."""
        now = host_memory()
        self.recorder.host(
            moment,
            {
                "rss_bytes": now.rss_bytes,
                "rss_peak_bytes": now.rss_peak_bytes,
                "available_bytes": available_host_bytes(),
            },
        )

    # -- the limit -----------------------------------------------------------------------------

    def reference(self, *, warmup: int = 3, windows: int = 2, steps: int = 4) -> Json:
        """Forward and backward only, of the bare model."""
        drops = self.options.get("drop_gradients", False)
        with dropped_gradients(self.model) if drops else contextlib.nullcontext():
            stepper = Stepper(ForwardBackward(self.model), self.batches, self.device)
            for _ in range(warmup):
                stepper.step()
            timing = measure(stepper, plan_of(windows, steps), [])
        result = self.summary(timing)
        print(f"forward and backward only: {timing.step_seconds:.4f} s", flush=True)
        return result

    # -- the engine ----------------------------------------------------------------------------

    def step(self) -> Json:
        """One step; what it says of itself."""
        assert self._stepper is not None
        self._stepper.step()
        row = self.placed.observe()
        assert row is not None
        return row

    def change_batch(self, batch: int) -> None:
        """From the next step on, so many sequences a step."""
        workload = dataclasses.replace(self.job.workload, batch=batch)
        self.batches = build_batches(workload)
        self._count_flops(workload)
        self._stepper = Stepper(self.placed, self.batches, self.device)

    def settle(self, *, most: int, quiet: int, least: int) -> Json:
        """Steps until nothing has been decided or moved for `quiet` steps."""
        begin = time.perf_counter()
        rows: list[Json] = []
        changed = 0
        decisions = self.placed.decisions()
        before = (len(decisions), decisions[-1].gpu_layers_target)
        while len(rows) < most and self.seconds_left() > 0.25 * self.job_limit:
            rows.append(self.step())
            now = (len(self.placed.decisions()), self.placed.gpu_layers())
            if now != before:
                changed, before = len(rows), now
            if len(rows) >= least and len(rows) - changed >= quiet:
                break
        synchronize(self.device)
        self._solving_decisions = list(self.placed.decisions())
        result: Json = {
            "steps": len(rows),
            "is_settled": len(rows) - changed >= quiet,
            "settled_after": changed,
            "seconds": time.perf_counter() - begin,
            "clipped_share": clipped_share(rows),
            "rows": [_brief(row) for row in rows],
            "decisions": [brief_decision(d) for d in self._solving_decisions],
        }
        print(
            f"{self.placed.gpu_layers()} of {self.placed.num_layers} GPU layers after {changed} "
            f"of {len(rows)} steps",
            flush=True,
        )
        return result

    @property
    def job_limit(self) -> float:
        """Seconds that the whole process has."""
        return float(self.options["limit_seconds"])

    def timed(self, *, windows: int, steps: int) -> Json:
        """Steps as they are, timed; then what they cost, and what is predicted from that."""
        assert self._stepper is not None
        decided = len(self.placed.decisions())
        timing = measure(self._stepper, plan_of(windows, steps), [])
        rows = list(timing.observations)
        self._rows += [{**row, "step_seconds": timing.step_seconds} for row in rows]
        costs = self.placed.costs()
        result = {
            **self.summary(timing),
            "gpu_layers": self.placed.gpu_layers(),
            "num_layers": self.placed.num_layers,
            "at_step": rows[-1]["step"],
            "clipped_share": clipped_share(rows),
            "update_seconds": statistics.mean(row["update_seconds"] for row in rows),
            "exposed_seconds": statistics.mean(row["exposed_seconds"] for row in rows),
            "host_rss_bytes": timing.host_rss_bytes,
            "first_loss": timing.losses[0],
            "loss": timing.losses[-1],
            "decisions_meanwhile": len(self.placed.decisions()) - decided,
            "costs": None if costs is None else costs.to_json(),
            "predicted_seconds": None if costs is None else list(predict(costs).step_seconds),
        }
        print(f"{result['gpu_layers']} GPU layers: {timing.step_seconds:.4f} s", flush=True)
        return result

    def at(self, gpu_layers: int, *, settling: int = 5, windows: int = 2, steps: int = 4) -> Json:
        """A fixed number of GPU layers, timed; where it is refused, why."""
        try:
            self.placed.place(gpu_layers)
        except ValueError as error:
            print(f"{gpu_layers} GPU layers: {error}", flush=True)
            return {"asked_gpu_layers": gpu_layers, "refused": str(error)}
        for _ in range(settling):
            self.step()
        return {"asked_gpu_layers": gpu_layers, **self.timed(windows=windows, steps=steps)}

    def write_metrics(self) -> None:
        """The decisions of the solver and the timed steps, for `hytrain explain`."""
        self.recorder.metrics(metrics_lines(self._solving_decisions, self._rows))

    def summary(self, timing: Timing) -> Json:
        """Seconds of a step, what it computes a second, memory."""
        seconds = timing.step_seconds
        return {
            "step_seconds": seconds,
            "window_seconds": list(timing.window_seconds),
            "tflops": self.flops / seconds / 1e12,
            "plain_tflops": self.plain_flops / seconds / 1e12,
            "gpu": gpu_memory(self.device),
            "allocator": self.allocator(),
        }


def checkpoint(model: Any) -> None:
    """Its blocks' activations are computed again in backward."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@functools.cache
def plan_of(windows: int, steps: int) -> Measurement:
    """Windows of so many steps, after no more warming up."""
    return Measurement(windows=windows, steps=steps, warmup=0)


def clipped_share(rows: list[Json]) -> float | None:
    """Share of the steps in which clipping acted, of those that tell."""
    coefficients = [row["clip_coefficient"] for row in rows if row["clip_coefficient"] is not None]
    return sum(value < 1.0 for value in coefficients) / len(coefficients) if coefficients else None


def _brief(row: Json) -> Json:
    coefficient = row["clip_coefficient"]
    clipped = None if coefficient is None else coefficient < 1.0
    return {**{name: row[name] for name in ROW}, "clipped": clipped}


def brief_decision(decision: Decision) -> Json:
    """Without the costs and sizes, which are in the metrics file."""
    limits = decision.limits
    return {
        "step": decision.step,
        "gpu_layers_before": decision.gpu_layers_before,
        "gpu_layers_target": decision.gpu_layers_target,
        "reason": decision.reason,
        "predicted_seconds": decision.predicted_seconds,
        "measured_seconds": decision.measured_seconds,
        "closed_form_k": decision.closed_form_k,
        "bounds": dataclasses.asdict(decision.bounds),
        "gpu_bytes": limits.gpu,
        "gpu_reserve_bytes": limits.gpu_reserve,
        "gpu_base_bytes": limits.gpu_base,
        "host_bytes": limits.host,
        "host_reserve_bytes": limits.host_reserve,
    }
