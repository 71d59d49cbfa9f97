"""What runs on each host of support/hosts.py: python training_on_hosts.py WHAT FOLDER.

train       trainings whose every weight is compared with plain torch's
differ      builds that differ between the ranks; each prints what it raises
fail        trains until another rank fails, and prints what it raises
firewall    as fail; the watch's port is closed by a firewall before anybody knows it
save        saves into FOLDER/apart, which is each host's own, and loads it again
load        loads FOLDER/apart and FOLDER/merged, and goes on as `save` has
restart     as training that ends once on rank 1, and goes on from FOLDER/saved
network     collectives, as the planner predicts them and as they are
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_batches
import torch
import torch.distributed as dist
from rank_batches import Shares
from support.engines import built, from_all_ranks, make_config
from support.models import loss_of, make_batch, make_model
from support.plans import a_plan, write_a_plan

from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.peers import Listener
from hytrain.errors import CheckpointError, HyTrainError, RankFailedError
from hytrain.formats.profile_file import CollectiveProfile, ProfiledModel
from hytrain.hardware.host_share import machine_identity
from hytrain.tools.planner import profile_problem
from hytrain.tools.planner.cluster import Cluster
from hytrain.tools.profiler import collective_profile
from hytrain.tools.profiler.collective_profile import collective_samples
from hytrain.tools.profiler.ranks import Ranks

_SIZES = {2: (3, 1), 3: (1, 4, 2), 4: (3, 1, 0, 2)}
_SHARDS = {2: (0.7, 0.3), 3: (0.2, 0.5, 0.3), 4: (0.4, 0.3, 0.1, 0.2)}


def say(word: str, *values: object) -> None:
    """A line that the test looks for; of one line whatever the value."""
    # In one write: other ranks of a launcher share its output.
    line = " ".join([word, *(str(value).replace("\n", " ") for value in values)])
    print(f"{line}\n", end="", flush=True)


def train(folder: Path) -> None:
    """ZeRO-2 and 3, equal and unequal, by keys and by a plan."""
    world = dist.get_world_size()
    equal = Shares((2,) * world, (1,) * world, (1 / world,) * world, 2, 1.0, (0.5,) * world)
    unequal = replace(
        equal,
        sizes=_SIZES[world],
        micro_sizes=tuple(max(1, min(2, size)) for size in _SIZES[world]),
        fractions=_SHARDS[world],
        stage=3,
        gpu_fractions=(1.0, 0.0, 0.5, 0.3)[:world],
    )
    for case in (equal, replace(equal, stage=3), replace(unequal, stage=2), unequal):
        rank_batches.trains_as_one_process(case)
        say("TRAINED", case)
    _train_by_plan(unequal, folder)
    say("HOSTS", sorted({each[0] for each in from_all_ranks((os.uname().nodename, 0))}))


def _train_by_plan(case: Shares, folder: Path) -> None:
    """The ranks of the plan are on the hosts that the ranks are on."""
    plan = a_plan(make_model("llama"), case.sizes, case.micro_sizes, fractions=case.fractions)
    hosts = from_all_ranks(machine_identity())
    ranks = [r.model_copy(update={"host": h}) for r, h in zip(plan.ranks, hosts, strict=True)]
    plan = plan.model_copy(update={"ranks": tuple(ranks), "stage": case.stage})
    if dist.get_rank() == 0:
        write_a_plan(folder, plan)
    dist.barrier()
    config = make_config(
        bf16=False,
        stage=case.stage,
        clipping=case.clipping,
        hytrain={"plan": str(folder / "plan.json")},
        optimizer=rank_batches.ADAMW,
        train_batch_size=sum(case.sizes),
        train_micro_batch_size_per_gpu=None,
        gradient_accumulation_steps=None,
    )
    with pytest.MonkeyPatch.context() as patch, rank_batches.built_quickly(patch, config) as engine:
        data = rank_batches.samples(case.batches, dist.get_rank())
        losses = [float(engine.train_batch(data)) for _ in range(rank_batches.STEPS)]
        state = engine.fp32_state_dict()
    if dist.get_rank() == 0:
        weights = {name: tensors["fp32"] for name, tensors in state.items()}
        rank_batches.assert_as_alone(case, losses, weights)
    say("TRAINED", "by a plan")


def differ(_: Path) -> None:
    """The test has put another version of hytrain on one of the hosts."""
    rank = dist.get_rank()
    own = {
        "version": make_config(),
        "config": make_config(clipping=1.0 + rank),
        "seed": make_config(seed=100 + rank),
        "plan": make_config(hytrain={"shard_fractions": [0.5, 0.5] if rank else [0.6, 0.4]}),
        "world": make_config(train_batch_size=2 + rank),
    }
    for name, config in own.items():
        try:
            with built(make_model("mlp"), config):
                say("BUILT", name)
        except (HyTrainError, ValueError, AssertionError) as error:
            say("REFUSED", name, type(error).__name__, error)


def _close_port(here: Listener) -> None:
    """Asks the test, which can, and waits until it has."""
    say("LISTENS", here.address.port)
    while not Path(sys.argv[-1], f"closed{dist.get_rank()}").exists():
        time.sleep(0.05)


def fail(_: Path) -> None:
    """Trains for ever; rank 1 ends when the test says so."""
    with built(make_model("mlp"), make_config()) as engine:
        listener = engine._collectives.watch._presence._peers._listener
        say("WATCHES", *listener._socket.getsockname()[:1])
        for number in range(10**9):
            if dist.get_rank() == 1 and Path(sys.argv[-1], "die").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                engine.backward(loss_of(engine(**make_batch("mlp", number))))
                engine.step()
                if number % 50 == 0:
                    say("STEP", number, f"{float(engine.get_global_grad_norm() or 0):.6f}")
            except RankFailedError as error:
                say("RAISED", f"{time.time():.1f}", error)
                raise


def firewall(folder: Path) -> None:
    """See the module."""
    listen = Listener.__init__

    def closed(self: Listener, host: str) -> None:
        listen(self, host)
        _close_port(self)

    Listener.__init__ = closed  # type: ignore[method-assign]
    fail(folder)


def _checkpointed(stage: int, *, is_async: bool) -> Any:
    """An engine with unequal shards and a loss that all ranks can compute."""
    section = {"shard_fractions": [0.3, 0.7], "checkpoint": {"async": is_async}}
    return built(make_model("llama"), make_config(stage=stage, hytrain=section, gpu_fraction=0.5))


def _goes_on(engine: Any, what: str) -> None:
    """Says what the state is, and after two steps more."""
    for _ in range(2):
        digest = hashlib.sha256()
        for name, tensors in sorted(engine.fp32_state_dict().items()):
            for kind, tensor in sorted(tensors.items()):
                digest.update(f"{name} {kind}".encode() + tensor.numpy().tobytes())
        if dist.get_rank() == 0:
            say("STATE", what, engine.global_steps, digest.hexdigest())
        _steps(engine, 2)


def _steps(engine: Any, number: int) -> None:
    for _ in range(number):
        batch = make_batch("llama", 10 * engine.global_steps + dist.get_rank())
        engine.backward(loss_of(engine(**batch)))
        engine.step()


def save(folder: Path) -> None:
    """See the module."""
    for stage, is_async in ((2, False), (3, True)):
        with _checkpointed(stage, is_async=is_async) as engine:
            _steps(engine, 3)
            for _ in range(2):  # the second replaces the first
                engine.save_checkpoint(str(folder / "apart"), tag=f"zero{stage}")
                engine.wait_for_checkpoint()
            _goes_on(engine, f"saved{stage}")
            engine.load_checkpoint(str(folder / "apart"))
            _goes_on(engine, f"loaded{stage}")


def load(folder: Path) -> None:
    """See the module."""
    for stage in (2, 3):
        with _checkpointed(stage, is_async=False) as engine:
            for where in ("apart", "merged"):
                try:
                    engine.load_checkpoint(str(folder / where), tag=f"zero{stage}")
                    _goes_on(engine, f"{where}{stage}")
                except CheckpointError as error:
                    say("REFUSED", where, stage, error)


def network(_: Path) -> None:
    """What the planner expects of collectives, and what they take: milliseconds."""
    for task in Path("/proc/self/task").iterdir():
        # Before all else that this machine does: it is a network that is measured.
        os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))
    cpu, rank = torch.device("cpu"), dist.get_rank()
    hosts = tuple(from_all_ranks(os.uname().nodename))
    twice = [collective_samples(cpu, Ranks(), dtype=torch.float32) for _ in range(2)]
    # What else the machine does can only add to it.
    samples = tuple(
        one.model_copy(update={name: min(ms, getattr(other, name)) for name, ms in one})
        for one, other in zip(*twice, strict=False)
    )
    now = datetime.now(timezone.utc)
    measured = CollectiveProfile(hosts=hosts, backend="gloo", samples=samples, measured=now)
    model = ProfiledModel.model_construct(
        dtype="fp32", layer_parameters=1 << 20, frozen_layer_parameters=0
    )
    gather, scatter, uneven, _ = profile_problem._measured_collectives(measured, model, 1.0)
    cluster: Any = SimpleNamespace(
        num_ranks=2, all_gather_ms=gather, reduce_scatter_ms=scatter, uneven_factors=uneven
    )
    collectives = ShardCollectives(None)
    for mebibytes in (3, 8):
        elements = mebibytes << 18
        for shares in ((0.5, 0.5), (0.25, 0.75)):
            sizes = [round(elements * share) for share in shares]
            flat, part = torch.zeros(elements), torch.zeros(sizes[rank])
            size, even = 4 * elements, shares == (0.5, 0.5)
            expected = Cluster.collective_seconds(cluster, size, size, even=even)
            runs = {
                "all-gather": lambda f=flat, s=sizes: collectives.all_gather(f, s),
                "reduce-scatter": lambda f=flat, s=sizes, p=part: collectives.reduce_scatter(
                    f, s, p
                ),
            }
            for (name, run), seconds in zip(runs.items(), expected, strict=True):
                took = min(collective_profile._seconds(run, cpu, Ranks()) for _ in range(2))
                say("NETWORK", name, mebibytes, shares[0], f"{1e3 * seconds:.1f} {1e3 * took:.1f}")


def restart(folder: Path) -> None:
    """Six steps with a checkpoint after each; the launcher starts the ranks a second time."""
    saved = folder / "saved"
    rank, is_first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with built(make_model("mlp"), make_config(stage=3)) as engine:
        if saved.is_dir():
            engine.load_checkpoint(saved)
        say("FIRST", engine.global_steps)
        for step in range(engine.global_steps, 6):
            if step == 3 and rank == 1 and is_first:
                os._exit(3)
            engine.backward(loss_of(engine(**make_batch("mlp", 2 * step + rank))))
            engine.step()
            engine.save_checkpoint(saved)
        say("LAST", engine.global_steps)


def main(what: str, folder: Path) -> None:
    """See the module."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    _ACTS[what](folder)
    dist.barrier()
    dist.destroy_process_group()
    say("ENDED")


_ACTS: dict[str, Any] = {
    "train": train,
    "differ": differ,
    "fail": fail,
    "firewall": firewall,
    "save": save,
    "load": load,
    "network": network,
    "restart": restart,
}

if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))  # launchers put theirs first
