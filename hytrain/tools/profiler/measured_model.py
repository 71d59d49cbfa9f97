"""The model that is profiled: its sizes, and a copy of it with few layers.

A copy with few layers runs the user's own model code, with all side inputs of a block, and fits in
memory even if the whole model does not.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import logging
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from hytrain.errors import ConfigError
from hytrain.formats.dtypes import ITEMSIZE, TORCH_NAMES, Dtype
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.profile_file import ProfiledModel
from hytrain.model.discovery import LayerParameters, can_be_sharded, find_layers
from hytrain.tools.planner.device_sheets import ModelShape
from hytrain.tools.profiler.language_model import (
    HIDDEN,
    build_language_model,
    check_length,
    hidden_size,
    read_config,
)

logger = logging.getLogger(__name__)

MakeBatch = Callable[[int], Mapping[str, Any]]
"""Makes keyword arguments of forward for a number of samples, on torch's default device."""

_DTYPES: dict[torch.dtype, Any] = {getattr(torch, n): dtype for dtype, n in TORCH_NAMES.items()}

Build = Callable[[int | None, int], tuple[nn.Module, MakeBatch]]
"""Builds a model with a number of layers (None: all of them), for a number of tokens per sample.

It is called with torch's default device and dtype set to those of the measurement; with all of the
layers the device is "meta", where weights have shapes and no memory. Called with a batch, the model
returns its loss, or an object with a ``loss``, or a tuple that begins with it.
"""


