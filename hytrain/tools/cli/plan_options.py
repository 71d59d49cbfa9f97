"""What `hytrain plan` may choose: from its flags, and from the DeepSpeed JSON of the training."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from hytrain.errors import ConfigError, UnsupportedError, unquoted
from hytrain.formats.dtypes import ITEMSIZE
from hytrain.formats.file_kind import other_kind
from hytrain.formats.moment_kinds import FP32, MasterName, MomentsName
from hytrain.formats.policies import ACCUMULATION_MODES, ACTIVATIONS, Accumulation
from hytrain.tools.cli.arguments import flag
from hytrain.tools.stdout import importing_deepspeed

_GIB = 1024**3
STAGES = (1, 2, 3)
_DEFAULT_STAGE = 2


def read_deepspeed(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The configuration of ``--deepspeed-config``; empty without one.

    Raises:
        OSError: there is no such file.
        ConfigError: it cannot be read as training reads it.
    """
    path = arguments.deepspeed_config
    if path is None:
        return {}
    if other := other_kind(path, "DeepSpeed configuration"):
        raise ConfigError(f"{other}: give a DeepSpeed JSON")
    path.stat()  # what is not a path, DeepSpeed takes for base64
    with importing_deepspeed():
        # Imported here: `hytrain --help` should not wait for torch.
        from hytrain.config import HyTrainConfig
        from hytrain.engine.config_checks import misspelt_keys
        from hytrain.engine.deepspeed_internals import load_config

        config = load_config(str(path))
        HyTrainConfig.from_deepspeed(config)
        for key, meant in misspelt_keys(config):
            if meant == "zero_optimization":
                raise ConfigError(f'{path}: "{key}" is no key of DeepSpeed: write "{meant}"')
    zero: Any = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f'{path}: "zero_optimization" must be a JSON object')
    if str((config.get("optimizer") or {}).get("type")).lower() == "muon":
        raise UnsupportedError(
            f'{path}: "optimizer.type" is "Muon", and plans are made for AdamW alone. `hytrain '
            "explain` with this file and --model says what fits"
        )
    return config


def plan_options(
    arguments: argparse.Namespace, config: Mapping[str, Any], profile: Any, *, is_estimated: bool
) -> Any:
    """The planner's options; ``is_estimated``: whether the profile is from data sheets.

    Raises:
        ConfigError: a flag is out of range, or contradicts the configuration or another one.
    """
    from hytrain.placement.memory import gpu_reserve, host_reserve
    from hytrain.tools.planner.device_sheets import estimated_interconnect
    from hytrain.tools.planner.profile_problem import PlanOptions

    interconnect = None if arguments.interconnect is None else arguments.interconnect * 1e9
    if interconnect is None and is_estimated:
        interconnect = estimated_interconnect(profile)

    def given(gib: float | None) -> int | None:
        return None if gib is None else int(gib * _GIB)

    kept = given(arguments.host_memory_reserve)
    for host in profile.hosts:
        if kept is not None and kept > host.memory_bytes:
            raise ConfigError(
                f"--host-memory-reserve {arguments.host_memory_reserve:g}: {host.host} has "
                f"{host.memory_bytes / _GIB:.2f} GiB: choose a smaller reserve"
            )
    stage, offload_param = zero_keys(arguments, config)
    mode = accumulation_of(arguments, config)
    _check_moments(arguments, config, profile)
    return PlanOptions(
        batch=arguments.batch,
        gpu_reserve=lambda total: gpu_reserve(given(arguments.gpu_memory_reserve), total),
        host_reserve=lambda total: host_reserve(kept, total),
        stage=stage,
        offload_param=offload_param,
        live_parameters=_live_parameters(config),
        activations=ACTIVATIONS if mode is None else ACCUMULATION_MODES[mode],
        memory_fraction=arguments.device_memory_fraction,
        allow_idle=not arguments.no_idle,
        interconnect=interconnect,
        clipped_share=1.0 if arguments.clipped_share is None else arguments.clipped_share,
        master=_master(arguments, config, profile),
        **_shared_sequences(arguments, config, profile),
    )


