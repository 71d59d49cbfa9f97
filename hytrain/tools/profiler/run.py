"""`hytrain profile`: what a plan needs to know of each GPU, each host, and what joins them.

All ranks measure at once, as they will train: layers, the GPU's update, copies, the CPU's update,
and last the collectives (rank_measurements.py has the order of all before these). Ranks of one
label (see :func:`device_label`) make one device profile, in which the slowest of them counts, since
it is the one that the others will wait for.
"""

from __future__ import annotations

import datetime
import socket

import torch

from hytrain.formats.profile_file import CollectiveProfile, ProfileFile
from hytrain.hardware.device_facts import DeviceFacts, device_facts
from hytrain.hardware.host_share import divide_host, this_host
from hytrain.hardware.machine import cpu_model, package_version
from hytrain.kernels.host_limits import host_memory_pools
from hytrain.tools.profiler import collective_profile
from hytrain.tools.profiler.join_ranks import (
    RankProfile,
    device_profiles,
    host_names,
    host_profiles,
)
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.progress import Progress
from hytrain.tools.profiler.rank_measurements import measure_rank
from hytrain.tools.profiler.ranks import Ranks

_PACKAGES = ("hytrain", "torch", "deepspeed", "transformers", "triton")


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
    share = divide_host([machine for _, machine in machines], ranks.rank)

    def facts(ranks_on_host: int = 1) -> DeviceFacts:
        return device_facts(
            device, multiprocessors=options.multiprocessors, ranks_on_host=ranks_on_host
        )

    model, mine, host_bytes = ranks.together(
        lambda: (subject.sizes(), facts(share.ranks), share.memory(host_memory_pools()))
    )
    own, cpu_rates, boundary_bytes = measure_rank(
        subject,
        device,
        options,
        ranks,
        progress,
        model=model,
        host=host_names(machines)[ranks.rank],
        facts=mine,
        cores=ranks.gather(share.cores),
        ranks_on_host=share.ranks,
    )
    progress.show(0.9, "collectives")
    samples = collective_profile.collective_samples(
        device, ranks, dtype=subject.dtype, sizes=options.collective_bytes
    )
    if device.type == "cuda":
        # What NCCL has taken by now, training will miss as well.
        usable = min(own.limit_bytes, facts().memory_bytes)
        own = own.model_copy(update={"memory_bytes": usable})
    cores = machines[ranks.rank][1].cores
    everybody = ranks.gather(RankProfile(own, cores, host_bytes, cpu_model(), cpu_rates))
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    collectives: tuple[CollectiveProfile, ...] = ()
    if samples:
        names = tuple(rank.device.host for rank in everybody)
        found = CollectiveProfile(hosts=names, backend=ranks.backend, samples=samples, measured=now)
        collectives = (found,)
    known = {"boundary_bytes": boundary_bytes, "moments": options.moments}
    profile = ProfileFile(
        model=model.model_copy(update=known),
        devices=device_profiles(everybody, now),
        hosts=host_profiles(everybody, now),
        collectives=collectives,
        versions=_versions(),
    )
    progress.show(1.0, "done")
    return ranks.gather(profile)[0]  # clocks differ; all have the first rank's


def _versions() -> dict[str, str]:
    versions = {name: package_version(name) for name in _PACKAGES} | {"cuda": torch.version.cuda}
    return {name: version for name, version in versions.items() if version is not None}