class SmallModel:
    """The copy of the model with few layers, on the device where it is measured."""

    def __init__(self, model: nn.Module, make_batch: MakeBatch, block_class: str | None) -> None:
        self.model = model
        self.make_batch = make_batch
        trained = [p for p in model.parameters() if p.requires_grad]
        self.layers = find_layers(model, trained, block_class)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers' modules, in order."""
        return [layer.block for layer in self.layers if layer.block is not None]

    def loss(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Runs the forward of a batch and returns its loss.

        Raises:
            ConfigError: the model returns no loss.
        """
        output = self.model(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = output[0] if isinstance(output, Sequence) else output
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"--model: its forward returns a {type(output).__name__} without a loss: return "
                "one number, an object with .loss, or a tuple that begins with it"
            )
        return loss


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model that can be built with any number of layers.

    Attributes:
        build: see :data:`Build`.
        seq_len: tokens per sample.
        dtype: the training copy's.
        block_class: class name of the block; None: detect.
    """

    name: str
    build: Build
    seq_len: int
    dtype: torch.dtype = torch.bfloat16
    block_class: str | None = None

    def sizes(self) -> ProfiledModel:
        """Sizes of the whole model, from the meta device; ``boundary_bytes`` is not known and 0.

        Raises:
            ConfigError: no block is found, or the model cannot be made on the meta device.
        """
        try:
            model, _ = self._build(None, torch.device("meta"))
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"--model {self.name} cannot be made on the meta device, where its parameters are "
                f"counted ({error}): build(None, ...) must not read values of tensors"
            ) from error
        return self._count(model)

    def _count(self, model: nn.Module) -> ProfiledModel:
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if can_be_sharded(p)]
        layers = find_layers(model, trained, self.block_class, frozen)
        blocks = [layer for layer in layers if layer.block is not None and layer.parameters]
        if not blocks:
            raise ConfigError(f"--model {self.name}: no layer with a trained parameter was found")
        still = [layer for layer in layers if layer.block is not None and not layer.parameters]
        self._warn(parameters, blocks, still)
        first = layers.index(blocks[0])
        outside = [layer for layer in layers if layer.block is None]
        before = [layer for layer in layers[:first] if layer.block is None]
        sizes = [sum(map(_trained, those)) for those in (blocks, before, outside)]
        others = [sum(map(_frozen, those)) for those in (blocks, before, outside)]
        return ProfiledModel(
            name=self.name,
            seq_len=self.seq_len,
            dtype=_DTYPES[self.dtype],
            boundary_bytes=0,
            num_layers=len(blocks),
            layer_parameters=round(sizes[0] / len(blocks)),
            outside_parameters=(sizes[1], sum(p.numel() for p in trained) - sizes[0] - sizes[1]),
            frozen_layer_parameters=round(others[0] / len(blocks)),
            frozen_outside_parameters=(others[1], others[2] - others[1]),
            frozen_block_parameters=sum(map(_frozen, still)),
        )

    def _warn(
        self,
        parameters: Sequence[nn.Parameter],
        blocks: Sequence[LayerParameters],
        still: Sequence[LayerParameters],
    ) -> None:
        """Warns of what a plan does not take into account."""
        for count, kind in ((_trained, ""), (_frozen, " that are not trained")):
            sizes = [count(layer) for layer in blocks]
            if max(sizes) > min(sizes):
                logger.warning(
                    "blocks of %s have %d to %d parameters%s: a plan treats them as equal",
                    self.name, min(sizes), max(sizes), kind,
                )  # fmt: skip
        if still:
            logger.warning(
                "%d of %d blocks of %s train nothing: a plan counts their memory and gathers, but "
                "not the time of their forward",
                len(still), len(still) + len(blocks), self.name,
            )  # fmt: skip
        unknown = [p for p in parameters if not p.requires_grad and not can_be_sharded(p)]
        if unknown:
            logger.warning(
                "%s has %.2f GiB of weights that are neither trained nor floating point: every "
                "rank keeps all of them. Plans do not count them: leave --gpu-memory-reserve",
                self.name, sum(p.nbytes for p in unknown) / 2**30,
            )  # fmt: skip

    def copy(self, num_layers: int, device: torch.device) -> SmallModel:
        """The model with ``num_layers`` layers, in training mode.

        Raises:
            ConfigError: it has another number of blocks.
        """
        model, make_batch = self._build(num_layers, device)
        made = SmallModel(model.to(device, self.dtype), make_batch, self.block_class)
        if len(made.blocks) != num_layers:
            raise ConfigError(
                f"--model {self.name} with {num_layers} layers has {len(made.blocks)} blocks: the "
                "number of layers must be that of one stack of blocks; give module:function, or "
                "--block-class"
            )
        made.model.train()
        return made

    @contextlib.contextmanager
    def defaults(self, device: torch.device) -> Generator[None]:
        """Sets torch's default device and dtype for making models and batches."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                yield
        finally:
            torch.set_default_dtype(before)

    def _build(self, num_layers: int | None, device: torch.device) -> tuple[nn.Module, MakeBatch]:
        with self.defaults(device):
            built: Any = self.build(num_layers, self.seq_len)
        is_pair = isinstance(built, Sequence) and len(cast("Sequence[Any]", built)) == 2
        if not is_pair or not isinstance(built[0], nn.Module) or not callable(built[1]):
            raise ConfigError(
                f"--model {self.name} returns a {type(built).__name__}: it must return "
                "(model, make_batch), a torch module and a function of a micro-batch size that "
                "returns the arguments of its forward"
            )
        return built[0], built[1]


def _trained(layer: LayerParameters) -> int:
    return sum(parameter.numel() for _, parameter in layer.parameters)


def _frozen(layer: LayerParameters) -> int:
    return sum(parameter.numel() for _, parameter in layer.frozen)


# ---- where a model comes from ----


def read_subject(
    model: str,
    *,
    seq_len: int,
    dtype: torch.dtype = torch.bfloat16,
    block_class: str | None = None,
) -> MeasuredModel:
    """Reads what ``--model`` names.

    Args:
        model: a transformers ``config.json`` or its folder; or ``module:function``, where the
            module is a name to import or a path that ends with ``.py`` (see :data:`Build`).
        seq_len: tokens per sample.
        dtype: the training copy's.
        block_class: class name of the block; None: detect.

    Raises:
        ConfigError: it is neither.
    """
    module, colon, function = model.rpartition(":")
    if colon and function.isidentifier():
        return MeasuredModel(model, _read_function(module, function), seq_len, dtype, block_class)
    path = Path(model)
    build = _configured(read_config(path), path, seq_len)
    name = path.parent.name if path.name == "config.json" else path.stem
    return MeasuredModel(name or model, build, seq_len, dtype, block_class)


def _configured(config: Any, path: Path, seq_len: int) -> Build:
    check_length(config, path, seq_len)
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise ConfigError(
            f"--model {path} has no num_hidden_layers: models of several stacks are described by "
            "module:function"
        )
    config.use_cache = False

    def build(num_layers: int | None, tokens: int) -> tuple[nn.Module, MakeBatch]:
        described = copy.deepcopy(config)
        if num_layers is not None:
            described.num_hidden_layers = num_layers
            kinds = getattr(described, "layer_types", None)
            if kinds:
                described.layer_types = [kinds[i % len(kinds)] for i in range(num_layers)]
        model = build_language_model(described, path)

        def make_batch(size: int) -> Mapping[str, Any]:
            ids = torch.randint(0, int(config.vocab_size), (size, tokens))
            return {"input_ids": ids, "labels": ids}

        return model, make_batch

    return build


def _read_function(module: str, function: str) -> Build:
    found = getattr(_import(module), function, None)
    if not callable(found):
        raise ConfigError(f"--model {module}:{function}: the module has no such function")
    try:
        inspect.signature(found).bind(1, 1)
    except TypeError as error:
        raise ConfigError(
            f"--model {module}:{function} cannot be called with (num_layers, seq_len): {error}"
        ) from error
    return cast(Build, found)


def _import(module: str) -> ModuleType:
    try:
        if not module.endswith(".py"):
            return importlib.import_module(module)
        spec = importlib.util.spec_from_file_location(Path(module).stem, module)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"--model {module}: cannot be imported ({error}): give a path that ends with .py, or a "
            "module on PYTHONPATH"
        ) from error
    except Exception as error:  # whatever the user's own code raises
        *_, last = traceback.extract_tb(error.__traceback__)
        where = last.filename, last.lineno
        if isinstance(error, SyntaxError):
            where = error.filename, error.lineno
        raise ConfigError(
            f"--model {module}: {where[0]}, line {where[1]}: {type(error).__name__}: {error}: mend "
            f"the file, or see `python {module}`"
        ) from error


def read_model_shape(
    path: Path, *, seq_len: int, dtype: Dtype, moments: MomentsName = FP32
) -> ModelShape:
    """The model of a transformers ``config.json`` as equal blocks and what is outside of them.

    Raises:
        ConfigError: the file is no transformers configuration, or gives no sizes.
    """
    config = read_config(path)
    hidden = hidden_size(config)
    vocabulary = getattr(config, "vocab_size", None)
    if hidden is None or not isinstance(vocabulary, int):
        raise ConfigError(
            f"--model {path} gives no vocab_size, or none of {', '.join(HIDDEN)}: profile the "
            "model instead"
        )
    subject = read_subject(str(path), seq_len=seq_len, dtype=getattr(torch, TORCH_NAMES[dtype]))
    known = {"boundary_bytes": ITEMSIZE[dtype] * seq_len * hidden, "moments": moments}
    return ModelShape(subject.sizes().model_copy(update=known), hidden, vocabulary)
