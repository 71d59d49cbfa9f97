"""The report in words and tables: three sentences first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hytrain.formats.text_table import align, longer_by
from hytrain.tools.trace import causes, kinds, step_times
from hytrain.tools.trace.analysis import Analysis, Cause
from hytrain.tools.trace.spans import NONE, RankTrace
from hytrain.tools.trace.step_times import StepTimes, overlap

_WORTH: Final = 0.01
"""Share of a step below which a cause or a fix is not worth a word."""
_BESIDE: Final = step_times.ACTIVITIES[3:]
"""Activities other than the GPU's compute."""
_MOST_LAYERS: Final = 8
_MOST_STEPS: Final = 20
_COMPARED: Final = 0.06
"""In seconds: shorter steps vary by more than a comparison would show."""

_WAITS_FOR: Final = {
    kinds.D2H: "copies to the host",
    causes.CPU_ADAM: "CPU Adam",
    kinds.H2D: "copies to the GPU",
    kinds.COMMUNICATION: "communication",
    causes.CLIPPING: "updates repeated because of clipping",
    causes.LATE_GRADIENT_COPY: "late gradient copies",
    causes.LATE_WEIGHT_COPY: "late weight copies",
    causes.STARVED_CPU: "late (starved) threads of CPU Adam",
    causes.LATE_COLLECTIVE: "collectives issued late",
    causes.LAUNCH: "the host to launch its work",
    causes.DATA_LOADING: "data loading",
    causes.SYNCHRONIZATION: "a synchronization with the host",
    causes.HOST_CODE: "other code of the host",
    causes.HAND_OVER: "hand-overs between threads and streams",
    causes.KERNEL_GAPS: "the gaps between kernels",
}


