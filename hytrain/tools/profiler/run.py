"""`hytrain profile`: what a plan needs to know of each GPU, each host, and what joins them.

All ranks measure at once, as they will train: layers, the GPU's update, copies, the CPU's update,
and last the collectives (rank_measurements.py has the order of all before these). Ranks of one
label (see :func:`device_label`) make one device profile, in which the slowest of them counts, since
it is the one that the others will wait for.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from hytrain.formats.dtypes import TORCH_NAMES
from hytrain.formats.moment_kinds import MomentsName
from hytrain.formats.profile_file import (
    CollectiveProfile,
    CopyRates,
    DeviceProfile,
    HostProfile,
    LayerSample,
    OutsideSample,
    ProfiledModel,
    ProfileFile,
    UpdateLaunches,
    UpdateRate,
)
from hytrain.hardware.device_facts import DeviceFacts, device_facts
from hytrain.hardware.host_share import RankHost, divide_host, this_host
from hytrain.hardware.machine import cpu_model, package_version
from hytrain.kernels.host_limits import host_memory_pools
from hytrain.tools.profiler import collective_profile
from hytrain.tools.profiler.layer_profile import LayerProfiling
from hytrain.tools.profiler.measured_model import MeasuredModel, SubjectSizes
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.progress import Progress
from hytrain.tools.profiler.rank_measurements import Measured, RankMeasurements
from hytrain.tools.profiler.ranks import Ranks

_DTYPES = {getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items()}
_PACKAGES = ("hytrain", "torch", "deepspeed", "transformers", "triton")


@dataclass(frozen=True, slots=True)
class _Rank:
    """Who a rank is.

    Attributes:
        host: name of its machine, the same for all ranks there and for no others.
        facts: of its device.
        cores: its part of the machine's.
        all_cores: those it may use.
        memory_bytes: its part of the host's memory.
        ranks_on_host: that share the machine.
        cpu: the CPU's name.
    """

    host: str
    facts: DeviceFacts
    cores: int
    all_cores: frozenset[int]
    memory_bytes: int
    ranks_on_host: int
    cpu: str


def profile_ranks(
    subject: MeasuredModel,
    device: torch.device,
    options: ProfileOptions,
    *,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> ProfileFile:
    """Measures this rank's device, host and collectives together with all other ranks.

    GPU work goes to the current stream, whatever that may use of the GPU.

    Args:
        subject: the model; the same on all ranks.
        device: this rank's.
        options: the same on all ranks, but for ``multiprocessors`` and ``settings``.
        ranks: who measures; None: the default process group, or this process where there is none.
        progress: told how far the work is.

    Returns:
        The profile of all hosts, on every rank.

    Raises:
        ConfigError: the model cannot be measured; on every rank.
        ProfileRunError: another rank failed.
    """
    ranks = ranks if ranks is not None else Ranks()
    progress = progress if progress is not None else Progress()
    machines = ranks.gather((socket.gethostname(), this_host()))
    sizes, me = ranks.together(
        lambda: (subject.sizes(), _who(device, options, machines, ranks.rank))
    )
    everybody = ranks.gather(me)
    measured = _measure(subject, sizes, device, options, ranks, everybody, progress)
    progress.show(0.9, "collectives")
    samples = collective_profile.collective_samples(
        device, ranks, dtype=subject.dtype, sizes=options.collective_bytes
    )
    if device.type == "cuda":
        # What NCCL has taken by now, training will miss as well.
        me = replace(me, facts=device_facts(device, multiprocessors=options.multiprocessors))
        everybody = ranks.gather(me)
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    settings = ranks.gather(options.settings)
    groups = _Groups(everybody, ranks.gather(measured), settings, sizes.layer_parameters, now)
    collectives: list[CollectiveProfile] = []
    if samples:
        names = tuple(rank.host for rank in everybody)
        collectives.append(
            CollectiveProfile(hosts=names, backend=ranks.backend, samples=samples, measured=now)
        )
    profile = ProfileFile(
        model=_model(subject, sizes, measured.layer.boundary_bytes, options.moments),
        devices=groups.devices(),
        hosts=groups.hosts(),
        collectives=tuple(collectives),
        versions=_versions(),
    )
    return ranks.gather(profile)[0]  # clocks differ; all have the first rank's


def _measure(
    subject: MeasuredModel,
    sizes: SubjectSizes,
    device: torch.device,
    options: ProfileOptions,
    ranks: Ranks,
    everybody: Sequence[_Rank],
    progress: Progress,
) -> Measured:
    """All but the collectives; leaves nothing on the device."""
    me = everybody[ranks.rank]
    with contextlib.ExitStack() as opened:
        layers = ranks.together(
            lambda: opened.enter_context(LayerProfiling(subject, device, options.layer))
        )
        measurements = RankMeasurements(
            device=device,
            options=options,
            ranks=ranks,
            cores=[rank.cores for rank in everybody],
            ranks_on_host=me.ranks_on_host,
            shard=sizes.parameters // len(everybody),
        )
        return measurements.run(layers, subject.dtype, progress)


def _who(
    device: torch.device,
    options: ProfileOptions,
    machines: Sequence[tuple[str, RankHost]],
    rank: int,
) -> _Rank:
    share = divide_host([machine for _, machine in machines], rank)
    facts = device_facts(device, multiprocessors=options.multiprocessors, ranks_on_host=share.ranks)
    return _Rank(
        host=host_names(machines)[rank],
        facts=facts,
        cores=share.cores,
        all_cores=machines[rank][1].cores,
        memory_bytes=share.memory(host_memory_pools()),
        ranks_on_host=share.ranks,
        cpu=cpu_model(),
    )


def host_names(machines: Sequence[tuple[str, RankHost]]) -> list[str]:
    """A name for each rank's machine.

    Ranks of one machine have the name that its first rank gives it (containers have several); of
    machines that call themselves the same, the later ones get a number.

    Args:
        machines: what each rank calls its machine, and what identifies it.
    """
    names: dict[str, str] = {}
    for name, where in machines:
        if where.machine not in names:
            number = sum(taken.split("#")[0] == name for taken in names.values())
            names[where.machine] = f"{name}#{number + 1}" if number else name
    return [names[where.machine] for _, where in machines]


# ---- from ranks to devices and hosts ----

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Groups:
    """Everybody's measurements, to be joined by device and by host."""

    everybody: Sequence[_Rank]
    measured: Sequence[Measured]
    settings: Sequence[str]
    layer_parameters: int
    now: datetime.datetime

    def devices(self) -> tuple[DeviceProfile, ...]:
        members: dict[tuple[str, str], list[int]] = {}
        for number, rank in enumerate(self.everybody):
            members.setdefault((rank.host, rank.facts.label), []).append(number)
        return tuple(self._device(numbers) for numbers in members.values())

    def _device(self, numbers: Sequence[int]) -> DeviceProfile:
        rank = self.everybody[numbers[0]]
        measured = [self.measured[number] for number in numbers]
        layers = [one.layer for one in measured]
        return DeviceProfile(
            host=rank.host,
            label=rank.facts.label,
            device=rank.facts.name,
            multiprocessors=rank.facts.multiprocessors,
            limit_bytes=rank.facts.limit_bytes,
            memory_bytes=min(
                rank.facts.limit_bytes,
                *(self.everybody[number].facts.memory_bytes for number in numbers),
            ),
            idle_bytes=max(layer.idle_bytes for layer in layers),
            layer=slowest([layer.layer for layer in layers], LayerSample),
            outside=slowest([layer.outside for layer in layers], OutsideSample),
            update_rate=min(one.update_rate for one in measured),
            copies=CopyRates(
                **{
                    name: min(getattr(one.copies, name) for one in measured)
                    for name in CopyRates.model_fields
                }
            ),
            accumulation_ms=1e3 * self.layer_parameters * max(one.accumulation for one in measured),
            launch_slowdown=_most([layer.launch_slowdown for layer in layers]),
            launch_spread=_most([layer.launch_spread for layer in layers]),
            update_launches=_longest([one.update_launches for one in measured]),
            measured=self.now,
            settings=self.settings[numbers[0]],
        )

    def hosts(self) -> tuple[HostProfile, ...]:
        return tuple(map(self._host, dict.fromkeys(rank.host for rank in self.everybody)))

    def _host(self, host: str) -> HostProfile:
        members = [number for number, rank in enumerate(self.everybody) if rank.host == host]
        ranks = [self.everybody[number] for number in members]
        # Ranks that are bound to cores may have unlike numbers of them.
        threads = sorted(
            set[int].intersection(*(set(self.measured[n].cpu.updates) for n in members))
        )
        cpu = [self.measured[number].cpu for number in members]
        return HostProfile(
            host=host,
            ranks=tuple(rank.facts.label for rank in ranks),
            cores=len(frozenset[int]().union(*(rank.all_cores for rank in ranks))),
            memory_bytes=sum(rank.memory_bytes for rank in ranks),
            bandwidth=max(sum(one.memory[t] for one in cpu) for t in threads),
            updates=tuple(
                UpdateRate(
                    threads=t,
                    rate=min(one.updates[t] for one in cpu),
                    in_training=min(one.in_training[t] for one in cpu),
                )
                for t in threads
            ),
            cpu=ranks[0].cpu,
            measured=self.now,
        )


