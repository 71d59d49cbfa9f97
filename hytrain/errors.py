"""Every error that hytrain raises on purpose.

A message says what was seen, what the limit is, and which key or call to change. Whatever the
user can mend is a ``ValueError``; what broke while running is a ``RuntimeError``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable


class HyTrainError(Exception):
    """Base class of all errors raised by hytrain."""


class ConfigError(HyTrainError, ValueError):
    """The DeepSpeed JSON, its "hytrain" section, or an argument asks for what cannot be done."""


class NestedReductionError(ConfigError, AssertionError):
    """``coalesce_grad_reduction()``, ``no_sync()`` or step() within one another.

    An AssertionError as well: DeepSpeed raises one there.
    """


class UnusedParametersError(ConfigError, AssertionError):
    """Parameters without a gradient, where ``ignore_unused_parameters`` is false.

    An AssertionError as well: DeepSpeed raises one there.
    """


class KernelArgumentError(HyTrainError, ValueError):
    """A buffer or hyper-parameter passed to a CPU kernel is unusable; nothing was touched."""


class UnsupportedError(HyTrainError, ValueError):
    """A feature of DeepSpeed that hytrain does not support was asked for."""


class CheckpointError(HyTrainError, ValueError):
    """A checkpoint is missing, incomplete, or does not match the model."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, or not what was saved; nothing was touched."""


class PlanError(HyTrainError, ValueError):
    """A profile or a plan cannot be used: unreadable, or of another job."""


class TraceError(HyTrainError, ValueError):
    """A trace cannot be used: unreadable, no trace, of another format, or broken."""


class PlacementError(HyTrainError, ValueError):
    """Costs, bounds or a record that no decision about GPU layers can be made from."""


class MemoryBudgetError(PlacementError):
    """No split of the optimizer state fits; nothing was allocated. The text has the table."""


class ProfileRunError(HyTrainError, RuntimeError):
    """A measurement of ``hytrain profile`` failed on another rank."""


class HostMemoryError(HyTrainError, MemoryError):
    """Host memory cannot be had; the message says for what, what is left, and what would help."""


class GradientOrderError(HyTrainError, RuntimeError):
    """A gradient arrived for a layer whose update had already been previewed as final."""


class StatesOffloadedError(HyTrainError, ValueError):
    """The engine was used between ``offload_states()`` and ``reload_states()``."""


class RankFailedError(HyTrainError, RuntimeError):
    """Another rank has failed; the message says which, and its own error, or that it was killed."""


class OutOfStepError(HyTrainError, RuntimeError):
    """The ranks' collectives cannot meet: some have made other backward passes or steps."""


class AbortedBackwardError(HyTrainError, RuntimeError):
    """A backward ended with an exception, and what it left cannot become a step."""


class AbortedStepError(HyTrainError, RuntimeError):
    """A step failed midway: some layers have made it and others have not."""


class LossScaleError(HyTrainError, RuntimeError):
    """Gradients overflow at the smallest loss scale, or a loss has run back without its scale.

    Nothing was changed: the step was skipped, or the backward was ended.
    """


class LossGraphError(HyTrainError, ValueError, AssertionError):
    """A loss cannot run back: nothing that is trained is in its graph.

    An AssertionError as well: DeepSpeed raises one there.
    """


class WorkerError(HyTrainError, RuntimeError):
    """The update worker failed; the message names the layer it was working on."""


class EngineClosedError(HyTrainError, RuntimeError):
    """The engine was used after destroy()."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """For a message: the known name that is most like another one, if one is."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f'did you mean "{near[0]}"? ' if near else ""


def unquoted(value: object) -> str:
    """The end of a message that refuses a value: a number in quotes is to be without."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value)
    return f"; write {value} without quotes" if is_number else ""


def refuse_all(*checks: Callable[[], object]) -> None:
    """Makes all checks. Raises what one has raised, or a ConfigError with what several have."""
    found: list[ConfigError | UnsupportedError] = []
    for check in checks:
        try:
            check()
        except (ConfigError, UnsupportedError) as error:
            found.append(error)
    if found:
        raise found[0] if len(found) == 1 else ConfigError(";\n".join(map(str, found)))


def size_text(num_bytes: int) -> str:
    """For a message or a table: bytes in the unit that suits them."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB" if num_bytes else "0"