def percent(share: float) -> str:
    """A share as a percentage with one decimal.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{share * 100:.1f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds < 1.0 else f"{seconds * 1e3:.0f}"


def _ns(nanoseconds: float) -> str:
    return _ms(nanoseconds * 1e-9)


def sentences(analysis: Analysis) -> tuple[str, str, str]:
    """Three sentences: how well work overlaps, what the GPU waits for, what to change."""
    return _overlap_words(analysis), _wait_words(analysis), change_words(analysis)


def verdict(analysis: Analysis) -> list[tuple[str, str, str]]:
    """The sentences with a name and a number each, for a page."""
    busy = analysis.busy_share(analysis.slowest)
    idle = 1.0 - analysis.busy_share(analysis.idlest)
    numbers = (percent(busy), percent(idle), change_number(analysis))
    names = ("computing", "waiting", "do this")
    if len(analysis.ranks) > 1:
        names = (f"rank {analysis.slowest} computes", f"rank {analysis.idlest} waits", "do this")
    return list(zip(names, numbers, sentences(analysis), strict=True))


def change_number(analysis: Analysis) -> str:
    """What the best change saves at most, for a page; empty if none is worth it."""
    gain = max((fix.gain for fix in analysis.fixes), default=0.0)
    return f"-{percent(gain)} at most" if gain >= _WORTH else ""


def _overlap_words(analysis: Analysis) -> str:
    rank = analysis.slowest
    step, share = analysis.step_seconds(rank), analysis.busy_share(rank)
    note = "" if analysis.has_gpu else " (the CPU: no GPU was recorded)"
    who = analysis.named("The GPU") + note
    if len(analysis.ranks) > 1:
        who = f"{analysis.named('The GPU')} of rank {rank}, the slowest{note},"
    words = f"{who} computes {percent(share)} of a step ({_ms(share * step)} of {_ms(step)} ms)"
    hidden: list[str] = []
    for activity in _BESIDE:
        found = overlap(analysis.steps[rank], activity)
        if found.total:
            hidden.append(
                f"{percent(found.hidden / found.total)} of the {analysis.named(activity)}"
            )
    if hidden and not any(overlap(analysis.steps[rank], name).hidden for name in _BESIDE):
        return f"{words}, and nothing else runs meanwhile."
    return f"{words}, which hides {_and(hidden)}." if hidden else f"{words}."


def _wait_words(analysis: Analysis) -> str:
    rank, several = analysis.idlest, len(analysis.ranks) > 1
    idle, step = 1.0 - analysis.busy_share(rank), analysis.step_seconds(rank)
    if idle < _WORTH:
        who = f"Rank {rank} waits longest, and" if several else "It waits"
        return f"{who} for next to nothing: it is idle {percent(idle)}."
    shares = [(one.seconds / step, one) for one in analysis.causes if one.rank == rank]
    named = [
        (f"{_cause_words(cause)} ({percent(share)})", cause)
        for share, cause in shares
        if share >= _WORTH / 5 and cause.cause != causes.UNRESOLVED
    ][:4]
    unresolved = sum(share for share, cause in shares if cause.cause == causes.UNRESOLVED)
    rest = f"{percent(unresolved)} of a step is unresolved."
    who = f"Rank {rank} waits longest, {percent(idle)} of a step" if several else "It waits"
    if not named:
        return f"{who}; {rest}"
    late = [_late_words(analysis, one) for _, one in named if one.cause == causes.SLOW_RANK]
    words = _and([words for words, _ in named])
    return f"{who}{':' * several} for {words}; {rest}{''.join(late)}"


def _cause_words(cause: Cause) -> str:
    if cause.cause == causes.SLOW_RANK:
        return f"rank {cause.late_rank}"
    words = _WAITS_FOR[cause.cause]
    is_of_host = cause.cause in causes.HOST_CAUSES or cause.cause == causes.KERNEL_GAPS
    if cause.detail:
        words += f", {cause.detail}"
    elif cause.layer != NONE and not is_of_host:
        mostly = "mostly " if cause.layer_share < 0.995 else ""
        words += f", {mostly}of layer {cause.layer}" if mostly else f" of layer {cause.layer}"
    return words


def _late_words(analysis: Analysis, cause: Cause) -> str:
    """What makes a rank late for another one, as far as that is known."""
    known: list[str] = []
    if not cause.detail.startswith(causes.UNRESOLVED):
        known.append(f"is late mostly in {cause.detail.replace(' layer ', ' of layer ')}")
    for one in analysis.slow_layers:
        if one.rank == cause.late_rank and one.is_beside_ranks:
            words = f"takes {_ms(one.seconds)} ms a step for {one.activity} of layer {one.layer}"
            known.append(f"{words} (other ranks: {_ms(one.usual)})")
            break
    return f" Rank {cause.late_rank} {_and(known)}." if known else ""


def change_words(analysis: Analysis) -> str:
    """What to try first, and what it would save."""
    if not analysis.has_gpu:
        return "Record a run with a GPU: what a change would save there cannot be seen on a CPU."
    worth = [fix for fix in analysis.fixes if fix.gain >= _WORTH]
    if not worth:
        return "No change saves more than 1 %: the rest of the step is compute."
    first, *others = worth[:3]
    others = [f"{fix.name} {percent(fix.gain)}" for fix in others]
    then = f" Then: {_and(others)}." if others else ""
    return (
        f"Try first: {first.name}, which saves at most {percent(first.gain)} of a step "
        f"({first.words}).{then} Each is an upper bound, for it alone."
    )


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


# -- tables ------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table of rows under a heading; empty if there are none."""
    return "\n".join(align(rows, left=left)) if len(rows) > 1 else ""


def report(analysis: Analysis, *, verbose: bool = False) -> str:
    """The report, not yet folded to a terminal's width; ``verbose``: with all tables."""
    blocks = ["\n".join(sentences(analysis))]
    blocks += [_fixes(analysis)] if analysis.has_gpu or verbose else []
    measured = [_measured(analysis, rank) for rank in analysis.ranks]
    blocks += ["\n".join(measured)]
    if not verbose:
        return "\n\n".join([block for block in blocks if block] + ["--verbose: all tables."])
    blocks.append(_steps(analysis))
    for rank in analysis.ranks:
        blocks += _rank(analysis, rank)
    blocks.append(_slow_layers(analysis))
    return "\n\n".join(block for block in blocks if block)


