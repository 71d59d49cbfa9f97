"""What the CPU kernel refuses: always before it touches anything."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_cases import ISAS, Case, make_case

from hytrain.errors import KernelArgumentError
from hytrain.kernels import cpu_adam
from hytrain.kernels.cpu_adam import (
    AdamHyper,
    Gradient,
    commit,
    commit_then_preview,
    preview,
    publish,
    sum_of_squares,
)

N = 100
HYPER = AdamHyper(lr=1e-3)

Change = Callable[[dict[str, torch.Tensor]], object]


def set_to(name: str, make: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({name: make(tensors)})


def strided(_: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.zeros(2 * N)[::2]


def overlapping_halves(name: str, other: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        memory = torch.zeros(2 * N - 1)
        tensors[name], tensors[other] = memory[:N], memory[N - 1 :]

    return change


BAD_BUFFERS: dict[str, tuple[Change, str]] = {
    "p is float64": (set_to("p", lambda t: t["p"].double()), "p is torch.float64"),
    "m is bfloat16": (set_to("m", lambda t: t["m"].bfloat16()), "m is torch.bfloat16"),
    "v is float16": (set_to("v", lambda t: t["v"].half()), "v is torch.float16"),
    "g is float64": (set_to("g", lambda t: t["g"].double()), "gradient is torch.float64"),
    "g is int32": (set_to("g", lambda t: t["g"].int()), "gradient is torch.int32"),
    "out is float64": (set_to("out", lambda t: t["out"].double()), "out is torch.float64"),
    "p is on meta": (set_to("p", lambda t: t["p"].to("meta")), "p is on meta"),
    "out is on meta": (set_to("out", lambda t: t["out"].to("meta")), "out is on meta"),
    "m is short": (set_to("m", lambda t: t["m"][1:]), "m has 99 elements"),
    "g is long": (set_to("g", lambda t: torch.zeros(N + 1)), "gradient has 101 elements"),
    "out is short": (set_to("out", lambda t: t["out"][1:]), "out has 99 elements"),
    "v is strided": (set_to("v", strided), "v of shape .* not contiguous"),
    "g is strided": (set_to("g", strided), "gradient of shape .* not contiguous"),
    "g is expanded": (set_to("g", lambda t: torch.zeros(1).expand(N)), "not contiguous"),
    "out is strided": (set_to("out", strided), "out of shape .* not contiguous"),
    "p is m": (set_to("p", lambda t: t["m"]), "p and m overlap by 400"),
    "m overlaps v": (overlapping_halves("m", "v"), "m and v overlap by 4 "),
    "p overlaps g": (overlapping_halves("g", "p"), "p and .*gradient overlap by 4 "),
    "out overlaps v": (overlapping_halves("v", "out"), "v and out overlap by 4 "),
    "out overlaps g": (overlapping_halves("out", "g"), "out and .*gradient overlap by 4 "),
}


def run_commit(t: dict[str, torch.Tensor], num_threads: int = 1) -> None:
    gradient = Gradient(t["g"], 1.0, HYPER)
    commit(t["p"], t["m"], t["v"], gradient, out=t["out"], num_threads=num_threads)


def run_preview(t: dict[str, torch.Tensor], num_threads: int = 1) -> None:
    gradient = Gradient(t["g"], 1.0, HYPER)
    preview(t["p"], t["m"], t["v"], gradient, out=t["out"], num_threads=num_threads)


def run_both(t: dict[str, torch.Tensor], num_threads: int = 1) -> None:
    gradient = Gradient(t["g"], 1.0, HYPER)
    good = Gradient(torch.zeros(N), 1.0, HYPER)
    for pair in ((gradient, good), (good, gradient)):
        commit_then_preview(t["p"], t["m"], t["v"], *pair, out=t["out"], num_threads=num_threads)


PASSES = [run_commit, run_preview, run_both]


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    return {"p": case.p, "m": case.m, "v": case.v, "g": case.current, "out": torch.zeros(N)}


@pytest.mark.parametrize("run", PASSES)
@pytest.mark.parametrize("name", BAD_BUFFERS)
def test_bad_buffers_are_refused_and_nothing_is_touched(
    name: str, run: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    change, message = BAD_BUFFERS[name]
    tensors = tensors_of(make_case(N, torch.float32))
    run(tensors)  # these are good
    change(tensors)
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    with pytest.raises(KernelArgumentError, match=message):
        run(tensors)
    for key, tensor in tensors.items():
        if tensor.device.type == "cpu":
            assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize("run", PASSES)
@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_bad_thread_counts_are_refused(
    run: Callable[[dict[str, torch.Tensor], int], None], num_threads: int
) -> None:
    tensors = tensors_of(make_case(N, torch.float32))
    before = tensors["p"].clone()
    with pytest.raises(KernelArgumentError, match=f"num_threads is {num_threads}"):
        run(tensors, num_threads)
    assert torch.equal(tensors["p"], before)


def test_publish_and_sum_check_too() -> None:
    p = torch.zeros(N)
    with pytest.raises(KernelArgumentError, match="p and out overlap"):
        publish(p, out=p)
    with pytest.raises(KernelArgumentError, match="out has 3 elements"):
        publish(p, out=torch.zeros(3))
    with pytest.raises(KernelArgumentError, match=r"tensor is torch\.int64"):
        sum_of_squares(torch.arange(3))
    with pytest.raises(KernelArgumentError, match="num_threads is 0"):
        sum_of_squares(p, num_threads=0)


def test_two_gradients_may_be_the_same_memory() -> None:
    case = make_case(N, torch.float32)
    gradient = Gradient(case.current, 1.0, HYPER)
    commit_then_preview(*case.state, gradient, gradient, out=torch.zeros(N))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, bad) for name in ("lr", "eps", "weight_decay") for bad in (-1.0, 1e39)),
        *((name, bad) for name in ("beta1", "beta2") for bad in (-0.1, 1.0, 1.5)),
        *(
            (name, bad)
            for name in ("lr", "eps", "weight_decay", "beta1", "beta2")
            for bad in (math.nan, math.inf, -math.inf)
        ),
        ("step", 0),
        ("step", -3),
        ("step", 2**60),
    ],
)
def test_bad_hyper_parameters_are_refused(field: str, value: float) -> None:
    with pytest.raises(KernelArgumentError, match=f"{field} is "):
        replace(HYPER, **{field: value})


def test_constants_beyond_fp32_are_refused() -> None:
    with pytest.raises(KernelArgumentError, match="beyond fp32's range"):
        AdamHyper(lr=1e38, weight_decay=1e3)
    with pytest.raises(KernelArgumentError, match="beyond fp32's range"):
        AdamHyper(lr=1e38, beta1=0.999)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39])
def test_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(KernelArgumentError, match="scale is"):
        Gradient(torch.zeros(1), scale, HYPER)


def test_unknown_instruction_set_names_the_choices() -> None:
    active = cpu_adam.active_isa()
    with pytest.raises(ValueError, match=r'"sse9".*' + ISAS[-1]):
        cpu_adam.set_isa("sse9")
    assert cpu_adam.active_isa() == active


def in_fresh_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def last_line(text: str) -> str:
    """What the code printed: DeepSpeed, if imported, logs to standard output before it."""
    return text.strip().splitlines()[-1] if text.strip() else ""


def test_environment_forces_an_instruction_set() -> None:
    code = "from hytrain.kernels.cpu_adam import active_isa; print(active_isa())"
    for isa in {ISAS[0], ISAS[-1]}:
        done = in_fresh_python(code, HYTRAIN_CPU_ISA=isa)
        assert last_line(done.stdout) == isa, done.stderr


def test_wrong_instruction_set_in_the_environment_is_a_value_error() -> None:
    code = """
