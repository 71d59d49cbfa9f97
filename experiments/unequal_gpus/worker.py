"""One rank of one run: profiles and plans, or trains as planned, evenly, or by itself."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hytrain
from experiments.common.memory import gpu_memory, reset_gpu_peak
from experiments.common.model import Batch, build_model, checkpoint, model_config
from experiments.common.records import GIB, Json
from experiments.common.sizes import size_of
from experiments.common.systems import ADAMW, OFFLOAD
from experiments.common.timing import clipped_share, synchronize
from experiments.common.worker import Recorder
from experiments.unequal_gpus import planning
from experiments.unequal_gpus.green import Limited, limited_stream
from hytrain.config import BatchShares
from hytrain.formats.plan_file import PlanFile, write_plan
from hytrain.formats.profile_file import ProfileFile, write_profile
from hytrain.hardware.device_facts import MULTIPROCESSORS_VARIABLE
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.tools.profiler.measured_model import MakeBatch, MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.run import profile_ranks

RATE_SECONDS = 0.1
"""Length of each measurement of a rate: less than by default, since GPU time is scarce."""
COLLECTIVE_BYTES = (2**22, 2**26, 2**28)
"""Sizes of a layer's collectives; a block of the 3 B model has 216 MiB."""
NUM_BATCHES = 4
"""Number of batches of different tokens, which take turns."""