def _steps(analysis: Analysis) -> str:
    busy = analysis.named("GPU busy")
    rows = [("rank", "step", "ms", busy, "forward", "backward", "update", "idle", "mostly")]
    lines = [(rank.rank, one) for rank in analysis.ranks for one in analysis.steps[rank.rank]]
    for rank, one in lines[:_MOST_STEPS]:
        parts = one.parts
        backward = parts[kinds.BACKWARD] + parts[kinds.RECOMPUTE]
        idle = {cause: parts[cause] for cause in causes.CAUSES if parts[cause]}
        most = max(idle, key=lambda cause: idle[cause], default="")
        rows.append(
            (
                *(str(rank), str(one.step.number), _ns(one.step.length)),
                percent(one.busy / one.step.length if one.step.length else 0.0),
                *(_ns(parts[kinds.FORWARD]), _ns(backward), _ns(parts[kinds.GPU_UPDATE])),
                *(_ns(sum(idle.values())), f"{most} {_ns(idle[most])}" if most else ""),
            )
        )
    left = f"\n... and {len(lines) - _MOST_STEPS} more (--json)" if len(lines) > _MOST_STEPS else ""
    return "Steps (ms)\n\n" + "\n".join(align(rows, left=(8,))) + left


def _rank(analysis: Analysis, rank: RankTrace) -> list[str]:
    steps = analysis.steps[rank.rank]
    is_slowest = len(analysis.ranks) > 1 and analysis.slowest == rank.rank
    title = f"Rank {rank.rank}" + (", the slowest" if is_slowest else "")
    source = "" if rank.header is not None else ", not hytrain's"
    return [
        f"{title}: {rank.path.name}{source}",
        *(_activities(analysis, steps), _idle(analysis, rank.rank), _layers(steps)),
        *(_critical(analysis, rank.rank), _rates(analysis, rank.rank)),
    ]


def _activities(analysis: Analysis, steps: Sequence[StepTimes]) -> str:
    heading = ("activity, ms a step", "total", "hidden", "exposed", "blocking", "hidden share")
    rows: list[tuple[str, ...]] = [heading]
    for activity in step_times.ACTIVITIES:
        found = overlap(steps, activity)
        if found.total:
            times = [_ns(value / len(steps)) for value in found]
            share = percent(found.hidden / found.total)
            rows.append((analysis.named(activity), *times, share))
    return "\n".join(align(rows))


def _idle(analysis: Analysis, rank: int) -> str:
    rows = [(analysis.named("the GPU is idle because of"), "ms a step", "share", "layer", "what")]
    for cause in analysis.causes:
        if cause.rank == rank:
            layer = "" if cause.layer == NONE else str(cause.layer)
            late = f"rank {cause.late_rank}: " if cause.late_rank != NONE else ""
            share = percent(cause.seconds / analysis.step_seconds(rank))
            rows.append((cause.cause, _ms(cause.seconds), share, layer, late + cause.detail))
    return _table(rows, (0, 4)) or analysis.named("The GPU is never idle.")


def _layers(steps: Sequence[StepTimes]) -> str:
    layers = sorted({layer for one in steps for layer in one.layers})
    if not layers:
        return ""
    passes = (kinds.FORWARD, kinds.BACKWARD)
    rows: list[tuple[float, int, tuple[str, ...]]] = []
    for layer in layers:
        beside = [overlap(steps, name, layer) for name in _SHORT]
        blocking = sum(one.blocking for one in beside)
        numbers = [
            *(overlap(steps, name, layer).total for name in passes),
            *(one.exposed for one in beside),
            blocking,
        ]
        weight = blocking + sum(one.exposed for one in beside) * 1e-6
        rows.append((weight, layer, (str(layer), *(_ns(n / len(steps)) for n in numbers))))
    chosen = sorted(sorted(rows, reverse=True)[:_MOST_LAYERS], key=lambda row: row[1])
    heading = ("layer, ms a step", *passes, *(f"{n} exposed" for n in _SHORT.values()), "blocking")
    left = len(rows) - len(chosen)
    table = "\n".join(align([heading, *(cells for *_, cells in chosen)]))
    return table + (f"\n... and {left} layers with less (--json)" if left else "")


