"""What a run reports: a line of JSON a step, a loss curve, a closing table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hytrain.engine.metrics_file import json_line

Record = dict[str, Any]

# The first steps measure allocators, calibration and thread start, not training.
_WARMUP_STEPS = 3


class MetricsFile:
    """A file of JSON lines, flushed at each line, so that a killed job loses none."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Opens ``path``, keeping its lines of steps up to ``keep_steps``.

        A resumed run makes the steps after its checkpoint again: their old lines are dropped.
        """
        old = read_metrics(path) if keep_steps else []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self.write(record for record in old if _is_kept(record, keep_steps))

    def write(self, records: Iterable[Record]) -> None:
        """Appends lines; fields that are None are left out, values that are not finite are null."""
        self._file.writelines(map(json_line, records))
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """Reads a metrics file; empty if there is none. A half line, of a killed job, is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _is_kept(record: Record, keep_steps: int) -> bool:
    """Whether a line is from before the checkpoint after ``keep_steps`` steps."""
    # A decision after step n is made in the backward of step n + 1.
    return record["step"] < keep_steps + ("placement" not in record)


def plot_loss(metrics: Path, image: Path) -> None:
    """Draws loss and held-out loss over steps as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_metrics(metrics)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, style, label in (("loss", "-", "training batch"), ("eval_loss", "o", "held out")):
        points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        axes.plot([at for at, _ in points], [y for _, y in points], style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


def summarize(records: Sequence[Record]) -> Record:
    """Condenses a metrics file: medians over the steps after the first three, if there are more.

    The loss at the start is the first step's, at the end the mean of the last ten. The hidden
    share is of the summed times, so a step with a long update weighs more than one with none; k is
    the last one, and its reason is that one's.
    """
    steps = [r for r in records if "step_s" in r]
    held_out = [r["eval_loss"] for r in records if "eval_loss" in r]
    steady = steps[_WARMUP_STEPS:] or steps
    losses = [r["loss"] for r in steps if r["loss"] is not None]
    last = losses[-min(10, max(1, len(losses) // 4)) :]
    update = sum(r.get("update_s", 0.0) for r in steady)
    exposed = sum(r.get("exposed_s", 0.0) for r in steady)

    def of(key: str, condense: Any = statistics.median) -> float | None:
        values = [r[key] for r in steady if r.get(key) is not None]
        return condense(values) if values else None

    # Energy counters are renewed less often than many steps end: a median would be of zeros.
    joules = {key: of(key, statistics.fmean) for key in ("gpu_energy_j", "cpu_energy_j")}
    known = sum(value for value in joules.values() if value is not None)
    tokens = statistics.fmean(r["tokens_per_s"] * r["step_s"] for r in steady) if steady else 0.0
    return {
        "loss_start": losses[0] if losses else None,
        "loss_end": statistics.fmean(last) if last else None,
        "eval_loss_start": held_out[0] if held_out else None,
        "eval_loss_end": held_out[-1] if len(held_out) > 1 else None,
        **{key: of(key) for key in ("step_s", "tokens_per_s", "tflops")},
        **joules,
        "tokens_per_j": tokens / known if known else None,
        "k": steps[-1].get("k") if steps else None,
        "k_reason": _last_reason(records),
        "update_s": of("update_s"),
        "hidden_share": min(1.0, max(0.0, 1.0 - exposed / update)) if update else None,
        "gpu_memory_gib": steps[-1].get("gpu_memory_gib") if steps else None,
        "host_memory_gib": steps[-1]["host_memory_gib"] if steps else None,
    }


def _last_reason(records: Sequence[Record]) -> str | None:
    """The reason of rank 0's last decision; None if it was not made from measured times."""
    own = [r["placement"] for r in records if "placement" in r and r.get("rank", 0) == 0]
    if not own or own[-1]["costs"] is None:
        return None
    # `hytrain explain` shows what follows the first clause: how many layers, what is predicted.
    return own[-1]["reason"].split("; ")[0]


_ROWS = {
    "loss_start": ("training loss, first step", "{:.3f}"),
    "loss_end": ("training loss, mean of the last steps", "{:.3f}"),
    "eval_loss_start": ("held-out loss at the start", "{:.3f}"),
    "eval_loss_end": ("held-out loss at the end", "{:.3f}"),
    "step_s": ("step time, median", "{:.3f} s"),
    "tokens_per_s": ("tokens/s, all ranks", "{:,.0f}"),
    "tflops": ("TFLOP/s a rank", "{:.3g}"),
    "gpu_energy_j": ("GPU energy a step, all ranks", "{:.1f} J"),
    "cpu_energy_j": ("processors' energy a step, all hosts", "{:.1f} J"),
    "tokens_per_j": ("tokens a joule", "{:.3g}"),
    "k": ("share of layers updated on the GPU at the end (k)", "{:.2f}"),
    "k_reason": ("why that k", "{}"),
    "update_s": ("CPU update time a step, median", "{:.3f} s"),
    "hidden_share": ("share of update time hidden behind compute", "{:.1%}"),
    "gpu_memory_gib": ("GPU memory, peak", "{:.1f} GiB"),
    "host_memory_gib": ("host memory, peak", "{:.1f} GiB"),
}


def format_table(summary: Record) -> str:
    """Lays out the closing table; a row without a value is left out."""
    rows = [(label, form.format(summary[k])) for k, (label, form) in _ROWS.items()
            if summary[k] is not None]  # fmt: skip
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{label:<{width}}  {value:>14}" for label, value in rows)
