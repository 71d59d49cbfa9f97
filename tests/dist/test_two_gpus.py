"""Two GPUs over NCCL: equal and unequal shards, ZeRO-3, a checkpoint that changes between them.

Runs in processes of its own, because the ranks of the other tests in this folder use gloo.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from support.ports import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]

SHARDS = ((0.5, 0.5), (0.7, 0.3))


def enter_rank(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from deepspeed import comm

    torch.cuda.set_device(rank)
    comm.init_distributed("nccl", verbose=False)


def between_on_rank(rank: int, port: int) -> None:
    enter_rank(rank, port)
    import test_between as cases

    for stage in (2, 3):
        for way in ("grad", "frozen"):
            cases.input_gradients(way, 2, stage)
        cases.numbers_of_forwards(stage)
        cases.second_order(stage, is_normed=False)
        cases.late_hooks(stage)
        cases.tiles(stage, ((3, 3), (3, 3), (2, 2), (3, 3)))


def test_between_steps() -> None:
    multiprocessing.spawn(between_on_rank, args=(free_port(),), nprocs=2)


def parity_on_rank(rank: int, port: int) -> None:
    enter_rank(rank, port)
    from support.comparisons import assert_bitwise_serial, assert_clipping, assert_close_to_torch
    from support.parity import Case, expected_outcomes, gathered, torch_states, train

    cases = [
        Case("llama", 0.0, "sometimes", 1, "bf16", 2, SHARDS[0]),
        Case("llama", 0.3, "always", 4, "bf16", 2, SHARDS[1]),
        Case("gpt2", 0.3, "sometimes", 4, "fp32", 1, SHARDS[1]),
        Case("vit", 1.0, "never", 1, "bf16", 1, SHARDS[0]),
        Case("llama-100m", 0.5, "sometimes", 1, "bf16", 2, SHARDS[0], steps=20, observe=(10,)),
        Case("llama-100m", 0.5, "sometimes", 1, "bf16", 2, SHARDS[1], steps=20, observe=(10,)),
    ]
    for case in cases:
        run = train(case)
        found = [outcome for outcome in run.outcomes if outcome is not None]
        assert_clipping(run, found)
        for ours, theirs in zip(found, expected_outcomes(run), strict=True):
            assert ours.norm == pytest.approx(theirs.norm, rel=1e-12)
        assert_bitwise_serial(run, found, placements="cpu")
        if case.model != "llama-100m":  # gigabytes of gradients are not worth the transfer
            whole = gathered(run)
            assert_close_to_torch(whole, torch_states(whole))
        for copies in run.copies.values():
            for flat in copies:
                other: list[Any] = [None, None]
                dist.all_gather_object(other, flat)
                assert torch.equal(other[0], other[1]), "the ranks' weights differ"
        if rank == 0:
            print(f"{case}: passed", flush=True)
    dist.destroy_process_group()


def muon_on_rank(rank: int, port: int) -> None:
    """Whole matrices are dealt to the ranks: what NCCL reduces and gathers has unequal parts."""
    enter_rank(rank, port)
    from support.muon import MuonCase, check_muon

    steps: dict[str, Any] = {"steps": 10, "observe": (1, 6)}
    for case in (
        MuonCase("llama", 0.0, "sometimes", stage=2, fractions=SHARDS[0], **steps),
        MuonCase("gpt2", 0.3, "always", 4, stage=3, fractions=SHARDS[1], **steps),
        MuonCase("llama", 0.5, "off", stage=3, fractions=SHARDS[0], offload_param=True, **steps),
    ):
        check_muon(case)
        if rank == 0:
            print(f"{case}: passed", flush=True)
    dist.destroy_process_group()


def resume_on_rank(rank: int, port: int, folder: str) -> None:
    enter_rank(rank, port)
    from support.engines import built, device, make_config
    from support.models import loss_of, make_batch, make_model

    def step(engine: Any, number: int) -> None:
        loss = loss_of(engine(**make_batch("llama", 2 * number + rank, device())))
        engine.backward(loss)
        engine.step()

    def config(fractions: tuple[float, ...], gpu_fraction: float) -> dict[str, Any]:
        section = {"shard_fractions": list(fractions)}
        return make_config(gpu_fraction=gpu_fraction, hytrain=section)

    with built(make_model("llama"), config(SHARDS[1], 0.3)) as engine:
        for number in range(5):
            step(engine, number)
        saved = engine.fp32_state_dict()
        engine.save_checkpoint(folder)
    with built(make_model("llama", seed=1), config(SHARDS[0], 0.7)) as engine:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        loaded = engine.fp32_state_dict()
        assert set(loaded) == set(saved)
        for name, states in saved.items():
            for kind, tensor in states.items():
                assert torch.equal(tensor, loaded[name][kind]), f"{kind} of {name}"
        step(engine, 5)
    assert bool(saved) == (rank == 0)
    dist.destroy_process_group()


def sharded_on_rank(rank: int, port: int) -> None:
    """Two summands have one sum in any order: what NCCL adds up is the same bits too."""
    enter_rank(rank, port)
    from support.sharded import assert_same, deterministic, train

    with deterministic():
        for gpu_fraction in (0.0, 0.5):
            # Where ranks wait for each other changes no bit either.
            theirs = train(2, gpu_fraction, rank=rank, wait_in_stream=False)
            for streamed, fractions in ((False, None), (False, SHARDS[1]), (True, SHARDS[1])):
                for delays in (None, 1):
                    ours = train(
                        3,
                        gpu_fraction,
                        streamed=streamed,
                        delays=delays,
                        shard_fractions=fractions,
                        rank=rank,
                    )
                    assert_same(ours, theirs)
                    assert bool(ours[1]) == (rank == 0)
            if rank == 0:
                print(f"gpu_fraction {gpu_fraction}: passed", flush=True)
    dist.destroy_process_group()


def frozen_on_rank(rank: int, port: int) -> None:
    """Weights that are not trained are sharded and streamed as the others are."""
    enter_rank(rank, port)
    from support.sharded import assert_same, deterministic, train

    with deterministic():
        for frozen in ("lora", "last"):
            theirs = train(2, 0.5, rank=rank, frozen=frozen)
            for streamed, fractions, delays in ((False, SHARDS[1], 1), (True, None, None)):
                ours = train(
                    3,
                    0.5,
                    streamed=streamed,
                    delays=delays,
                    shard_fractions=fractions,
                    rank=rank,
                    frozen=frozen,
                )
                assert_same(ours, theirs)
            if rank == 0:
                print(f"{frozen}: passed", flush=True)
    dist.destroy_process_group()


def gate_on_rank(rank: int, port: int) -> None:
    """No rank is in NCCL's kernel before the other one has come to it."""
    enter_rank(rank, port)
    from hytrain.comm.collectives import ShardCollectives

    device = torch.device("cuda", rank)
    collectives = ShardCollectives(None)
    collectives.start_gate(device)
    assert collectives._gate is not None
    flat = torch.ones(1 << 24, device=device)
    collectives.all_reduce(flat)  # makes the communicator
    hosts = dist.new_group(backend="gloo")
    seconds: list[float] = []
    for number in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.cuda.synchronize()
            dist.barrier(hosts)  # starting a profiler takes one rank longer than another
            begin.record()
            if rank == 1:
                torch.cuda._sleep(400_000_000)  # clock cycles: 0.2 s or more
            collectives.all_reduce(flat)
            end.record()
            torch.cuda.synchronize()
        if number == 0:  # the first one sets the profiler up
            continue
        kernels = [e for e in profile.events() if "nccl" in e.name.lower()]
        seconds.append(sum(e.device_time_total for e in kernels) / 1e6)
        assert begin.elapsed_time(end) > 100.0, "the ranks were not apart: nothing is shown"
        assert kernels
    assert float(flat[0]) == 2.0**7
    print(f"rank {rank}: NCCL's kernels took {[f'{1e3 * s:.2f} ms' for s in seconds]}", flush=True)
    assert max(seconds) < 0.05
    collectives.close()
    dist.destroy_process_group()


