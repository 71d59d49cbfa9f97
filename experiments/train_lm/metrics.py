"""What a run reports: a line of JSON a step, a progress bar, a loss curve, a closing table."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

# The first steps measure allocators, calibration and thread start, not training.
_WARMUP_STEPS = 3


class UpdateStatistics(Protocol):
    """What ``HyTrainEngine.step_statistics()`` returns, as far as it is recorded here."""

    @property
    def step(self) -> int: ...

    @property
    def gpu_fraction(self) -> float: ...

    @property
    def update_seconds(self) -> float: ...

    @property
    def exposed_seconds(self) -> float: ...

    @property
    def hidden_share(self) -> float: ...

    @property
    def grad_norm(self) -> float | None: ...

    @property
    def clip_coefficient(self) -> float | None: ...

    @property
    def skipped(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step. The fields from ``k`` on are hytrain's; None without it."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the tokens of the global batch, before the step's update."""
    lr: float
    """Learning rate that the update used."""
    grad_norm: float | None
    """Norm before clipping; None where the step did not wait for it."""
    step_s: float
    """Wall time, seconds."""
    tokens_per_s: float
    """All ranks together."""
    tflops: float
    """Useful TFLOP/s a rank: 6 operations a parameter and token."""
    host_memory_gib: float
    """Largest resident set of this rank's process so far."""
    gpu_memory_gib: float | None
    """Most memory that torch's allocator has had in use on this rank's GPU; None on a CPU."""
    gpu_energy_j: float | None = None
    """Joules of all ranks' GPUs in the step; None where one of them cannot be read."""
    cpu_energy_j: float | None = None
    """Joules of all hosts' processors in the step, other programs' included; None as above."""
    tokens_per_j: float | None = None
    """Tokens of the step over the joules that are known, GPUs' and processors'."""
    k: float | None = None
    """Share of layers updated on the GPU."""
    update_s: float | None = None
    """Seconds that the CPU worker spent updating."""
    exposed_s: float | None = None
    """Seconds that forward and step() waited for updates."""
    hidden_share: float | None = None
    """1 - exposed_s / update_s, in [0, 1]."""
    clip_coefficient: float | None = None
    """Factor on the gradient; 1 where it was not clipped."""
    skipped: bool | None = None
    """Whether the gradient was not finite and the step changed nothing."""


def update_fields(statistics_of_step: UpdateStatistics | None) -> dict[str, Any]:
    """Name the engine's statistics as ``StepRecord`` does; empty without any."""
    if statistics_of_step is None:
        return {}
    return {
        "k": statistics_of_step.gpu_fraction,
        "update_s": statistics_of_step.update_seconds,
        "exposed_s": statistics_of_step.exposed_seconds,
        "hidden_share": statistics_of_step.hidden_share,
        "clip_coefficient": statistics_of_step.clip_coefficient,
        "skipped": statistics_of_step.skipped,
    }


def host_memory_gib() -> float:
    """Largest resident set of this process so far, GiB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)


class MetricsFile:
    """A file of JSON lines, flushed at each line, so that a killed job loses none."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open ``path``, keeping its lines of steps up to ``keep_steps``.

        A resumed run trains again on the steps after its checkpoint: their old lines go.
        """
        old = read_metrics(path) if keep_steps else []
        kept = [record for record in old if _is_kept(record, keep_steps)]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        for record in kept:
            self._write(record)

    def step(self, record: StepRecord) -> None:
        """Append a step; a field that is None is left out."""
        self._write({k: v for k, v in asdict(record).items() if v is not None})

    def evaluation(self, step: int, loss: float) -> None:
        """Append the held-out loss after ``step`` steps."""
        self._write({"step": step, "eval_loss": loss})

    def decisions(self, records: Sequence[dict[str, Any]]) -> None:
        """Append decisions about k, each as ``hytrain explain`` reads it."""
        for record in records:
            self._write(record)

    def plan(self, step: int, report: dict[str, Any]) -> None:
        """Append what the plan predicted, and what was measured."""
        self._write({"step": step, "plan": report})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
        self._file.flush()


def write_reference(out: Path, seconds: Sequence[float]) -> None:
    """Write what passes without an update took."""
    reference = {"seconds": list(seconds), "median": statistics.median(seconds)}
    (out / "reference.json").write_text(json.dumps(reference) + "\n")
    print(f"reference {reference['median']:.3f} s: forward and backward without an update")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file; empty if there is none. A half line, of a killed job, is left out."""
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records


