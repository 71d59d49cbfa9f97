"""A backend of torch.compile whose graphs return memory that is reused, as CUDA graphs' is.

What a graph has returned belongs to it: when the next forward runs, whatever was returned since
the last one is overwritten (here with NaN). For tests without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func


class ReusedMemory:
    """The backend, and what its graphs have returned in this pass."""

    def __init__(self) -> None:
        self._returned: list[torch.Tensor] = []
        self._in_backward = False
        self.overwritten = 0
        """Tensors that have been overwritten so far."""
        self.backend: Callable[..., Any] = aot_autograd(
            fw_compiler=self._compiler(is_backward=False),
            bw_compiler=self._compiler(is_backward=True),
        )

    def _compiler(self, *, is_backward: bool) -> Callable[..., Any]:
        def compiled(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            def run(*inputs: Any) -> Any:
                if self._in_backward and not is_backward:
                    self._overwrite()
                self._in_backward = is_backward
                outputs = module(*inputs)
                given = {_memory(value) for value in inputs if isinstance(value, torch.Tensor)}
                # Views: autograd copies a gradient that somebody else refers to.
                self._returned += [
                    value.detach()
                    for value in outputs
                    if isinstance(value, torch.Tensor) and _memory(value) not in given
                ]
                return outputs

            return make_boxed_func(run)

        return compiled

    def _overwrite(self) -> None:
        for tensor in self._returned:
            if tensor.is_floating_point():
                # Unnoticed by autograd, as a replay is.
                with torch.autograd._unsafe_preserve_version_counter(tensor), torch.no_grad():
                    tensor.fill_(float("nan"))
        self.overwritten += len(self._returned)
        self._returned.clear()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
