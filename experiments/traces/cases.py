"""The runs that are recorded, and which fix of which run another one applies. No torch here."""

from __future__ import annotations

import dataclasses
from typing import Final

from experiments.common.records import Entry, Job, Json, Measurement, Workload

CLIPS_ALWAYS: Final = 1e-3
"""A clipping norm that every step exceeds."""

MEASUREMENT: Final = Measurement(windows=2, steps=4, warmup=4)
"""Of each variant."""

SOLVING_STEPS: Final = 80
"""After which k has settled; a fixed k is recorded after RECORD_AFTER steps."""
RECORD_AFTER: Final = 10
RECORDED: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What is changed in a run's engine after the recording, and timed beside the run as it was."""

    label: str
    fix: str
    """The name that the report has for it."""
    gpu_fraction: float | None = None
    batch_factor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A process: an engine that is recorded, then its variants in turns."""

    label: str
    model: str
    batch: int
    seq: int
    system: str = "hytrain"
    gpu_fraction: float | str = 0.0
    clip: float | None = CLIPS_ALWAYS
    direct: bool = False
    threads: int | None = None
    variants: tuple[Variant, ...] = ()

    def job(self, device: str, folder: str, model: str, batch: int, seq: int) -> Job:
        """What its process is given; a toy's model, batch and tokens take the place of its own."""
        section: Json = {} if self.threads is None else {"offload": {"cpu_threads": self.threads}}
        first = (SOLVING_STEPS if self.gpu_fraction == "solve" else RECORD_AFTER) + 1
        if self.system == "hytrain":
            section["trace"] = {"dir": folder, "steps": [first, first + RECORDED]}
        return Job(
            entry=Entry(
                label=self.label,
                system=self.system,
                clip=self.clip,
                options={
                    "gpu_fraction": self.gpu_fraction,
                    "direct": self.direct,
                    "section": section,
                    "folder": folder,
                    "first": first,
                    "variants": [dataclasses.asdict(variant) for variant in self.variants],
                },
            ),
            workload=Workload(model=model, batch=batch, seq=seq, device=device),
            measurement=MEASUREMENT,
        )


def _fractions(*fractions: float) -> tuple[Variant, ...]:
    return tuple(
        Variant(label=f"k {fraction:g}", fix="more GPU layers", gpu_fraction=fraction)
        for fraction in fractions
    )


def _batches(*factors: int) -> tuple[Variant, ...]:
    return tuple(
        Variant(label=f"batch x{factor}", fix="larger batch", batch_factor=factor)
        for factor in factors
    )


FEW_THREADS: Final = 4

_MIDDLE: Final = {"model": "llama-1b", "batch": 8, "seq": 1024}
_LARGE: Final = {"model": "llama-3b", "batch": 8, "seq": 1024}

RUNS: Final = (
    Run(label="1b k 0", **_MIDDLE, variants=(*_fractions(0.5, 1.0), *_batches(2))),
    Run(label="1b k 0, no clipping", **_MIDDLE, clip=None, direct=True),
    Run(label="1b k 0, few threads", **_MIDDLE, threads=FEW_THREADS),
    Run(
        label="0.4b k 1",
        model="llama-0.4b",
        batch=4,
        seq=512,
        gpu_fraction=1.0,
        variants=_batches(4),
    ),
    Run(
        label="0.4b k 0.5",
        model="llama-0.4b",
        batch=4,
        seq=512,
        gpu_fraction=0.5,
        variants=_fractions(1.0),
    ),
    Run(label="3b k 0", **_LARGE, variants=_fractions(0.5, 0.9)),
    Run(label="3b solved", **_LARGE, gpu_fraction="solve"),
    Run(label="3b ZeRO-2 offload", **_LARGE, system="deepspeed_zero2_offload"),
)

ACROSS: Final = (
    ("1b k 0", "no clipping", "1b k 0, no clipping"),
    ("1b k 0, few threads", "more cores", "1b k 0"),
)
"""(recorded run, fix, the run that is it with the fix): in processes of their own."""
