"""A rank: the longest sequence that trains, steps of given lengths, or weights to compare.

Besides the fields that systems.py reads, a job has "degree" (ranks that share a sequence),
"host_gib" (of a rank, for everything), "lengths" (two, whose peaks say which length fills the
memory), "times" (lengths to be timed with the whole attention, "timed_steps" steps each), "keep"
(file for the weights after "steps" steps of "seq" tokens) and "beside" (file to compare them with).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.common import systems
from experiments.common.bench import empty_cache, limit_memory
from experiments.common.memory import HostMemorySampler, gpu_memory, reset_gpu_peak
from experiments.common.model import build_model
from experiments.common.records import GIB, Json
from experiments.common.timing import synchronize
from experiments.common.worker import Recorder
from experiments.long_context.model import Attention, HostInputs, adapt

WINDOW = 4096
GRAIN = 4096
"""Lengths that are tried are multiples of this, times the number of ranks."""
OTHER_HOST_BYTES = 4 * GIB
"""Host memory of a process for Python, torch and CUDA's context."""
LEAST_HOST_BYTES = 4 * GIB
"""Least for inputs of blocks in systems other than hytrain, even if it is more than their limit."""
DEEPSPEED_BYTES = 20.0
"""DeepSpeed's host memory a parameter, beside OTHER_HOST_BYTES: state and gradients take 16; 8 B
took 18.5 in all and 5.4 B 20 (H200, DeepSpeed 0.19.8)."""
GPU_MARGIN_BYTES = 3 * GIB
"""GPU memory that the prediction leaves free for the allocator's fragmentation."""


