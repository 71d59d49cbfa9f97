"""Small profiles, as `hytrain profile` would write them."""

from __future__ import annotations

from datetime import datetime, timezone

from hytrain.formats.profile_file import (
    CollectiveProfile,
    CollectiveSample,
    CopyRates,
    DeviceProfile,
    HostProfile,
    LayerSample,
    OutsideSample,
    ProfiledModel,
    ProfileFile,
    UpdateRate,
    device_label,
)

GIB = 1024**3
MIB = 1024**2


def day(number: int) -> datetime:
    return datetime(2026, 11, number, tzinfo=timezone.utc)


def a_model(num_layers: int = 12) -> ProfiledModel:
    return ProfiledModel(
        name="small",
        num_layers=num_layers,
        layer_parameters=100_000_000,
        outside_parameters=(50_000_000, 51_000_000),
        seq_len=1024,
        dtype="bf16",
        boundary_bytes=6 * MIB,
    )


def a_device(
    host: str, name: str, *, speed: float = 1.0, gigabytes: float = 80.0, age: int = 1
) -> DeviceProfile:
    limit = int(gigabytes * GIB)
    multiprocessors = int(100 * speed)
    return DeviceProfile(
        host=host,
        label=device_label(name, multiprocessors, limit),
        device=name,
        multiprocessors=multiprocessors,
        limit_bytes=limit,
        memory_bytes=limit - GIB // 2,
        layer=tuple(
            LayerSample(
                samples=size,
                forward_ms=(0.2 + 0.5 * size) / speed,
                backward_ms=(0.4 + 1.0 * size) / speed,
                recompute_backward_ms=(0.6 + 1.5 * size) / speed,
                kept_bytes=120 * MIB * size,
                peak_bytes=250 * MIB * size + 400 * MIB,
                recompute_peak_bytes=250 * MIB * size + 400 * MIB,
            )
            for size in (1, 2, 4, 8)
        ),
        outside=tuple(
            OutsideSample(
                samples=size,
                forward_ms=0.4 * size / speed,
                backward_ms=0.8 * size / speed,
                peak_bytes=400 * MIB * size,
            )
            for size in (1, 2, 4, 8)
        ),
        update_rate=1e11 * speed,
        copies=CopyRates(to_host=5e10, from_host=5e10, to_host_both=4.5e10, from_host_both=4.5e10),
        measured=day(age),
    )


def a_host(host: str, *devices: DeviceProfile, gigabytes: int = 256, age: int = 1) -> HostProfile:
    return HostProfile(
        host=host,
        ranks=tuple(device.label for device in devices),
        cores=32,
        memory_bytes=gigabytes * GIB,
        bandwidth=2e11,
        updates=(UpdateRate(threads=4, rate=2e9), UpdateRate(threads=16, rate=4e9)),
        measured=day(age),
    )


def collectives(*hosts: str, age: int = 1) -> CollectiveProfile:
    return CollectiveProfile(
        hosts=hosts,
        backend="nccl",
        samples=tuple(
            CollectiveSample(
                num_bytes=megabytes * MIB,
                all_gather_ms=0.05 + megabytes / 400.0,
                reduce_scatter_ms=0.06 + megabytes / 400.0,
                uneven_all_gather_ms=0.06 + megabytes / 350.0,
                uneven_reduce_scatter_ms=0.07 + megabytes / 350.0,
            )
            for megabytes in (16, 64, 256)
        ),
        measured=day(age),
    )


def a_profile(host: str = "one", *devices: DeviceProfile, age: int = 1) -> ProfileFile:
    """A profile of one host, by default with a fast device and one of half its speed."""
    found = devices or (
        a_device(host, "GPU", age=age),
        a_device(host, "GPU", speed=0.5, age=age),
    )
    return ProfileFile(
        model=a_model(),
        devices=tuple({device.label: device for device in found}.values()),
        hosts=(a_host(host, *found, age=age),),
        collectives=(collectives(*[host] * len(found), age=age),) if len(found) > 1 else (),
        versions={"hytrain": "0.1.0"},
    )
