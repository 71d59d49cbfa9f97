"""The cells of regimes.py's grid, and what a cell's process trains: hytrain's engine and its rival.

The rival has a copy of the model and everything on the GPU: fp32 master weights and torch's fused
AdamW. It stays beside the engine where the device's memory holds both, so that they can be measured
in turns: steps of one host differ by 10 to 30 % within a minute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiments.common.records import Json

SHAPES = {
    # blocks, hidden, intermediate; vocabulary 32000
    "toy": (4, 32, 64),
    "0.1B": (12, 768, 2048),
    "0.37B": (24, 1024, 2816),
    "0.95B": (16, 2048, 5632),
    "2.7B": (32, 2560, 6912),
    "2.9B": (24, 3072, 8192),
    "9.8B": (30, 5120, 13824),
}
COMPILE_MODES = {"compiled": "default", "graphs": "reduce-overhead"}
"""A cell's word -> the mode of torch.compile; "graphs" are CUDA graphs."""
FORM = "MODEL/BATCHxTOKENS/CORES[/noclip][/compiled|/graphs[/whole]]"
_BATCHES = {
    "0.1B": ("4x512", "16x1024"),
    "0.37B": ("4x512", "16x1024"),
    "0.95B": ("2x512", "8x1024"),
    "2.7B": ("2x512", "8x1024"),
    "9.8B": ("2x512", "8x1024"),
}
_CORES = (16, 8, 4, 2)
_BYTES_OF_BOTH = 44
"""A parameter, at most: the rival has 20 (weight, gradient, master, moments, fp32 gradient), the
engine 18 with all its state on the GPU, and activations some."""


@dataclass(frozen=True)
class Cell:
    """What a process trains.

    Attributes:
        compile: the mode of torch.compile, None for none; of each block, or of the whole model.
    """

    model: str
    batch: int
    tokens: int
    cores: int
    clips: bool
    compile: str | None = None
    whole: bool = False

    @staticmethod
    def of(text: str) -> Cell:
        """From a text of :data:`FORM`.

        Raises:
            SystemExit: it is of another form, or the model is unknown.
        """
        try:
            model, shape, cores, *words = text.split("/")
            batch, tokens = shape.split("x")
            modes = [COMPILE_MODES[word] for word in words if word in COMPILE_MODES]
            known = {"noclip", *COMPILE_MODES} | ({"whole"} if modes else set())
            if model not in SHAPES or len(modes) > 1 or not set(words) <= known:
                raise ValueError
            clips, whole = "noclip" not in words, "whole" in words
            mode = modes[0] if modes else None
            return Cell(model, int(batch), int(tokens), int(cores), clips, mode, whole)
        except ValueError:
            raise SystemExit(
                f"--cells: {text!r} is not {FORM} with a model of {', '.join(SHAPES)}"
            ) from None

    @property
    def clip(self) -> float | None:
        """Every step is clipped, which costs the worker most, or none is.

        A model that learns its batch by heart comes below 1e-3 within some fifty steps; gradients
        of this norm lie below Adam's epsilon, and it does not learn.
        """
        return 1e-6 if self.clips else None


def grid() -> list[str]:
    """Every model with each batch and number of cores, half of them clipped: every pair of models,
    batches, cores and clipping is there."""
    return [
        f"{model}/{batch}/{cores}" + ("/noclip" if (m + b + c) % 2 else "")
        for c, cores in enumerate(_CORES)
        for m, (model, batches) in enumerate(_BATCHES.items())
        for b, batch in enumerate(batches)
    ]


def ds_config(cell: Cell) -> Json:
    """DeepSpeed's configuration of the cell's engine."""
    return {
        "train_micro_batch_size_per_gpu": cell.batch,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "gradient_clipping": cell.clip or 0.0,
        "hytrain": {},
    }


