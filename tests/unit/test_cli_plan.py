"""`hytrain plan`: profiles, libraries and data sheets; what is printed and written; refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.plan_profiles import GIB, a_device, a_host, a_profile

from hytrain.formats.plan_file import read_plan
from hytrain.formats.profile_file import ProfileFile, UpdateRate, write_profile
from hytrain.tools import cli
from hytrain.tools.planner import plan_report
from hytrain.tools.planner.result import even_split

Capture = pytest.CaptureFixture[str]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "tie_word_embeddings": False,
}
BLOCK = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256


def _write(folder: Path, profile: ProfileFile, name: str = "profile.json") -> Path:
    path = folder / name
    write_profile(path, profile)
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return _write(tmp_path, a_profile())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "small-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def _run(*arguments: object) -> int:
    return cli.main(["plan", *map(str, arguments)])


def _error(capsys: Capture, *arguments: object) -> str:
    """What a refused command says: one line on stderr, nothing on stdout."""
    assert _run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def _misfit(capsys: Capture, *arguments: object) -> str:
    """What is said where nothing fits, in a line; as printed no line is too long."""
    assert _run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert max(map(len, captured.err.splitlines())) <= 100
    return " ".join(captured.err.split())


def _json(capsys: Capture, *arguments: object) -> dict[str, Any]:
    assert _run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_table_says_what_each_gpu_does(profile: Path, capsys: Capture) -> None:
    assert _run("--profile", profile, "--batch", 32) == 0
    text = capsys.readouterr().out
    head, devices, plan = text.split("\n\n")
    step = (
        r"Step: [\d.]+ ms predicted \(with engine.train_batch, not in Trainer\), "
        r"([\d.]+) samples/s; even split: ([\d.]+)\."
    )
    found = re.fullmatch(step, " ".join(head.split()))
    assert found is not None
    record = _json(capsys, "--profile", profile, "--batch", 32)
    assert float(found[1]) == pytest.approx(record["samples_per_second"], rel=0.01)
    assert float(found[2]) < float(found[1])  # the second GPU is half as fast
    assert devices.startswith("rank")
    assert "GPU, 100 SMs" in devices
    assert plan.startswith("rank")
    assert "compute" in plan
    found = re.search(r"\n(\d+)% of the speed of forward and backward alone\n", plan)
    assert found is not None
    alone, whole = max(record["forward_backward_seconds"]), record["predicted"]["step_seconds"]
    assert int(found[1]) == round(100 * alone / whole)
    assert "longer than the shortest step that this can predict" in plan


def test_idle_gpus_are_warned_of(profile: Path, capsys: Capture) -> None:
    assert _run("--profile", profile, "--batch", 1) == 0
    head = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
    assert "rank 1 (--batch 1 is less than 2 GPUs)." in head
    assert "even split" not in head
    assert _run("--profile", profile, "--batch", 32) == 0
    assert "Warning" not in capsys.readouterr().out


def test_json_has_the_plan_and_what_passes_take(profile: Path, capsys: Capture) -> None:
    record = _json(capsys, "--profile", profile, "--batch", 32)
    assert record["estimated"] is False
    assert sum(rank["batch_size"] for rank in record["ranks"]) == 32
    assert [rank["multiprocessors"] for rank in record["ranks"]] == [100, 50]
    passes = record["forward_backward_seconds"]
    assert max(passes) <= record["predicted"]["step_seconds"]
    assert all(0.0 <= waited < 0.1 * max(passes) for waited in record["collective_seconds"])


def test_the_plan_is_written(profile: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "plan.json"
    record = _json(capsys, "--profile", profile, "--batch", 32, "--stage", 1, "--out", out)
    plan = read_plan(out)
    assert plan.global_batch == 32
    assert plan.stage == 1
    assert plan.ranks[0].memory_bytes == 80 * GIB
    assert plan.model_dump(mode="json")["ranks"] == record["ranks"]


def test_the_path_is_printed_and_an_earlier_plan_may_be_replaced(
    profile: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "plan.json"
    for batch in (16, 32):
        assert _run("--profile", profile, "--batch", batch, "--out", out) == 0
        replaced = ", in place of an earlier plan" * (batch == 32)
        assert capsys.readouterr().err == f"plan: {out}{replaced}\n"
        assert read_plan(out).global_batch == batch


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"traceEvents": []}', "is a trace, for `hytrain trace report`"),
        ('{"rank": 0, "kind": "step", "step": 1}\n', "is a metrics file, for `hytrain explain`"),
        ('{"zero_optimization": {"stage": 2}}', "is a DeepSpeed configuration"),
        ('{"version": 1, "model": {}, "global_batch": 8}', "is a plan, for training"),
        ("", "is empty"),
    ],
)
def test_a_file_of_another_kind_is_named(
    tmp_path: Path, capsys: Capture, text: str, words: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert words in _error(capsys, "--profile", path, "--batch", 8)


def test_plans_hold_where_every_step_is_clipped_by_default(tmp_path: Path, capsys: Capture) -> None:
    made = a_profile("one", a_device("one", "GPU", gigabytes=12))
    weak = made.hosts[0].model_copy(update={"updates": (UpdateRate(threads=16, rate=5e8),)})
    path = _write(tmp_path, made.model_copy(update={"hosts": (weak,)}))
    found: dict[float | None, dict[str, Any]] = {}
    for share in (None, 0, 0.25, 1):
        options = () if share is None else ("--clipped-share", share)
        predicted = _json(capsys, "--profile", path, "--batch", 32, *options)["predicted"]
        low, high = predicted["unclipped_seconds"], predicted["clipped_seconds"]
        mean = low + (1.0 if share is None else share) * (high - low)
        assert predicted["step_seconds"] == pytest.approx(mean)
        found[share] = predicted
    assert found[None] == found[1]
    assert found[1]["clipped_seconds"] > 1.01 * found[1]["unclipped_seconds"]
    assert found[0]["step_seconds"] < found[1]["step_seconds"]
    assert _run("--profile", path, "--batch", 32) == 0
    plan = capsys.readouterr().out
    assert plan.splitlines()[-1].endswith("predicted for 100% clipped")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--clipped-share", "often", "'often' is not a share: it must be from 0 to 1"),
        ("--clipped-share", "2", "'2' is not a share: it must be from 0 to 1"),
        ("--clipped-share", "-0.5", "'-0.5' is not a share"),
        ("--clipped-share", "nan", "'nan' is not a share"),
        ("--batch", "1.5", "'1.5' is not a whole number of at least 1"),
        ("--batch", "0", "'0' is not a whole number of at least 1"),
        ("--host-memory", "-1", "'-1' is not a number above 0"),
        ("--host-memory", "nan", "'nan' is not a number"),
        ("--host-memory", "1e308", "'1e308' is not a number above 0"),
        ("--host-bandwidth", "1e305", "'1e305' is not a number above 0"),
    ],
)
def test_values_out_of_range_are_refused_in_words(
    profile: Path, capsys: Capture, option: str, value: str, said: str
) -> None:
    with pytest.raises(SystemExit) as left:
        _run("--profile", profile, "--batch", 8, option, value)
    assert left.value.code == 2
    assert f"argument {option}: {said}" in capsys.readouterr().err


def test_files_are_looked_at_before_anything_is_planned(
    profile: Path, model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "ds.json"
    config.write_text("{}")
    before = {path: path.read_bytes() for path in (profile, config, model / "config.json")}
    monkeypatch.setattr("hytrain.tools.cli.plan.profile_of", None)  # no work is done
    given = ("--profile", profile, "--batch", 8, "--deepspeed-config", config, "--model", model)
    for path, owner in (
        (profile, "--profile"),
        (model / ".." / profile.name, "--profile"),
        (config, "--deepspeed-config"),
        (model / "config.json", "--model"),
    ):
        assert f"would replace the file of {owner}" in _error(capsys, *given, "--out", path)
    assert "is a folder" in _error(capsys, *given, "--out", tmp_path)
    text = _error(capsys, *given, "--out", tmp_path / "no" / "x.json")
    assert f"--out {tmp_path / 'no' / 'x.json'}: there is no folder" in text
    script = tmp_path / "train.py"
    before[script] = b"import torch"
    script.write_bytes(before[script])
    assert "replace a file that is no plan" in _error(capsys, *given, "--out", script)
    assert {path: path.read_bytes() for path in before} == before


def test_batches_that_would_take_minutes_are_refused_at_once(
    profile: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hytrain.tools.cli.plan.profile_of", None)  # no work is done
    text = _error(capsys, "--profile", profile, "--batch", 65_537)
    assert "--batch 65537: at most 65536 samples are planned for" in text


def test_a_host_keeps_no_more_free_than_it_has(profile: Path, capsys: Capture) -> None:
    arguments = ("--profile", profile, "--batch", 8, "--host-memory-reserve")
    text = _error(capsys, *arguments, 5000)
    assert text.startswith("hytrain: --host-memory-reserve 5000: ")
    assert "choose a smaller reserve" in text
    assert _run(*arguments, 2) == 0
    capsys.readouterr()


def test_nothing_that_fits_is_an_error_that_says_what_is_missing(
    tmp_path: Path, capsys: Capture
) -> None:
    device = a_device("one", "Tiny", gigabytes=6)
    made = a_profile("one", device)
    poor = a_host("one", device, gigabytes=2)
    path = _write(tmp_path, made.model_copy(update={"hosts": (poor,)}))
    text = _misfit(capsys, "--profile", path, "--batch", 4)
    assert text.startswith("Does not fit: 16.25 GiB missing. The GPUs and hosts can hold 4.2% of")
    assert text.endswith("memory for 16.25 GiB is missing, on any host or GPU.")


def _small(folder: Path, gigabytes: float, host: int) -> Path:
    """For 2.6 GB of weights and 18 of state."""
    device = a_device("one", "Small", gigabytes=gigabytes)
    made = a_profile("one", device)
    poor = a_host("one", device, gigabytes=host)
    return _write(folder, made.model_copy(update={"hosts": (poor,)}))


def test_weights_go_to_the_host_where_that_is_asked_for(tmp_path: Path, capsys: Capture) -> None:
    path = _small(tmp_path, 4.5, 64)
    arguments = ("--profile", path, "--batch", 4)
    # Below stage 3 and with it, what would help is said; the former wherever it is enough.
    for stage in ((), ("--stage", 3)):
        text = _misfit(capsys, *arguments, *stage)
        assert re.match(r"Does not fit: .*; try --stage 3 --offload-param cpu \([^,]*\)\. ", text)
    out = tmp_path / "plan.json"
    record = _json(capsys, *arguments, "--stage", 3, "--offload-param", "cpu", "--out", out)
    assert record["offload_param"] == read_plan(out).offload_param == "cpu"
    assert record["without_offload_param"] == {"step_seconds": None}
    (rank,) = record["ranks"]
    assert rank["host_bytes"] > 2 * 1_301_000_000
    assert "only stage 3" in _error(capsys, *arguments, "--offload-param", "cpu")
    # Where not even that helps, nothing is promised.
    poor = _small(tmp_path, 4.5, 8)
    assert "try" not in _misfit(capsys, "--profile", poor, "--batch", 4)


def test_a_plan_from_a_cpu_says_that_there_was_no_gpu(tmp_path: Path, capsys: Capture) -> None:
    for name in ("CPU X", "X"):
        path = _write(tmp_path, a_profile("one", a_device("one", name)))
        assert _run("--profile", path, "--batch", 4) == 0
        text = capsys.readouterr().out
        assert ('\nThere was no GPU: what is called "GPU" below is the CPU itself.\n' in text) is (
            name == "CPU X"
        )


def test_stage_and_offload_param_are_those_of_the_configuration(
    profile: Path, tmp_path: Path, capsys: Capture
) -> None:
    path, out = tmp_path / "ds.json", tmp_path / "plan.json"
    given = (
        "--profile",
        profile,
        "--batch",
        8,
        "--accumulation",
        "layer_major",
        "--deepspeed-config",
        path,
    )

    def write(zero: object) -> None:
        values = {} if zero is None else {"zero_optimization": zero}
        path.write_text(json.dumps({"train_batch_size": 8} | values))

    cpu, none = {"device": "cpu"}, {"device": "none"}
    for zero, expected in (
        (None, (2, None)),
        ({"stage": 1}, (1, None)),
        ({"stage": 3}, (3, None)),
        ({"stage": 3, "offload_param": none}, (3, None)),
        ({"stage": 3, "offload_param": cpu}, (3, "cpu")),
    ):
        write(zero)
        _json(capsys, *given, "--out", out)
        plan = read_plan(out)
        assert (plan.stage, plan.offload_param) == expected
    assert _run(*given, "--stage", 3, "--offload-param", "cpu") == 0  # the same
    capsys.readouterr()
    assert "--stage 2, but" in _error(capsys, *given, "--stage", 2)
    write({"stage": 3})
    assert "--offload-param cpu, but" in _error(capsys, *given, "--offload-param", "cpu")
    write({"stage": 3, "offload_param": {"device": "nvme"}})
    assert "offload_param.device\" is 'nvme'" in _error(capsys, *given)
    write({})
    assert '"zero_optimization.stage" is 0: hytrain trains with 1, 2 or 3' in _error(capsys, *given)
    write([])
    assert '"zero_optimization" must be a JSON object' in _error(capsys, *given)


def test_the_configuration_is_read_as_training_reads_it(
    profile: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "ds.json"
    given = ("--profile", profile, "--batch", 8, "--deepspeed-config", path)
    assert "No such file" in _error(capsys, *given)
    for text, words in (
        ('{"zero_optimization": {"stage": 1}, "hytrain": {}, "hytrain": {}}', "Duplicate keys"),
        ('{"zero_optimisation": {"stage": 1}}', 'write "zero_optimization"'),
        ('{"hytrain": {"momemts": "bf16"}}', 'did you mean "moments"?'),
        ('{"zero_optimization": {"stage": "2"}}', "write 2 without quotes"),
        ('{"traceEvents": []}', "is a trace"),
    ):
        path.write_text(text)
        assert words in _error(capsys, *given)
    path.write_text('{\n  // ours\n  "zero_optimization": {"stage": 1}\n}')
    assert _json(capsys, *given)["stage"] == 1


def test_a_lower_stage_is_named_where_it_fits(tmp_path: Path, capsys: Capture) -> None:
    # In stage 3 one GPU has the gradients beside the weights, in stage 2 they go to the host.
    arguments = (
        "--profile",
        _small(tmp_path, 7, 20),
        "--batch",
        4,
        "--accumulation",
        "layer_major",
    )
    text = _misfit(capsys, *arguments, "--stage", 3)
    assert "; try --stage 2 (" in text
    assert _run(*arguments, "--stage", 2) == 0
    capsys.readouterr()


def test_what_fits_on_the_gpu_is_named(tmp_path: Path, capsys: Capture) -> None:
    # The host holds the state, but not the weights besides.
    path = _small(tmp_path, 12, 12)
    arguments = ("--profile", path, "--batch", 1)
    text = _misfit(capsys, *arguments, "--stage", 3, "--offload-param", "cpu")
    assert "; try without --offload-param (" in text
    assert _run(*arguments, "--stage", 3) == 0
    capsys.readouterr()


def test_a_first_backward_may_do_without_its_gradients(tmp_path: Path, capsys: Capture) -> None:
    for gigabytes, keeps in ((6, False), (16, True)):
        arguments = ("--profile", _small(tmp_path, gigabytes, 64), "--batch", 4, "--stage", 3)
        record = _json(capsys, *arguments)
        assert record["keeps_gradients"] is keeps
        policies = {rank["activations"] for rank in record["ranks"]}
        assert keeps or policies <= {"store", "recompute"}
        assert _run(*arguments) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert ("the first backward sends each layer's as later ones do" in words) is not keeps


def test_what_is_short_is_said_of_the_plan_that_lacks_less(tmp_path: Path, capsys: Capture) -> None:
    # With gradients the GPU lacks more than both do without them; 20 GB of host would do.
    arguments = ("--batch", 4, "--stage", 3)
    text = _misfit(capsys, "--profile", _small(tmp_path, 6, 18), *arguments)
    assert "GiB is missing, on any host or GPU" in text
    assert _run("--profile", _small(tmp_path, 6, 20), *arguments) == 0
    capsys.readouterr()


def test_weights_stay_where_they_fit(profile: Path, capsys: Capture) -> None:
    arguments = ("--profile", profile, "--batch", 8, "--stage", 3, "--accumulation", "layer_major")
    resident = _json(capsys, *arguments)
    assert resident["offload_param"] is None
    streamed = _json(capsys, *arguments, "--offload-param", "cpu")
    without = streamed["without_offload_param"]["step_seconds"]
    assert without == resident["predicted"]["step_seconds"]
    assert _run(*arguments, "--offload-param", "cpu") == 0
    text = capsys.readouterr().out
    assert f"fits without --offload-param, too: a step would take {1e3 * without:.1f} ms" in text


def test_layers_that_are_gathered_are_those_of_the_configuration(
    profile: Path, tmp_path: Path, capsys: Capture
) -> None:
    found = {}
    for live in (None, 0, 400_000_000):
        options: tuple[object, ...] = ()
        if live is not None:
            config = tmp_path / "ds.json"
            keys = {"stage": 3, "stage3_max_live_parameters": live}
            config.write_text(json.dumps({"zero_optimization": keys}))
            options = ("--deepspeed-config", config)
        record = _json(
            capsys, "--profile", profile, "--batch", 16, "--stage", 3, *options,
            "--accumulation", "micro_batch_major",
        )  # fmt: skip
        found[live] = [
            rank["gpu_bytes"]
            - 14 * 1_301_000_000 * rank["shard_fraction"] * rank["gpu_layers"] / 12
            for rank in record["ranks"]
        ]
    # Beside the layer in use, of 100 M parameters, none, four, or by DeepSpeed's own keys those
    # that are needed again before 10^9 others: four and the head.
    for none, four, default in zip(found[0], found[400_000_000], found[None], strict=True):
        assert four - none == pytest.approx(2 * 400_000_000, abs=1e6)
        assert default - none == pytest.approx(2 * 451_000_000, abs=1e6)
    bad = tmp_path / "bad.json"
    for key in ("max_live_parameters", "prefetch_bucket_size"):
        bad.write_text(json.dumps({"zero_optimization": {"stage": 3, f"stage3_{key}": -5}}))
        text = _error(capsys, "--profile", profile, "--batch", 8, "--deepspeed-config", bad)
        assert f'"zero_optimization.stage3_{key}" is -5: it must be 0 or more' in text
    bad.write_text("[]")
    arguments = ("--profile", profile, "--batch", 16, "--stage", 3, "--deepspeed-config")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"optimizer": {"type": "Muon"}}))
    assert "plans are made for AdamW alone" in _error(capsys, *arguments, other)
    assert "is a list: write a JSON object" in _error(capsys, *arguments, bad)
    bad.write_text("{")
    assert "cannot be read" in _error(capsys, *arguments, bad)
    assert "No such file" in _error(capsys, *arguments, tmp_path / "none.json")


def test_less_memory_and_other_choices_are_planned_with(profile: Path, capsys: Capture) -> None:
    small = _json(
        capsys, "--profile", profile, "--batch", 32, "--device-memory-fraction", 0.15,
        "--gpu-memory-reserve", 0.5, "--host-memory-reserve", 2,
        "--accumulation", "micro_batch_major",
    )  # fmt: skip
    for rank in small["ranks"]:
        assert rank["activations"] in ("store", "recompute")
        assert rank["memory_bytes"] == 12 * GIB
        assert rank["gpu_bytes"] <= 11.5 * GIB
    never = _json(capsys, "--profile", profile, "--batch", 2, "--no-idle")
    assert [rank["batch_size"] for rank in never["ranks"]] == [1, 1]


def test_the_mode_of_accumulation_may_be_asked_for(profile: Path, capsys: Capture) -> None:
    arguments = ("--profile", profile, "--batch", 32, "--stage", 3)
    found: dict[str | None, dict[str, Any]] = {None: _json(capsys, *arguments)}
    for mode in ("micro_batch_major", "layer_major"):
        found[mode] = _json(capsys, *arguments, "--accumulation", mode)
        assert found[mode]["accumulation"] == mode
        assert found[mode]["other_accumulation"] is None
    chosen = found[None]["accumulation"]
    other = found[None]["other_accumulation"]
    assert {chosen, other["accumulation"]} == {"micro_batch_major", "layer_major"}
    assert found[None]["predicted"]["step_seconds"] == min(
        one["predicted"]["step_seconds"] for one in found.values()
    )
    expected = found[other["accumulation"]]["predicted"]["step_seconds"]
    # What has lost is not searched for as long.
    assert other["step_seconds"] == pytest.approx(expected, rel=0.05)


def test_files_of_two_hosts_are_planned_together(tmp_path: Path, capsys: Capture) -> None:
    one = _write(tmp_path, a_profile("one"), "one.json")
    two = _write(tmp_path, a_profile("two"), "two.json")
    record = _json(capsys, "--profile", one, two, "--batch", 32, "--interconnect", 25)
    assert [rank["host"] for rank in record["ranks"]] == ["one", "one", "two", "two"]
    assert "--interconnect" in _error(capsys, "--profile", one, two, "--batch", 32)


@pytest.mark.parametrize(
    ("gpus", "hosts", "gb_per_s"),
    [
        (("2xh100",), (), 360.0),
        (("h100", "a100"), (), 240.0),
        (("h100", "l4"), (), 20.0),
        (("2xh100pcie",), (), 40.0),
        (("2xh100",), ("--hosts", 1, 1), 40.0),
    ],
)
def test_gpus_of_a_host_are_linked_where_all_are(
    model: Path, capsys: Capture, gpus: tuple[str, ...], hosts: tuple[Any, ...], gb_per_s: float
) -> None:
    record = _json(capsys, "--gpus", *gpus, "--model", model, "--batch", 64, *hosts)
    assert record["assumed"]["interconnect"] == gb_per_s * 1e9


def test_data_sheets_stand_in_and_say_so(model: Path, capsys: Capture) -> None:
    arguments = ("--gpus", "l4", "l4", "a6000", "p40", "--model", model, "--batch", 64)
    assert _run(*arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("Step: ")
    assert (
        "Assumed: 1,024 tokens a sample (--seq-len), bf16 weights (--dtype), fp32 moments "
        "(--moments), ZeRO-2 (--stage), every step clipped (--clipped-share), 16 cores a host "
        "(--cores), 64 GiB of host memory (--host-memory), 100 GB/s of host memory bandwidth "
        "(--host-bandwidth), 10 GB/s between ranks (--interconnect). rank"
    ) in " ".join(text.split())
    record = _json(capsys, *arguments, "--cores", 8, "--interconnect", 5)
    assert record["assumed"]["cores"] == 8
    assert record["assumed"]["interconnect"] == 5e9
    assert record["estimated"] is True
    assert record["model"] == {
        "name": "small-llama",
        "num_layers": 4,
        "num_updates": 6,
        "parameters": 4 * BLOCK + 2 * 1024 * 256 + 256,
        "frozen": 0,
        "dtype": "bf16",
        "moments": "fp32",
        "seq_len": 1024,
    }
    l4, other, a6000, p40 = (rank["batch_size"] for rank in record["ranks"])
    assert l4 == pytest.approx(other, abs=2)
    assert a6000 > l4 > p40
    text = _error(capsys, "--gpus", "h1000", "l4x4", "8", "zz", "--model", model, "--batch", 64)
    words = 'called h1000 (did you mean "h100"?), l4x4 (write 4xl4), 8 (write 8xNAME, as 8xh100), '
    assert f"{words}zz: there are p40, " in text
    text = _error(capsys, "--gpus", "99999999999xh100", "--model", model, "--batch", 64)
    assert "99999999999xh100: give 1 to 4096 devices of a kind" in text
    record = _json(capsys, "--gpus", "4090", "--model", model, "--batch", 8)
    assert "RTX 4090" in record["ranks"][0]["device"]
    assert "no data sheet of a GPU called b200" in _error(
        capsys, "--gpus", "b200", "--model", model, "--batch", 64
    )
    assert "need a --model" in _error(capsys, "--gpus", "l4", "--batch", 64)


def test_what_was_given_is_not_assumed(model: Path, tmp_path: Path, capsys: Capture) -> None:
    call = ["--gpus", "h100", "--model", model, "--batch", 8, "--dtype", "bf16", "--cores", 8]
    call += ["--host-memory", 99, "--host-bandwidth", 9, "--clipped-share", 0, "--seq-len", 512]
    assert _run(*call) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Assumed: fp32 moments (--moments), ZeRO-2 (--stage). NVIDIA H100" in text
    assert "on host0: 8 samples in micro-batches of 8, activations stored; the state of " in text
    assert "rank" not in text  # no table of one GPU
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": 1}}))
    assert _run(*call, "--deepspeed-config", config) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert 'Assumed: micro-batches as in the configuration or, with "auto", Trainer (--acc' in text
    assert _run(*call, "--moments", "bf16", "--stage", 2) == 0
    assert "Assumed" not in capsys.readouterr().out


@pytest.mark.parametrize(("layers", "hidden", "launching"), [(24, 1024, "72"), (24, 3072, None)])
def test_how_far_off_an_estimate_is_follows_it(
    layers: int, hidden: int, launching: str | None, model: Path, capsys: Capture
) -> None:
    """0.4 B of 24 layers took 67 to 77 ms on an H200 (docs/benchmarks.md)."""
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    (model / "config.json").write_text(json.dumps(LLAMA | shape))
    call = ["--gpus", "h200", "--model", model, "--batch", 4, "--accumulation", "micro_batch_major"]
    assert _run(*call, "--host-memory", 128) == 0
    first, second, *_ = " ".join(capsys.readouterr().out.split()).split(". ")
    assert first.startswith("Step: ")
    if launching is None:
        assert second == "Estimated from data sheets"
    else:
        assert second.startswith("Far too short: the host's launches set the pace")
        assert float(first.split()[1]) < float(launching)
    assert _run(*call, "--host-memory", 128) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("within 15 % of measured ones where the GPU set the pace" in text) == (not launching)
    assert launching is None or f"here {launching} ms a step: measure with" in text


def test_an_even_plan_is_not_set_beside_an_even_split(model: Path, capsys: Capture) -> None:
    for gpus, is_told in ((("2xh100",), False), (("h100", "l4"), True)):
        assert _run("--gpus", *gpus, "--model", model, "--batch", 16) == 0
        assert ("even split" in capsys.readouterr().out) == is_told


def test_data_sheets_have_the_moments_of_the_training(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    arguments = ("--gpus", "l4", "l4", "--model", model, "--batch", 8, "--cores", 2)
    for moments in ("fp32", "bf16", "8bit"):
        assert _json(capsys, *arguments, "--moments", moments)["model"]["moments"] == moments
    config = tmp_path / "ds.json"
    section = {"zero_optimization": {"stage": 2}, "hytrain": {"moments": "8bit"}}
    config.write_text(json.dumps(section))
    given = (*arguments, "--deepspeed-config", config)
    assert _json(capsys, *given)["model"]["moments"] == "8bit"
    assert _json(capsys, *given, "--moments", "8bit")["model"]["moments"] == "8bit"
    text = _error(capsys, *given, "--moments", "bf16")
    assert f'--moments bf16, but {config} has "hytrain.moments" "8bit"' in text
    config.write_text(json.dumps({"hytrain": {"moments": "4bit"}}))
    assert "hytrain.moments = '4bit': must be" in _error(capsys, *given)
    config.write_text(json.dumps({"hytrain": {"master": "split"}}))
    text = _error(capsys, *given, "--out", tmp_path / "plan.json")
    assert f'{config}: "hytrain.master" is "split": training takes no plan beside it' in text
    assert "it is for bf16 weights" in _error(capsys, *given, "--dtype", "fp32")


@pytest.mark.parametrize(("host_gib", "form"), [(128, "whole"), (36, "split")])
def test_split_master_weights_take_what_explain_says(
    model: Path, tmp_path: Path, capsys: Capture, host_gib: int, form: str
) -> None:
    large = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288}
    (model / "config.json").write_text(json.dumps(LLAMA | large | {"vocab_size": 32000}))
    config = tmp_path / "ds.json"
    section: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "hytrain": {"master": "split"},
    }
    config.write_text(json.dumps(section))
    given = ("--model", model, "--host-memory", host_gib)
    call = (*given, "--gpus", "h100", "--batch", 1, "--deepspeed-config", config)
    record = _json(capsys, *call)
    (late,) = record["late_layers"]
    assert (late > 0) is (form == "split")
    assert cli.main(["explain", str(config), *map(str, given), "--gpu-memory=79.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"layers on the CPU are {form}," in found["decision"]["host_master_reason"]
    (rank,) = record["ranks"]
    told = found["candidates"][rank["gpu_layers"]]
    # A plan counts activations as well, and what passes through staging as taken.
    assert 0 <= rank["gpu_bytes"] - told["gpu_bytes"] < 4 * GIB
    held = told["host_bytes"] - found["decision"]["staging_bytes"]
    assert rank["host_bytes"] == pytest.approx(held, rel=5e-2)
    assert _run(*call) == 0
    words = "those of layers on the CPU are whole"
    if late:
        words = (
            f"of layers on the CPU those of the last {late} of {38 - rank['gpu_layers']} are split"
        )
    assert words in capsys.readouterr().out


def test_collectives_that_bound_a_step_are_named(tmp_path: Path, capsys: Capture) -> None:
    large = {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | large))
    call = ["--gpus", "2xh100", "--model", tmp_path, "--stage", 3, "--batch", 4]
    call += ["--accumulation", "micro_batch_major"]
    for speed, column in ((5, "  collectives"), (80, "  compute, collectives"), (999, "  compute")):
        assert _run(*call, "--interconnect", speed) == 0
        text = capsys.readouterr().out
        rows = [line for line in text.splitlines() if line.startswith(("0 ", "1 "))]
        assert all(row.endswith(column) for row in rows[2:]), text
        found = re.search(r"of ([\d.]+) s, ([\d.]+)\s+are\s+collectives", text)
        assert (found is None) == (speed == 999)
        if found:
            record = _json(capsys, *call, "--interconnect", speed)
            assert float(found[2]) == pytest.approx(max(record["collective_seconds"]), rel=0.01)


def test_what_trainer_cannot_run_is_said(model: Path, tmp_path: Path, capsys: Capture) -> None:
    """One GPU keeps inputs of layers where that is faster, which needs engine.train_batch."""
    large = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288}
    (model / "config.json").write_text(json.dumps(LLAMA | large | {"vocab_size": 151936}))
    call = ["--gpus", "a100", "--model", model, "--batch", 8, "--host-memory", 128]
    assert _json(capsys, *call)["accumulation"] == "layer_major"
    other = _json(capsys, *call, "--accumulation", "micro_batch_major")
    assert _run(*call) == 0
    text = " ".join(capsys.readouterr().out.split())
    seconds = other["predicted"]["step_seconds"]
    rest = f"one micro-batch after another, as in Trainer: {1e3 * seconds:.1f} ms), "
    assert f" ms predicted (layer by layer, with engine.train_batch; {rest}" in text
    assert f"(--accumulation micro_batch_major) the step would take {1e3 * seconds:.1f} ms" in text
    config = tmp_path / "ds.json"
    for batch, own, mode in (
        ("auto", {}, "micro_batch_major"),
        (8, {}, "layer_major"),
        ("auto", {"accumulation": "layer_major"}, "layer_major"),
    ):
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        given = {"train_batch_size": batch, "zero_optimization": zero, "hytrain": own}
        config.write_text(json.dumps(given))
        assert _json(capsys, *call, "--deepspeed-config", config)["accumulation"] == mode


def test_a_batch_that_is_too_large_is_said_to_be(model: Path, capsys: Capture) -> None:
    """Gradients of several micro-batches stay on the GPU, where one micro-batch has room."""
    large = {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824}
    (model / "config.json").write_text(json.dumps(LLAMA | large))
    call = ["--gpus", "a10040gb", "--model", model, "--host-memory", 512, "--batch"]
    text = _misfit(capsys, *call, 512)
    found = re.search(r"it is enough for (\d+) of the batch's 512 samples", text)
    assert found is not None
    assert "GiB of gradients stay on each GPU between micro-batches" in text
    most = int(found[1])
    assert f"; try --batch {most} or less (" in text
    assert "), or --stage 3 --offload-param cpu (" in text
    assert sum(rank["batch_size"] for rank in _json(capsys, *call, most)["ranks"]) == most
    # Where the smaller batch lacks host memory, it is no advice.
    call[5] = 64
    text = _misfit(capsys, *call, 512)
    assert "try --batch" not in text
    assert f"; with --batch {most}, the GPUs and hosts can hold " in text
    alone = _misfit(capsys, *call, most)
    assert "is missing, on any host or GPU" in alone
    assert text.partition(" GiB missing")[0] == alone.partition(" GiB missing")[0]


def test_a_plan_is_no_slower_than_its_even_split(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stage 3, where ranks make equally many micro-batches."""
    qwen = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288}
    qwen |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}
    (model / "config.json").write_text(json.dumps(LLAMA | qwen))
    call = ["--gpus", "2xh100", "h200", "--model", model, "--host-memory", 256, "--stage", 3]
    call += ["--moments", "8bit", "--batch"]
    planned: list[tuple[Any, Any]] = []
    with monkeypatch.context() as patched:
        patched.setattr(plan_report, "headline", lambda *both: planned.append(both) or "")
        assert _run(*call, 33) == 0
    ((problem, plan),) = planned
    even = even_split(problem)
    assert even is not None
    assert plan.predicted_seconds <= even.predicted_seconds
    capsys.readouterr()
    assert _run(*call, 32) == 0  # of which it leaves two out
    assert "; even split of 30 samples: " in " ".join(capsys.readouterr().out.split())


