"""The format: DeepSpeed's universal checkpoints. What is where, under which keys.

<save_dir>/latest, latest_universal           the tag
<save_dir>/<tag>/mp_rank_00_model_states.pt   module weights, buffers, schedule, counters
<save_dir>/<tag>/zero_pp_rank_0_mp_rank_00_model_states.pt    that without weights, for plain ZeRO-3
<save_dir>/<tag>/zero/optimizer_state.pt      parameter groups and hytrain's own record
<save_dir>/<tag>/zero/hytrain_manifest.json   all files' checksums; DeepSpeed does not look at it
<save_dir>/<tag>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    whole tensors
<save_dir>/<tag>/zero/<parameter>/step.pt     steps that the parameter has made
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from hytrain.checkpoint.gather import STATES, ParameterPlace
from hytrain.checkpoint.inert import Unknown
from hytrain.checkpoint.torch_files import load
from hytrain.errors import CheckpointError
from hytrain.formats.moment_kinds import FP32
from hytrain.model.state_format import StateFormat
from hytrain.optimizer.loss_scaling import LossScaling

_STATE_OF_ZERO3 = "optimizer_state_dict"
MODEL_STATES_OF_ZERO3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The file from which plain DeepSpeed reads the counters under ZeRO-3."""

LATEST = ("latest", "latest_universal")
"""Files that name the newest tag; plain DeepSpeed reads the second for universal checkpoints."""

PARAM = "param"
CAT_DIM = "cat_dim"
STEP = "step"
PARAM_GROUPS = "param_groups"
UNIVERSAL_INFO = "universal_checkpoint_info"
UNIVERSAL_VERSION = {"universal_checkpoint_version": 0.4}
RECORD = "hytrain"
RECORD_VERSION = 1
LOSS_SCALE = "loss_scale"

RESERVED_CLIENT_KEYS = frozenset(("module", RECORD, "checkpoint_parallel_dimensions"))
"""Keys of the model states that a client's own state may not replace."""

_IMPLEMENTATION_KEYS = frozenset(
    # How torch computes a step, not what: the running optimizer's own choice stays.
    ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad",
     "decoupled_weight_decay")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointPaths:
    """Paths of one checkpoint."""

    folder: Path

    @property
    def zero(self) -> Path:
        """Parent of the parameters' folders."""
        return self.folder / "zero"

    @property
    def optimizer_state(self) -> Path:
        """The file of parameter groups and record."""
        return self.zero / "optimizer_state.pt"

    @property
    def model_states(self) -> Path:
        """The file of module, schedule, counters and client state."""
        return self.folder / "mp_rank_00_model_states.pt"

    def state(self, name: str, kind: str) -> Path:
        """The file of a parameter's state tensor or of its ``step``."""
        return self.zero / name / f"{kind}.pt"

    def name_of(self, path: Path) -> str:
        """A file's path in the checkpoint's folder, with "/"."""
        return path.relative_to(self.folder).as_posix()

    @staticmethod
    def state_of(file: str) -> tuple[str, str] | None:
        """The parameter and kind that a file (its path in the folder) is of; None: of neither."""
        path = PurePosixPath(file)
        if path.parts[0] != "zero" or len(path.parts) < 3:
            return None
        return path.parent.relative_to("zero").as_posix(), path.stem


def is_plain_path(name: str) -> bool:
    """Whether a name is a relative path that stays inside its folder, in normal form."""
    path = PurePosixPath(name)
    return (
        bool(path.name) and str(path) == name and ".." not in path.parts and not path.is_absolute()
    )


def no_parameters(paths: CheckpointPaths) -> str:
    """The message about a checkpoint without parameters' state."""
    return (
        f"{paths.zero} has no parameters: this is no universal checkpoint; convert it with `python "
        f"-m deepspeed.checkpoint.ds_to_universal --input_folder {paths.folder} --output_folder "
        f"{paths.folder}_universal --inject_missing_state`, or pass load_optimizer_states=False to "
        "load its weights"
    )


def unpack_tensor(stored: object, path: Path) -> torch.Tensor:
    """The tensor of a state file; raises a CheckpointError if it holds something else."""
    tensor = stored.get(PARAM) if isinstance(stored, Mapping) else stored
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path} holds a {type(tensor).__name__} where a tensor was expected")
    return tensor


def group_names(places: Sequence[ParameterPlace], num_groups: int) -> list[list[str]]:
    """Parameter names of each group, sorted."""
    names: list[list[str]] = [[] for _ in range(num_groups)]
    for place in places:
        names[place.group].append(place.name)
    return [sorted(group) for group in names]


