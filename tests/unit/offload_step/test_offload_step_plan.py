"""Sizes and operations, the parts' entries, thread candidates, statuses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from experiments.common import records
from experiments.common.model import build_model
from experiments.common.processes import needs_adam, status_of, tail
from experiments.common.records import Job, Measurement, Workload
from experiments.common.sizes import SIZES, model_flops, size_of
from experiments.common.systems import NAMES
from experiments.common.tables import slug_of
from experiments.common.threads import candidates_for, set_threads
from experiments.offload_step.parts import (
    PARTS,
    REFERENCE,
    Settings,
    entries_of,
    expected_seconds,
)
from experiments.offload_step.run import measure_entry, parse, select

SETTINGS = Settings(gpu_fractions=(0.0, 0.3), clip=1.0, threads=(8, 16), section={})
TOY = Workload(model="toy", batch=2, seq=16, device="cpu")


def test_the_3b_model_and_its_operations() -> None:
    size = SIZES["llama-3b"]
    assert size.num_parameters == pytest.approx(2.91e9, rel=0.005)
    # 0.326 s a step was measured as 440 TFLOP/s, counting 6 for every parameter and token.
    assert 6 * size.num_parameters * 8 * 1024 / 0.326 / 1e12 == pytest.approx(440, rel=0.005)
    assert model_flops(size, 8, 1024) / 0.326 / 1e12 == pytest.approx(440, rel=0.015)


def test_attention_operations_against_a_count_of_its_products() -> None:
    size, seq = SIZES["toy"], 16
    products = 6 * size.num_matmul * seq
    head = size.hidden // size.heads
    forward = size.layers * size.heads * 2 * (2 * seq * seq * head)
    assert model_flops(size, 1, seq) - products == pytest.approx(3 * forward / 2)


@pytest.mark.parametrize("model", ["toy", "llama-100m"])
def test_parameter_counts_are_those_of_the_model(model: str) -> None:
    workload = Workload(model=model, batch=1, seq=16, device="meta")
    built = build_model(workload, torch.bfloat16)
    size = size_of(model)
    assert sum(p.numel() for p in built.parameters()) == size.num_parameters
    matrices = [
        p.numel() for n, p in built.named_parameters() if "norm" not in n and "embed" not in n
    ]
    assert sum(matrices) == size.num_matmul


def test_cpu_parameters_by_fraction() -> None:
    size = SIZES["llama-3b"]
    assert size.num_cpu_parameters(0.0) == size.num_parameters
    assert size.num_cpu_parameters(1.0) == 0
    assert size.num_cpu_parameters(0.7) / size.num_parameters == pytest.approx(0.3, abs=0.01)


def test_the_model_starts_equal_in_every_dtype() -> None:
    low = build_model(TOY, torch.bfloat16)
    full = dict(build_model(TOY, torch.float32).named_parameters())
    for name, parameter in low.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert full[name].dtype == torch.float32
        assert torch.equal(parameter.float(), full[name])


@pytest.mark.parametrize("part", PARTS)
def test_parts_fit_their_time_and_begin_and_end_with_the_reference(part: str) -> None:
    entries = entries_of(part, SETTINGS)
    assert entries[0].system == entries[-1].system == REFERENCE
    assert not entries[0].optional
    assert entries[-1].optional
    assert {entry.system for entry in entries} <= set(NAMES)
    needed = sum(expected_seconds(e, "llama-3b") for e in entries if not e.optional)
    assert needed <= 570


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        entries_of("nothing", SETTINGS)


def test_adam_is_compiled_only_where_it_is_used() -> None:
    assert needs_adam(entries_of("A", SETTINGS))
    assert not needs_adam(entries_of("C", SETTINGS))


def test_only_keeps_the_reference_and_refuses_unknown_labels() -> None:
    entries = entries_of("A", SETTINGS)
    labels = [entry.label for entry in select(entries, "hytrain 0, fsdp2")]
    assert labels == [REFERENCE, "hytrain 0", "fsdp2"]
    with pytest.raises(ValueError, match="hytrain 9"):
        select(entries, "hytrain 9")


def test_clip_variants() -> None:
    entries = {entry.label: entry for entry in entries_of("C", SETTINGS)}
    assert entries["hytrain 0 direct"].clip is None
    assert entries["hytrain 0 direct"].options["direct"]
    never, always = entries["hytrain 0 never"].clip, entries["hytrain 0 always"].clip
    assert never is not None
    assert always is not None
    assert always < 1 < never


def test_a_job_survives_its_file() -> None:
    job = Job(
        entry=entries_of("A", SETTINGS)[1],
        workload=TOY,
        measurement=Measurement(windows=1, steps=1, warmup=1),
    )
    assert Job.from_json(job.to_json()) == job


def test_thread_candidates() -> None:
    assert candidates_for((8, 12, 16), 12) == [8, 12]
    assert candidates_for((8, 12, 16), 2) == [2]


def test_set_threads_reaches_torch() -> None:
    before = torch.get_num_threads()
    set_threads(1)
    assert torch.get_num_threads() == 1
    set_threads(before)


@pytest.mark.parametrize(
    ("code", "lines", "status"),
    [
        (None, [], records.TIMED_OUT),
        (-signal.SIGKILL, [], records.OUT_OF_MEMORY),
        (1, ["torch.OutOfMemoryError: CUDA out of memory."], records.OUT_OF_MEMORY),
        (1, ["RuntimeError: no"], records.FAILED),
        (0, [], records.FAILED),
    ],
)
def test_status_of_a_process_without_a_result(
    code: int | None, lines: list[str], status: str
) -> None:
    assert status_of(code, None, lines) == status


def test_a_result_counts_even_where_the_process_ended_badly() -> None:
    assert status_of(None, {"status": records.OK}, []) == records.OK


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_bytes(b"\xff\n" + b"\n".join(b"%d" % i for i in range(100)))
    assert tail(log, 2) == ["98", "99"]


def test_an_entry_is_skipped_where_its_time_is_gone() -> None:
    job = Job(
        entry=entries_of("A", SETTINGS)[0],
        workload=TOY,
        measurement=Measurement(windows=1, steps=1, warmup=1),
    )
    record = measure_entry(job, remaining=1.0)
    assert record["status"] == records.SKIPPED
    assert record["result"] is None


def test_slug_of() -> None:
    assert slug_of("NVIDIA H200") == "nvidia_h200"
    assert slug_of("NVIDIA A100-SXM4-80GB") == "nvidia_a100-sxm4-80gb"
    assert slug_of(None) == "cpu"


def test_command_line_lists() -> None:
    options = parse(["--part", "A", "--out", "x", "--gpu-fractions", "0,0.5", "--threads", "1,2"])
    assert options.gpu_fractions == (0.0, 0.5)
    assert options.threads == (1, 2)