def test_short_host_memory_is_told_beside_short_gpu_memory(model: Path, capsys: Capture) -> None:
    large = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288}
    (model / "config.json").write_text(json.dumps(LLAMA | large | {"vocab_size": 151936}))
    call = ["--model", model, "--batch", 8, "--stage", 3, "--gpus"]
    text = _misfit(capsys, *call, "l4")
    sides = re.findall(r"(GPU|host) memory is short: the .*? can use (\S+) .*? hold (\S+) at", text)
    assert [side for side, *_ in sides] == ["GPU", "host"]
    assert all(float(usable) < float(least) for _, usable, least in sides)
    assert sides[1][1] == "61.58"  # 64 GiB, the reserve and staging
    # Without the first backward's gradients the GPU is large enough: the host is what is short.
    text = _misfit(capsys, *call, "rtx4090", "--offload-param", "cpu")
    assert "with 22.60 GiB of GPU memory and 61.58 of host memory: memory for " in text
    # The weights alone are too much for the GPU, and the state for the host; a large host has room.
    (model / "config.json").write_text(json.dumps(LLAMA | large | {"num_hidden_layers": 60}))
    call[5] = 2
    words = "; host memory is short: the host (host0) can use "
    assert words in _misfit(capsys, *call, "rtx4090").partition("weights alone")[2]
    assert words not in _misfit(capsys, *call, "rtx4090", "--host-memory", 512)