def _finite(value: Any) -> Any:
    """Return the value as JSON can hold it: what is not finite becomes None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_kept(record: dict[str, Any], keep_steps: int) -> bool:
    """Whether a line is from before the checkpoint after ``keep_steps`` steps."""
    if "placement" in record:
        # A decision after step n is made in the backward of step n + 1.
        return record["step"] < keep_steps
    return record["step"] <= keep_steps


def progress_bar(*, first: int, steps: int, disable: bool) -> tqdm[Any]:
    """Make the bar over steps, which starts at ``first`` where a run is resumed."""
    return tqdm(
        total=steps, initial=first, unit="step", dynamic_ncols=True, smoothing=0.1, disable=disable
    )


def bar_fields(record: StepRecord) -> dict[str, str]:
    """Return what stands behind the progress bar."""
    fields = {
        "loss": f"{record.loss:.3f}",
        "tok/s": f"{record.tokens_per_s:,.0f}",
        "TFLOP/s": f"{record.tflops:.3g}",
    }
    if record.k is not None:
        fields["k"] = f"{record.k:.2f}"
    return fields


def plot_loss(metrics: Path, image: Path) -> None:
    """Draw loss and held-out loss over steps as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_metrics(metrics)
    train = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    held_out = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=1, label="training batch")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    if train or held_out:
        axes.legend()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the closing table shows, over the whole metrics file."""

    loss_start: float | None
    loss_end: float | None
    eval_loss_start: float | None
    eval_loss_end: float | None
    step_s: float | None
    tokens_per_s: float | None
    tflops: float | None
    gpu_energy_j: float | None
    cpu_energy_j: float | None
    tokens_per_j: float | None
    k: float | None
    k_reason: str | None
    """Of rank 0's last decision; None where it was not made from measured times."""
    update_s: float | None
    hidden_share: float | None
    host_memory_gib: float | None
    gpu_memory_gib: float | None


def summarize(records: Sequence[dict[str, Any]]) -> Summary:
    """Condense a metrics file: medians over the steps after the first three, if there are more.

    The loss at the start is the first step's, at the end the mean of the last ten. The hidden
    share is of the summed times, so a step with a long update weighs more than one with none.
    """
    steps = [r for r in records if "step_s" in r]
    held_out = [r["eval_loss"] for r in records if "eval_loss" in r]
    steady = steps[_WARMUP_STEPS:] or steps
    losses = [r["loss"] for r in steps if r["loss"] is not None]
    last = losses[-min(10, max(1, len(losses) // 4)) :]
    update = sum(r.get("update_s", 0.0) for r in steady)
    exposed = sum(r.get("exposed_s", 0.0) for r in steady)
    return Summary(
        loss_start=losses[0] if losses else None,
        loss_end=statistics.fmean(last) if last else None,
        eval_loss_start=held_out[0] if held_out else None,
        eval_loss_end=held_out[-1] if len(held_out) > 1 else None,
        step_s=_median(steady, "step_s"),
        tokens_per_s=_median(steady, "tokens_per_s"),
        tflops=_median(steady, "tflops"),
        # Counters are renewed in intervals longer than many a step: a median would be of zeros.
        gpu_energy_j=_mean(steady, "gpu_energy_j"),
        cpu_energy_j=_mean(steady, "cpu_energy_j"),
        tokens_per_j=_tokens_per_joule(steady),
        k=_median(steady, "k"),
        k_reason=_last_reason(records),
        update_s=_median(steady, "update_s"),
        hidden_share=min(1.0, max(0.0, 1.0 - exposed / update)) if update else None,
        host_memory_gib=steps[-1]["host_memory_gib"] if steps else None,
        gpu_memory_gib=steps[-1].get("gpu_memory_gib") if steps else None,
    )


def _last_reason(records: Sequence[dict[str, Any]]) -> str | None:
    own = [r["placement"] for r in records if "placement" in r and r.get("rank", 0) == 0]
    if not own or own[-1]["costs"] is None:
        return None
    # What follows the first clause, how many layers and what is predicted, `hytrain explain` says.
    return own[-1]["reason"].split("; ")[0]


def _mean(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [r[key] for r in records if r.get(key) is not None]
    return statistics.fmean(values) if values else None


def _tokens_per_joule(records: Sequence[dict[str, Any]]) -> float | None:
    joules = tokens = 0.0
    for record in records:
        known = [record[k] for k in ("gpu_energy_j", "cpu_energy_j") if record.get(k) is not None]
        if known:
            joules += sum(known)
            tokens += record["tokens_per_s"] * record["step_s"]
    return tokens / joules if joules else None


def _median(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [r[key] for r in records if r.get(key) is not None]
    return statistics.median(values) if values else None


_ROWS: tuple[tuple[str, str, str], ...] = (
    ("loss_start", "training loss, first step", "{:.3f}"),
    ("loss_end", "training loss, mean of the last steps", "{:.3f}"),
    ("eval_loss_start", "held-out loss at the start", "{:.3f}"),
    ("eval_loss_end", "held-out loss at the end", "{:.3f}"),
    ("step_s", "step time, median", "{:.3f} s"),
    ("tokens_per_s", "tokens/s, all ranks", "{:,.0f}"),
    ("tflops", "TFLOP/s a rank", "{:.3g}"),
    ("gpu_energy_j", "GPU energy a step, all ranks", "{:.1f} J"),
    ("cpu_energy_j", "processors' energy a step, all hosts", "{:.1f} J"),
    ("tokens_per_j", "tokens a joule", "{:.3g}"),
    ("k", "share of layers updated on the GPU (k)", "{:.2f}"),
    ("k_reason", "why that k", "{}"),
    ("update_s", "CPU update time a step, median", "{:.3f} s"),
    ("hidden_share", "share of update time hidden behind compute", "{:.1%}"),
    ("gpu_memory_gib", "GPU memory, peak", "{:.1f} GiB"),
    ("host_memory_gib", "host memory, peak", "{:.1f} GiB"),
)


def format_table(summary: Summary) -> str:
    """Lay out the closing table; a row without a value is left out."""
    values = asdict(summary)
    rows = [(label, form.format(values[k])) for k, label, form in _ROWS if values[k] is not None]
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{label:<{width}}  {value:>14}" for label, value in rows)
