"""Every error that hytrain raises on purpose.

A message says what was seen, what the limit is, and which key or call to change. An error that
the user can fix is a ``ValueError``; a failure while running is a ``RuntimeError``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable


class HyTrainError(Exception):
    """Base class of all errors raised by hytrain."""


class ConfigError(HyTrainError, ValueError):
    """The DeepSpeed JSON, its "hytrain" section or an argument asks for something impossible."""


class NestedReductionError(ConfigError, AssertionError):
    """``coalesce_grad_reduction()``, ``no_sync()`` and step() are nested.

    An AssertionError as well: DeepSpeed raises one there.
    """


class UnusedParametersError(ConfigError, AssertionError):
    """Parameters got no gradient, although ``ignore_unused_parameters`` is false.

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
    """A profile or a plan cannot be used: unreadable, or for another job."""


class TraceError(HyTrainError, ValueError):
    """A trace cannot be used: unreadable, no trace, of another format, or broken."""


class PlacementError(HyTrainError, ValueError):
    """Costs, bounds or a record from which no decision about GPU layers can be made."""


class MemoryBudgetError(PlacementError):
    """No split of the optimizer state fits; nothing was allocated. The message has the table."""


class ProfileRunError(HyTrainError, RuntimeError):
    """A measurement of ``hytrain profile`` failed on another rank."""


class HostMemoryError(HyTrainError, MemoryError):
    """Too little host memory; the message says for what, how much is left and what would help."""


class GradientOrderError(HyTrainError, RuntimeError):
    """A gradient arrived for a layer whose update had already been previewed as final."""


class StatesOffloadedError(HyTrainError, ValueError):
    """The engine was used between ``offload_states()`` and ``reload_states()``."""


class RankFailedError(HyTrainError, RuntimeError):
    """Another rank has failed; the message says which, and its own error, or that it was killed."""


class OutOfStepError(HyTrainError, RuntimeError):
    """The ranks' collectives do not match: some made different backward passes or steps."""


class AbortedBackwardError(HyTrainError, RuntimeError):
    """A backward ended with an exception, and what it left cannot become a step."""


class AbortedStepError(HyTrainError, RuntimeError):
    """A step failed midway: some layers were updated and others were not."""


class LossScaleError(HyTrainError, RuntimeError):
    """Gradients overflow at the smallest loss scale, or backward ran on an unscaled loss.

    Nothing was changed: the step was skipped, or the backward was ended.
    """


class LossGraphError(HyTrainError, ValueError, AssertionError):
    """A loss cannot run backward: no trained parameter is in its graph.

    An AssertionError as well: DeepSpeed raises one there.
    """


class WorkerError(HyTrainError, RuntimeError):
    """The update worker failed; the message names the layer it was working on."""


class EngineClosedError(HyTrainError, RuntimeError):
    """The engine was used after destroy()."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """For a message: asks whether the most similar known name is meant; empty if there is none."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f'did you mean "{near[0]}"? ' if near else ""


def unquoted(value: object) -> str:
    """The end of a message that refuses a value: a number in quotes must be without; else empty."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value)
    return f"; write {value} without quotes" if is_number else ""


def refuse_all(*checks: Callable[[], object]) -> None:
    """Runs all checks. Raises the error of one, or a ConfigError with those of several."""
    found: list[ConfigError | UnsupportedError] = []
    for check in checks:
        try:
            check()
        except (ConfigError, UnsupportedError) as error:
            found.append(error)
    if found:
        raise found[0] if len(found) == 1 else ConfigError(";\n".join(map(str, found)))


def size_text(num_bytes: int) -> str:
    """For a message or a table: a number of bytes in a suitable unit."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.0f} KiB" if num_bytes else "0"