def test_what_would_fit_is_told_with_amounts(model: Path, capsys: Capture) -> None:
    large = {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824}
    (model / "config.json").write_text(json.dumps(LLAMA | large))
    call = ["--gpus", "l4", "--model", model, "--batch", 1]
    text = _misfit(capsys, *call)
    assert (
        "too little for the weights alone; host memory is short: the host (host0) can use" in text
    )
    assert "64 GiB of host memory (--host-memory)" in text
    # Smaller state and more memory; with 90 GiB the former alone.
    streamed = ["--stage", "3", "--offload-param", "cpu"]
    assert _planned_remedies(capsys, text, *call) == [
        [*streamed, "--moments", "8bit", "--host-memory", "128"]
    ]
    call += ["--host-memory", 90]
    found = _planned_remedies(capsys, _misfit(capsys, *call), *call)
    smaller = [*streamed, "--moments", "8bit", "--master", "split"]
    assert found == [smaller, [*streamed, "--host-memory", "180"]]
    # A smaller change does not fit.
    assert "Does not fit" in _misfit(capsys, *call, *smaller[:-2])


def _planned_remedies(capsys: Capture, text: str, *call: object) -> list[list[str]]:
    """The flags that are told to help, each of which is planned."""
    found = re.findall(r"(--\S[^()]*) \((\S+) s a step", text.partition("Assumed")[0])
    for flags, seconds in found:
        record = _json(capsys, *call, *flags.split())
        assert f"{record['predicted']['step_seconds']:.3g}" == seconds
    return [flags.split() for flags, _ in found]


