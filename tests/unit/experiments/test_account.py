"""The account of a step of several GPUs: its causes are told apart, and add up to what it took."""

import pytest

from experiments.weak_scaling.account import Kernel, account

COMPUTE, OTHER = 7, 26
MS = 1_000_000


def _kernels(stream: int, *parts: tuple[str, float, float]) -> list[Kernel]:
    """(name, begin, end) in ms."""
    return [Kernel(name, stream, round(begin * MS), round(end * MS)) for name, begin, end in parts]


ALONE = _kernels(
    COMPUTE, ("gemm", 0.0, 1.0), ("add", 1.002, 1.5), ("Memcpy DtoD", 1.5, 1.6), ("gemm", 1.6, 2.6)
)
OURS = [
    *_kernels(COMPUTE, ("gemm", 0.0, 1.3), ("add", 1.304, 1.802)),
    *_kernels(OTHER, ("ncclDevKernel_ReduceScatter", 0.2, 1.2), ("adam_grouped_kernel", 3.4, 5.0)),
    *_kernels(COMPUTE, ("Memcpy DtoD", 1.802, 2.002), ("Memcpy DtoD", 2.002, 2.202)),
    *_kernels(COMPUTE, ("gemm", 2.202, 3.302), ("gather", 3.402, 3.502)),
]


@pytest.mark.parametrize("steps", [1, 2])
def test_each_cause(steps: int) -> None:
    found = account(sorted(OURS, key=lambda kernel: kernel.begin), ALONE, steps)
    assert found["forward_backward"] == pytest.approx(2.6 / steps)
    assert found["more"] == pytest.approx(2.4 / steps)
    assert found["collectives"] == pytest.approx(1.0 / steps)
    assert found["updates"] == pytest.approx(1.6 / steps)
    expected = {
        "kernels beside collectives": 0.3,
        "kernels beside neither": 0.1,  # the second product
        "copies within the GPU": 0.3,
        "calls of its own": 0.1,  # the gather, of which the update's time beside it is no part
        "gaps between kernels": 0.002,
        "waits": 1.598,  # 0.1 before the gather, and the update's end
    }
    causes = {name: took for name, took in found["causes"].items() if took}
    assert causes == pytest.approx({n: t / steps for n, t in expected.items()}, abs=5e-4)
    assert sum(causes.values()) == pytest.approx(found["more"], abs=3e-3)


def test_a_call_that_is_missing() -> None:
    (first, *_), shorter = ALONE, ALONE[:1]
    found = account(shorter, ALONE, 1)
    assert found["more"] == pytest.approx((first.end - ALONE[-1].end) / MS)
    assert sum(found["causes"].values()) == pytest.approx(found["more"], abs=3e-3)
    assert found["causes"]["calls of its own"] == pytest.approx(-1.5, abs=0.01)
    assert found["causes"]["copies within the GPU"] == pytest.approx(-0.1)
