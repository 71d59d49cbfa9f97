"""Memory is what was said before it was taken: peaks of RSS beside predictions, and refusals."""

from __future__ import annotations

import gc
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import built, device, environment, join_process_group, make_config
from support.scripts import run_script

from hytrain.errors import MemoryBudgetError
from hytrain.placement.costs import LayerBytes
from hytrain.placement.peak_memory import (
    PHASES,
    PeakMemoryInputs,
    hard_limit,
    peaks_table,
    predict_peaks,
    refuse_what_cannot_fit,
)

TESTS = Path(__file__).resolve().parents[2]
MIB = 2**20

_MEASURE = f"""
    import json, sys
    sys.path.insert(0, {str(TESTS)!r})
    import torch
    from support.engines import built, join_process_group, make_config
    join_process_group()
    folder, master, direct = sys.argv[1:4]
    stage, k, width, layers, follows_step = map(float, sys.argv[4:])
    width, model = int(width), torch.nn.Sequential()

    def make_layer():
        return torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)

    def status(name):
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    def peak_of(action):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        action()
        return status("VmHWM")

    def one_step():
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().sum())
        engine.step()

    def step():
        for _ in range(2):
            one_step()
        engine.synchronize()

    def evaluate():
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(1, width, dtype=torch.bfloat16))
        engine.train()

    def build():
        global engine
        engine = context.__enter__()

    # Libraries, allocators and threads get what they take once from a small engine.
    small = make_config(
        offload={{"chunk_elements": 2**20}}, stage=int(stage), hytrain={{"master": master}}
    )
    with built(torch.nn.Sequential(make_layer()), small) as engine:
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().sum())
        engine.step()
        engine.save_checkpoint(folder, tag="small")
        engine.load_checkpoint(folder, tag="small")
    model = torch.nn.Sequential(*(make_layer() for _ in range(int(layers))))
    config = make_config(
        gpu_fraction=k, stage=int(stage), offload={{"chunk_elements": 2**20}},
        hytrain={{"layers": {{"class": "Linear"}}, "master": master}}, direct=direct == "True",
    )
    context = built(model, config)
    before = status("VmRSS")
    measured = {{"build": [peak_of(build) - before]}}
    said = {{name: (peak.host, peak.pinned) for name, peak in engine.memory_peaks().items()}}
    for name, action in (
        ("step", step), ("save", lambda: engine.save_checkpoint(folder, tag="one")),
        ("load", lambda: engine.load_checkpoint(folder, tag="one")), ("evaluation", evaluate),
    ):
        measured[name] = []
        # On a busy machine the worker may be the faster one, and has fetched the gradients.
        for _ in range(10 if follows_step and name != "step" else 1):
            if follows_step and name != "step":
                one_step()
            measured[name].append(peak_of(action) - before)
            if measured[name][-1] >= 0.9 * sum(said[name]):
                break
    assert said == {{
        name: (peak.host, peak.pinned) for name, peak in engine.memory_peaks().items()
    }}
    context.__exit__(None, None, None)
    print("RESULT", json.dumps([measured, said]))
"""


_MMAP_THRESHOLD = """
import ctypes
ctypes.CDLL(None).mallopt(-3, 65536)
"""
"""M_MMAP_THRESHOLD of malloc.h, for a process that has begun."""


