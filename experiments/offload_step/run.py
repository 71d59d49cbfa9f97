"""What a step costs when Adam's state lives on the host: every system in its own process.

    python experiments/offload_step/run.py --part A --out DIR
    python experiments/offload_step/run.py --part B --out DIR --device cpu --model toy

Host bandwidth differs between machines of one class and drifts on one machine, so two systems are
compared only within a part. Every part begins with the reference, forward and backward only, and
ends with it where time is left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.report import Claim, ratio, short, worst
from experiments.common.sizes import size_of

REFERENCE = "forward_backward"
CLIPS = {
    "never": 1e9,  # no gradient norm reaches it: clipping is on and never triggers
    "always": 1e-3,  # every gradient norm of an untrained model exceeds it
    "direct": None,
}
EXPECTED_SECONDS = {REFERENCE: 35.0, "all_gpu": 40.0, "hytrain": 65.0, "fsdp2": 110.0}
"""Expected seconds of one process with the 3 B model; 150 for DeepSpeed's and other systems."""
HOST_BYTES_PER_PARAMETER = 15.0
HOST_EXTRA_GIB = 3.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, budget=570.0)
    add = parser.add_argument
    add("--part", required=True, choices=PARTS)
    add("--windows", default=3, type=int)
    add("--steps", default=5, type=int, help="steps in a window")
    add("--warmup", default=4, type=int, help="steps before anything is timed")
    add("--gpu-fractions", default=(0.0, 0.3, 0.5, 0.7, 1.0), type=runner.numbers, metavar="F,...")
    add("--clip", default=1.0, type=float, help="gradient clipping norm")
    add("--threads", default=(8, 12, 16), type=runner.counts, metavar="N,...",
        help="CPU threads that DeepSpeed and FSDP2 may choose from")  # fmt: skip
    add("--checkpointing", action="store_true", help="activations are computed again in backward")
    add("--hytrain-section", default={}, type=json.loads, metavar="JSON",
        help="further keys of hytrain's config section")  # fmt: skip
    return parser.parse_args(arguments)


def _hytrain(fraction: float, variant: str = "") -> Json:
    job: Json = {"label": f"hytrain {fraction:g}", "system": "hytrain", "gpu_fraction": fraction}
    if variant:
        job |= {"label": f"{job['label']} {variant}", "clip": CLIPS[variant]}
        job |= {"variant": variant, "direct": variant == "direct"}
    return job


def _other(label: str, system: str, **more: object) -> Json:
    return {"label": label, "system": system, **more}


ZERO2 = _other("zero2_offload", "deepspeed_zero2_offload")
FSDP2 = _other("fsdp2", "fsdp2", clip=None)
TORCHAO = _other("torchao", "torchao", clip=None)
SOLVED = _other("hytrain", "hytrain", settle={"least": 20, "quiet": 8, "most": 60})
PARTS = {
    # hytrain beside the two strongest systems with everything on the host.
    "A": lambda _: [_hytrain(0.0), ZERO2, _hytrain(0.7), FSDP2],
    # hytrain over gpu_fraction, between the limit and everything on the GPU.
    "B": lambda fractions: [_other("all_gpu", "all_gpu"), *map(_hytrain, fractions)],
    # What clipping costs: never triggering against none at all, and always triggering.
    "C": lambda _: [_hytrain(f, v) for f in (0.7, 0.0) for v in ("direct", "never", "always")],
    # The other systems.
    "D": lambda _: [
        _other("twin_flow", "deepspeed_twin_flow"),
        _other("zero3_offload", "deepspeed_zero3_offload"),
        _other("fsdp2 keeping weights", "fsdp2", clip=None, reshard_after_forward=False),
        _hytrain(0.0),
    ],
    # torchao's optimizer, which keeps no fp32 weights.
    "E": lambda _: [_hytrain(0.7), TORCHAO, _hytrain(0.0)],
    # DeepSpeed's systems that are newer than ZeRO-2 offload.
    "G": lambda _: [
        SOLVED,
        _other("superoffload", "deepspeed_superoffload"),
        _other("superoffload not clipped", "deepspeed_superoffload", clip=None),
        _other("zenflow", "deepspeed_zenflow", steps=8, warmup=8),
        _hytrain(0.0),
    ],
    # hytrain with default settings beside all others: the README's figures.
    "F": lambda _: [SOLVED, _other("all_gpu", "all_gpu"), ZERO2, FSDP2, TORCHAO, _hytrain(0.0)],
}


def jobs(options: argparse.Namespace) -> list[Json]:
    """The part's jobs, the reference at both ends."""
    reference = _other(REFERENCE, REFERENCE, clip=None)
    some = PARTS[options.part](options.gpu_fractions)
    return [
        {
            "worker": "experiments.common.bench",
            "clip": options.clip,
            "section": options.hytrain_section,
            "checkpointing": options.checkpointing,
            **({} if one["system"] == "hytrain" else {"threads": list(options.threads)}),
            **{"windows": options.windows, "steps": options.steps, "warmup": options.warmup},
            "seconds": EXPECTED_SECONDS.get(one["system"], 150.0),
            **runner.workload(options),
            **one,
        }
        for one in [reference, *some, {**reference, "label": f"{REFERENCE} again"}]
    ]


