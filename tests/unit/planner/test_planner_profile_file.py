"""profile.json: written and read back, checked, merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.plan_profiles import GIB, a_device, a_host, a_model, a_profile, day

from hytrain.errors import PlanError
from hytrain.formats.profile_file import (
    ProfileFile,
    device_label,
    merge_profiles,
    read_profile,
    write_profile,
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = a_profile()
    path = tmp_path / "profile.json"
    write_profile(path, profile)
    assert read_profile(path) == profile
    record = json.loads(path.read_text())
    assert record["hosts"][0]["ranks"] == ["GPU, 100 SMs, 80.0 GiB", "GPU, 50 SMs, 80.0 GiB"]


def test_parameters_are_counted() -> None:
    assert a_model().parameters == 12 * 100_000_000 + 101_000_000


def test_a_label_tells_devices_of_one_name_apart() -> None:
    labels = {
        device_label("H", 132, 140 * GIB),
        device_label("H", 66, 140 * GIB),
        device_label("H", 132, 70 * GIB),
    }
    assert len(labels) == 3
    assert device_label("CPU X", 2, GIB) == "CPU X, 2 cores, 1.0 GiB"


def _changed(change: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(a_profile().model_dump(mode="json") | change))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "has version 2"),
        ({"devices": []}, "devices"),
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"hosts": []}, "hosts"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_profile(_changed(change, tmp_path))


def test_tables_as_long_as_a_file_says_are_limited(tmp_path: Path) -> None:
    values = a_profile().model_dump(mode="json")
    values["model"]["num_layers"] = 10**12
    with pytest.raises(PlanError, match="num_layers: Input should be less than or equal to 10000"):
        read_profile(_changed({"model": values["model"]}, tmp_path))
    values["devices"][0]["layer"][-1]["samples"] = 10**12
    with pytest.raises(PlanError, match="samples: Input should be less than or equal to 65536"):
        read_profile(_changed({"devices": values["devices"]}, tmp_path))


def test_ranks_on_what_was_not_measured_are_refused(tmp_path: Path) -> None:
    hosts = a_profile().model_dump(mode="json")["hosts"]
    hosts[0]["ranks"] = ["another"]
    with pytest.raises(PlanError, match=r"another.*not measured"):
        read_profile(_changed({"hosts": hosts}, tmp_path))


def test_sizes_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    devices = a_profile().model_dump(mode="json")["devices"]
    devices[0]["layer"].reverse()
    with pytest.raises(PlanError, match="ascending samples"):
        read_profile(_changed({"devices": devices}, tmp_path))


def test_collectives_of_one_rank_are_refused(tmp_path: Path) -> None:
    collectives = a_profile().model_dump(mode="json")["collectives"]
    collectives[0]["hosts"] = ["one"]
    with pytest.raises(PlanError, match=r"collectives.*hosts.*at least 2"):
        read_profile(_changed({"collectives": collectives}, tmp_path))


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        read_profile(tmp_path / "profile.json")
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        read_profile(tmp_path / "profile.json")
    with pytest.raises(PlanError, match="cannot write"):
        write_profile(tmp_path / "no" / "profile.json", a_profile())


def test_files_of_two_hosts_merge() -> None:
    merged = merge_profiles([a_profile("one"), a_profile("two")])
    assert [host.host for host in merged.hosts] == ["one", "two"]
    assert len(merged.devices) == 4
    assert [one.hosts for one in merged.collectives] == [("one", "one"), ("two", "two")]


def test_the_newest_measurement_wins_whatever_the_order_of_files() -> None:
    old = a_profile("one", a_device("one", "A", age=1), a_device("one", "B", age=1))
    again = a_device("one", "A", age=3).model_copy(update={"update_rate": 7.0})
    new = ProfileFile(
        model=a_model(),
        devices=(again,),
        hosts=(a_host("one", again, age=3),),
        versions={"torch": "new"},
    )
    for files in ([old, new], [new, old]):
        merged = merge_profiles(files)
        assert merged.device("one", again.label).update_rate == 7.0
        assert merged.hosts[0].ranks == (again.label,)
        assert len(merged.devices) == 2
        assert merged.collectives == old.collectives
        assert merged.versions == {"hytrain": "0.1.0", "torch": "new"}
    assert merged.hosts[0].measured == day(3)


def test_profiles_of_two_models_are_refused_with_the_difference() -> None:
    other = a_profile("two").model_copy(update={"model": a_model(num_layers=24)})
    with pytest.raises(PlanError, match="num_layers is 12 and 24"):
        merge_profiles([a_profile("one"), other])
    with pytest.raises(PlanError, match="no profile"):
        merge_profiles([])


def test_a_device_that_was_not_measured() -> None:
    with pytest.raises(PlanError, match="no profile of X of one"):
        a_profile().device("one", "X")