class LongContext:
    """One system's model and its steps; lengths are of whole sequences."""

    def __init__(self, job: Json, recorder: Recorder) -> None:
        self.job, self.recorder = job, recorder
        self.degree: int = job["degree"]
        self.rank = int(os.environ["RANK"])
        self.inputs: HostInputs | None = None
        self.attention = Attention()
        dtype = torch.float32 if job.get("fp32", False) else torch.bfloat16

        def make(_: torch.dtype) -> Any:
            model = build_model(job, dtype)
            adapt(model, lambda: self.inputs, self.attention, self.rank % self.degree)
            if self.degree > 1:
                _share_sequences(model, self.degree)
            self.config, self.elements = model.config, sum(p.numel() for p in model.parameters())
            return model

        self.system = systems.build(job, make)
        # Random tokens of a length are the same with every system and number of ranks.
        self._generator = torch.Generator().manual_seed(1)
        recorder.reached(f"{job['system']} is built")

    @property
    def is_reference(self) -> bool:
        """Whether the system is forward and backward only, without updates."""
        return self.job["system"] == systems.REFERENCE

    def reserve(self) -> None:
        """Reserves the host memory that is left for the inputs of blocks."""
        if isinstance(self.system, systems.HyTrain):
            step = self.system.engine.memory_peaks()["step"]
            own = step.host + step.pinned
        else:
            elements = 0 if self.is_reference else self.elements
            own = int(DEEPSPEED_BYTES * elements) // int(os.environ["WORLD_SIZE"])
        left = int(self.job["host_gib"] * GIB) - OTHER_HOST_BYTES - own
        if not isinstance(self.system, systems.HyTrain):
            left = max(left, LEAST_HOST_BYTES)
        wanted = self._input_bytes(max(self.job["times"])) if self.is_reference else left
        self.inputs = HostInputs(max(0, min(left, wanted * self._layers)))
        self.recorder.put(host_inputs_gib=self.inputs.num_bytes / GIB, system_host_gib=own / GIB)
        self.recorder.reached("host memory for inputs of blocks")

    @property
    def _layers(self) -> int:
        return self.config.num_hidden_layers

    def _input_bytes(self, length: int) -> int:
        """Bytes of one block's input on this rank."""
        return length // self.degree * self.config.hidden_size * 2

    def step(self, length: int) -> torch.Tensor:
        """Makes one step; all ranks take part."""
        if self.inputs is not None:
            self.inputs.begin(self._input_bytes(length), self._layers)
        tokens = torch.randint(self.config.vocab_size, (1, length), generator=self._generator)
        part = tokens.chunk(self.degree, 1)[self.rank % self.degree].to(self.job["device"])
        return self.system.step([{"input_ids": part, "labels": part}])

    def steps(self, length: int, count: int, *, window: int) -> Json:
        """Makes steps of one length; returns their times and the GPU's peak."""
        self.attention.window = window
        empty_cache()
        reset_gpu_peak(self.job["device"])
        times: list[float] = []
        with HostMemorySampler() as host:
            for _ in range(count):
                synchronize(self.job["device"])
                begin = time.perf_counter()
                loss = self.step(length)
                synchronize(self.job["device"])
                times.append(time.perf_counter() - begin)
        found: Json = {"length": length, "seconds": times, "loss": float(loss)}
        found |= {"blocks_on_host": self.inputs.blocks if self.inputs else 0}
        found |= {"host_gib": host.rss_bytes / GIB, "window": window}
        found |= {f"gpu_{k[:-6]}_gib": v / GIB for k, v in gpu_memory(self.job["device"]).items()}
        self.recorder.append("measured", found)
        self.recorder.reached(f"{length} tokens: {times[-1]:.2f} s")
        return found

    def longest(self) -> None:
        """Predicts from two lengths which one fills the GPU, and confirms it or a shorter one."""
        at = [self.steps(length, 1, window=WINDOW) for length in self.job["lengths"]]
        if self.job["device"] != "cuda":
            self.recorder.put(longest=at[-1])
            return
        length = self._agreed(self._fitting(at))
        while True:
            try:
                found = self.steps(length, 2, window=WINDOW)
            except torch.OutOfMemoryError as error:
                self.recorder.append("too_long", {"length": length, "error": str(error)[:200]})
                if not isinstance(self.system, systems.HyTrain) or self.degree > 1:
                    raise  # DeepSpeed's engine cannot go on, nor can other ranks
                length = int(0.95 * length) // GRAIN * GRAIN
            else:
                self.recorder.put(longest=found)
                return

    def _fitting(self, at: list[Json]) -> int:
        """The longest that fits, if GPU memory besides blocks' inputs grows linearly with it."""
        limit = torch.cuda.mem_get_info()[1]
        room = min(int(self.job.get("cap_gib", 1e6) * GIB), limit) - GPU_MARGIN_BYTES
        bytes_ = [
            one["gpu_peak_allocated_gib"] * GIB
            - (self._layers - one["blocks_on_host"]) * self._input_bytes(one["length"])
            for one in at
        ]
        slope = (bytes_[1] - bytes_[0]) / (at[1]["length"] - at[0]["length"])
        if slope <= 0.0:
            raise ValueError(
                f"the peaks of {self.job['lengths']} tokens do not grow: give --length"
            )
        base = bytes_[1] - slope * at[1]["length"]
        length = grain = GRAIN * self.degree
        while True:
            following = length + grain
            each = self._input_bytes(following)
            on_gpu = max(0, self._layers - self.inputs.num_bytes // each) if self.inputs else 0
            if base + slope * following + on_gpu * each > room:
                self.recorder.put(predicted=length, base_gib=base / GIB, bytes_a_token=slope)
                return self.job.get("length") or length
            length = following

    def _agreed(self, length: int) -> int:
        if self.degree == 1:
            return length
        shortest = torch.tensor(length, device=self.job["device"])
        dist.all_reduce(shortest, dist.ReduceOp.MIN)
        return int(shortest)

    def weights(self) -> dict[str, torch.Tensor]:
        """Every fp32 master weight, on the host."""
        from deepspeed.utils import safe_get_full_fp32_param

        named = self.system.model.named_parameters()
        return {name: safe_get_full_fp32_param(parameter).cpu() for name, parameter in named}


def _share_sequences(model: Any, degree: int) -> None:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed()
    UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", sequence_parallel_size=degree, micro_batch_size=1
    )


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Json:
    assert found.keys() == expected.keys()
    largest = {name: float((found[name] - expected[name]).abs().max()) for name in found}
    worst = max(largest, key=lambda name: largest[name])
    return {"elements": sum(t.numel() for t in found.values()), "largest_difference":
            largest[worst], "of": worst}  # fmt: skip


def run(job: Json, recorder: Recorder) -> None:
    """Measures one system, or compares its weights if the job has "steps"."""
    limit_memory(job)
    on = LongContext(job, recorder)
    if "steps" in job:
        before = on.weights()
        for _ in range(job["steps"]):
            on.steps(job["seq"], 1, window=0)
        weights = on.weights()
        recorder.put(moved_by=_compare(weights, before)["largest_difference"])
        if job.get("keep") and on.rank == 0:
            torch.save(weights, job["keep"])
        if job.get("beside") and on.rank == 0:
            kept = torch.load(Path(job["beside"]), weights_only=True)
            recorder.put(compared=_compare(weights, kept))
        return
    on.reserve()
    on.steps(job["lengths"][0], 1, window=WINDOW)  # buffers grow to their size
    if not on.is_reference:
        on.longest()
    for length in job["times"]:
        on.steps(length, job["timed_steps"], window=0)
    if (observed := on.system.observe()) is not None:
        recorder.put(observed={**observed, "gpu_layers": on.system.gpu_layers()})
