"""Measures the rates that `hytrain doctor` reports, each in about a second."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from hytrain.checkpoint.summed_files import sync_names
from hytrain.hardware.gpu_memory import shares_host_memory
from hytrain.hardware.host_tree import HostTree
from hytrain.hardware.numa import call_on, node_cores, nodes_of_memory, pci_address
from hytrain.kernels.host_memory import host_zeros
from hytrain.offload.pinning import Pinning
from hytrain.offload.threads import choose_threads
from hytrain.tools.doctor.findings import NumaFacts, Rates
from hytrain.tools.profiler.copies import copy_rates
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.rates import cpu_rates

_SECONDS = 0.3
_FILE_BYTES = 64 * 2**20
_FSYNCS = 7
_UNPINNED_BYTES = 64 * 2**20
_PLACED_ELEMENTS = 2**22
"""16 MiB, touched on each node."""


def measure_rates(folder: Path, cores: int, elements: int | None) -> Rates:
    """Measures this machine, with nothing beside it.

    Args:
        folder: where files are written and removed.
        cores: cores of one rank.
        elements: length of the arrays; None: beyond the caches.

    Raises:
        OSError: the folder cannot be written.
        HostMemoryError: there is no memory for the arrays.
    """
    threads = choose_threads(cores, None).num_threads
    alone = Ranks(alone=True)
    cpu = torch.device("cpu")
    rates = cpu_rates(cpu, [threads], 1, alone, seconds=_SECONDS, elements=elements)
    to_host = to_device = unpin = None
    pinned: str | None = None
    shares_memory = False
    if torch.cuda.is_available():
        try:
            device = torch.device("cuda", torch.cuda.current_device())
            shares_memory = shares_host_memory(device)
            copies = copy_rates(device, alone, seconds=_SECONDS)
            to_host, to_device = copies.to_host, copies.from_host
            unpin = _unpin_seconds(device)
        except RuntimeError as error:
            pinned = str(error).partition("\n")[0]
    fsync, write = _disk_rates(folder)
    return Rates(
        threads=threads,
        memory=rates.memory[threads],
        adam=rates.updates[threads],
        to_host=to_host,
        to_device=to_device,
        pinned=pinned,
        fsync_seconds=fsync,
        write=write,
        folder=str(folder),
        free_bytes=shutil.disk_usage(folder).free,
        unpin_seconds=unpin,
        shares_memory=shares_memory,
    )


def _unpin_seconds(device: torch.device) -> float | None:
    """Seconds to unpin one piece of pinned memory; None if it could not be pinned."""
    memory = host_zeros(_UNPINNED_BYTES, dtype=torch.uint8, touch_threads=2)
    pinning = Pinning(memory.data_ptr(), _UNPINNED_BYTES, device, "a measurement")
    if not pinning.is_pinned:
        return None
    begin = time.perf_counter()
    pinning.release()
    return time.perf_counter() - begin


def numa_facts(tree: HostTree, usable: frozenset[int]) -> NumaFacts:
    """The nodes of the GPUs, and where memory that is touched on each node comes to lie."""
    gpu_nodes: list[int | None] = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        address = pci_address(torch.device("cuda", number))
        gpu_nodes.append(None if address is None else tree.pci_node(address))
    placed: dict[int, float] = {}
    nodes = node_cores(None, usable, tree).nodes
    for number, cores in nodes.items() if len(nodes) > 1 else ():
        memory = call_on(cores, lambda: host_zeros(_PLACED_ELEMENTS, touch_threads=2))
        pages = nodes_of_memory(memory.data_ptr())
        if pages:
            placed[number] = pages.get(number, 0) / sum(pages.values())
    return NumaFacts(gpu_nodes, placed)


def _disk_rates(folder: Path) -> tuple[float, float]:
    """Seconds of a small file's fsync, and bytes/s of writing a large file with its fsync."""
    with tempfile.TemporaryDirectory(prefix="hytrain-doctor-", dir=folder) as name:
        root = Path(name)
        seconds: list[float] = []
        for number in range(_FSYNCS):
            path = root / str(number)
            with path.open("wb") as file:
                file.write(b"x" * 4096)
                file.flush()
                begun = time.perf_counter()
                os.fsync(file.fileno())
            sync_names(root, [path])
            seconds.append(time.perf_counter() - begun)
        content = os.urandom(2**20)
        begun = time.perf_counter()
        with (root / "large").open("wb") as file:
            for _ in range(_FILE_BYTES // len(content)):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        sync_names(root, [root / "large"])
        return statistics.median(seconds), _FILE_BYTES / (time.perf_counter() - begun)