def _clipping(job: Json) -> str:
    if "variant" in job:
        words = {"never": "on, never active", "always": "active at every step", "direct": "none"}
        return words[job["variant"]]
    if job["system"] == REFERENCE:
        return "no update"
    return "none" if job["clip"] is None else f"{job['clip']:g}"


def _share(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.0%}" if values else "-"


def rows(result: Json) -> list[Json]:
    """A row for each system; the reference's is the median of its two runs."""
    found: dict[str, list[Json]] = {}
    for record in result["jobs"]:
        found.setdefault(record["label"].removesuffix(" again"), []).append(record)
    timed = {
        label: [r["ranks"][0] for r in some if r["status"] == records.OK]
        for label, some in found.items()
    }
    limit = _median(timed[REFERENCE])
    table: list[Json] = []
    for label, some in found.items():
        job, results = some[0]["job"], timed[label]
        row: Json = {"system": label, "clipping": _clipping(job)}
        table.append(row)
        if not results:
            row |= report.failure(some[0])
            continue
        seconds = _median(results)
        seen = [each for one in results for each in one["observations"]]
        # If the CPU updated nothing, there was nothing to hide.
        hidden = [r["hidden_share"] for r in seen if r["update_seconds"] > 0.0]
        told = [r["clip_coefficient"] for r in seen if r.get("clip_coefficient") is not None]
        clipped = [float(c < 1.0) for c in told]
        host = max(one["host_bytes"] for one in results)
        fraction = results[0].get("gpu_fraction") or 0.0
        on_cpu = size_of(job["model"]).num_cpu_parameters(fraction)
        row |= {
            "runs": len(results),
            "gpu_layers": results[0].get("gpu_layers"),
            "step_s": short(seconds, 5),
            "window_s": [short(s, 5) for one in results for s in one["window_seconds"]],
            "over_forward_backward": short(ratio(seconds, limit), 5),
            "tflops": short(statistics.median(one["tflops"] for one in results)),
            "peak_gpu_gib": report.peak_gib(results),
            "host_gib": report.gib(host),
            "host_bytes_per_cpu_parameter": short((host - HOST_EXTRA_GIB * records.GIB) / on_cpu)
            if on_cpu
            else None,
            "cpu_worker_busy": _share([o["busy_share"] for o in results if "busy_share" in o]),
            **{"update_hidden": _share(hidden), "steps_clipped": _share(clipped)},
            "threads": [o["threads"] for o in results if o["threads"]] or None,
            "joules_a_step": short(
                sum(results[0][k] or 0.0 for k in ("gpu_joules", "cpu_joules")) or None
            ),
            "losses": [short(results[0]["losses"][at]) for at in (0, -1)],
        }
    return table


def _median(results: Sequence[Json]) -> float | None:
    return statistics.median(one["step_seconds"] for one in results) if results else None


def claims(rows: Sequence[Json]) -> list[Claim]:
    """Each claim, decided by the worst part that measured it: ratios are taken within a part."""
    parts: dict[tuple[str, str], dict[str, Json]] = {}
    for row in rows:
        part = parts.setdefault((str(row.get("run", "")), str(row.get("part", ""))), {})
        part[row["system"]] = row

    def over(
        above: str, below: str, key: str = "step_s", *, at_least: bool = False
    ) -> float | None:
        ratios = (ratio(p[above].get(key), p[below].get(key)) for p in parts.values()
                  if above in p and below in p)  # fmt: skip
        return worst(ratios, at_least=at_least)

    def of(system: str, key: str) -> float | None:
        return worst(p[system].get(key) for p in parts.values() if system in p)

    found = [
        Claim(f"gpu_fraction {fraction}: {name}'s time / hytrain's",
              over(label, f"hytrain {fraction}", at_least=True), limit, True,
              over(label, REFERENCE, at_least=True))
        for fraction, label, name, limit in (
            ("0", "zero2_offload", "ZeRO-2 offload", 2.0),
            ("0", "fsdp2", "FSDP2", 1.75),
            ("0.7", "zero2_offload", "ZeRO-2 offload", 4.5),
        )
    ]  # fmt: skip
    found.append(Claim("gpu_fraction 0.7: time / forward and backward only",
                       over("hytrain 0.7", REFERENCE), 1.12))  # fmt: skip
    for fraction, limit in (("0.7", 1.03), ("0", 1.08)):
        for variant, most in (("never", limit), ("always", None)):
            text = (
                f"gpu_fraction {fraction}: time with clipping that {variant} acts / direct commit"
            )
            name = f"hytrain {fraction}"
            found.append(Claim(text, over(f"{name} {variant}", f"{name} direct"), most))
        text = f"gpu_fraction {fraction}: host bytes a parameter on the CPU side, beyond 3 GiB"
        value = of(f"hytrain {fraction}", "host_bytes_per_cpu_parameter")
        found.append(Claim(text, value, HOST_BYTES_PER_PARAMETER))
    text = "gpu_fraction 0: peak GPU memory / ZeRO-2 offload's"
    return [*found, Claim(text, over("hytrain 0", "zero2_offload", "peak_gpu_gib"), 1.0)]


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows, claims)))
