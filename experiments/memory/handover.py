"""Weights that are handed over (engine.iterate_weights), beside plain copies of as many bytes.

    torchrun --nproc-per-node 2 -m experiments.memory.handover --model llama-7b --stage 3

Rank 0 prints, for weights on the device and on the host, the bytes that every rank takes and their
rate by the median time, then the rates of copies and all-gathers, which bound it. On the device the
taker copies each tensor into memory of its own, as an inference engine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import hytrain
from experiments.common.copies import copy_rates
from experiments.common.model import build_batches, build_host_model, build_model
from experiments.common.timing import synchronize


def _seconds(device: str, action: Callable[[], object], rounds: int) -> float:
    """The median seconds of some rounds, after one that does not count."""
    times: list[float] = []
    for _ in range(rounds + 1):
        synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _take(named: Iterable[tuple[str, torch.Tensor]], own: torch.Tensor) -> None:
    for _name, tensor in named:
        own[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1), non_blocking=True)


def _copy(source: torch.Tensor, own: torch.Tensor, num_bytes: int) -> None:
    for begin in range(0, num_bytes, source.nbytes):
        some = min(source.nbytes, num_bytes - begin)
        own[:some].copy_(source[:some], non_blocking=True)


def _gather(all_gather: Any, part: torch.Tensor, whole: torch.Tensor, num_bytes: int) -> None:
    for _ in range(0, num_bytes, whole.nbytes):
        all_gather(whole, part)


def _engine(options: argparse.Namespace) -> Any:
    job = {"model": options.model, "seq": 16, "batch": 1, "device": options.device}
    model = (build_host_model if options.stage == 3 else build_model)(job, torch.bfloat16)
    stage: dict[str, Any] = {"stage": options.stage, "offload_optimizer": {"device": "cpu"}}
    if options.offload_param:
        stage["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": stage,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "gradient_clipping": 1.0,
        "hytrain": {"gpu_fraction": options.k, "moments": options.moments},
    }
    engine, *_ = hytrain.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(**build_batches(job)[0]).loss)
    engine.step()
    return engine


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="toy", help="of experiments/common/sizes.py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--offload-param", action="store_true")
    parser.add_argument("--k", type=float, default=0.0, help="hytrain.gpu_fraction")
    parser.add_argument("--moments", default="fp32")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(one, MASTER_PORT=os.environ.get("MASTER_PORT", "29511"))
    deepspeed.init_distributed("nccl" if options.device == "cuda" else "gloo")
    engine = _engine(options)
    device, bucket = engine.device, options.bucket_mib << 20
    num_bytes = sum(tensor.nbytes for _name, tensor in engine.iterate_weights())
    largest = max(tensor.nbytes for _name, tensor in engine.iterate_weights())
    own = torch.empty(largest, dtype=torch.uint8, device=device)
    source = torch.empty(largest, dtype=torch.uint8, device=device)
    whole = torch.empty(largest // 2**10 * 2**10 or largest, dtype=torch.uint8, device=device)
    ranks = dist.get_world_size()
    part = whole[: whole.numel() // ranks].clone()
    whole = whole[: part.numel() * ranks]
    rows = {
        "to the device": lambda: _take(engine.iterate_weights(bucket_bytes=bucket), own),
        "a copy on the device": lambda: _copy(source, own, num_bytes),
        "to the host": lambda: [
            None for _ in engine.iterate_weights(bucket_bytes=bucket, on_host=True)
        ],
    }
    if ranks > 1:  # the name is new in torch 2.13, and the old one warns there
        names = vars(dist)
        all_gather = names.get("all_gather_single") or names["all_gather_into_tensor"]
        rows["an all-gather"] = lambda: _gather(all_gather, part, whole, num_bytes)
    rates = {name: num_bytes / _seconds(options.device, row, options.rounds)
             for name, row in rows.items()}  # fmt: skip
    if device.type == "cuda":
        words = {"offload": "a pinned copy to the host", "reload": "a pinned copy to the device"}
        rates |= {words[name]: rate for name, rate in copy_rates(1 << 30, device).items()}
    else:
        seconds = _seconds("cpu", lambda: _copy(source, own.clone(), num_bytes), options.rounds)
        rates["a copy on the host"] = num_bytes / seconds
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        shards = ", offload_param" if options.offload_param else ""
        setup = f"{where}, {ranks} ranks, ZeRO-{options.stage}{shards}, {options.model}"
        print(f"{setup}: {num_bytes / 1e9:.4f} GB, buckets of {options.bucket_mib} MiB")
        for name, rate in rates.items():
            print(f"{name:28} {rate / 1e9:9.2f} GB/s")
    engine.destroy()


if __name__ == "__main__":
    main()