try:
    import hytrain.kernels.cpu_adam
except ValueError as error:
    print(error)
"""
    done = in_fresh_python(code, HYTRAIN_CPU_ISA="sse9")
    assert "HYTRAIN_CPU_ISA" in done.stdout, done.stderr
    assert all(isa in done.stdout for isa in ISAS)


def test_one_openmp_runtime_serves_torch_and_the_kernel() -> None:
    """The extension's OpenMP calls must land in the copy of libgomp that torch brought."""
    code = """
import os, torch
before = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit
n = 1 << 20
commit(*(torch.zeros(n) for _ in range(3)), Gradient(torch.ones(n), 1.0, AdamHyper(lr=1.0)),
       num_threads=2)
from hytrain import _C
print(os.path.realpath(_C.openmp_library()) in before or not before)
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    done = in_fresh_python(code)
    assert last_line(done.stdout) == "True", done.stdout + done.stderr


def test_a_renamed_openmp_runtime_is_the_one_that_is_called(tmp_path: Path) -> None:
    """As torch's wheels for Arm bring it: under a name of its own, loaded for torch alone."""
    code = """
import ctypes, re, sys, types
sys.modules["torch"] = types.ModuleType("torch")
ctypes.CDLL(sys.argv[1])
from hytrain import _C
loaded = set(re.findall(r"/.*/libgomp[^/\\n]*", open("/proc/self/maps").read()))
print({_C.openmp_library()} == loaded == {sys.argv[1]}, loaded)
"""
    known = set(re.findall(r"/.*/libgomp[^/\n]*", Path("/proc/self/maps").read_text()))
    if not known:
        pytest.skip("torch has no libgomp here")
    renamed = tmp_path / "libgomp-1a2b3c.so.1.0.0"
    renamed.write_bytes(
        Path(known.pop()).read_bytes().replace(b"libgomp.so.1\0", b"libgomp.so.9\0")
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(renamed)], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("True"), done.stdout + done.stderr