def _run(folder: Path, script: str, *arguments: Any, **variables: str) -> str:
    path = folder / "script.py"
    path.write_text(_MMAP_THRESHOLD + textwrap.dedent(script))
    ended = run_script(path, *map(str, arguments), timeout=200.0, **variables)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("stage", "k", "delays", "master", "direct"),
    [
        (2, 0.0, None, "fp32", False),
        (3, 0.5, "1:20000", "fp32", False),
        pytest.param(2, 0.0, None, "split", False, marks=pytest.mark.parity_full),
        (2, 0.25, None, "split", True),
    ],
    ids=["settled", "gradients in flight", "split", "split, committed directly"],
)
def test_peaks_are_what_was_said(
    stage: int, k: float, delays: str | None, master: str, direct: bool, tmp_path: Path
) -> None:
    """38 M parameters: 432 MiB of state. What imports take is left out, and a small engine's.

    Gradients, which are the GPU's elsewhere, go back to the system as they are freed: with its
    default glibc keeps up to 200 MiB of them for later. With delays a step returns before its
    updates have fetched anything, and each phase follows a step: it is within its peak.
    """
    arguments = (tmp_path, master, direct, stage, k, 1536, 16, int(delays is not None))
    output = _run(tmp_path, _MEASURE, *arguments, **({"HYTRAIN_DELAYS": delays} if delays else {}))
    measured, said = json.loads(output.partition("RESULT ")[2])
    for name, growths in measured.items():
        found = ", ".join(f"{growth / MIB:.0f}" for growth in growths)
        print(f"{name}: {found} MiB, said {sum(said[name]) / MIB:.0f}")
    for name, growths in measured.items():
        # How many gradients are in flight depends on who is faster; all else is known.
        least = 0.85 if name == "step" or not delays else 0.9
        # A load has pages of mapped files as well, which the system takes back when it needs them.
        most = 1.08 if name == "load" else 1.03
        assert least * sum(said[name]) <= max(growths) <= most * sum(said[name]), name


def _terms(**changes: Any) -> PeakMemoryInputs:
    values: dict[str, Any] = {
        "layers": [LayerBytes(f"layer {number}", 1000) for number in range(4)],
        "gpu_layers": 1,
        "pinned_bytes": 500,
        "home_bytes": 70,
        "largest_parameter": 100,
        "gradients": [2000] * 4,
        "gpu_base": 9000,
        "num_ranks": 1,
        "measuring_bytes": 256 * MIB,
        **changes,
    }
    return PeakMemoryInputs(**values)


def test_each_phase_has_what_it_takes() -> None:
    peaks = predict_peaks(_terms(layers=[LayerBytes("layer", 100 * MIB)] * 4))
    assert tuple(peaks) == PHASES
    gib = 3 * 12 * 100 * MIB
    assert [peaks[phase].host - gib for phase in PHASES] == [0, 0, 400 + 18 * MIB, 400, 0]
    assert {peak.pinned for peak in peaks.values()} == {570}
    base = 9000 + 12 * 100 * MIB
    gradient = 2 * 100 * MIB
    left = 3 * gradient  # of what is updated on the CPU
    assert [peaks[phase].gpu for phase in PHASES] == [
        base, base + gradient, base + left, base + left, base,
    ]  # fmt: skip
    assert [peaks[phase].in_flight for phase in PHASES] == [0, left + 2000, 0, 0, left]
    assert "pageable" in peaks_table(peaks)
    small = predict_peaks(_terms())
    assert small["build"].host == 256 * MIB  # measuring the update takes more than the state
    on_cpu = predict_peaks(_terms(gpu_base=None))
    state, left = 4 * 12 * 1000, 3 * 2 * 1000
    assert on_cpu["evaluation"].host == state + left
    assert on_cpu["load"].host == state + left + 18 * MIB
    assert on_cpu["save"].host == state + left + 18 * MIB
    assert on_cpu["step"].host == state + 5 * 2000
    assert {(peak.gpu, peak.in_flight) for peak in on_cpu.values()} == {(None, 0)}


def test_what_is_gathered_and_what_is_in_flight_do_not_add_up() -> None:
    peaks = predict_peaks(_terms(largest_parameter=10_000))
    assert peaks["save"].gpu == peaks["load"].gpu == 9000 + 12_000 + 40_000
    all_away = predict_peaks(_terms(gpu_layers=4))
    assert {peak.in_flight for peak in all_away.values()} == {0}
    assert all_away["save"].gpu == 9000 + 48_000 + 400


def test_gradients_that_micro_batches_keep_are_there_beside_activations() -> None:
    step = predict_peaks(_terms(kept_gradients=8000))["step"]
    assert (step.gpu, step.in_flight) == (9000 + 12_000 + 8000, 0)


