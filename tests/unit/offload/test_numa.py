"""Threads and memory on the right NUMA node: simulated hosts, and real threads that are bound."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import make_model
from support.numa_machine import Machine, Ranks, Setting, best_by_hand, hosts_of, seconds

from hytrain.engine import build_optimizer
from hytrain.hardware import host_share
from hytrain.hardware.host_share import NearCores, divide_host
from hytrain.hardware.host_tree import HostTree
from hytrain.hardware.numa import (
    NodeCores,
    assign_nodes,
    call_on,
    node_cores,
    nodes_of_memory,
    on_cores,
    prefers_near,
)
from hytrain.kernels.host_memory import host_zeros
from hytrain.offload import threads as threads_module
from hytrain.offload.threads import place_threads

TWO = tuple(tuple(range(node * 32, node * 32 + 32)) for node in range(2))
ONE = (tuple(range(64)),)
# Siblings of one core are numbered far apart, and nodes take turns, on real machines.
INTERLEAVED = (tuple(range(0, 64, 2)), tuple(range(1, 64, 2)))


def _address(gpu: int) -> str:
    return f"0000:{gpu + 1:02x}:00.0"


def _choose(
    machine: Machine,
    root: Path,
    gpu_nodes: Sequence[int],
    cores: Sequence[frozenset[int]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    are_known: bool = True,
) -> list[Setting]:
    """What each rank's engine decides on a simulated machine, all ranks at the same time."""
    number = len(gpu_nodes)
    tree = machine.write_files(root, {_address(r): n for r, n in enumerate(gpu_nodes)})
    addresses = [_address(rank) if are_known else None for rank in range(number)]
    hosts = hosts_of(tree, addresses, cores)
    ranks, here = Ranks(number), threading.local()

    def measure(counts: Sequence[int], _: str, elements: int) -> dict[int, float]:
        mine = (getattr(here, "bound", None) or cores[here.rank], list(counts))
        posted = ranks.exchange(here.rank, mine)
        found: dict[int, float] = {}
        for index, count in enumerate(counts):
            settings = [
                Setting(on, their[min(index, len(their) - 1)], node)
                for (on, their), node in zip(posted, gpu_nodes, strict=True)
            ]
            found[count] = elements * seconds(machine, settings)[here.rank]
        return found

    def bound(on: frozenset[int] | None, function: Any) -> Any:
        here.bound = on
        try:
            return function()
        finally:
            here.bound = None

    def rank(index: int) -> Setting:
        here.rank = index
        collectives: Any = SimpleNamespace(
            gather_objects=lambda value, _: ranks.exchange(index, value)
        )
        share = divide_host(hosts, index, started_here=number, num_cores=64)
        choice = place_threads(share, None, "fp32", collectives, may_bind=True)
        return Setting(choice.cores or cores[index], choice.num_threads, gpu_nodes[index])

    monkeypatch.setattr(threads_module, "_measure", measure)
    monkeypatch.setattr(threads_module, "call_on", bound)
    for name in ("choose_threads", "_choose_near"):  # a process has one rank, and measures once
        function = getattr(threads_module, name)
        monkeypatch.setattr(threads_module, name, getattr(function, "__wrapped__", function))
    return ranks.run(rank)


