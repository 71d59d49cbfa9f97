"""Tries an installed hytrain, away from its sources: the import, the kernels, the OpenMP runtime.

Prints the bits of every pass, as tests/aarch64/digest.py does.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parents[1]
sys.path = [path for path in sys.path if Path(path or ".").resolve() != SOURCES]


def runtimes() -> set[str]:
    """The OpenMP runtimes that this process has loaded."""
    return set(re.findall(r"/.*/lib(?:gomp|i?omp)[^/\n]*", Path("/proc/self/maps").read_text()))


def main() -> None:
    """Raises AssertionError of what does not hold."""
    of_torch = runtimes()
    from hytrain import _C
    from hytrain.kernels import cpu_adam
    from hytrain.kernels.cpu_adam import AdamHyper, Gradient

    assert SOURCES not in Path(_C.__file__).parents, _C.__file__

    n = 1 << 20
    start, grad = torch.linspace(-1, 1, n), torch.linspace(1, -2, n)
    expected = torch.nn.Parameter(start.clone())
    expected.grad = grad
    torch.optim.AdamW([expected], lr=1e-3, weight_decay=0.1).step()
    for isa in cpu_adam.available_isas():
        cpu_adam.set_isa(isa)
        p, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
        hyper = AdamHyper(lr=1e-3, weight_decay=0.1)
        cpu_adam.commit(p, m, v, Gradient(grad, 1.0, hyper), num_threads=2)
        torch.testing.assert_close(p, expected.data, rtol=1e-6, atol=1e-7)
    assert not of_torch or runtimes() == of_torch, "a second OpenMP runtime"
    assert not of_torch or _C.openmp_library() in of_torch

    sys.path.insert(0, str(SOURCES / "tests/aarch64"))
    import digest

    kinds = (torch.float32, torch.bfloat16, torch.uint8)
    for kind, dtype in itertools.product(kinds, (torch.float32, torch.bfloat16, torch.float16)):
        found = []
        for isa in cpu_adam.available_isas():
            cpu_adam.set_isa(isa)
            found.append(digest.passes(kind, dtype))
        assert all(one == found[0] for one in found), (kind, dtype)
        for name, bits in found[0].items():
            print(name, str(kind)[6:], str(dtype)[6:], bits)


if __name__ == "__main__":
    main()
