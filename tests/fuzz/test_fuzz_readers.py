"""Whatever an external file contains, a command ends with a message, never with a traceback.

Files are changed in their structure and in their bytes; checksums that would show it are corrected.
HYTRAIN_READER_CASES: number of changes of each file.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import pickle
import pickletools
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.placement_runs import text_of, typical_run
from support.plan_profiles import a_profile
from support.resume import Run, engine_of, train
from support.trace_schedule import Schedule, write

from hytrain.errors import HyTrainError
from hytrain.formats.plan_file import read_plan
from hytrain.formats.profile_file import write_profile
from hytrain.tools import cli

CASES = int(os.environ.get("HYTRAIN_READER_CASES", "10"))

NASTY: list[Any] = [
    None, True, 0, -1, 1, 300, 10**19, -(10**19), 0.5, 1e308, -1e308, 1e-308, float("nan"),
    float("inf"), "", "x", "a\nb", "é\u2028", "../../x", "/etc/passwd", "9" * 30, "x" * 5000, [],
    [0], [[]], {}, {"": 0}, {"a": {"b": []}}, "{{block}}", "<!--<script>",
]  # fmt: skip
RAW = [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 6000, b"\xff\xfe", b"\x00" * 50, b"1e999", b""]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    keys: Any = ()
    if isinstance(value, dict):
        keys = value
    elif isinstance(value, (list, tuple)):
        keys = range(min(len(value), 30))
    for key in keys:
        found += _places(value[key], (*path, key))
    return found


def _changed(draw: Any, values: Any) -> Any:
    """Returns values with one to three of them exchanged, removed, or copied elsewhere."""
    values = copy.deepcopy(values)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(values)))
        if not path:
            values = copy.deepcopy(draw(st.sampled_from(NASTY)))
            continue
        inside = values
        for key in path[:-1]:
            inside = inside[key]
        if isinstance(inside, tuple):
            continue
        how = draw(st.sampled_from(("exchange", "exchange", "remove", "move", "repeat")))
        value = inside[path[-1]]
        if how == "exchange":
            inside[path[-1]] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        elif how == "remove":
            del inside[path[-1]]
        elif isinstance(inside, list):
            inside.append(copy.deepcopy(value))
        else:
            inside[draw(st.sampled_from(("", "x", "a/../b", "é")))] = copy.deepcopy(value)
    return values


def _changed_bytes(draw: Any, content: bytes) -> bytes:
    at = draw(st.integers(0, max(0, len(content) - 1)))
    how = draw(st.sampled_from(("flip", "cut", "put", "repeat")))
    if how == "flip" and content:
        return (
            content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
        )
    if how == "cut":
        return content[:at]
    more = draw(st.sampled_from(RAW)) if how == "put" else content[at : at + 100]
    return content[:at] + more + content[at:]


@dataclass(frozen=True)
class Subject:
    """A file, how it is packed, and the commands that read it."""

    file: Path
    commands: list[list[str]]
    unpack: Callable[[bytes], Any] = json.loads
    pack: Callable[[Any], bytes] = lambda values: json.dumps(values).encode()
    calls: tuple[Callable[[], object], ...] = ()


def _hold(subject: Subject) -> None:
    """Changes the file CASES times, and has it read by a command and by the calls."""
    original = subject.file.read_bytes()
    values = subject.unpack(original)
    scratch = subject.file.parent / "out"

    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def hold(data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            content = subject.pack(_changed(data.draw, values))
        else:
            content = _changed_bytes(data.draw, original)
        subject.file.write_bytes(content)
        if subject.commands:
            command = data.draw(st.sampled_from(subject.commands))
            shutil.rmtree(scratch, ignore_errors=True)
            told = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
                status = cli.main(command)
            assert status in (0, 1, 2), (command, status)
            assert status != 2 or len(told.getvalue()) < 20_000
        for call in subject.calls:
            with contextlib.suppress(HyTrainError):
                call()

    try:
        hold()
    finally:
        subject.file.write_bytes(original)


def test_traces(tmp_path: Path) -> None:
    file = write(tmp_path, Schedule(layers=2, steps=3), first=2)[0]
    page = str(tmp_path / "page.html")
    report = ["trace", "report", str(file), "--html", page]
    _hold(Subject(file, [report, [*report[:3], "--json"]]))


KINETO: dict[str, Any] = {
    "distributedInfo": {"rank": 0, "world_size": 2},
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "ts": 0, "args": {"name": "main"}},
        *(
            event
            for step in range(3)
            for event in (
                {"name": f"ProfilerStep#{step}", "cat": "user_annotation", "dur": 90.0, "args": {}},
                {"name": "nn.Module: Block_1", "cat": "python_function", "dur": 80.0, "args": {}},
                {"name": "aten::mm", "cat": "cpu_op", "dur": 9.0, "args": {"Sequence number": 5}},
                {
                    **{"name": "autograd::engine::evaluate_function: Mm", "cat": "cpu_op"},
                    **{"dur": 20.0, "args": {"Sequence number": 5, "Fwd thread id": 1}},
                },
                {"name": "launch", "cat": "cuda_runtime", "dur": 1.0, "args": {"correlation": 7}},
                {
                    **{"name": "gemm", "cat": "kernel", "dur": 30.0},
                    "args": {"correlation": 7, "stream": 7, "bytes": 10},
                },
                {
                    **{"name": "ncclAllReduce", "cat": "kernel", "dur": 3.0},
                    "args": {"In msg nelems": 5, "dtype": "Float"},
                },
                {"name": "Optimizer.step#Adam", "cat": "user_annotation", "dur": 5.0, "args": {}},
            )
        ),
    ],
}


def test_foreign_traces(tmp_path: Path) -> None:
    content = copy.deepcopy(KINETO)
    for number, event in enumerate(content["traceEvents"][1:]):
        event |= {"ph": "X", "pid": 1, "tid": 2, "ts": 100.0 * (number // 8) + number % 8}
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(content))
    report = ["trace", "report", str(file), "--html", str(tmp_path / "page.html")]
    assert cli.main(report) == 0
    _hold(Subject(file, [report]))


def test_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text_of(typical_run()))

    def unpack(content: bytes) -> Any:
        return [json.loads(line) for line in content.splitlines()]

    def pack(values: Any) -> bytes:
        lines = values if isinstance(values, list) else [values]
        return b"\n".join(json.dumps(line).encode() for line in lines)

    command = ["explain", str(file)]
    _hold(Subject(file, [command, [*command, "--json"]], unpack, pack))


def test_configs(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    config = {
        **{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
        **{"bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_clipping": 1.0},
        **{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        **{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}},
        "hytrain": {
            **{"gpu_fraction": 0.5, "layers": {"class": "Block"}, "moments": "fp32"},
            **{"offload": {"cpu_threads": 2, "chunk_elements": 1024}, "trace": {"steps": [2, 4]}},
            **{"shard_fractions": [0.5, 0.5], "checkpoint": {"async": True}},
        },
    }
    file.write_text(json.dumps(config))
    _hold(Subject(file, [["explain", str(file)]]))


def test_plans_and_profiles(tmp_path: Path) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    write_profile(profile, a_profile())
    command = ["plan", "--profile", str(profile), "--batch", "8", "--out", str(plan)]
    assert cli.main(command) == 0
    _hold(Subject(plan, [], calls=(lambda: read_plan(plan),)))
    _hold(Subject(profile, [command]))


def test_models(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"bf16": {"enabled": True}, "hytrain": {}}))
    file = tmp_path / "config.json"
    llama = {
        **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64},
        **{"intermediate_size": 64, "num_attention_heads": 4, "tie_word_embeddings": False},
    }
    file.write_text(json.dumps(llama))
    _hold(Subject(file, [["explain", str(config), "--model", str(file)]]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    with engine_of(Run()) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(folder, tag="t", client_state={"best": 0.5, "order": [1, (2, "a")]})
    (folder / "config.json").write_text('{"model_type": "x", "dtype": "float32"}')
    return folder


def _commands(folder: Path) -> list[list[str]]:
    out = str(folder / "t" / "out")
    info, verify = ["checkpoint", "info", str(folder)], ["checkpoint", "verify", str(folder)]
    export = ["export", str(folder), "--out", out]
    return [info, [*info, "--json"], verify, [*verify, "--all", "--json"], export]


def test_manifests(checkpoint: Path) -> None:
    def unpack(content: bytes) -> Any:
        return json.loads(content)["manifest"]

    def pack(values: Any) -> bytes:
        text = f'"manifest": {json.dumps(values)}}}\n'.encode()
        return f'{{"crc32": "{zlib.crc32(text):08x}",\n'.encode() + text

    file = checkpoint / "t/zero/hytrain_manifest.json"
    commands = [[word.replace("zero/out", "out") for word in c] for c in _commands(checkpoint)]
    _hold(Subject(file, commands, unpack, pack))


@pytest.mark.parametrize("name", ["latest", "config.json"])
def test_files_beside(name: str, checkpoint: Path) -> None:
    file = checkpoint / name
    commands = [[*command] for command in _commands(checkpoint)]
    _hold(Subject(file, commands, lambda content: content.decode(), lambda v: str(v).encode()))


def _repacked(values: Any) -> bytes:
    content = io.BytesIO()
    torch.save(values, content)
    return content.getvalue()


def _torch(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_00_model_states.pt",
        "zero/optimizer_state.pt",
        "zero/norm.weight/fp32.pt",
        "zero/norm.weight/exp_avg.pt",
    ],
)
def test_checkpoints(name: str, checkpoint: Path) -> None:
    manifest = checkpoint / "t/zero/hytrain_manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    try:
        with engine_of(Run().another()) as engine:
            load = partial(engine.load_checkpoint, checkpoint, tag="t")
            file = checkpoint / "t" / name
            _hold(Subject(file, _commands(checkpoint), _torch, _repacked, (load,)))
    finally:
        manifest.write_bytes(content)


def _operations(archive: bytes) -> list[list[bytes]]:
    """The operations of a torch file's pickle but the last, STOP, in at most 30 lists of 30."""
    (name,) = _pickles(archive)
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        content = file.read(name)
    begins = [at for _op, _argument, at in pickletools.genops(content) if at is not None]
    pieces = [content[a:b] for a, b in itertools.pairwise(begins)]
    each = -(-len(pieces) // 900)
    joined = [b"".join(pieces[at : at + each]) for at in range(0, len(pieces), each)]
    return [joined[at : at + 30] for at in range(0, len(joined), 30)]


def _pickles(archive: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return [name for name in file.namelist() if name.endswith("/data.pkl")]


def _with_operations(archive: bytes, values: Any) -> bytes:
    """The torch file with other operations; values that are no operations are pushed."""

    def operations(value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, list):
            return b"".join(map(operations, value))
        return pickle.dumps(value, 2)[2:-1]

    changed = io.BytesIO()
    (pickled,) = _pickles(archive)
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(changed, "w") as new:
        for entry in old.infolist():
            content = operations(values) + b"." if entry.filename == pickled else old.read(entry)
            new.writestr(entry.filename, content)
    return changed.getvalue()


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero/optimizer_state.pt"])
def test_pickles(name: str, checkpoint: Path) -> None:
    """Operations of a pickle are exchanged, removed and repeated, in an archive that is whole."""
    manifest = checkpoint / "t/zero/hytrain_manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    file = checkpoint / "t" / name
    whole = file.read_bytes()
    same = _with_operations(whole, _operations(whole))
    assert repr(_torch(same)) == repr(_torch(whole))
    try:
        with engine_of(Run().another()) as engine:
            load = partial(engine.load_checkpoint, checkpoint, tag="t")
            pack = partial(_with_operations, whole)
            _hold(Subject(file, _commands(checkpoint), _operations, pack, (load,)))
    finally:
        manifest.write_bytes(content)
