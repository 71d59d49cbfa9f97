"""torch's settings of a thread, carried over to another one, and those of the whole process."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast contexts that a thread is in."""

    device: torch.device
    states: tuple[tuple[str, bool, torch.dtype], ...]
    caches: bool

    @staticmethod
    def here(device: torch.device) -> Autocast:
        """Returns the contexts that this thread is in."""
        states = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device.type, "cpu"))
        )
        return Autocast(device, states, torch.is_autocast_cache_enabled())

    @contextmanager
    def applied(self) -> Generator[None]:
        """Puts this thread into the contexts, unless it is in them already."""
        if self == Autocast.here(self.device):
            yield
            return
        with ExitStack() as stack:
            for kind, enabled, dtype in self.states:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.caches)
                )
            yield


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Everything that torch keeps per thread and that a model's forward depends on."""

    autocast: Autocast
    with_gradients: bool
    default_device: torch.device
    stream: torch.cuda.Stream | None

    @staticmethod
    def here(device: torch.device) -> Surroundings:
        """Returns those of this thread."""
        is_cuda = device.type == "cuda"
        return Surroundings(
            Autocast.here(device),
            torch.is_grad_enabled(),
            torch.get_default_device(),
            torch.cuda.current_stream(device) if is_cuda else None,
        )

    @contextmanager
    def applied(self) -> Generator[None]:
        """Applies them to a thread that has just begun."""
        with ExitStack() as stack:
            if self.stream is not None:
                # A new thread would launch on device 0, and on the default stream: not ordered with
                # the kernels of the engine's thread, which computes the blocks.
                torch.cuda.set_device(self.stream.device)
                stack.enter_context(torch.cuda.stream(self.stream))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            stack.enter_context(torch.set_grad_enabled(self.with_gradients))
            stack.enter_context(self.autocast.applied())
            yield


def process_settings() -> dict[str, object]:
    """torch's settings that all threads share and on which results depend, by name."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "the default dtype": torch.get_default_dtype(),
        "the attention kernels (sdpa_kernel)": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the precision of fp32 matrix products": (
            torch.get_float32_matmul_precision(),
            cudnn.allow_tf32,
        ),
        "cuDNN's flags": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
    }


@contextmanager
def warning_filters_kept() -> Generator[None]:
    """Undoes changes that the block makes to Python's warning filters, in whatever order."""
    # catch_warnings would forget which warnings have been shown.
    filters = warnings.filters
    try:
        yield
    finally:
        if warnings.filters is not filters:
            warnings.filters = filters
            vars(warnings)["_filters_mutated"]()