_SHORT: Final = {
    kinds.CPU_UPDATE: "CPU",
    kinds.D2H: "to host",
    kinds.H2D: "to GPU",
    kinds.COMMUNICATION: "comm.",
}


def _critical(analysis: Analysis, rank: int) -> str:
    step = analysis.step_seconds(rank)
    parts = [f"{name} {percent(s / step)}" for name, s in analysis.critical[rank].items() if s]
    return analysis.named("Critical path: " + ", ".join(parts) + ".")


def _rates(analysis: Analysis, rank: int) -> str:
    # On a CPU, compute takes cores and memory bandwidth from the measured work and its peak alike.
    of_peak = ("measured peak", "of peak") if analysis.has_gpu else ()
    rows: list[tuple[str, ...]] = [("rate while it runs", "achieved", *of_peak, "runs")]
    for rate in analysis.rates[rank]:
        share = "unknown" if rate.share is None else percent(rate.share)
        peak = (_quantity(rate.peak, rate.unit), share) if of_peak else ()
        achieved = _quantity(rate.achieved, rate.unit)
        rows.append((rate.name, achieved, *peak, percent(rate.busy_share)))
    return _table(rows)


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    if unit == "cores":
        return f"{value:.1f} cores"
    return f"{value / 1e9:.2f} G{unit}"


def _measured(analysis: Analysis, rank: RankTrace) -> str:
    step = analysis.step_seconds(rank.rank)
    is_long = step >= _COMPARED
    who = f"Rank {rank.rank}: measured" if len(analysis.ranks) > 1 else "Measured"
    words = [f"{who} step {_ms(step)} ms"]
    header, power = rank.header, analysis.energy[rank.rank]
    if header is not None and header.predicted_step_s is not None:
        error = longer_by(step / header.predicted_step_s - 1.0)
        than = f"{error} than predicted" if is_long else "predicted"
        words.append(f"{than} ({_ms(header.predicted_step_s)} ms)")
    if header is not None and header.unprofiled_step_s is not None:
        words.append(f"steps that are not recorded {_ms(header.unprofiled_step_s)} ms")
    if header is not None and header.recording_overhead is not None and is_long:
        words.append(f"recorded ones are {longer_by(header.recording_overhead)}")
    if power is not None:
        for name, joules in (("GPU", power.gpu), ("CPU", power.cpu)):
            words += [] if joules is None else [f"{joules:.1f} J a step on the {name}"]
        if power.tokens_per_joule is not None:
            words.append(f"{power.tokens_per_joule:.2f} tokens a joule")
    lost = ""
    if header is not None and (header.overwritten or header.dropped_spans):
        lost = (
            f" The recorder's ring was full: {header.dropped_spans} spans are missing, and what "
            "they would explain is unresolved."
        )
    unknown = f"\nUnknown: {'; '.join(rank.unknown)}." if rank.unknown else ""
    return "; ".join(words) + "." + lost + unknown


def _slow_layers(analysis: Analysis) -> str:
    rows = [("slow layers, ms a step", "rank", "layer", "takes", "usual", "beside")]
    for one in sorted(analysis.slow_layers[:_MOST_LAYERS], key=lambda one: (one.rank, one.layer)):
        beside = "other ranks" if one.is_beside_ranks else "other layers"
        times = _ms(one.seconds), _ms(one.usual)
        rows.append((one.activity, str(one.rank), str(one.layer), *times, beside))
    return _table(rows, (0, 5))


def _fixes(analysis: Analysis) -> str:
    rows = [("fix, each alone", "saves at most", "step, ms", "what is assumed")]
    for fix in analysis.fixes:
        rows.append((fix.name, percent(fix.gain), _ms(fix.step_seconds), fix.words))
    return _table(rows, (0, 3))
