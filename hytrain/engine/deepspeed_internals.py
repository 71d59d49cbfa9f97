"""DeepSpeed's internals: classes, version, partitioned parameters, process group."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import threading
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, cast, get_args

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops import __compatible_ops__ as compatible_ops
from deepspeed.runtime import lr_schedules as lr_schedules
from deepspeed.runtime.base_optimizer import ZeROOptimizer as ZeROOptimizer
from deepspeed.runtime.config import MUON_OPTIMIZER
from deepspeed.runtime.config import DeepSpeedConfig as DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.dataloader import DeepSpeedDataLoader as DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine as DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    TiledFusedLogitsLoss as TiledFusedLogitsLoss,
)
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.runtime.torch_autocast import autocast_if_enabled as autocast_if_enabled
from deepspeed.runtime.zero.partition_parameters import (
    PartitionedParamStatus as PartitionedParamStatus,
)
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus as ZeroParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamType as ZeroParamType
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import groups, zero_to_fp32
from deepspeed.utils.logging import print_dist as print_dist
from pydantic import BaseModel
from torch import nn

from hytrain.errors import ConfigError

logger = logging.getLogger(__name__)

_clone_world_group: Callable[[], torch.distributed.ProcessGroup] = vars(groups)[
    "_clone_world_group"
]


class ForcedOptimizerError(ConfigError, ZeRORuntimeException):
    """The optimizer is not DeepSpeed's, but "zero_force_ds_cpu_optimizer" is true.

    Also a ZeRORuntimeException, which DeepSpeed raises in this case.
    """


def mark_matrices(model: torch.nn.Module) -> None:
    """Sets ``use_muon`` of every parameter as DeepSpeed does if the optimizer is Muon."""
    config: Any = SimpleNamespace(optimizer_name=MUON_OPTIMIZER)
    deepspeed.set_optimizer_flags(config, model)


def deepspeed_version() -> str:
    """Returns the installed version of DeepSpeed."""
    return str(deepspeed.__version__)


def state_group_of(mpu: Any) -> torch.distributed.ProcessGroup | None:
    """Returns DeepSpeed's group of the ranks that an engine's state is sharded over; None: all."""
    if hasattr(mpu, "get_sequence_data_parallel_group"):
        return mpu.get_sequence_data_parallel_group()
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):
        return None
    return mpu.get_data_parallel_group()


def state_group_of_engine(mpu: Any) -> torch.distributed.ProcessGroup | None:
    """Like :func:`state_group_of`; without an ``mpu``, DeepSpeed's own group of all ranks.

    The engine's sequence-data-parallel group will not do: with a mesh, even one that an earlier
    engine has left behind, DeepSpeed puts only the data ranks into it.
    """
    return _clone_world_group() if mpu is None else state_group_of(mpu)


def load_config(given: Any) -> dict[str, Any]:
    """Returns a configuration as a dict, from a dict, a file (JSON or HJSON) or base64 JSON.

    Raises:
        ConfigError: it is none of these, or empty.
    """
    loaded: Any = given
    if not isinstance(given, Mapping):
        try:
            loaded = load_ds_config(str(given))
        except (OSError, ValueError, AssertionError, RecursionError) as error:
            if not os.path.exists(str(given)):  # nor base64, which DeepSpeed takes, too
                raise ConfigError(
                    f"there is no file {given}: give a configuration's file, or a dict"
                ) from None
            raise ConfigError(f"the configuration {given!r} cannot be read: {error}") from error
    if not isinstance(loaded, Mapping) or not loaded:
        seen = "empty" if loaded in ({}, None) else f"a {type(loaded).__name__}"
        raise ConfigError(f"the configuration {given!r} is {seen}: write a JSON object, {{...}}")
    return dict(cast(Mapping[str, Any], loaded))


def keys_of_section(model: str, path: Sequence[int | str] = ()) -> list[str]:
    """Returns the keys that DeepSpeed knows in a section, or in its part that ``path`` leads to.

    ``model``: name of the class that validates the section."""
    kinds: list[type[BaseModel]] = [DeepSpeedConfigModel]
    for kind in kinds:  # grows meanwhile
        kinds.extend(kind.__subclasses__())
    found = next((kind for kind in kinds if kind.__name__ == model), None)
    for part in path:
        field = None if found is None else found.model_fields.get(str(part))
        inner = () if field is None else (field.annotation, *get_args(field.annotation))
        found = next((one for one in inner if one in kinds), None)
    fields = {} if found is None else found.model_fields
    return [field.alias or name for name, field in fields.items()]


class _Section(dict[str, Any]):
    """A section that remembers which keys it was asked for."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # DeepSpeed looks keys up in these, too

    def __copy__(self) -> _Section:
        return self