def test_what_would_fit_with_smaller_state_is_told(model: Path, capsys: Capture) -> None:
    large = {"num_hidden_layers": 12, "hidden_size": 5120, "intermediate_size": 13824}
    (model / "config.json").write_text(json.dumps(LLAMA | large))
    call = ["--gpus", "l4", "--model", model, "--batch", 1, "--host-memory", 38]
    text = _misfit(capsys, *call)
    assert "; try --moments bf16 (" in text
    assert "), or --host-memory 76 (" in text
    assumed = text.partition("Assumed: ")[2]
    assert "fp32 master weights (--master)" in assumed
    assert "micro-batches in either order (--accumulation)" in assumed
    assert "--host-memory" not in assumed
    call[-1] = 18
    smallest = ["--moments", "8bit"]
    text = _misfit(capsys, *call, *smallest)
    assert "; try --master split (" in text
    assert _run(*call, *smallest, "--master", "split", "--stage", 2) == 0
    assert "Split master weights: " in capsys.readouterr().out
    # With --out split ones are refused: they are no help.
    out = ("--out", model / "plan.json")
    assert "try --master" not in _misfit(capsys, *call, *smallest, *out)
    text = _error(capsys, *call, "--master", "split", *out)
    assert "--master split: training takes no plan beside it: leave --out" in text
    config = model / "ds.json"
    config.write_text(json.dumps({"hytrain": {"moments": "8bit"}}))
    call += ["--deepspeed-config", config]
    assert f"try --master split, and {config} to match, (" in _misfit(capsys, *call)
    config.write_text(json.dumps({"hytrain": {"master": "split", "moments": "8bit"}}))
    assert _run(*call, "--stage", 2) == 0
    capsys.readouterr()
    text = _error(capsys, *call, "--master", "fp32")
    assert f'--master fp32, but {config} has "hytrain.master" "split": leave the flag out' in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs --batch"),
        (("--batch", 8), "needs --profile"),
        (("--batch", 8, "--profile", "{profile}", "--cores", 4), "--cores: for data sheets"),
        (("--batch", 8, "--profile", "{profile}", "--seq-len", 4), "--seq-len: for data sheets"),
        (("--batch", 8, "--profile", "nowhere.json"), "cannot read the profile"),
        (("--batch", 8, "--profile", "{profile}", "--device-memory-fraction", 2), "in (0, 1]"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    profile: Path, capsys: Capture, arguments: tuple[object, ...], words: str
) -> None:
    filled = [str(part).replace("{profile}", str(profile)) for part in arguments]
    assert words in _error(capsys, *filled)


