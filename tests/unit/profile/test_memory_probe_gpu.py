"""The short way to the allocator's numbers gives torch's own."""

from __future__ import annotations

import pytest
import torch

from hytrain.hardware.gpu_memory import allocated_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_allocated_bytes_are_torchs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    large = torch.empty(1 << 20, device=device)
    small = torch.empty(1 << 10, device=device)
    del large
    now, peak = allocated_bytes(device)
    assert now == torch.cuda.memory_allocated(device)
    assert peak == torch.cuda.max_memory_allocated(device)
    assert peak >= now + (4 << 20)
    assert now >= small.nbytes