@cache
def keys_that_are_read() -> dict[str, frozenset[str]]:
    """Returns the keys that DeepSpeed looks for at the top level (""), and in "optimizer" and
    "scheduler", which no class of DeepSpeed's validates."""
    inner = {"optimizer": _Section({"type": "AdamW"}), "scheduler": _Section({"type": "WarmupLR"})}
    whole = _Section({"train_micro_batch_size_per_gpu": 1, **inner})
    DeepSpeedConfig(whole)
    return {name: frozenset(one.asked) for name, one in {"": whole, **inner}.items()}


@contextmanager
def engine_class(build: Callable[..., DeepSpeedEngine]) -> Generator[None]:
    """Makes ``deepspeed.initialize`` build its engine with ``build`` while the block runs.

    It looks the class up under the module-global name ``DeepSpeedEngine``; rebinding that name
    reuses its whole body, whatever a version adds to it.
    """
    original = deepspeed.DeepSpeedEngine
    deepspeed.DeepSpeedEngine = cast(Any, build)
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine = original


def avoid_cpu_communication_build() -> None:
    """Keeps ``init_distributed`` on a CPU from compiling an extension that is not used here."""
    accelerator = get_accelerator()
    if accelerator is not None and accelerator.device_name() == "cpu":
        compatible_ops["deepspeed_shm_comm"] = False


_CONVERTED = frozenset(
    ("aligned_size", "all_gather", "all_gather_coalesced", "convert_to_zero_parameters",
     "is_external_param", "item", "nvme_swapper", "padding_size", "partition",
     "partition_gradients", "partition_numel", "reduce_gradients_at_owner")
)  # fmt: skip
"""Attributes that ``deepspeed.zero.Init`` adds to a parameter besides those named ``ds_...``."""


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether ``deepspeed.zero.Init`` has partitioned a parameter: it is empty then.

    Its ``ds_tensor`` does not tell: an engine of this package sets that on its parameters, too.
    """
    return "convert_to_zero_parameters" in vars(parameter)


def shape_partitioned(parameter: torch.Tensor) -> torch.Size:
    """Returns the shape of a partitioned parameter."""
    return torch.Size(vars(parameter)["ds_shape"])


def assemble_partitioned(parameters: Sequence[torch.Tensor]) -> None:
    """Gathers partitioned parameters, whole on every rank; a collective."""
    vars(parameters[0])["all_gather"](param_list=list(parameters))


def forget_partition(parameter: torch.Tensor) -> None:
    """Turns a partitioned parameter that has been gathered into a plain one."""
    for name in list(vars(parameter)):
        if name.startswith("ds_") or name in _CONVERTED:
            delattr(parameter, name)


def create_loss_scaler(engine: Any) -> Any:
    """Returns DeepSpeed's own scaler for its "fp16" section: the scale moves exactly as there."""
    return CreateLossScaler(
        dtype=torch.float16,
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )


_main = cast(FunctionType, vars(ds_to_universal)["main"])
convert_to_universal: Callable[[argparse.Namespace], None] = FunctionType(
    _main.__code__, _main.__globals__, "main", _main.__defaults__, _main.__closure__
)
"""DeepSpeed's ``ds_to_universal``: reads a ZeRO checkpoint, writes a universal one."""


def _convert(args: argparse.Namespace) -> None:
    _hytrain_convert(args)  # type: ignore[name-defined]  # noqa: F821  (of DeepSpeed's module)


def convert_by(function: Callable[[argparse.Namespace], None]) -> None:
    """Makes ``deepspeed.checkpoint.ds_to_universal.main`` call ``function`` from now on.

    The code of ``main`` is replaced, not the module's attribute: scripts import ``main`` itself,
    mostly before there is an engine.
    """
    setattr(ds_to_universal, "_hytrain_convert", function)  # noqa: B010 (its type is not known)
    _main.__code__ = _convert.__code__


fp32_weights_of_deepspeed: Callable[[str, bool], dict[str, torch.Tensor]] = vars(zero_to_fp32)[
    "_get_fp32_state_dict_from_zero_checkpoint"
]
"""DeepSpeed's (tag's folder, exclude frozen weights) -> fp32 weights of its own checkpoint."""


