"""A rank's part in each stage; everything it returns is plain JSON."""

from __future__ import annotations

import contextlib
import copy
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
from experiments.common.memory import gpu_memory, host_memory, reset_gpu_peak
from experiments.common.model import Batch, build_model, model_config
from experiments.common.ranks import DataParallel, Ranks
from experiments.common.records import GIB, Json, Workload
from experiments.common.sizes import register
from experiments.common.systems.base import OPTIMIZER
from experiments.unequal_gpus import planning
from experiments.unequal_gpus.cases import Case
from experiments.unequal_gpus.green import Limited, limited_stream
from experiments.unequal_gpus.measure import Passes, collector_pauses, passes_of_size
from experiments.unequal_gpus.stand_in import Memory, slow_down
from hytrain.comm.collectives import ShardCollectives
from hytrain.config import BatchShares
from hytrain.formats.plan_file import PlanFile, write_plan
from hytrain.formats.policies import LAYER_MAJOR
from hytrain.formats.profile_file import ProfileFile, write_profile
from hytrain.hardware.device_facts import MULTIPROCESSORS_VARIABLE
from hytrain.hardware.host_share import share_host
from hytrain.kernels.host_limits import host_memory_pools
from hytrain.optimizer.statistics import StepStatistics
from hytrain.tools.profiler.layer_profile import LayerOptions
from hytrain.tools.profiler.measured_model import MakeBatch, MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.ranks import Ranks as ProfileRanks
from hytrain.tools.profiler.run import profile_ranks

RATE_SECONDS = 0.1
"""Of each measurement of a rate: shorter than by default, for time on GPUs is short."""

COLLECTIVE_BYTES = (2**22, 2**26, 2**28)
"""Sizes of a layer's collectives; a block of the 3 B model has 216 MiB."""

NUM_BATCHES = 4
"""Of different tokens, which take turns."""


def steps_of(rows: Sequence[StepStatistics]) -> Json:
    """What the timed steps reported: k, the share of clipped ones, each one's updates and waits.

    A step's coefficient is that of its own decision; one that no step waited for clipped nothing.
    """
    clipped = [row.clip_coefficient for row in rows if not row.skipped]
    return {
        "gpu_fraction": rows[-1].gpu_fraction,
        "clipped_share": sum(c is not None and c < 1.0 for c in clipped) / len(rows),
        "step_times": [row.step_seconds for row in rows],
        "update_seconds": [row.update_seconds for row in rows],
        "exposed_seconds": [row.exposed_seconds for row in rows],
    }


