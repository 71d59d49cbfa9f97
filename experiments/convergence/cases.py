"""The trainings that are compared, with everything that differs between them."""

from __future__ import annotations

import dataclasses

from experiments.common.records import Json

SEEDS = (0, 1, 2)
SYSTEM_SEEDS = (0, 1)
"""The seeds with which systems are compared."""
MOMENTS = ("fp32", "bf16", "8bit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    kind: str
    """What it is compared as; cases of a kind differ in their seed."""
    seed: int
    """Seed of the weights and of the data's order."""
    engine: str
    """The --engine of train_lm."""
    moments: str = "fp32"
    optimizer: str = "AdamW"
    """AdamW or Muon."""
    attention: str = "sdpa"
    offload: bool = True
    """For DeepSpeed: whether state is in host memory; else torch's AdamW updates it on the GPU."""
    enough: float = 1.0
    """The training is ended after this share of the schedule's steps."""
    cores: int = 1
    """Cores of its own, so that no other training takes turns with its threads."""

    @property
    def label(self) -> str:
        """The case's unique name."""
        return f"{self.kind}, seed {self.seed}"


HYTRAIN = "hytrain"
ZERO2 = "ZeRO-2 offload"
ZERO2_GPU = "ZeRO-2 on the GPU"
ZERO2_EAGER = "ZeRO-2 on the GPU, other attention"
ADAMW = "torch AdamW"
HYTRAIN_MUON = "hytrain, Muon"
TORCH_MUON = "torch Muon"
ZERO2_SHARE = 0.75
"""The share of the schedule that trainings with ZeRO-2 or Muon run: 3,000 of 4,000 steps."""
ZERO2_CORES = 10
"""DeepSpeed's CPU Adam updates all 97 M parameters after every backward pass, and its threads wait
for each other: if other processes use the same cores, it takes several times as long."""
SCHEDULE_STEPS = 4000
LEARNING_RATE = 6e-4
MUON_LEARNING_RATE = 0.02
"""For torch's and DeepSpeed's Muon alike: a matrix's step is this times an orthogonal matrix."""
FIXED_FRACTION = 0.75
"""The fixed k of the last seed: the CPU's and the GPU's kernel both update layers throughout."""
HYTRAIN_CORES = 2
"""One core launches, the other updates."""


def hytrain_kind(moments: str) -> str:
    """The kind of hytrain's trainings with these moments."""
    return HYTRAIN if moments == "fp32" else f"{HYTRAIN}, {moments} moments"


def all_cases() -> list[Case]:
    """All cases in their starting order: systems seed by seed, then other kinds seed by seed."""
    cases = [case for seed in SYSTEM_SEEDS for case in _systems(seed)]
    for seed in SEEDS:
        cases += [
            Case(
                kind=hytrain_kind(moments),
                seed=seed,
                engine="hytrain",
                moments=moments,
                cores=HYTRAIN_CORES,
            )
            for moments in MOMENTS
            if moments != "fp32" or seed not in SYSTEM_SEEDS
        ]
        cases.append(Case(kind=ADAMW, seed=seed, engine="torch"))
    for seed in SYSTEM_SEEDS:
        muon = {"seed": seed, "optimizer": "Muon", "enough": ZERO2_SHARE}
        cases.append(Case(kind=HYTRAIN_MUON, engine="hytrain", cores=HYTRAIN_CORES, **muon))
        cases.append(Case(kind=TORCH_MUON, engine="torch", **muon))
    return cases


def _systems(seed: int) -> list[Case]:
    zero2 = {"seed": seed, "engine": "deepspeed", "enough": ZERO2_SHARE}
    return [
        Case(kind=ZERO2, cores=ZERO2_CORES, **zero2),
        Case(kind=HYTRAIN, seed=seed, engine="hytrain", cores=HYTRAIN_CORES),
        Case(kind=ZERO2_GPU, offload=False, **zero2),
        Case(kind=ZERO2_EAGER, offload=False, attention="eager", **zero2),
    ]


def training_config(
    micro_batch: int, *, steps: int, warmup: int, lr: float, beta2: float, on_gpu: bool
) -> Json:
    """ZeRO-2 with the optimizer on the host, AdamW, clipping at 1, a cosine of `steps` steps."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "steps_per_print": 10**9,
        "bf16": {"enabled": on_gpu},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": on_gpu},
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": lr, "betas": [0.9, beta2], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": warmup,
                "warmup_min_ratio": 0.0,
                "warmup_type": "linear",
                "cos_min_ratio": 0.1,
            },
        },
    }


def ds_config(
    case: Case,
    *,
    micro_batch: int,
    cpu_threads: int,
    on_gpu: bool,
    schedule_steps: int = SCHEDULE_STEPS,
    lr: float = LEARNING_RATE,
) -> Json:
    """The DeepSpeed JSON of a case: DeepSpeed's own betas, clipping at 1.

    A second moment with such a long memory (0.999) would stop moving if it were rounded to nearest
    (arXiv 2603.16731): the harder case for moments in fewer bytes.
    """
    config = training_config(
        micro_batch,
        steps=schedule_steps,
        warmup=max(1, schedule_steps // 20),
        lr=lr,
        beta2=0.999,
        on_gpu=on_gpu,
    )
    if case.optimizer == "Muon":
        adam = config["optimizer"]["params"]
        lrs = {"muon_lr": MUON_LEARNING_RATE, "adam_lr": adam.pop("lr")}
        config["optimizer"] = {"type": "Muon", "params": {**adam, **lrs, "momentum": 0.95}}
    if case.engine == "deepspeed" and not case.offload:
        del config["zero_optimization"]["offload_optimizer"]
        config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's would have to be compiled
    if case.engine == "hytrain":
        # A solved k would put all of Muon's state on the GPU: a quarter is to be streamed.
        is_fixed = case.seed == SEEDS[-1] or case.optimizer == "Muon" or not on_gpu
        config["hytrain"] = {
            "gpu_fraction": FIXED_FRACTION if is_fixed else "solve",
            "moments": case.moments,
            "moments_seed": case.seed,
            "offload": {"cpu_threads": cpu_threads},
        }
    return config