def _shared_sequences(
    arguments: argparse.Namespace, config: Mapping[str, Any], profile: Any
) -> dict[str, Any]:
    """Options of a plan for ranks that share each sequence; none if they do not.

    Raises:
        ConfigError: a plan file is asked for, the GPUs differ, or ``--batch`` cannot be divided.
    """
    from hytrain.engine.sequence_groups import KEY, SHARED_DTYPE, mesh_of

    labels = [label for host in profile.hosts for label in host.ranks]
    groups, degree = mesh_of(config, None, None, len(labels)) or (len(labels), 1)
    if degree == 1:
        return {}
    wrong = ""
    if arguments.out is not None:
        wrong = f"training takes no plan beside it: leave --out {arguments.out} out"
    elif len(set(labels)) > 1:
        wrong = (
            "ranks that share a sequence have equal parts of it, but the GPUs are not alike ("
            f"{'; '.join(dict.fromkeys(labels))}): plan for GPUs of one kind, or remove the key"
        )
    elif arguments.batch % groups:
        wrong = f"--batch {arguments.batch}: give a multiple of {groups}, the sequences at a time"
    if wrong:
        raise ConfigError(f'{arguments.deepspeed_config}: "{KEY}" is {degree}: {wrong}')
    itemsize, exchanged = ITEMSIZE[profile.model.dtype], 4.0 * profile.model.boundary_bytes
    if arguments.model is not None:
        from hytrain.tools.profiler.language_model import read_config

        text = read_config(arguments.model).get_text_config()
        if heads := getattr(text, "num_attention_heads", 0):
            width = getattr(text, "head_dim", None) or text.hidden_size // heads
            # Every rank gets a key-value head: fewer are repeated.
            pairs = max(degree, getattr(text, "num_key_value_heads", None) or heads)
            exchanged = 2.0 * (heads + pairs) * width * itemsize * profile.model.seq_len
    reduced = (4 if config.get(SHARED_DTYPE) in (None, "fp32") else 2) / itemsize
    return {"sequence_ranks": degree, "exchanged_bytes": exchanged, "reduced": reduced}


def assumed_words(
    arguments: argparse.Namespace,
    config: Mapping[str, Any],
    profile: Any,
    options: Any,
    *,
    is_refused: bool = False,
) -> str:
    """What a plan from data sheets assumes because it was not given, with the options for it."""
    host, model = profile.hosts[0], profile.model
    words = {
        "seq_len": f"{model.seq_len:,} tokens a sample",
        "dtype": f"{model.dtype} weights",
        "moments": "" if config else f"{model.moments} moments",
        "stage": "" if "zero_optimization" in config else f"ZeRO-{options.stage}",
        "clipped_share": "every step clipped",
        "cores": f"{host.cores} cores a host",
        "host_memory": f"{host.memory_bytes / _GIB:g} GiB of host memory",
        "host_bandwidth": f"{host.bandwidth / 1e9:g} GB/s of host memory bandwidth",
        "interconnect": f"{options.interconnect / 1e9:.3g} GB/s between ranks",
        "accumulation": 'micro-batches as in the configuration or, with "auto", Trainer',
    }
    if sum(len(one.ranks) for one in profile.hosts) == 1:
        words["interconnect"] = ""
    if accumulation_of(arguments, config) is None:  # a plan has chosen, and says so
        words["accumulation"] = "micro-batches in either order" if is_refused else ""
    if is_refused and not config and model.dtype == "bf16":
        words["master"] = f"{options.master} master weights"
    own = [name for name, text in words.items() if text and getattr(arguments, name) is None]
    return f"Assumed: {', '.join(f'{words[name]} ({flag(name)})' for name in own)}." if own else ""


