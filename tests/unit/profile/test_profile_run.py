"""Ranks' measurements become devices and hosts; the command's files can be planned from."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from typing import Any

import pytest
from support.configs import write_llama

from hytrain.formats.profile_file import (
    CopyRates,
    DeviceProfile,
    LayerSample,
    OutsideSample,
    device_label,
    read_profile,
)
from hytrain.hardware.host_share import RankHost
from hytrain.tools import cli
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from
from hytrain.tools.planner.result import Plan
from hytrain.tools.profiler import layer_bench, profile_options, rates
from hytrain.tools.profiler.layer_profile import LayerProfiling
from hytrain.tools.profiler.profile_options import Progress
from hytrain.tools.profiler.profile_report import profile_table
from hytrain.tools.profiler.rates import CpuRates
from hytrain.tools.profiler.run import (
    RankProfile,
    device_profiles,
    host_names,
    host_profiles,
)

Capture = pytest.CaptureFixture[str]
NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone.utc)
GIB = 1024**3


def layer_sample(samples: int, slowness: float) -> LayerSample:
    return LayerSample(
        samples=samples,
        forward_ms=slowness * samples,
        backward_ms=2.0 * slowness * samples,
        recompute_backward_ms=3.0 * slowness * samples,
        kept_bytes=100 * samples,
        peak_bytes=200 * samples,
        recompute_peak_bytes=int(210 * samples * slowness),
    )


def measured(
    host: str,
    memory: int,
    cores: range,
    slowness: float,
    sizes: tuple[int, ...],
    settings: str = "",
) -> RankProfile:
    device = DeviceProfile(
        host=host,
        label=device_label("GPU", 100, memory * GIB),
        device="GPU",
        multiprocessors=100,
        limit_bytes=memory * GIB,
        memory_bytes=memory * GIB - int(slowness),
        idle_bytes=int(slowness),
        layer=tuple(layer_sample(size, slowness) for size in sizes),
        outside=(OutsideSample(samples=1, forward_ms=1.0, backward_ms=slowness, peak_bytes=5),),
        update_rate=8.0 / slowness,
        copies=CopyRates(to_host=4.0, from_host=5.0 / slowness, to_host_both=3.0, from_host_both=2),
        accumulation_ms=1500.0 * slowness,
        measured=NOW - datetime.timedelta(seconds=slowness),
        settings=settings,
    )
    cpu_rates = CpuRates(
        {1: 10.0 / slowness, 2: 16.0},
        {1: 8.0 / slowness, 2: 12.0},
        {1: 100.0, 2: 170.0 / slowness},
    )
    return RankProfile(device, frozenset(cores), 50 * GIB, "a CPU", cpu_rates)


def test_ranks_of_a_label_are_one_device_and_the_slowest_counts() -> None:
    everybody = [
        measured("one", 80, range(0, 4), 1.0, (1, 2, 4)),
        measured("one", 40, range(4, 8), 1.0, (1,), "half"),
        measured("one", 80, range(0, 4), 2.0, (1, 2)),
        measured("two", 80, range(0, 2), 1.0, (1, 2)),
    ]
    devices = device_profiles(everybody, NOW)
    large, small, other = devices
    assert [(d.host, d.limit_bytes // GIB, d.settings) for d in devices] == [
        ("one", 80, ""),
        ("one", 40, "half"),
        ("two", 80, ""),
    ]
    assert large.layer == (layer_sample(1, 2.0), layer_sample(2, 2.0))
    assert small.layer == (layer_sample(1, 1.0),)
    assert large.outside[0].backward_ms == 2.0
    assert (large.update_rate, small.update_rate) == (4.0, 8.0)
    assert (large.accumulation_ms, small.accumulation_ms) == (3000.0, 1500.0)
    assert (large.copies.from_host, large.copies.to_host) == (2.5, 4.0)
    assert (large.idle_bytes, large.memory_bytes) == (2, 80 * GIB - 2)
    assert (large.launch_slowdown, large.update_launches, large.measured) == (None, None, NOW)
    assert other.layer == (layer_sample(1, 1.0), layer_sample(2, 1.0))

    one, two = host_profiles(everybody, NOW)
    assert one.ranks == (large.label, small.label, large.label)
    assert (one.cores, two.cores) == (8, 2)
    assert one.bandwidth == pytest.approx(170.0 + 170.0 + 85.0)  # with two threads each
    assert [(row.threads, row.rate, row.in_training) for row in one.updates] == [
        (1, 5.0, 4.0),
        (2, 16.0, 12.0),
    ]
    assert (one.memory_bytes, two.memory_bytes) == (150 * GIB, 50 * GIB)


def test_ranks_of_one_machine_have_one_name() -> None:
    def machine(name: str, boot: str) -> tuple[str, RankHost]:
        return name, RankHost(boot, frozenset({0}), frozenset())

    assert host_names(
        [machine("a", "1"), machine("container", "1"), machine("b", "2"), machine("a", "3")]
    ) == ["a", "a", "b", "a#2"]


# ---- the command ----


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def arguments(llama: Path, *others: object, seq_len: int = 16) -> list[str]:
    model = ["--model", llama, "--seq-len", seq_len, "--dtype", "fp32", "--seconds", "0.5"]
    return ["profile", *map(str, [*model, "--micro-batches", "1,2", *others])]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of small arrays: what is large is for real machines."""
    ordinary = profile_options.ProfileOptions

    def options(**given: Any) -> profile_options.ProfileOptions:
        return ordinary(rate_seconds=0.01, cpu_elements=1 << 14, copy_bytes=1 << 16, **given)

    monkeypatch.setattr(profile_options, "ProfileOptions", options)
    monkeypatch.setattr(layer_bench, "_MOST_PASSES", 6)
    # Threads that wait for each other on a busy machine take seconds.
    monkeypatch.setattr(rates, "thread_counts", lambda cores: [1])