def test_what_a_save_copies_to_the_host_beside_states() -> None:
    bare, none = predict_peaks(_terms()), {"largest_frozen": 0}
    frozen = predict_peaks(_terms(largest_frozen=5000))
    assert frozen["save"].host - bare["save"].host == 5000 - 400
    assert frozen["load"] == bare["load"]
    rounded = [LayerBytes(f"layer {number}", 1000, moments="bf16") for number in range(4)]
    some, no = (predict_peaks(_terms(layers=rounded, gpu_layers=k)) for k in (1, 0))
    for phase in ("save", "load"):  # fp32 values of a moment that is on the device
        assert some[phase].host - no[phase].host == 2 * 100 - 8 * 1000
    split = [LayerBytes(f"layer {number}", 1000, master="split") for number in range(4)]
    for ranks, joined in ((1, 400), (2, 0)):  # with more ranks pieces have memory of their own
        whole, halved = (
            predict_peaks(_terms(num_ranks=ranks, largest_frozen=0, **more))["save"]
            for more in ({}, {"layers": split})
        )
        assert halved.host - whole.host == joined - 3 * 2 * 1000
    on_cpu = (_terms(gpu_base=None, **more) for more in ({"largest_frozen": 5000}, none))
    assert len({repr(predict_peaks(terms)) for terms in on_cpu}) == 1


def test_limits_that_end_a_process_refuse_and_the_machines_do_not() -> None:
    assert hard_limit({"machine": 10}) is None
    pools = {"machine": 10, "cgroup 1:2": 250 * MIB, "data of 7": 400 * MIB}
    assert hard_limit(pools) == ("cgroup 1:2", 250 * MIB)
    peaks = predict_peaks(_terms())
    refuse_what_cannot_fit(peaks, None, None, 0.25)
    refuse_what_cannot_fit(peaks, ("cgroup 1:2", 300 * MIB), 10**6, 0.25)
    with pytest.raises(MemoryBudgetError, match=r"build takes 256\.0 MiB .* the cgroup 1:2 leaves"):
        refuse_what_cannot_fit(peaks, ("cgroup 1:2", 250 * MIB), None, 0.25)
    with pytest.raises(MemoryBudgetError, match=r"of the GPU's memory, and there is \d+ KiB"):
        refuse_what_cannot_fit(peaks, None, 20_000, 0.25)


_LIMITED = f"""
    import resource, sys
    sys.path.insert(0, {str(TESTS)!r})
    import psutil, torch
    from support.engines import built, join_process_group, make_config
    from support.models import make_batch, make_model
    join_process_group()
    with built(make_model("mlp"), make_config()) as engine:
        engine.backward(engine(**make_batch("mlp", 0)))
        engine.step()
    limits = {{"as": (resource.RLIMIT_AS, "vms"), "data": (resource.RLIMIT_DATA, "data")}}
    which, used = limits[sys.argv[1]]
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
    k = sys.argv[2] if sys.argv[2] == "solve" else float(sys.argv[2])
    config = make_config(bf16=False, gpu_fraction=k, offload={{"chunk_elements": 2**20}},
                         hytrain={{"layers": {{"class": "Linear"}}}})
    old = resource.getrlimit(which)
    had = getattr(psutil.Process().memory_info(), used)
    resource.setrlimit(which, (had + (150 << 20), old[1]))
    try:
        with built(model, config):
            pass
    except Exception as error:
        print("RAISED", type(error).__name__, str(error).replace(chr(10), " "))
    resource.setrlimit(which, old)
    with built(model, config) as engine:
        engine.backward(engine(torch.ones(1, 2048)).sum())
        engine.step()
    print("TRAINED")
"""


@pytest.mark.parametrize(("which", "k"), [("as", "0.0"), ("data", "solve")])
def test_a_limit_of_the_process_refuses_the_build(which: str, k: str, tmp_path: Path) -> None:
    """The real thing; and where the limit is gone the same process trains."""
    output = _run(tmp_path, _LIMITED, which, k)
    lines = [x for x in output.splitlines() if x.startswith(("RAISED", "TRAIN"))]
    assert len(lines) == 2, lines
    assert lines[0].startswith("RAISED MemoryBudgetError "), lines[0]
    assert "nothing was allocated" in lines[0]
    if k != "solve":
        assert "the address space (ulimit -v) of process" in lines[0]


