"""A rank's part in each stage; everything it returns is plain JSON."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Generator, Iterator, Sequence

import torch

import hytrain
from experiments.offload_step.memory import gpu_memory, host_memory, reset_gpu_peak
from experiments.offload_step.model import Batch, build_model
from experiments.offload_step.records import Json, Workload
from experiments.offload_step.systems.base import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY
from experiments.solve_k.sizes import register
from experiments.unequal_gpus import planning
from experiments.unequal_gpus.cases import GIB, Case
from experiments.unequal_gpus.green import Limited, limited_stream
from experiments.unequal_gpus.measure import Passes, collectives, copy_rate, passes_of_size
from experiments.unequal_gpus.ranks import DataParallel, Ranks
from experiments.unequal_gpus.stand_in import Memory, slow_down
from hytrain.config import BatchShares
from hytrain.offload.threads import choose_threads
from hytrain.parallel.collectives import ShardCollectives
from hytrain.placement.memory import gpu_reserve
from hytrain.profile.calibration import gpu_seconds_per_parameter
from hytrain.profile.host_share import share_host
from hytrain.profile.machine import host_memory_pools
from hytrain.profile.memory_probe import usable_gpu_bytes

NUM_BATCHES = 4
"""Of different tokens, which take turns."""


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
            return planning.Limits(host_bytes=self.stand_in.host(self.case))
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

    def profile(self) -> Json:
        """Passes of each micro-batch that fits, memory, rates, collectives."""
        begin = time.perf_counter()
        model = self.build()
        parameters = list(model.parameters())
        num_parameters = sum(p.numel() for p in parameters)
        copy_bytes = sum(p.numel() * p.element_size() for p in parameters)
        passes = Passes(model, self.device)
        rows: dict[str, list[float]] = {
            name: [] for name in ("sizes", "forward", "backward", "accumulation", "stored_bytes")
        }
        for size in self._sizes():
            reset_gpu_peak(self.ranks.device)
            try:
                row = passes_of_size(passes, self.batch(size))
            except torch.OutOfMemoryError:
                break
            rows["sizes"].append(size)
            for name, value in row.items():
                rows[name].append(value)
            # At its peak are the weights, as many bytes of gradients to add to, and activations.
            peak = torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0
            beside = max(0, peak - 2 * copy_bytes)
            rows["stored_bytes"].append(beside if self.is_cuda else self.stand_in.stored(size))
        if not rows["sizes"]:
            raise torch.OutOfMemoryError("not even a single sample fits")
        ran = self._backward_ran(passes, self.limited)
        passes.drop_gradients()
        del model, parameters, passes
        self.clean()
        found = {
            **rows,
            "accumulation": min(rows["accumulation"]),
            "model": self.workload.model,
            "parameters": num_parameters,
            "num_layers": self.size.layers + 2,
            "idle_bytes": GIB if self.is_cuda else 0,
            "backward_ran": ran,
            "made_unequal": self.made_unequal(),
            **self._rates(),
            "collectives": collectives(
                ShardCollectives(self.ranks.everyone().get_data_parallel_group()),
                num_parameters // (self.size.layers + 2),
                torch.bfloat16,
                self.device,
            ),
        }
        self.clean()
        return {**found, "seconds": time.perf_counter() - begin}

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

    def _sizes(self) -> Sequence[int]:
        """Micro-batches worth measuring: the even share is the most that a rank may get for sure,
        and a slow GPU is left the large ones only as far as they are quick."""
        most = max(1, self.case.batch // 2)
        return [size for size in self.case.sizes if size <= most]

    def _rates(self) -> Json:
        """Of updates and copies; of memory what there is."""
        rank = self.ranks.rank
        stand_in = self.stand_in
        total = usable_gpu_bytes(self.device)
        memory = stand_in.gpu(self.case, rank) if total is None else total
        reserve = stand_in.reserve(self.case, rank)
        threads = choose_threads(self._host_share.cores, None)
        # hytrain updates on a stream of its own, which has the whole GPU.
        whole = torch.cuda.stream(torch.cuda.default_stream()) if self.is_cuda else None
        with whole or contextlib.nullcontext():
            gpu_seconds = gpu_seconds_per_parameter(self.device, torch.bfloat16)
        return {
            "device": torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu",
            "memory_bytes": memory,
            "reserve_bytes": gpu_reserve(None, memory) if self.is_cuda else reserve,
            "gpu_rate": 1.0 / gpu_seconds,
            "cpu_rate": 1.0 / threads.seconds_per_parameter,
            "cores": self._host_share.cores,
            "copy_rate": copy_rate(self.device),
            "host_bytes": self.host_bytes(),
        }

    # -- training ------------------------------------------------------------------------------

    def alone(self, share: int, profile: Json) -> Json:
        """This GPU by itself, with all of the model's state."""
        told = planning.alone_of(profile, share)
        config = self._config({"gpu_fraction": told["gpu_fraction"]})
        config["train_micro_batch_size_per_gpu"] = told["micro_batch"]
        config["gradient_accumulation_steps"] = told["accumulation"]
        sizes = [told["micro_batch"]] * told["accumulation"]
        found = self._train(config, sizes, self.ranks.alone(), self.settings["steps"])
        return {**told, **found, "samples_per_second": sum(sizes) / found["step_seconds"]}

    def together(self, run: str, plan: Json) -> Json:
        """All ranks, as the plan says or evenly.

        Raises:
            torch.OutOfMemoryError: it does not fit.
            HyTrainError: hytrain refuses it, on all ranks.
        """
        rank = self.ranks.rank
        section = planning.section_of(run, plan, rank, self.limits, self.host_bytes())
        if not self.is_cuda:
            self.stand_in.check(self.case, self.ranks.rank, section)
        shares = BatchShares(tuple(section["batch_sizes"]), tuple(section["micro_batch_sizes"]))
        sizes = shares.micro_batches(self.ranks.rank)
        steps = self.settings["even_steps" if run == "even" else "steps"]
        found = self._train(self._config(section), sizes, self.ranks.everyone(), steps)
        rate = shares.global_batch / found["step_seconds"]
        return {**found, "section": section, "samples_per_second": rate}

    def _config(self, section: Json) -> Json:
        return {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": LEARNING_RATE,
                    "betas": list(BETAS),
                    "eps": EPS,
                    "weight_decay": WEIGHT_DECAY,
                },
            },
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

    def _train(self, config: Json, sizes: Sequence[int], job: DataParallel, steps: int) -> Json:
        """Warm-up steps, then timed ones with nothing in between."""
        begin = time.perf_counter()
        before = host_memory()
        model = self.build()
        reset_gpu_peak(self.ranks.device)
        engine, _, _, _ = hytrain.initialize(
            model=model, model_parameters=model.parameters(), config=config, mpu=job
        )
        built = time.perf_counter() - begin
        batches = self._batches(sizes)
        losses = [engine.train_batch(batches) for _ in range(self.settings["warmup"])]
        engine.synchronize()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            losses.append(engine.train_batch(batches))
        engine.synchronize()
        self.synchronize()
        seconds = (time.perf_counter() - start) / steps
        statistics = engine.step_statistics()
        after = host_memory()
        found = {
            "step_seconds": seconds,
            "build_seconds": built,
            "gpu_fraction": statistics.gpu_fraction,
            "update_seconds": statistics.update_seconds,
            "exposed_seconds": statistics.exposed_seconds,
            "losses": [float(loss) for loss in losses],
            "gpu": gpu_memory(self.ranks.device),
            "host_grown_bytes": after.rss_bytes - before.rss_bytes,
        }
        engine.destroy()
        del engine, model, batches
        self.clean()
        return {**found, "seconds": time.perf_counter() - begin}