MACHINES = {
    "one node": Machine(ONE, memory=300.0),
    "one slow node": Machine(ONE, core=30.0, memory=120.0),
    "two nodes": Machine(TWO),
    "two nodes, many cores needed": Machine(TWO, core=5.0, memory=200.0),
    "two nodes, a narrow link": Machine(TWO, link=15.0),
    "two nodes, a wide link": Machine(TWO, link=200.0, far=0.85),
    "two nodes that take turns": Machine(INTERLEAVED),
}
GPUS = {1: [(0,), (1,)], 2: [(0, 1), (0, 0)], 4: [(0, 0, 1, 1)], 8: [(0,) * 4 + (1,) * 4, (1,) * 8]}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_within_5_percent_of_the_best_by_hand(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = MACHINES[name]
    usable = frozenset(range(64))
    for number, gpu_nodes in enumerate(GPUS[ranks]):
        nodes = tuple(min(node, len(machine.nodes) - 1) for node in gpu_nodes)
        with monkeypatch.context() as patch:
            root = tmp_path / str(number)
            chosen = _choose(machine, root, nodes, [usable] * ranks, patch)
        taken = max(seconds(machine, chosen))
        assert taken <= 1.05 * best_by_hand(machine, usable, nodes), (nodes, chosen)


@pytest.mark.parametrize("cores", [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("name", ["one node", "two nodes", "two nodes that take turns"])
def test_within_5_percent_in_a_cpuset(
    cores: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = MACHINES[name]
    usable = frozenset(range(cores))
    for ranks in (1, 2):
        if cores // ranks < 2:
            continue
        nodes = tuple(range(ranks)) if len(machine.nodes) > 1 else (0,) * ranks
        with monkeypatch.context() as patch:
            chosen = _choose(machine, tmp_path / str(ranks), nodes, [usable] * ranks, patch)
        taken = max(seconds(machine, chosen))
        assert taken <= 1.05 * best_by_hand(machine, usable, nodes), (ranks, chosen)


def test_eight_ranks_have_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = frozenset(range(64))
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    chosen = _choose(Machine(TWO), tmp_path, nodes, [usable] * 8, monkeypatch)
    assert [setting.cores for setting in chosen] == [frozenset(TWO[node]) for node in nodes]
    # All of them together leave each rank a core for the thread that launches.
    assert all(setting.threads <= 7 for setting in chosen)


def test_ranks_that_a_launcher_has_bound_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`deepspeed --bind_cores_to_rank`, `numactl`: there is nothing to choose."""
    cores = [frozenset(range(8 * rank, 8 * rank + 8)) for rank in range(8)]
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    chosen = _choose(Machine(TWO), tmp_path, nodes, cores, monkeypatch)
    assert [setting.cores for setting in chosen] == cores
    assert {setting.threads for setting in chosen} <= {4, 5, 6, 7}


def test_ranks_whose_gpus_nodes_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in virtual machines: a node each all the same, so that no memory is far."""
    usable = frozenset(range(64))
    chosen = _choose(Machine(TWO), tmp_path, (0, 1), [usable] * 2, monkeypatch, are_known=False)
    assert {setting.cores for setting in chosen} == {frozenset(node) for node in TWO}


def test_nodes_are_dealt_out() -> None:
    both = {0: frozenset(range(32)), 1: frozenset(range(32, 64))}

    def ranks(*gpu_nodes: int | None) -> list[NodeCores]:
        return [NodeCores(both, node) for node in gpu_nodes]

    assert assign_nodes(ranks(1, 1, 0, 0)) == [1, 1, 0, 0]
    assert assign_nodes(ranks(1, 1)) == [1, 0]
    assert assign_nodes(ranks(None, 1)) == [0, 1]
    assert assign_nodes(ranks(0, 0, 0)) == [0, 0, 1]
    assert assign_nodes(ranks(5)) in ([0], [1])  # a node of memory alone
    small = {0: frozenset(range(8)), 1: frozenset(range(8, 32))}
    assert assign_nodes([NodeCores(small, 0)] * 4) == [0, 1, 1, 1]
    assert assign_nodes([NodeCores(both, 0), NodeCores({0: frozenset({1})}, 1)]) == [1, 0]
    assert assign_nodes([NodeCores(both, 0), NodeCores()]) is None
    assert assign_nodes([]) == []


def test_unseen_ranks_and_other_machines(tmp_path: Path) -> None:
    tree = Machine(TWO).write_files(tmp_path, {_address(0): 1})
    hosts = hosts_of(tree, [_address(0)], [frozenset(range(64))])
    alone = divide_host(hosts, 0, num_cores=64)
    assert alone.near == NearCores(frozenset(range(32, 64)), 32)
    assert alone.some_near
    assert divide_host(hosts, 0, started_here=4, num_cores=64).near is None
    other = host_share.RankHost("there", frozenset(range(4)), frozenset({"machine"}))
    share = divide_host([*hosts, other], 1, num_cores=64)
    assert share.near is None
    assert share.some_near  # it takes part in what the others exchange


def test_what_the_kernel_does_not_tell(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    assert tree.pci_node(_address(0)) is None
    assert node_cores(_address(0), frozenset({0, 1}), tree) == NodeCores({}, None)
    folder = tmp_path / "sys/bus/pci/devices" / _address(0)
    folder.mkdir(parents=True)
    for text, node in (("-1\n", None), ("nonsense", None), ("1\n", 1)):
        (folder / "numa_node").write_text(text)
        assert tree.pci_node(_address(0)) == node


def test_all_or_none() -> None:
    assert prefers_near([1.0, 1.0], [1.0, 1.0])
    assert prefers_near([1.02], [1.0])
    assert not prefers_near([0.5, 2.0], [1.0, 1.0])


# -- real threads ------------------------------------------------------------------------------


@pytest.fixture
def cores() -> list[int]:
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        pytest.skip("there is one core: no thread can be bound to a part of them")
    return found


def _tasks() -> dict[int, set[int]]:
    """This process's threads and their cores."""
    found: dict[int, set[int]] = {}
    for task in os.listdir("/proc/self/task"):
        try:
            found[int(task)] = os.sched_getaffinity(int(task))
        except OSError:
            continue  # it has ended
    return found


def test_a_call_is_bound_and_the_caller_is_not(cores: list[int]) -> None:
    last = frozenset(cores[-1:])
    assert call_on(last, lambda: os.sched_getaffinity(0)) == set(last)
    assert os.sched_getaffinity(0) == set(cores)
    assert call_on(None, threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        call_on(last, lambda: 1 // 0)
    with on_cores(last):
        assert os.sched_getaffinity(0) == set(last)
    assert os.sched_getaffinity(0) == set(cores)


def test_warns_of_cores_that_are_refused(
    caplog: pytest.LogCaptureFixture, cores: list[int]
) -> None:
    with on_cores(frozenset({max(cores) + 4096})):
        assert os.sched_getaffinity(0) == set(cores)
    assert "cannot be bound" in caplog.text


@pytest.mark.usefixtures("process_group")
def test_updates_run_on_the_node_and_nothing_else_does(
    cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker and its team; the threads of the training are where they were."""
    node = frozenset(cores[-1:])
    choice = threads_module.ThreadChoice(2, 1e-9, node)
    monkeypatch.setattr("hytrain.engine.build_optimizer.place_threads", lambda *_, **__: choice)
    touched: list[set[int]] = []

    def taking(*arguments: Any, **named: Any) -> torch.Tensor:
        touched.append(os.sched_getaffinity(0))
        return host_zeros(*arguments, **named)

    monkeypatch.setattr(build_optimizer, "host_zeros", taking)
    before = _tasks()
    with built(make_model("mlp"), make_config()) as engine:
        engine.backward(engine(inputs=torch.randn(4, 32)))
        engine.step()
        engine.synchronize()
        now = _tasks()
        assert touched
        assert all(found == set(node) for found in touched)
        new = {task: found for task, found in now.items() if task not in before}
        assert any(found == set(node) for found in new.values())
        assert os.sched_getaffinity(0) == set(cores)
        # Whoever is started from here on is not bound: data loaders, the user's own.
        assert all(now[task] == found for task, found in before.items() if task in now)


def test_where_memory_lies_is_read(tmp_path: Path) -> None:
    maps = tmp_path / "numa_maps"
    maps.write_text(
        "7f0000000000 default anon=5 dirty=5 N0=1 N1=4 kernelpagesize_kB=4\n"
        "7f0000400000 default anon=512 dirty=512 N1=512 kernelpagesize_kB=4\n"
    )
    assert nodes_of_memory(0x7F0000000000, maps) == {0: 1, 1: 4}
    assert nodes_of_memory(0x7F0000400000, maps) == {1: 512}
    assert nodes_of_memory(0x1000, maps) == {}
    assert nodes_of_memory(0x1000, tmp_path / "none") == {}