_WEIGHTS_ON_THE_HOST = f"""
    import resource, sys
    sys.path.insert(0, {str(TESTS)!r})
    import psutil, torch
    from support.engines import built, join_process_group, make_config
    join_process_group()
    config = make_config(bf16=False, stage=3, offload={{"chunk_elements": 2**20}},
                         hytrain={{"layers": {{"class": "Linear"}}}})
    config["zero_optimization"]["offload_param"] = {{"device": "cpu"}}

    def train(limit):
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
        used = psutil.Process().memory_info().data
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (used + limit, resource.RLIM_INFINITY))
        with built(model, config) as engine:
            engine.backward(engine(torch.ones(1, 2048)).sum())
            engine.step()
            peaks = engine.memory_peaks().values()
            return max(peak.resident for peak in peaks), engine.optimizer.placement._peak_inputs(0)

    needed, inputs = train(0)
    assert inputs.home_bytes > 48 << 20
    train(needed - inputs.home_bytes + (32 << 20))
    print("TRAINED")
"""


def test_weights_on_the_host_are_not_counted_twice(tmp_path: Path) -> None:
    """A limit that leaves room for the state alone: the weights take the place of the model's."""
    assert _run(tmp_path, _WEIGHTS_ON_THE_HOST).splitlines()[-1] == "TRAINED"


@pytest.mark.parametrize(
    ("changes", "itemsize"),
    [
        ({}, 0),
        ({"accumulation": 2}, 2),
        ({"accumulation": 2, "data_types": {"grad_accum_dtype": "fp32"}}, 4),
        ({"accumulation": 2, "hytrain": {"accumulation": "layer_major"}}, 0),
        ({"accumulation": 2, "hytrain": {"accumulation": "layer_major"}, "direct": True}, 2),
    ],
)
def test_the_engine_says_what_its_model_keeps(changes: dict[str, Any], itemsize: int) -> None:
    join_process_group()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    model[1].requires_grad_(False)
    with built(model, make_config(**changes)) as engine:
        terms = engine.optimizer.placement._peak_inputs(0)
        assert terms.kept_gradients == itemsize * 2 * 64 * 64
        assert terms.largest_frozen == 2 * 64 * 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("phase", ["save", "load", "evaluation"])
def test_gradients_in_flight_on_the_gpu(phase: str, stage: int, tmp_path: Path) -> None:
    """38 M parameters: 72 MiB of gradients, of which the delayed update has fetched few."""
    join_process_group()
    gc.collect()  # models of earlier tests, which would go later: they would be needed, it seems
    x = torch.ones(1, 1536, dtype=torch.bfloat16, device=device())
    layers = [torch.nn.Linear(1536, 1536, bias=False, dtype=torch.bfloat16) for _ in range(16)]
    # cuBLAS's workspaces, 32 MiB each, are there before the engine is.
    torch.nn.Linear(1536, 1536, bias=False, dtype=x.dtype, device=x.device)(x).sum().backward()
    config = make_config(
        stage=stage, offload={"chunk_elements": 2**20}, hytrain={"layers": {"class": "Linear"}}
    )
    with (
        environment("HYTRAIN_DELAYS", "1:20000"),
        built(torch.nn.Sequential(*layers), config) as engine,
    ):

        def evaluate() -> None:
            engine.eval()
            with torch.no_grad():
                engine(x)

        def step() -> None:
            engine.backward(engine(x).float().sum())
            engine.step()

        step()
        engine.save_checkpoint(str(tmp_path), tag="one")
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        {
            "save": lambda: engine.save_checkpoint(str(tmp_path), tag="two"),
            "load": lambda: engine.load_checkpoint(str(tmp_path), tag="one"),
            "evaluation": evaluate,
        }[phase]()
        torch.cuda.synchronize()
        said = engine.memory_peaks()[phase]
        assert said.gpu is not None
        bare = engine.memory_peaks()["build"].gpu
        peak = torch.cuda.max_memory_allocated()
        assert peak <= 1.03 * (said.gpu + said.in_flight)
        assert peak > 1.1 * bare  # or nothing was in flight
