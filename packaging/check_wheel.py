"""Tries an installed hytrain, away from its sources: the import, the kernels, the OpenMP runtime.

Prints the bits of every pass, as tests/aarch64/digest.py does. Without torch the extension alone is
tried, with GCC's OpenMP runtime.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).resolve().parents[1]
sys.path = [path for path in sys.path if Path(path or ".").resolve() != SOURCES]


def runtimes() -> set[str]:
    """The OpenMP runtimes that this process has loaded."""
    return set(re.findall(r"/.*/lib(?:gomp|i?omp)[^/\n]*", Path("/proc/self/maps").read_text()))


def step_beside_torch(extension: ModuleType, of_torch: set[str]) -> None:
    """A step by the OpenMP runtime that torch brought.

    Raises:
        AssertionError: what does not hold.
    """
    import torch

    from hytrain.kernels import cpu_adam
    from hytrain.kernels.cpu_adam import AdamHyper, Gradient

    n = 1 << 20
    start, grad = torch.linspace(-1, 1, n), torch.linspace(1, -2, n)
    # AdamW's first step, without its class: that imports torch's compiler, which takes minutes
    # under emulation.
    expected = start * (1 - 1e-3 * 0.1) - 1e-3 * grad / (grad.abs() + 1e-8)
    for isa in cpu_adam.available_isas():
        cpu_adam.set_isa(isa)
        p, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
        hyper = AdamHyper(lr=1e-3, weight_decay=0.1)
        cpu_adam.commit(p, m, v, Gradient(grad, 1.0, hyper), num_threads=2)
        torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-7)
    assert not of_torch or runtimes() == of_torch, "a second OpenMP runtime"
    called = str(Path(extension.openmp_library()).resolve())  # /lib may be a link
    assert not of_torch or called in of_torch, (called, of_torch)


def main() -> None:
    """Raises AssertionError of what does not hold."""
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch:
        importlib.import_module("torch")
    of_torch = runtimes()

    sys.path.insert(0, str(SOURCES / "tests/aarch64"))
    digest = importlib.import_module("digest")
    extension = importlib.import_module("hytrain._C")
    assert SOURCES / "hytrain" not in Path(str(extension.__file__)).parents, extension.__file__
    if has_torch:
        step_beside_torch(extension, of_torch)

    for kind, dtype in itertools.product(digest.KINDS, digest.DTYPES):
        found = []
        for isa in extension.available_isas():
            extension.set_isa(isa)
            found.append(digest.passes(kind, dtype))
        assert all(one == found[0] for one in found), (kind, dtype)
        for name, bits in found[0].items():
            print(name, kind, dtype, bits)
    if has_torch:
        version = sys.modules["torch"].__version__
        print("imported with torch", version, file=sys.stderr)
    else:
        print("the extension alone, without torch", file=sys.stderr)


if __name__ == "__main__":
    main()
