"""Plans of the unequal GPUs' experiment: its cases, and its sections of a configuration."""

from __future__ import annotations

import pytest

from experiments.common.records import GIB, Json
from experiments.unequal_gpus import run
from experiments.unequal_gpus.cases import PARTS, RUNS
from experiments.unequal_gpus.planning import (
    Limits,
    alone_of,
    best_passes,
    naive_even,
    passes_of,
    predicted_seconds,
    section_of,
    verdicts,
    work_of,
)
from hytrain.formats.profile_file import ProfileFile

# -- profiles of GPUs, made up -----------------------------------------------------------------

PARAMETERS = 2_900_000_000


LAYERS = 24
SIZES = (1, 2, 4, 8)


def device(speed: float, memory_gib: float, best: int = 8) -> Json:
    """A GPU that takes 6 ms of forward a sample at speed 1, twice that of backward, and a tenth
    more at sizes other than the best."""
    rows: list[Json] = []
    for size in SIZES:
        worse = 1.0 if size == best else 1.1
        rows.append(
            {
                "samples": size,
                "forward_ms": worse * 6.0 * size / LAYERS / speed,
                "backward_ms": worse * 12.0 * size / LAYERS / speed,
                "recompute_backward_ms": worse * 18.0 * size / LAYERS / speed,
                "kept_bytes": int(1.5 * GIB * size / LAYERS),
                "peak_bytes": int(1.5 * GIB * size / LAYERS),
                "recompute_peak_bytes": int(1.5 * GIB * size / LAYERS),
            }
        )
    outside = [
        {"samples": size, "forward_ms": 0.2 / speed, "backward_ms": 0.3 / speed, "peak_bytes": 0}
        for size in SIZES
    ]
    count = int(128 * speed)
    return {
        "host": "host",
        "label": f"GPU, {count} SMs, {memory_gib:.1f} GiB",
        "device": "GPU",
        "multiprocessors": count,
        "limit_bytes": int(memory_gib * GIB),
        "memory_bytes": int(memory_gib * GIB),
        "idle_bytes": GIB // 2,
        "layer": rows,
        "outside": outside,
        "update_rate": 120e9,
        "copies": dict.fromkeys(("to_host", "from_host", "to_host_both", "from_host_both"), 5e10),
        "measured": "2026-11-21T00:00:00Z",
    }


def profiled(*devices: Json) -> Json:
    """What `hytrain profile` would have written of these ranks."""
    host = {
        "host": "host",
        "ranks": [one["label"] for one in devices],
        "cores": 16 * len(devices),
        "memory_bytes": 100 * GIB * len(devices),
        "bandwidth": 4e11,
        "updates": [{"threads": 15, "rate": 4e9}],
        "measured": "2026-11-21T00:00:00Z",
    }
    times = ("all_gather_ms", "reduce_scatter_ms")
    uneven = ("uneven_all_gather_ms", "uneven_reduce_scatter_ms")
    collectives = {
        "hosts": ["host"] * len(devices),
        "backend": "nccl",
        "samples": [
            {"num_bytes": 2**28, **dict.fromkeys(times, 0.6), **dict.fromkeys(uneven, 0.7)}
        ],
        "measured": "2026-11-21T00:00:00Z",
    }
    layer = (PARAMETERS - 200_000_000) // LAYERS
    return {
        "version": 1,
        "model": {
            "name": "llama-3b",
            "num_layers": LAYERS,
            "layer_parameters": layer,
            "outside_parameters": [100_000_000, 100_000_000],
            "seq_len": 512,
            "dtype": "bf16",
            "boundary_bytes": 512 * 3072 * 2,
        },
        "devices": list({one["label"]: one for one in devices}.values()),
        "hosts": [host],
        "collectives": [collectives] if len(devices) > 1 else [],
    }


# -- what is run, what is planned from a profile, and what the ranks are given -----------------

UNLIMITED = Limits(host_bytes=None)


def test_runs_come_after_the_profile_and_take_turns() -> None:
    options = run.parse(["--part", "two,memory", "--compare-waits", "2"])
    labels = [job["label"] for job in run.jobs(options)]
    turns = ["planned", "in_kernels#1", "planned#2", "in_kernels#2"]
    assert labels[:7] == [f"half {each}" for each in ("profile", "alone", *turns, "even")]
    assert labels[-2:] == ["offload even_offload", "offload no_offload"]
    alone = next(job for job in run.jobs(options) if job["label"] == "half alone")
    assert alone["separate"]
    kinds = {job["run"] for job in run.jobs(options)}
    assert kinds <= {"profile", *RUNS}


def file_with(*gpus: tuple[float, float]) -> ProfileFile:
    """Ranks of (speed, GiB)."""
    return ProfileFile.model_validate(profiled(*(device(*gpu) for gpu in gpus)))