def read_fp32_weights_by(function: Callable[[str, bool], dict[str, torch.Tensor]]) -> None:
    """Makes ``deepspeed.utils.zero_to_fp32`` read checkpoints with ``function`` from now on."""
    setattr(zero_to_fp32, fp32_weights_of_deepspeed.__name__, function)


_NO_LAUNCHER = (
    "the script was started without a launcher, which says who is which rank: start it with "
    "`deepspeed SCRIPT ...` or `torchrun --nproc_per_node GPUS SCRIPT ...`; a single process can "
    "do without one: set RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
)

_WARN_SECONDS = 30.0


def _tell_of_waiting() -> None:
    """Warns of missing ranks: torch is silent until its timeout, and then does not say which."""
    told = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    logger.warning(
        "hytrain.initialize has waited for %.0f s for other ranks to join: host %s was told %s. "
        "Have all ranks been started, each with its own RANK and all with one WORLD_SIZE? Compare "
        "these words of all hosts (a wrong hostfile or --node_rank?)",
        _WARN_SECONDS,
        socket.gethostname(),
        ", ".join(f"{name}={os.environ.get(name)}" for name in told),
    )


def join_ranks(
    args: Any, *, distributed_port: int | None, dist_init_required: bool | None
) -> torch.device:
    """Joins the process group as ``deepspeed.initialize`` would, unless that has been done.

    Returns this rank's device, which on GPUs becomes torch's current one.

    Raises:
        ConfigError: the process was not started by a launcher.
    """
    accelerator: Any = get_accelerator()
    if not torch.distributed.is_initialized():
        keywords: dict[str, Any] = {"dist_init_required": dist_init_required}
        if distributed_port is not None:
            keywords["distributed_port"] = distributed_port
        waiting = threading.Timer(_WARN_SECONDS, _tell_of_waiting)
        waiting.daemon = True
        waiting.start()
        try:
            deepspeed.init_distributed(accelerator.communication_backend_name(), **keywords)
        except ModuleNotFoundError as error:
            if error.name != "mpi4py":
                raise
            raise ConfigError(_NO_LAUNCHER) from None
        finally:
            waiting.cancel()
    local = getattr(args, "local_rank", None)
    if not isinstance(local, int) or local < 0:
        local = int(os.environ.get("LOCAL_RANK", "0"))
    if accelerator.communication_backend_name() == "nccl":
        accelerator.set_device(local)
    return torch.device(accelerator.device_name(local))


def use_checkpointing(model: torch.nn.Module, *, wanted: bool) -> bool | None:
    """Turns activation checkpointing on, by transformers' switch, if it is wanted and off.

    Returns whether the model recomputes activations; None if it has no switch.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not callable(enable):
        return None
    if wanted and not _is_checkpointing(model):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _is_checkpointing(model)


def _is_checkpointing(model: torch.nn.Module) -> bool:
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):  # new, old
        found = getattr(model, name, None)
        if found is not None:
            return bool(found)
    return False


class HookSnapshot:
    """The hooks that a model and its modules get while an engine is built around them.

    DeepSpeed's engine does not remove its hooks: those of a second engine would be added to them,
    and the first one's would still be called.
    """

    def __init__(self, model: Any) -> None:
        """Notes the present hooks; a ``model`` that is no module has none."""
        self._model = model
        self._before = {id(hooks): set(hooks) for hooks in _hooks_of(model)}
        self._added: list[tuple[MutableMapping[Any, Any], Any]] = []

    def note(self) -> None:
        """Notes the hooks added since then; later ones are somebody else's."""
        self._added = [
            (hooks, key)
            for hooks in _hooks_of(self._model)
            for key in hooks
            if key not in self._before.get(id(hooks), ())
        ]

    def remove(self) -> None:
        """Removes the noted hooks. May be called twice."""
        for hooks, key in self._added:
            hooks.pop(key, None)
        self._added = []


def _hooks_of(model: Any) -> list[MutableMapping[Any, Any]]:
    """Returns all hook tables of all modules, including those of hook options."""
    if not isinstance(model, nn.Module):
        return []
    return [
        hooks
        for module in model.modules()
        for name, hooks in vars(module).items()
        # torch has a dozen of them, all named like this.
        if "_hooks" in name and isinstance(hooks, MutableMapping)
    ]