def memory_on_rank(rank: int, port: int) -> None:
    """What one stream has freed the allocator gives to no other: nothing large may be another's."""
    enter_rank(rank, port)
    from support.engines import built, make_config
    from support.sharded import llama

    tokens = torch.randint(8192, (4, 512), generator=torch.Generator().manual_seed(rank)).cuda()
    with built(llama(), make_config(gpu_fraction=0.5)) as engine:
        for _ in range(4):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.synchronize()
        streams = engine.optimizer.pipeline.streams
        shards = sum(2 * layer.shard_size for layer in engine.optimizer.pipeline.layers)
        others = {
            name: getattr(streams, name).cuda_stream
            for name in ("communication", "update", "to_host", "to_device")
        }
        for name, stream in others.items():
            segments = [s for s in torch.cuda.memory_snapshot() if s["stream"] == stream]
            cached = sum(segment["total_size"] for segment in segments)
            assert cached < 0.25 * shards, f"{name}: {cached} bytes, shards have {shards}"
    dist.destroy_process_group()


def test_streams_share_the_memory_of_gradients() -> None:
    multiprocessing.spawn(memory_on_rank, args=(free_port(),), nprocs=2)


def test_ranks_wait_in_a_stream() -> None:
    multiprocessing.spawn(gate_on_rank, args=(free_port(),), nprocs=2)


def test_zero3_is_zero2_on_two_gpus() -> None:
    multiprocessing.spawn(sharded_on_rank, args=(free_port(),), nprocs=2)


def test_frozen_weights_on_two_gpus() -> None:
    multiprocessing.spawn(frozen_on_rank, args=(free_port(),), nprocs=2)


def test_parity_on_two_gpus() -> None:
    multiprocessing.spawn(parity_on_rank, args=(free_port(),), nprocs=2)


def test_muon_on_two_gpus() -> None:
    multiprocessing.spawn(muon_on_rank, args=(free_port(),), nprocs=2)


def test_a_checkpoint_moves_between_shardings(tmp_path: Path) -> None:
    multiprocessing.spawn(resume_on_rank, args=(free_port(), str(tmp_path)), nprocs=2)