class Bench:
    """One rank of a case, made as fast and given as much memory as the case says."""

    def __init__(self, job: Json) -> None:
        self.job, self.case = job, job["case"]
        self.rank = int(os.environ["LOCAL_RANK"])
        self.is_cuda = job["device"] == "cuda"
        self.device = torch.device("cuda", self.rank) if self.is_cuda else torch.device("cpu")
        asked = job["sms"].get(f"{self.case['speeds'][self.rank]:g}")
        self.limited: Limited | None = None
        if self.is_cuda:
            torch.cuda.set_device(self.device)
            share = self.case["memory"][self.rank]
            if share < 1.0:
                torch.cuda.set_per_process_memory_fraction(share, self.device)
            self.limited = limited_stream(asked, self.rank)
        # Distinguishes devices of one name, here and in the engine that takes a plan.
        count = (asked or 1) if self.limited is None else self.limited.granted
        os.environ[MULTIPROCESSORS_VARIABLE] = str(count)

    @contextlib.contextmanager
    def slowed(self) -> Generator[None]:
        """Within the block, what torch runs on its current stream runs at this rank's speed."""
        stream = None if self.limited is None else self.limited.stream
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            yield

    def batch(self, samples: int, seed: int = 0) -> Batch:
        """Random tokens, which are also the labels."""
        generator = torch.Generator().manual_seed(1000 * self.rank + seed)
        shape = (samples, self.job["seq"])
        tokens = torch.randint(size_of(self.job["model"]).vocab, shape, generator=generator)
        tokens = tokens.to(self.device)
        return {"input_ids": tokens, "labels": tokens}

    def _batches(self, sizes: Sequence[int]) -> Iterator[Batch]:
        largest = max(sizes, default=1)
        pool = [self.batch(largest, seed) for seed in range(NUM_BATCHES)]
        for batch, size in zip(itertools.cycle(pool), itertools.cycle(sizes or [1]), strict=False):
            yield {name: tensor[:size] for name, tensor in batch.items()}

    # -- before the plan -----------------------------------------------------------------------

    def profile(self, folder: Path) -> Json:
        """Profiles as `hytrain profile`, on all ranks at once, each at its speed; rank 0 plans.

        Raises:
            PlanError: there is no plan.
        """
        from deepspeed import comm

        from hytrain.engine.deepspeed_internals import avoid_cpu_communication_build

        avoid_cpu_communication_build()
        comm.init_distributed("nccl" if self.is_cuda else "gloo", verbose=False)
        most = max(1, self.case["batch"] // 2)
        sizes = tuple(size for size in self.case["sizes"] if size <= most)
        settings = {"speed": self.case["speeds"][self.rank]}
        if self.limited is not None:
            settings["multiprocessors"] = self.limited.granted
        options = ProfileOptions(
            micro_batches=sizes,
            seconds=self.job["profile_seconds"],
            rate_seconds=RATE_SECONDS,
            collective_bytes=COLLECTIVE_BYTES,
            multiprocessors=int(os.environ[MULTIPROCESSORS_VARIABLE]),
            settings=json.dumps(settings),
        )
        profile = profile_ranks(self._subject(), self.device, options)
        found: Json = {"granted": settings}
        if self.rank == 0:
            write_profile(folder / "profile.json", profile)
            found |= planning.verdicts(profile, self.case["batch"], self.limits)
            write_plan(folder / "plan.json", PlanFile.model_validate(found.pop("file")))
            found["path"] = str(folder / "plan.json")
            (folder / "verdicts.json").write_text(json.dumps(found))
            found["speeds"] = planning.speeds_of(profile)
            found["passes_samples_per_s"] = planning.passes_rate(profile)
        return found

    @property
    def limits(self) -> planning.Limits:
        """What the plan may use."""
        gib = self.case["host_gib"]
        # Without a GPU there is nothing to run out of.
        return planning.Limits(
            host_bytes=int(gib * GIB) if gib is not None and self.is_cuda else None,
            least_reserve=GIB if self.is_cuda else 0,
        )

    def _subject(self) -> MeasuredModel:
        own = size_of(self.job["model"]).layers

        def build(num_layers: int | None, seq_len: int) -> tuple[torch.nn.Module, MakeBatch]:
            config = model_config({**self.job, "layers": num_layers or own})
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

            def make_batch(samples: int) -> Batch:
                tokens = torch.randint(config.vocab_size, (samples, seq_len))
                return {"input_ids": tokens, "labels": tokens}

            return model, make_batch

        return MeasuredModel(name=self.job["model"], build=build, seq_len=self.job["seq"])

    # -- training ------------------------------------------------------------------------------

    def alone(self, profile: ProfileFile, share: int) -> Json:
        """Trains on this GPU by itself, with all of the model's state."""
        micro, accumulation = planning.alone_of(profile, self.rank, share)
        config = self._config({"gpu_fraction": 1.0})
        config["train_micro_batch_size_per_gpu"] = micro
        config["gradient_accumulation_steps"] = accumulation
        found = self._train(config, [micro] * accumulation)
        return {**found, "samples_per_s": micro * accumulation / found["step_seconds"]}

    def together(self, run: str, plan: Json) -> Json:
        """Trains on all ranks, as the plan says or evenly.

        Raises:
            torch.OutOfMemoryError: it does not fit.
            HyTrainError: hytrain refuses it, on all ranks.
        """
        available = available_host_bytes() // len(self.case["speeds"])
        section = planning.section_of(run, plan, self.rank, self.limits, available)
        work = planning.work_of(run, plan)
        shares = BatchShares(tuple(work["batch_sizes"]), tuple(work["micro_batch_sizes"]))
        sizes = shares.micro_batches(self.rank)
        found = self._train(self._config(section), sizes, work["activations"][self.rank])
        return {**found, "samples_per_s": shares.global_batch / found["step_seconds"]}

    def _config(self, section: Json) -> Json:
        return {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": dict(ADAMW)},
            "zero_optimization": {"stage": 2, "offload_optimizer": dict(OFFLOAD)},
            "steps_per_print": 10**9,
            "hytrain": section,
        }

    def _train(self, config: Json, sizes: Sequence[int], policy: str = "store") -> Json:
        """Makes warm-up steps, then timed ones with nothing in between.

        Times are from the end of one step to the end of another, when the host knows the norm of
        all gradients. What the CPU has left to do then is hidden by the next step; this holds at
        the first timed step as well as after the last.
        """
        model: Any = build_model(self.job, torch.bfloat16)
        is_planned = "plan" in config["hytrain"]
        if policy == "recompute" and not is_planned:
            checkpoint(model)  # else hytrain does it, as with every layer-major policy
        reset_gpu_peak(self.job["device"])
        engine, *_ = hytrain.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        batches = self._batches(sizes)
        losses = [engine.train_batch(batches) for _ in range(self.job["warmup"])]
        rows: list[Any] = []
        gc.collect()
        gc.disable()  # all ranks would wait for one rank's collection of some tenths of a second
        start = time.perf_counter()
        for _ in range(self.job["steps"]):
            losses.append(engine.train_batch(batches))
            rows.append(engine.step_statistics())
        seconds = (time.perf_counter() - start) / self.job["steps"]
        gc.enable()
        engine.synchronize()
        synchronize(self.job["device"])
        report = engine.plan_report().to_json() if is_planned else None
        retries = torch.cuda.memory_stats()["num_alloc_retries"] if self.is_cuda else None
        engine.destroy()
        return {
            "step_seconds": seconds,
            "step_times": [row.step_seconds for row in rows],
            "gpu_fraction": rows[-1].gpu_fraction,
            "clipped_share": clipped_share([vars_of(row) for row in rows]),
            "plan_report": report,
            "allocator_retries": retries,
            "losses": [float(loss) for loss in losses],
            "gpu": gpu_memory(self.job["device"]),
        }


def vars_of(row: Any) -> Json:
    """The row that `clipped_share` reads; a step that no one waited for clipped nothing."""
    coefficient = row.clip_coefficient
    return {"clip_coefficient": 1.0 if coefficient is None else coefficient}


def run(job: Json, recorder: Recorder) -> None:
    """Makes the job's run; later ones read what the profile's rank 0 has written."""
    bench, kind = Bench(job), job["run"]
    case_folder = Path(job["folder"]).parent / f"{job['case']['label']}_profile"
    with bench.slowed():
        if kind == "profile":
            recorder.put(**bench.profile(case_folder))
            return
        plan = json.loads((case_folder / "verdicts.json").read_text())
        if kind == "alone":
            text = (case_folder / "profile.json").read_text()
            profile = ProfileFile.model_validate_json(text)
            share = plan["planned"]["batch_sizes"][bench.rank]
            own = share or job["case"]["batch"] // len(job["case"]["speeds"])
            recorder.put(**bench.alone(profile, own))
            return
        recorder.put(**bench.together(kind, plan))