def zero_keys(arguments: argparse.Namespace, config: Mapping[str, Any]) -> tuple[Any, bool]:
    """ZeRO's stage, and whether weights are in host memory: the file's, which flags may repeat.

    Training compares both with the plan, so a flag that contradicts the file to train with would
    make a plan that training refuses.

    Raises:
        ConfigError: a flag contradicts the file, or hytrain does not support the file's values.
    """
    zero = config.get("zero_optimization")
    if zero is None:
        return arguments.stage or _DEFAULT_STAGE, arguments.offload_param is not None
    path = arguments.deepspeed_config
    stage = zero.get("stage", 0)  # DeepSpeed's default
    if type(stage) is not int or stage not in STAGES:
        raise ConfigError(
            f'{path}: "zero_optimization.stage" is {stage!r}: hytrain trains with 1, 2 or 3'
            f"{unquoted(stage)}"
        )
    if arguments.stage not in (None, stage):
        raise ConfigError(
            f'--stage {arguments.stage}, but {path} has "zero_optimization.stage" {stage}: leave '
            "one of both out, or make them equal"
        )
    section: Any = zero.get("offload_param") or {}
    device = section.get("device") if isinstance(section, dict) else section
    if device not in (None, "none", "cpu"):
        raise ConfigError(
            f'{path}: "zero_optimization.offload_param.device" is {device!r}: hytrain keeps '
            'weights on the GPU or in host memory, "cpu"'
        )
    if arguments.offload_param is not None and device != arguments.offload_param:
        raise ConfigError(
            f"--offload-param {arguments.offload_param}, but {path} has no "
            '"zero_optimization.offload_param": leave the flag out, or set {"device": "cpu"} there'
        )
    return stage, device == "cpu"


def accumulation_of(
    arguments: argparse.Namespace, config: Mapping[str, Any]
) -> Accumulation | None:
    """How micro-batches are computed: as given, or as Trainer does, which fills in "auto" values.

    None if the plan may choose.
    """
    section: Any = config.get("hytrain") or {}
    own = "micro_batch_major" if "auto" in config.values() else None
    return arguments.accumulation or section.get("accumulation", own)


def moments_of(config: Mapping[str, Any]) -> MomentsName:
    """How a configuration to train with keeps moments."""
    section: Any = config.get("hytrain") or {}
    return section.get("moments", FP32)


def _master(arguments: argparse.Namespace, config: Mapping[str, Any], profile: Any) -> MasterName:
    """How master weights are kept.

    Raises:
        ConfigError: the flag and the configuration differ, or split ones are not possible.
    """
    section: Any = config.get("hytrain") or {}
    master, path = section.get("master", FP32), arguments.deepspeed_config
    if config and arguments.master not in (None, master):
        raise ConfigError(
            f'--master {arguments.master}, but {path} has "hytrain.master" "{master}": leave the '
            "flag out, or make them equal"
        )
    where = f'{path}: "hytrain.master" is "{master}"' if config else f"--master {arguments.master}"
    master, wrong = arguments.master or master, ""
    if master != FP32 and arguments.out is not None:
        wrong = f"training takes no plan beside it: leave --out {arguments.out} out"
    elif master != FP32 and profile.model.dtype != "bf16":
        wrong = f"it is for bf16 weights, and the plan is for {profile.model.dtype}"
    if wrong:
        raise ConfigError(f"{where}: {wrong}")
    return master


def _check_moments(arguments: argparse.Namespace, config: Mapping[str, Any], profile: Any) -> None:
    """Refuses a configuration whose moments are not those that were measured or asked for."""
    if not config:
        return
    wanted, measured = moments_of(config), profile.model.moments
    if arguments.moments not in (None, wanted):
        raise ConfigError(
            f"--moments {arguments.moments}, but {arguments.deepspeed_config} has "
            f'"hytrain.moments" "{wanted}": leave the flag out, or make them equal'
        )
    if wanted != measured:
        raise ConfigError(
            f'{arguments.deepspeed_config}: "hytrain.moments" is "{wanted}", but the profile is of '
            f'updates with "{measured}": measure with `hytrain profile --moments {wanted}`, or '
            "change the key"
        )


def _live_parameters(config: Mapping[str, Any]) -> Any:
    """Tells how many parameters stage 3 has gathered at once, by the keys that training has."""
    from hytrain.tools.explain.training_form import read_form
    from hytrain.zero3.plan import gather_settings, most_live, persistent_layers

    settings = gather_settings(read_form(config).gather_keys)

    def live(sizes: Sequence[int]) -> int:
        whole = persistent_layers(sizes, settings)
        sharded = set(range(len(sizes))) - whole
        return most_live(sizes, sharded, settings) + sum(sizes[index] for index in whole)

    return live