class Bench:
    """One rank of a case."""

    def __init__(self, case: Case, settings: Json, ranks: Ranks) -> None:
        self.case = case
        self.settings = settings
        self.ranks = ranks
        self.is_cuda = ranks.device == "cuda"
        self.speed = case.speeds[ranks.rank]
        self.workload = Workload(
            model=settings["model"], batch=1, seq=settings["seq"], device=ranks.device
        )
        self.size = register(settings["model"], settings.get("layers"))
        local = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", local) if self.is_cuda else torch.device("cpu")
        world = ShardCollectives(ranks.everyone().get_data_parallel_group())
        self._host_share = share_host(world)
        self.limited: Limited | None = None
        if self.is_cuda:
            share = case.memory[ranks.rank]
            if share < 1.0:
                torch.cuda.set_per_process_memory_fraction(share, self.device)
            self.limited = limited_stream(settings["sms"].get(str(self.speed)), local)
        # By which devices of one name are distinguished, here and by the engine that takes a plan;
        # without a GPU it stands for the speed.
        count = settings["sms"].get(str(self.speed), 1)
        count = count if self.limited is None else self.limited.granted
        os.environ[MULTIPROCESSORS_VARIABLE] = str(count)

    @contextlib.contextmanager
    def slowed(self) -> Generator[None]:
        """What torch runs in the block, other streams apart, runs at this rank's speed."""
        if self.limited is None:
            yield
            return
        with torch.cuda.stream(self.limited.stream):
            yield

    def made_unequal(self) -> Json:
        """The settings that make this GPU what it is."""
        found: Json = {"speed": self.speed, "memory_share": self.case.memory[self.ranks.rank]}
        if self.limited is not None:
            found |= {
                "asked_sms": self.limited.asked,
                "granted_sms": self.limited.granted,
                "total_sms": self.limited.total,
            }
        return found

    @property
    def limits(self) -> planning.Limits:
        """What the plan may use."""
        if not self.is_cuda:
            least = int(self.stand_in.gib)
            return planning.Limits(host_bytes=self.stand_in.host(self.case), least_reserve=least)
        gib = self.case.host_gib
        return planning.Limits(host_bytes=None if gib is None else int(gib * GIB))

    @property
    def stand_in(self) -> Memory:
        return Memory(parameters=self.size.num_parameters)

    def build(self) -> torch.nn.Module:
        """A new model, the same on every rank."""
        model = build_model(self.workload, torch.bfloat16)
        if not self.is_cuda:
            slow_down(model, self.speed)
        return model

    def batch(self, samples: int, seed: int = 0) -> Batch:
        """Random tokens, labels like them."""
        generator = torch.Generator().manual_seed(1000 * self.ranks.rank + seed)
        shape = (samples, self.workload.seq)
        tokens = torch.randint(self.size.vocab, shape, generator=generator).to(self.device)
        return {"input_ids": tokens, "labels": tokens}

    def clean(self) -> None:
        """Gives back what a stage has left."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Waits for the device, and for the limited stream by name."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()
            torch.cuda.synchronize(self.device)

    def host_bytes(self) -> int:
        """Host memory left for this rank, as hytrain counts it."""
        return self._host_share.memory(host_memory_pools())

    # -- before the plan -----------------------------------------------------------------------

    def profile(self, folder: Path) -> Json:
        """`hytrain profile`, on all ranks at once, at each one's speed."""
        begin = time.perf_counter()
        most = max(1, self.case.batch // 2)
        sizes = tuple(size for size in self.case.sizes if size <= most)
        options = ProfileOptions(
            layer=LayerOptions(micro_batches=sizes, seconds=self.settings["profile_seconds"]),
            rate_seconds=RATE_SECONDS,
            collective_bytes=COLLECTIVE_BYTES,
            multiprocessors=int(os.environ[MULTIPROCESSORS_VARIABLE]),
            settings=json.dumps(self.made_unequal()),
        )
        ranks = ProfileRanks()
        try:
            profile = profile_ranks(self._subject(), self.device, options, ranks=ranks)
        finally:
            ranks.close()
        if not self.is_cuda:
            profile = self.stand_in.instead(self.case, profile)
        if self.ranks.rank == 0:
            write_profile(folder / "profile.json", profile)
        return {
            "file": profile.model_dump(mode="json"),
            "made_unequal": self.made_unequal(),
            "seconds": time.perf_counter() - begin,
        }

    def _subject(self) -> MeasuredModel:
        config = model_config(self.workload.model, self.workload.seq)

        def build(num_layers: int | None, seq_len: int) -> tuple[torch.nn.Module, MakeBatch]:
            own = copy.deepcopy(config)
            own.num_hidden_layers = num_layers or config.num_hidden_layers
            model = AutoModelForCausalLM.from_config(own, attn_implementation="sdpa")
            if not self.is_cuda:
                slow_down(model, self.speed)

            def make_batch(samples: int) -> Batch:
                tokens = torch.randint(config.vocab_size, (samples, seq_len))
                return {"input_ids": tokens, "labels": tokens}

            return model, make_batch

        return MeasuredModel(name=self.workload.model, build=build, seq_len=self.workload.seq)

    def plan(self, profile: ProfileFile, folder: Path) -> Json:
        """The plan and what it is compared with; the first rank writes plan.json.

        Raises:
            PlanError: there is no plan.
        """
        found = planning.verdicts(profile, self.case.batch, self.limits)
        path = folder.resolve() / "plan.json"
        if self.ranks.rank == 0:
            write_plan(path, PlanFile.model_validate(found["file"]))
        return {**found, "path": str(path)}

    def slowdown(self) -> Json:
        """Forward and backward with fewer and fewer multiprocessors."""
        rows: list[Json] = []
        batch = self.batch(self.case.batch)
        model = self.build() if self.is_cuda else None
        for asked in self.settings["counts"]:
            if model is None:
                stand_in = build_model(self.workload, torch.bfloat16)
                slow_down(stand_in, asked / self.settings["counts"][0])
                row = passes_of_size(Passes(stand_in, self.device), batch)
                rows.append({"asked_sms": asked, "granted_sms": asked, **row})
                continue
            limited = limited_stream(asked, self.device.index)
            with torch.cuda.stream(limited.stream):
                passes = Passes(model, self.device)
                row = passes_of_size(passes, batch)
                passes.drop_gradients()
            rows.append(
                {
                    "asked_sms": asked,
                    "granted_sms": limited.granted,
                    "total_sms": limited.total,
                    "backward_ran": self._backward_ran(passes, limited),
                    **row,
                }
            )
            # Each stream has memory of its own in torch's cache.
            self.clean()
        return {"samples": self.case.batch, "rows": rows}

    def _backward_ran(self, passes: Passes, limited: Limited | None) -> Json:
        """On which thread, and whether on the limited stream."""
        ran = passes.where_backward_ran()
        stream = None if limited is None else limited.stream.cuda_stream
        is_limited = limited is not None and ran["stream"] == stream
        return {"other_thread": ran["other_thread"], "limited_stream": is_limited}

    # -- training ------------------------------------------------------------------------------

    def alone(self, share: int, profile: ProfileFile) -> Json:
        """This GPU by itself, with all of the model's state."""
        chosen = planning.alone_of(profile, self.ranks.rank, share)
        config = self._config({"gpu_fraction": chosen["gpu_fraction"]})
        config["train_micro_batch_size_per_gpu"] = chosen["micro_batch"]
        config["gradient_accumulation_steps"] = chosen["accumulation"]
        sizes = [chosen["micro_batch"]] * chosen["accumulation"]
        found = self._train(config, sizes, self.ranks.alone(), self.settings["steps"])
        return {**chosen, **found, "samples_per_second": sum(sizes) / found["step_seconds"]}

    def together(self, run: str, plan: Json) -> Json:
        """All ranks, as the plan says or evenly.

        Raises:
            torch.OutOfMemoryError: it does not fit.
            HyTrainError: hytrain refuses it, on all ranks.
        """
        rank = self.ranks.rank
        section = planning.section_of(run, plan, rank, self.limits, self.host_bytes())
        work = planning.work_of(run, plan)
        if not self.is_cuda:
            self.stand_in.check(self.case, rank, work, section["gpu_fraction"])
        policy = work["activations"][rank]
        shares = BatchShares(tuple(work["batch_sizes"]), tuple(work["micro_batch_sizes"]))
        steps = self.settings["even_steps" if run == "even" else "steps"]
        config, sizes = self._config(section), shares.micro_batches(rank)
        found = self._train(config, sizes, self.ranks.everyone(), steps, policy)
        rate = shares.global_batch / found["step_seconds"]
        return {**found, "section": section, "samples_per_second": rate}

    def _config(self, section: Json) -> Json:
        return {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": copy.deepcopy(OPTIMIZER),
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
            "steps_per_print": 10**9,
            "hytrain": section,
        }

    def _batches(self, sizes: Sequence[int]) -> Iterator[Batch]:
        largest = max(sizes, default=1)
        pool = [self.batch(largest, seed) for seed in range(NUM_BATCHES)]
        for batch, size in zip(itertools.cycle(pool), itertools.cycle(sizes or [1]), strict=False):
            yield {name: tensor[:size] for name, tensor in batch.items()}

    def _allocator(self) -> Json:
        """What torch's allocator counts when memory was short; {} without a GPU."""
        if not self.is_cuda:
            return {}
        counts = torch.cuda.memory_stats(self.device)
        return {name: counts.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}

    def _bare(self, model: torch.nn.Module, sizes: Sequence[int]) -> Json | None:
        """A micro-batch of the bare model: whether host and GPU are as fast as in the profile.

        None for a rank without samples.
        """
        if not sizes:
            return None
        passes = Passes(model, self.device)
        found = passes_of_size(passes, self.batch(sizes[0]))
        passes.drop_gradients()
        self.clean()
        return {"samples": sizes[0], **found}

    def _train(
        self,
        config: Json,
        sizes: Sequence[int],
        job: DataParallel,
        steps: int,
        policy: str = "store",
    ) -> Json:
        """Warm-up steps, then timed ones with nothing in between.

        Times are from the end of one step to the end of another, where the host knows the norm of
        all gradients: what the CPU has left to do then, the next step hides, the first one's of
        those that are timed as well as the one's behind the last.
        """
        begin = time.perf_counter()
        before = host_memory()
        model: Any = self.build()
        is_planned = "plan" in config["hytrain"]
        if policy != "store":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        bare = self._bare(model, sizes) if is_planned else None
        if is_planned or policy in LAYER_MAJOR:
            model.gradient_checkpointing_disable()  # hytrain sees to it
        reset_gpu_peak(self.ranks.device)
        engine, _, _, _ = hytrain.initialize(
            model=model, model_parameters=model.parameters(), config=config, mpu=job
        )
        built = time.perf_counter() - begin
        batches = self._batches(sizes)
        losses = [engine.train_batch(batches) for _ in range(self.settings["warmup"])]
        counted = self._allocator()
        rows: list[StepStatistics] = []
        with collector_pauses() as pauses:
            start = time.perf_counter()
            for _ in range(steps):
                losses.append(engine.train_batch(batches))
                rows.append(engine.step_statistics())
            seconds = (time.perf_counter() - start) / steps
        engine.synchronize()
        self.synchronize()
        grown = {name: value - counted[name] for name, value in self._allocator().items()}
        report = engine.plan_report().to_json() if is_planned else None
        after = host_memory()
        found = {
            "step_seconds": seconds,
            "build_seconds": built,
            "plan_report": report,
            "bare": bare,
            **steps_of(rows),
            "allocator": grown,
            "collector_pauses": pauses,
            "losses": [float(loss) for loss in losses],
            "gpu": gpu_memory(self.ranks.device),
            "host_grown_bytes": after.rss_bytes - before.rss_bytes,
        }
        engine.destroy()
        del engine, model, batches
        self.clean()
        left = torch.cuda.memory_allocated(self.device) if self.is_cuda else None
        return {**found, "gpu_left_bytes": left, "seconds": time.perf_counter() - begin}