def test_launches_are_spread_over_the_profile(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is slow for ten seconds is slow for some of their turns only."""
    events: list[object] = []
    told = Progress.show
    again = LayerProfiling.launch_again

    def show(progress: Progress, share: float, what: str) -> None:
        events.append(what)
        told(progress, share, what)

    def launch_again(layers: LayerProfiling, pauses: int = 1) -> None:
        events.append(pauses)
        again(layers, pauses)

    monkeypatch.setattr(Progress, "show", show)
    monkeypatch.setattr(LayerProfiling, "launch_again", launch_again)
    monkeypatch.setattr(rates, "thread_counts", lambda cores: [1, 2])
    assert cli.main(arguments(llama, "--out", tmp_path / "profile.json")) == 0
    after_layers = events[events.index("layer, micro-batch of 2") + 1 :]
    assert after_layers == [
        *(5, 5, "update"),  # after layers, and after launches beside updates
        *(5, "copies", "update on the CPU"),
        *(5, 5, "launches of training"),  # after each number of threads
        *("collectives", "done"),
    ]


def test_a_profile_is_written_and_merged(tmp_path: Path, llama: Path, capsys: Capture) -> None:
    one, two, both = (tmp_path / name for name in ("1.json", "2.json", "b.json"))
    assert cli.main(arguments(llama, "--out", one)) == 0
    captured = capsys.readouterr()
    assert captured.out == profile_table(read_profile(one)) + "\n"
    assert "layer, micro-batch of 2" in captured.err
    assert f"profile: {one}" in captured.err
    found = read_profile(one)
    assert found.model.name == "tiny-llama"
    assert found.model.boundary_bytes == 16 * 32 * 4
    assert [row.samples for row in found.devices[0].layer] == [1, 2]
    assert found.hosts[0].ranks == (found.devices[0].label,)

    assert cli.main(arguments(llama, "--out", two)) == 0
    assert cli.main(["profile", "--merge", str(one), str(two), "--out", str(both)]) == 0
    assert read_profile(both).devices == read_profile(two).devices
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.json", "b.json"]


def refusal(capsys: Capture, *given: object) -> str:
    assert cli.main(["profile", *map(str, given)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_what_cannot_be_measured_is_refused_before_anything_is(
    tmp_path: Path, llama: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.json"
    model = ["--model", llama, "--seq-len", "16"]
    assert "there is no folder" in refusal(capsys, *model, "--out", tmp_path / "no" / "p.json")
    assert "give --seq-len too" in refusal(capsys, "--model", llama, "--out", out)
    assert "max_position_embeddings" in refusal(
        capsys, "--model", llama, "--seq-len", 65, "--out", out
    )
    assert "ascending" in refusal(capsys, *model, "--out", out, "--micro-batches", "2,1")
    merge = ["--merge", tmp_path / "none.json", "--out", out]
    assert "leave --model, --seq-len out" in refusal(capsys, *model, *merge)
    for option in (["--dtype", "bf16"], ["--micro-batches", "1,2"], ["--seconds", "40"]):
        assert f"leave {option[0]} out" in refusal(capsys, *option, *merge)
    assert "cannot read the profile" in refusal(capsys, *merge)
    text = refusal(capsys, "--merge", out, "--out", out)
    assert f"--out {out} would replace the file of --merge" in text
    fraction = "--device-memory-fraction"
    assert "must be in (0, 1]" in refusal(capsys, *model, "--out", out, fraction, "1.5")
    assert "2 values for 1 ranks" in refusal(capsys, *model, "--out", out, fraction, "0.5,1.0")
    assert "there is none" in refusal(capsys, *model, "--out", out, fraction, "0.5")
    assert not out.exists()


@pytest.mark.parametrize("made", ["model", "(model,)", "(1, 2)", "None"])
def test_a_function_must_return_a_model_and_its_batches(
    tmp_path: Path, capsys: Capture, made: str
) -> None:
    source = "import torch\n\ndef build(num_layers, seq_len):\n    model = torch.nn.Linear(2, 2)\n"
    (tmp_path / "models.py").write_text(f"{source}    return {made}\n")
    given = ["--model", f"{tmp_path / 'models.py'}:build", "--seq-len", 16]
    text = refusal(capsys, *given, "--out", tmp_path / "out.json")
    assert "it must return (model, make_batch)" in text


def test_a_plan_can_be_made_from_what_was_measured(tmp_path: Path, llama: Path) -> None:
    path = tmp_path / "profile.json"
    assert cli.main(arguments(llama, "--out", path)) == 0
    profile = read_profile(path)
    options = PlanOptions(batch=4, gpu_reserve=lambda _: 0, host_reserve=lambda _: 0)
    plan = make_plan(problem_from(profile, options))
    assert isinstance(plan, Plan)
    (planned,) = plan.ranks
    assert planned.batch_size == 4
    assert planned.microbatch_size in (1, 2)
    # With all state on the device, a step is its passes and its update.
    row = next(r for r in profile.devices[0].layer if r.samples == planned.microbatch_size)
    layers = 4 * (row.forward_ms + row.backward_ms) * (4 / planned.microbatch_size)
    assert plan.step_seconds >= layers / 1e3
    assert 0 < planned.gpu_bytes < profile.devices[0].memory_bytes


# ---- progress ----


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show(0.0, "layer")
    progress.show(0.1, "layer")
    progress.show(0.5, "copies")
    Progress().show(0.5, "to nobody")
    lines = stream.getvalue().splitlines()
    assert [line.split("] ")[1] for line in lines] == ["layer", "copies"]
    assert lines[1].startswith("[ 50%")