def _most(values: Sequence[Any]) -> Any:
    """The largest of what was measured."""
    return max((value for value in values if value is not None), default=None)


def _longest(ranks: Sequence[UpdateLaunches | None]) -> UpdateLaunches | None:
    """Of each term the largest of any rank."""
    measured = [one for one in ranks if one is not None]
    if not measured:
        return None
    names = UpdateLaunches.model_fields
    return UpdateLaunches(**{name: max(getattr(one, name) for one in measured) for name in names})


_Sample = TypeVar("_Sample", LayerSample, OutsideSample)


def slowest(ranks: Sequence[Sequence[_Sample]], kind: type[_Sample]) -> tuple[_Sample, ...]:
    """Of the sizes that all ranks measured, the largest time and memory of any.

    Args:
        ranks: each rank's samples.
        kind: their class.
    """
    common = set[int].intersection(*({row.samples for row in rows} for rows in ranks))
    joined: list[_Sample] = []
    for size in sorted(common):
        rows = [row for samples in ranks for row in samples if row.samples == size]
        values = {name: _most([getattr(row, name) for row in rows]) for name in kind.model_fields}
        joined.append(kind(**values))
    return tuple(joined)


def _model(
    subject: MeasuredModel, sizes: SubjectSizes, boundary_bytes: int, moments: MomentsName
) -> ProfiledModel:
    return ProfiledModel.model_validate(
        {
            **asdict(sizes),
            "name": subject.name,
            "seq_len": subject.seq_len,
            "dtype": _DTYPES[subject.dtype],
            "boundary_bytes": boundary_bytes,
            "moments": moments,
        }
    )


def _versions() -> dict[str, str]:
    versions = {name: package_version(name) for name in _PACKAGES}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return {name: version for name, version in versions.items() if version is not None}
