"""What is measured, in which order, on which sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from experiments.common.options import named
from experiments.common.sizes import SIZES, plain_flops, register, size_of
from experiments.solve_k.parts import PARTS, Settings, entries_of, expected_seconds
from experiments.solve_k.points import (
    closed_form_layers,
    errors,
    largest_error,
    layers_of,
    near,
    up_and_down,
)
from experiments.solve_k.run import command_text, main, parse

SETTINGS = Settings(
    clip=1.0,
    caps=(0.3, 0.4),
    few_threads=(2, 4),
    layers=None,
    checkpointing="part",
    section={"offload": {"chunk_elements": 4096}},
    least_settling=32,
    host_floor_gib=2.0,
)


@pytest.fixture(autouse=True)
def _restored_sizes() -> Iterator[None]:
    before = dict(SIZES)
    yield
    SIZES.clear()
    SIZES.update(before)


def test_the_large_models_have_the_parameters_that_the_claims_name() -> None:
    assert register("llama-10b").num_parameters == 9_843_819_520
    assert register("llama-15b").num_parameters == 15_342_127_104
    assert size_of("llama-15b").layers == 33


def test_layers_can_be_overridden() -> None:
    assert register("llama-15b", 40).layers == 40
    assert size_of("llama-15b").layers == 40
    assert register("toy", 8).hidden == 64


def test_six_operations_a_parameter_and_token() -> None:
    assert plain_flops(10, batch=2, seq=3) == 360.0


def test_the_sweep_goes_up_and_comes_down() -> None:
    numbers = layers_of([tenth / 10 for tenth in range(11)], 10)
    assert up_and_down([*numbers, 4]) == [0, 2, 4, 6, 8, 10, 9, 7, 5, 3, 1]


def test_neighbours_stay_within_the_model() -> None:
    assert near(1, [-4, -2, 0, 2], 2) == [1]
    assert near(24, [-4, 0, 2, 4], 26) == [20, 24, 26]


def test_the_closed_form_is_rounded_halves_up() -> None:
    assert closed_form_layers(0.25, 26) == 7
    assert closed_form_layers(0.0, 26) == 0


def test_errors_are_signed_and_the_largest_is_by_size() -> None:
    found = errors([1.0, 2.0, 3.0], {2: 2.0, 0: 4.0})
    assert found == {0: -0.75, 2: 0.5}
    assert largest_error(found) == (0, -0.75)
    assert largest_error({}) is None


def test_few_cores_limits_threads_cores_and_the_kernel() -> None:
    entry = entries_of("few_cores", SETTINGS)[0]
    assert entry.options["threads"] == [2]
    assert entry.options["cores"] == 4
    assert entry.options["section"] == {"offload": {"chunk_elements": 4096, "cpu_threads": 2}}
    # The settings are shared by all entries.
    assert SETTINGS.section == {"offload": {"chunk_elements": 4096}}


def test_every_part_of_ours_solves_k_under_clipping() -> None:
    for part in set(PARTS) - {"others"}:
        for entry in entries_of(part, SETTINGS):
            assert entry.options["gpu_fraction"] == "solve"
            assert entry.clip == 1.0
            assert expected_seconds(entry, "toy") <= expected_seconds(entry, "llama-3b")


def test_other_systems_have_growing_models() -> None:
    sizes = {"zero3_offload": (20, 30), "fsdp2": (30,)}
    entries = entries_of("others", dataclasses.replace(SETTINGS, sizes=sizes))
    found = [(e.label, e.system, e.options["layers"], e.clip) for e in entries]
    # FSDP2 has no clipping of gradients on the host.
    assert found == [
        ("zero3_offload 20", "deepspeed_zero3_offload", 20, 1.0),
        ("zero3_offload 30", "deepspeed_zero3_offload", 30, 1.0),
        ("fsdp2 30", "fsdp2", 30, None),
    ]
    options = parse(["--part", "others", "--out", "DIR", "--sizes", "fsdp2=20,24"])
    assert dict(options.sizes) == {"fsdp2": (20, 24)}
    # A model that the class of machines can hold, and one that it cannot.
    counts = [register("llama-7b", blocks).num_parameters for blocks in (24, 36)]
    assert counts == [5_119_348_736, 7_547_949_056]


def test_checkpointing_is_the_parts_unless_it_is_asked_for() -> None:
    def of(part: str, settings: Settings) -> str:
        return entries_of(part, settings)[0].options["checkpointing"]

    assert [of(p, SETTINGS) for p in ("sweep", "ten_b", "largest")] == ["off", "auto", "on"]
    off = dataclasses.replace(SETTINGS, checkpointing="off")
    assert of("largest", off) == "off"


def test_the_labels_of_a_part_can_be_chosen() -> None:
    entries = entries_of("caps", SETTINGS)
    assert [entry.label for entry in named(entries, "cap 0.4, cap lowered")] == [
        "cap 0.4",
        "cap lowered",
    ]
    with pytest.raises(ValueError, match=r"cap 0\.3, cap 0\.4, cap lowered"):
        named(entries, "cap 0.5")


def test_the_recorded_command_has_no_folder_of_the_machine() -> None:
    arguments = ["--part", "sweep", "--out", "/somewhere/else"]
    assert command_text(arguments).endswith("--part sweep --out DIR")
    parse(arguments)


def test_list_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--part", "largest", "--out", "nowhere", "--list", "--layers", "34"]) == 0
    assert "llama-15b: 15.795 B parameters" in capsys.readouterr().out