def test_a_plan_predicts_steps_that_are_clipped_and_others() -> None:
    slow = verdicts(file_with((1.0, 20.0), (0.5, 20.0)), 48, Limits(host_bytes=60 * GIB))
    planned = slow["planned"]
    low, high = planned["unclipped_seconds"], planned["clipped_seconds"]
    assert planned["predicted_seconds"] == high >= low > 0.0
    assert predicted_seconds(planned, 0.25) == pytest.approx(0.75 * low + 0.25 * high)


def test_passes_are_those_of_all_layers_and_what_is_outside() -> None:
    profile = file_with((1.0, 130.0), (0.5, 130.0))
    slow = passes_of(profile, 1)
    assert [each.samples for each in slow] == [1, 2, 4, 8]
    assert slow[-1].forward == pytest.approx(0.0964)
    assert slow[-1].backward == pytest.approx(0.1926)
    assert best_passes(slow).samples == 8
    assert best_passes(slow).rate == pytest.approx(8 / 0.289)


def test_where_there_is_no_even_split_one_is_tried_all_the_same() -> None:
    found = verdicts(file_with((1.0, 22.0), (0.5, 139.0)), 48, Limits(host_bytes=0))
    # The one that takes the least memory.
    assert found["even_split"] is not None
    assert found["even"] == naive_even(file_with((1.0, 22.0), (0.5, 139.0)), 48)
    assert found["even"]["batch_sizes"] == [24, 24]
    assert found["even"]["micro_batch_sizes"] == [1, 1]
    assert found["even"]["activations"] == ["recompute", "recompute"]


def test_even_runs_have_the_activations_that_were_planned() -> None:
    plan: Json = {"path": "p", "even": naive_even(file_with((1.0, 22.0), (0.5, 139.0)), 48)}
    assert "accumulation" not in section_of("even", plan, 0, UNLIMITED, 0)
    plan["even"]["activations"] = ["keep", "store"]
    section = section_of("even", plan, 0, UNLIMITED, 0)
    assert (section["accumulation"], section["activations"]) == ("layer_major", "keep")
    assert "accumulation" not in section_of("even", plan, 1, UNLIMITED, 0)


def test_passes_that_compute_again_take_longer() -> None:
    profile = file_with((1.0, 139.0), (0.5, 139.0))
    stored, again = passes_of(profile, 0), passes_of(profile, 0, "recompute")
    assert [p.forward for p in stored] == [p.forward for p in again]
    assert all(p.backward < q.backward for p, q in zip(stored, again, strict=True))


def test_a_gpu_alone_has_its_share_in_its_best_micro_batches() -> None:
    gpus = device(1.0, 130.0), device(0.5, 130.0, best=4)
    profile = ProfileFile.model_validate(profiled(*gpus))
    assert alone_of(profile, 1, 33) == (4, 8)
    assert alone_of(profile, 1, 1) == (4, 1)
    assert alone_of(profile, 0, 33) == (8, 4)


def test_sections_are_what_the_run_says() -> None:
    limits = Limits(host_bytes=60 * GIB)
    plan = verdicts(file_with((1.0, 20.0), (0.5, 20.0)), 48, limits)
    plan["path"] = "/tmp/plan.json"
    planned = section_of("planned", plan, 1, limits, 90 * GIB)
    fraction = plan["planned"]["gpu_fractions"][1]
    assert planned == {"plan": "/tmp/plan.json", "gpu_fraction": fraction}
    bare = section_of("no_offload", plan, 1, limits, 90 * GIB)
    assert bare == {**planned, "gpu_fraction": 1.0}
    even = section_of("even", plan, 0, limits, 90 * GIB)
    assert even["batch_sizes"] == [24, 24]
    assert "shard_fractions" not in even
    offload = section_of("even_offload", plan, 0, limits, 90 * GIB)
    assert offload["gpu_fraction"] == "solve"
    assert offload["solver"] == {"host_memory_reserve_bytes": 60 * GIB}
    assert work_of("no_offload", plan) == plan["planned"]
    assert work_of("even_offload", plan) == plan["even"]


def test_the_memory_cases_are_what_they_claim_to_be() -> None:
    # As an H200 would measure it: no bandwidth or speed enters, only sizes.
    for each in PARTS["memory"]:
        gpus = [(speed, 139.8 * s) for speed, s in zip(each.speeds, each.memory, strict=True)]
        assert each.host_gib is not None
        limits = Limits(host_bytes=int(each.host_gib * GIB))
        found = verdicts(file_with(*gpus), each.batch, limits)
        assert (found["without_host"] is not None) == (each.label == "offload")
        assert found["even_split"] is not None
        assert min(found["planned"]["batch_sizes"]) > 0
        assert sum(found["planned"]["host_gib"]) <= each.host_gib