def test_help_and_refusals_need_no_torch(profile: Path) -> None:
    script = (
        "import sys; from hytrain.tools import cli; "
        f"cli.main(['plan', '--profile', {str(profile)!r}, '--batch', '8', '--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_published_cases_stay_a_command_of_their_own(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "uneven", "--help"])
    assert left.value.code == 0
    assert "--cases" in capsys.readouterr().out


def test_longer_sequences_than_the_model_has_positions_are_refused(
    model: Path, capsys: Capture
) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 256}))
    given = ("--gpus", "l4", "--batch", 4, "--model", model)
    assert _run(*given, "--seq-len", 256) == 0
    capsys.readouterr()
    for options, asked in ((("--seq-len", 300), 300), ((), 1024)):
        text = _error(capsys, *given, *options)
        assert f"--seq-len {asked}: {model} has max_position_embeddings 256" in text


def test_options_of_a_plan_are_not_for_published_cases(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "plan.json"
    text = _error(capsys, "--batch", 5, "--out", out, "uneven", "--cases", tmp_path)
    assert "--batch, --out: not for `hytrain plan uneven`" in text
    assert not out.exists()


# -- ranks that share each sequence ------------------------------------------------------------


def _shared(folder: Path, degree: object = 2, **more: Any) -> list[object]:
    config = folder / "shared.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    keys: dict[str, Any] = {"zero_optimization": zero, "sequence_parallel_size": degree}
    keys |= {"bf16": {"enabled": True}, "hytrain": {}}
    config.write_text(json.dumps(keys | more))
    return ["--deepspeed-config", config]


def test_ranks_that_share_sequences(tmp_path: Path, model: Path, capsys: Capture) -> None:
    call = ["--gpus", "4xl4", "--model", model, "--batch", 12, *_shared(tmp_path)]
    call += ["--accumulation", "micro_batch_major"]
    record = _json(capsys, *call)
    assert record["global_batch"] == 12
    assert [rank["batch_size"] for rank in record["ranks"]] == [6] * 4  # of each of two groups
    assert [rank["shard_fraction"] for rank in record["ranks"]] == [0.25] * 4
    seconds = record["predicted"]["step_seconds"]
    assert record["samples_per_second"] == pytest.approx(12 / seconds)
    assert _run(*call) == 0
    text = " ".join(capsys.readouterr().out.split())
    size = record["ranks"][0]["microbatch_size"]
    assert f"{1024 * 12 / seconds:,.0f} tokens/s; 4 ranks in groups of 2, whose shares" in text
    assert f"train_micro_batch_size_per_gpu {size} and gradient_accumulation_steps" in text
    assert f"gradient_accumulation_steps {6 // size}." in text
    assert "even split" not in text
    assert "longer than the shortest step" not in text


def test_plan_and_explain_agree_on_shared_sequences(
    tmp_path: Path, model: Path, capsys: Capture
) -> None:
    """State on the host is what explain has, but for staging; blocks' inputs as well."""
    both = _shared(tmp_path, hytrain={})
    call = ["--gpus", "4xl4", "--model", model, "--seq-len", 1000, *both]
    call += ["--accumulation", "layer_major"]
    memory = ["--ranks", "4", "--seq", "1000", "--gpu-memory", "22", "--host-memory", "64"]
    inputs: list[int] = []
    for batch in (2, 4):
        _shared(tmp_path, train_micro_batch_size_per_gpu=batch // 2)
        rank = _json(capsys, *call, "--batch", batch)["ranks"][0]
        assert (rank["batch_size"], rank["shard_fraction"]) == (batch // 2, 0.25)
        asked = ["explain", str(both[1]), "--model", str(model / "config.json"), *memory]
        assert cli.main([*asked, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        candidate = told["candidates"][rank["gpu_layers"]]
        state = candidate["host_bytes"] - told["decision"]["staging_bytes"]
        assert rank["host_bytes"] == pytest.approx(state, abs=16)
        inputs.append(told["block_input_bytes"])
    assert inputs == [2 * 500 * 256 * 4, 2 * 2 * 500 * 256 * 4]


def test_what_attention_exchanges(tmp_path: Path, model: Path, capsys: Capture) -> None:
    """Queries and outputs of all heads, keys and values of their own, which are repeated."""
    profile = _write(tmp_path, a_profile("one", *[a_device("one", "GPU")] * 4))
    call = ["--profile", profile, "--batch", 16, "--interconnect", 360]
    found: dict[object, float] = {}
    for degree, pairs in ((2, None), (2, 4), (2, 2), (2, 1), (4, 1)):
        shared = _shared(tmp_path, degree, seq_parallel_communication_data_type="bf16")
        if pairs is not None:
            heads = {"num_key_value_heads": pairs, "head_dim": 1024, "num_hidden_layers": 12}
            (model / "config.json").write_text(json.dumps(LLAMA | heads))
            shared += ["--model", model]
        record = _json(capsys, *call, *shared, "--accumulation", "layer_major")
        rank = record["ranks"][0]
        assert rank["microbatch_size"] == rank["batch_size"] == 4 * degree
        found[degree, pairs] = record["forward_backward_seconds"][0]
    # A head of a sample is 1,024 tokens of 1,024 bf16 numbers; by the profile 6 MiB are sent.
    head, width = 2 * 1024 * 1024, 6 * 1024**2
    for (degree, pairs), heads in (((2, 4), 16), ((2, 2), 12), ((2, 1), 12), ((4, 1), 16)):
        more = (degree - 1) / degree * heads * head - 4 * width / 2
        longer = found[degree, pairs] - found[2, None]
        assert longer == pytest.approx(12 * 3 * 4 * more / 360e9, rel=1e-6), (degree, pairs)


def test_gradients_of_shared_sequences_are_reduced_in_fp32(tmp_path: Path, capsys: Capture) -> None:
    """DeepSpeed's default; the same key makes it less."""
    profile = _write(tmp_path, a_profile("one", *[a_device("one", "GPU")] * 4))
    call = ["--profile", profile, "--batch", 4, "--interconnect", 1]
    found = [
        _json(capsys, *call, *_shared(tmp_path, **keys))["collective_seconds"][0]
        for keys in ({}, {"seq_parallel_communication_data_type": "bf16"})
    ]
    assert found[0] > 1.2 * found[1]


def test_what_of_shared_sequences_is_refused(
    tmp_path: Path, profile: Path, capsys: Capture
) -> None:
    alike = _write(tmp_path, a_profile("one", *[a_device("one", "GPU")] * 4), "alike.json")
    call = ["--profile", alike, "--batch", 4, *_shared(tmp_path)]
    plan = tmp_path / "plan.json"
    assert f"training takes no plan beside it: leave --out {plan} out" in _error(
        capsys, *call, "--out", plan
    )
    assert not plan.exists()
    assert "--batch 5: give a multiple of 2" in _error(capsys, *call, "--batch", 5)
    text = _error(capsys, "--profile", profile, "--batch", 4, *_shared(tmp_path))
    assert '"sequence_parallel_size" is 2: ranks that share a sequence have equal parts' in text
    assert "plan for GPUs of one kind, or remove the key" in text
    assert "but the job has 4 ranks" in _error(capsys, *call, *_shared(tmp_path, 3))
    assert '"sequence_parallel_size" is 0' in _error(capsys, *call, *_shared(tmp_path, 0))
    assert "--model: for data sheets" in _error(
        capsys, *call, "--model", tmp_path, *_shared(tmp_path, None)
    )