def pack_optimizer_state(
    groups: Sequence[Mapping[str, Any]],
    steps: Sequence[int],
    places: Sequence[ParameterPlace],
    *,
    clip: float,
    num_ranks: int,
    scaling: LossScaling,
    moments: StateFormat,
) -> dict[str, Any]:
    """The contents of ``optimizer_state.pt``; ``num_ranks`` shared the state, for information."""
    saved: list[dict[str, Any]] = []
    index = 0
    for group in groups:
        values = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        count = len(group["params"])
        saved.append({**values, "params": list(range(index, index + count))})
        index += count
    return {
        PARAM_GROUPS: saved,
        # Plain DeepSpeed's ZeRO-3 reads this, and knows one group: the first one's steps for all.
        _STATE_OF_ZERO3: {
            "state": {0: {"step": torch.tensor(float(steps[0]))}},
            PARAM_GROUPS: copy.deepcopy(saved),
        },
        "overflow": False,
        **copy.deepcopy(scaling.deepspeed_state()),
        "clip_grad": clip,
        "partition_count": num_ranks,
        "ds_version": _deepspeed_version(),
        RECORD: {
            "version": RECORD_VERSION,
            "group_steps": list(steps),
            "group_parameters": group_names(places, len(groups)),
            "state_kinds": {
                place.name: list(place.kinds) for place in places if place.kinds != STATES
            },
            LOSS_SCALE: scaling.state(),
            "moments": moments.name,
            "moments_seed": moments.seed,
        },
    }


@cache
def _deepspeed_version() -> str:
    return importlib.metadata.version("deepspeed")  # it reads and parses a file each time


def restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Writes a saved group's hyper-parameters into a running optimizer's group."""
    for key, value in saved.items():
        if key != "params" and key not in _IMPLEMENTATION_KEYS:
            group[key] = copy.deepcopy(value)


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """What ``optimizer_state.pt`` says.

    Attributes:
        steps: steps of each group; None if the file does not say (``step.pt`` does then).
        names: parameter names of each group; None if the file is not hytrain's.
        loss_scale: what :meth:`LossScaling.load` takes.
        kinds: names of the state tensors of parameters that have others than Adam's.
    """

    groups: list[dict[str, Any]]
    steps: list[int] | None
    names: list[list[str]] | None
    loss_scale: object = None
    moments: StateFormat = field(default_factory=StateFormat)
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    @staticmethod
    def read(path: Path, *, trusted: bool = False) -> OptimizerRecord:
        """Reads the file; ``trusted``: see :func:`torch_files.load`.

        Raises:
            CheckpointError: it cannot be read, holds no parameter groups, or is of a later version.
        """
        stored = load(path, trusted=trusted)
        if not isinstance(stored, Mapping) or PARAM_GROUPS not in stored:
            raise CheckpointError(f'{path} holds no "{PARAM_GROUPS}"')
        groups = [dict(group) for group in stored[PARAM_GROUPS]]
        record = stored.get(RECORD)
        if record is None:
            steps = _steps_of_zero3(stored, len(groups))
            scaler = stored.get("loss_scaler")
            scaler = scaler.fields if isinstance(scaler, Unknown) else scaler
            return OptimizerRecord(groups, steps, None, scaler)
        if record["version"] > RECORD_VERSION:
            raise CheckpointError(
                f"{path} was written by a later hytrain (record version {record['version']}, this "
                f"one reads up to {RECORD_VERSION}): update hytrain"
            )
        moments = StateFormat(record.get("moments", FP32), record.get("moments_seed", 0))
        steps, names = list(record["group_steps"]), record["group_parameters"]
        kinds = record.get("state_kinds", {})
        return OptimizerRecord(groups, steps, names, record.get(LOSS_SCALE), moments, kinds)


def _steps_of_zero3(stored: Mapping[str, Any], num_groups: int) -> list[int] | None:
    """Steps of each group in a ZeRO-3 checkpoint that DeepSpeed converted: there are no others."""
    inner = stored.get(_STATE_OF_ZERO3)
    states = inner.get("state") if isinstance(inner, Mapping) else None
    found = [int(state["step"]) for state in (states or {}).values() if "step" in state]
    # Sub-groups of ZeRO-3 are no parameter groups, and all have made the same steps.
    return [found[0]] * num_groups if found else None