def llama(model: str, device: str | None, dtype: Any, blocks: int | None = None) -> Any:
    """A Llama of a shape of :data:`SHAPES`, with random weights that are always the same.

    Args:
        model: the shape.
        device: where its weights are; None for torch's default device.
        dtype: of them.
        blocks: so many instead of the shape's.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    number, hidden, intermediate = SHAPES[model]
    heads = max(1, hidden // 128)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks or number,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32000 if model != "toy" else 128,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device or torch.get_default_device()):
        return LlamaForCausalLM(config).to(dtype)


def make_model(cell: Cell, device: str) -> Any:
    """The cell's model in bf16, compiled in place if the cell says so."""
    import torch

    model = llama(cell.model, device, torch.bfloat16)
    if cell.compile is not None:
        for module in [model] if cell.whole else model.model.layers:
            module.compile(mode=cell.compile)
    return model


class Contest:
    """An engine and its rival, and seconds of their steps."""

    def __init__(self, cell: Cell, device: str) -> None:
        import torch

        self._cell = cell
        self._device = device
        self._model: Any = make_model(cell, device)
        shape = (cell.batch, cell.tokens)
        self._ids = torch.randint(0, self._model.config.vocab_size, shape, device=device)
        self.engine: Any = None
        self._rival_model: Any = None
        self._rival: Any = None
        self._waits = True

    @property
    def rival_fits(self) -> bool:
        """Whether the device holds the rival beside the engine with all its state there."""
        import torch

        if self._device != "cuda":
            return True
        needed = _BYTES_OF_BOTH * sum(p.numel() for p in self._model.parameters())
        return needed < torch.cuda.mem_get_info()[1]

    def start_rival(self) -> None:
        """Before the engine, which is told of the memory that is left."""
        from experiments.common.systems.all_gpu import AllGpu

        self._rival_model = make_model(self._cell, self._device)
        self._rival = AllGpu(self._rival_model, self._cell.clip)

    def start_engine(self) -> None:
        """Wraps the model."""
        import hytrain

        self.engine, *_ = hytrain.initialize(
            model=self._model,
            config=ds_config(self._cell),
            model_parameters=list(self._model.parameters()),
        )

    def compute(self, steps: int) -> list[float]:
        """Forward and backward alone: of the rival's model, or of the engine's before it is one."""
        model = self._model if self._rival_model is None else self._rival_model

        def step() -> None:
            model(input_ids=self._ids, labels=self._ids).loss.backward()
            model.zero_grad(set_to_none=True)

        return self._timed(steps, step)

    def all_gpu(self, steps: int) -> list[float]:
        """Whole steps of the rival."""
        batch = {"input_ids": self._ids, "labels": self._ids}
        return self._timed(steps, lambda: self._rival.step(batch))

    def train(self, steps: int, seconds: float = math.inf) -> list[float]:
        """Whole steps of the engine, until so many seconds are over."""

        def step() -> None:
            self.engine.backward(self.engine(input_ids=self._ids, labels=self._ids).loss)
            self.engine.step()

        return self._timed(steps, step, seconds)

    def queued(self, run: Callable[[], object]) -> float:
        """Seconds of a run of steps of which only the last is waited for, as in training."""
        self._wait()
        self._waits = False
        try:
            begin = time.perf_counter()
            run()
            self._wait()
            return time.perf_counter() - begin
        finally:
            self._waits = True

    def queued_steps(self, steps: int) -> float:
        """Seconds of each of some steps of the engine, from decision to decision.

        One goes before: what is done between steps, after a pause, is its to wait for.
        """
        times: list[float] = []
        self._waits = False
        try:
            for _ in range(steps + 1):
                self.train(1)
                times.append(time.perf_counter())
        finally:
            self._waits = True
        self._wait()
        return (times[-1] - times[0]) / steps

    def close(self) -> None:
        """Frees all of it."""
        self.engine.destroy()
        self.engine = self._model = self._rival_model = self._rival = None

    def _timed(
        self, steps: int, step: Callable[[], object], seconds: float = math.inf
    ) -> list[float]:
        times: list[float] = []
        while len(times) < steps and sum(times) < seconds:
            begin = time.perf_counter()
            step()
            if self._waits:
                self._wait()
            times.append(time.perf_counter() - begin)
        return times

    def _wait(self) -> None:
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()
