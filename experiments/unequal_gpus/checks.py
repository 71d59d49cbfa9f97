"""The claims of this experiment, each decided from measured cases. Plain data, no torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from experiments.common import records
from experiments.common.checks import Check
from experiments.common.group import REFUSED
from experiments.common.records import Json
from experiments.unequal_gpus.planning import best_passes, file_of, passes_of, predicted_seconds

SUM_OF_SPEEDS = 0.93
TIMES_EVEN = 2.2
PREDICTION = 0.07
MEMORY_PREDICTION = 0.10
SLOWDOWN = 0.10

DID_NOT_FIT = (records.OUT_OF_MEMORY, REFUSED)


def result_of(case: Json, stage: str) -> list[Json] | None:
    """A stage's results, a rank each; None where it has not been measured."""
    found = case["results"].get(stage)
    return found["ranks"] if found is not None and found["status"] == records.OK else None


def status_of(case: Json, stage: str) -> str:
    """How a stage ended."""
    found = case["results"].get(stage)
    return "not measured" if found is None else found["status"]


def throughput(case: Json, run: str) -> float | None:
    """Samples a second of a run; "alone": the sum of all ranks'."""
    ranks = result_of(case, run)
    if ranks is None:
        return None
    rates = [rank["samples_per_second"] for rank in ranks]
    return sum(rates) if run == "alone" else min(rates)


def passes_throughput(case: Json) -> float | None:
    """The sum of what the GPUs reach with forward and backward alone, without any update."""
    ranks = result_of(case, "profile")
    if ranks is None:
        return None
    profile = file_of(ranks)
    return sum(best_passes(passes_of(profile, rank)).rate for rank in range(len(ranks)))


def ratio(above: float | None, below: float | None) -> float | None:
    """None where either is."""
    return None if above is None or below is None else above / below


def step_seconds(case: Json, run: str) -> float | None:
    """Of the slowest rank."""
    ranks = result_of(case, run)
    return None if ranks is None else max(rank["step_seconds"] for rank in ranks)


def waits_in_turns(case: Json) -> tuple[str, str] | None:
    """Runs whose ranks wait in NCCL's kernels, and in a stream; None where none were compared."""
    runs = case["case"]["runs"]
    if "in_kernels" in runs:
        return "in_kernels", "planned"
    # Before the stream became the default (results of 2ff80a3).
    return ("planned", "in_stream") if "in_stream" in runs else None


def waits_ratio(case: Json) -> float | None:
    """Median step of the runs whose ranks wait in NCCL's kernels over that of those in a stream."""
    compared = waits_in_turns(case)
    if compared is None:
        return None
    steps: dict[str, list[float]] = {}
    for run in case["case"]["runs"]:
        seconds = step_seconds(case, run)
        if seconds is not None:
            steps.setdefault(run.partition("#")[0], []).append(seconds)
    in_kernels, in_stream = (steps.get(run) for run in compared)
    if not in_kernels or not in_stream:
        return None
    return statistics.median(in_kernels) / statistics.median(in_stream)


def clipped_share(case: Json, run: str) -> float | None:
    """Of a run's timed steps, those that were clipped, on all ranks alike; None in old results."""
    ranks = result_of(case, run)
    return None if ranks is None else ranks[0].get("clipped_share")


def judged_prediction(case: Json) -> float | None:
    """The planned step with as many clipped ones as were measured."""
    plan = result_of(case, "plan")
    if plan is None:
        return None
    return predicted_seconds(plan[0]["planned"], clipped_share(case, "planned"))


def reported(case: Json) -> Json | None:
    """What the engine itself reported of the planned run; None where there is no such run."""
    ranks = result_of(case, "planned")
    return None if ranks is None else ranks[0].get("plan_report")


def prediction_error(case: Json) -> float | None:
    """Measured over predicted step, less 1, by the mean of the timed steps."""
    error = ratio(step_seconds(case, "planned"), judged_prediction(case))
    return None if error is None else error - 1.0


def bare_over_profile(case: Json) -> list[float] | None:
    """For each rank: a bare micro-batch before the planned run over the profile's; 0 without one.

    A host that starts kernels more slowly than minutes before makes small micro-batches longer.
    """
    ranks, measured = result_of(case, "profile"), result_of(case, "planned")
    if ranks is None or measured is None or not all("bare" in rank for rank in measured):
        return None
    profile, plan = file_of(ranks), result_of(case, "plan")
    policies = plan[0]["planned"].get("activations") if plan else None
    found: list[float] = []
    for rank, bare in enumerate(each["bare"] for each in measured):
        policy = policies[rank] if policies else "store"
        known = {p.samples: p for p in passes_of(profile, rank, policy)}
        if bare is None or bare["samples"] not in known:
            found.append(0.0)
            continue
        expected = known[bare["samples"]]
        seconds = bare["forward"] + bare["backward"]
        found.append(seconds / (expected.forward + expected.backward))
    return found


def slowdowns(case: Json) -> list[tuple[float, float, float]] | None:
    """For each rank: stated speed, that of forward, that of backward, the first rank's being 1; at
    the largest micro-batch that all ranks have measured."""
    ranks = result_of(case, "profile")
    if ranks is None:
        return None
    profile = file_of(ranks)
    passes = [{p.samples: p for p in passes_of(profile, rank)} for rank in range(len(ranks))]
    size = max(set.intersection(*map(set, passes)))
    first = passes[0][size]
    return [
        (speed, first.forward / own[size].forward, first.backward / own[size].backward)
        for speed, own in zip(case["case"]["speeds"], passes, strict=True)
    ]


def counted_slowdowns(case: Json) -> list[tuple[int, float, float]] | None:
    """Of part slowdown: multiprocessors granted, speed of forward and of backward; the first has
    speed 1."""
    ranks = result_of(case, "slowdown")
    if ranks is None:
        return None
    rows = ranks[0]["rows"]
    return [
        (
            row["granted_sms"],
            rows[0]["forward"] / row["forward"],
            rows[0]["backward"] / row["backward"],
        )
        for row in rows
    ]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Multiprocessors that stand for speeds, and how far off forward or backward is at most."""

    by_speed: dict[float, int]
    error: float

    @property
    def option(self) -> str:
        """For run.py."""
        return "--sms " + ",".join(f"{speed:g}={n}" for speed, n in self.by_speed.items())


def best_counts(
    counted: Sequence[tuple[int, float, float]], speeds: Sequence[float] = (0.5, 0.25)
) -> Counts:
    """Which number stands for speed 1, and which for the others, so that they are nearest.

    Speed is not proportional to multiprocessors, and the driver deals them by eights: where one
    number for speed 1 has no good half, another has. Those of at least half of the GPU can be it.
    """
    most = max(count for count, _, _ in counted)
    found: list[Counts] = []
    for whole, *fastest in counted:
        if 2 * whole < most:
            continue
        chosen, worst = {1.0: whole}, 0.0
        for speed in speeds:
            errors = {
                count: max(
                    abs(own / of / speed - 1.0) for own, of in zip(both, fastest, strict=True)
                )
                for count, *both in counted
            }
            chosen[speed] = min(errors, key=lambda count: errors[count])
            worst = max(worst, errors[chosen[speed]])
        found.append(Counts(chosen, worst))
    return min(found, key=lambda counts: (counts.error, -counts.by_speed[1.0]))


def _check_slowdown(case: Json) -> list[Check]:
    counted = counted_slowdowns(case)
    best = None if counted is None else best_counts(counted)
    claim = "forward and backward from speeds 0.5 and 0.25, most"
    if best is not None:
        claim += f", with {best.option}"
    error = None if best is None else best.error
    checks = [_at_most(claim, error, SLOWDOWN, case["case"]["label"])]
    ranks = result_of(case, "slowdown")
    rows = ranks[0]["rows"] if ranks else []
    ran = [row["backward_ran"] for row in rows if "backward_ran" in row]
    if ran:
        value = float(all(each["other_thread"] and each["limited_stream"] for each in ran))
        claim = "backward ran on another thread, on the limited stream"
        checks.append(_at_least(claim, value, 1.0, case["case"]["label"]))
    return checks


def slowdown_error(case: Json) -> float | None:
    """How far forward or backward of any rank is from its stated speed, at most."""
    found = slowdowns(case)
    if found is None:
        return None
    return max(abs(own / stated - 1.0) for stated, *both in found for own in both)


def did_not_fit(case: Json, run: str) -> float | None:
    """1 where it ran out of memory or was refused for it, 0 where it ran."""
    status = status_of(case, run)
    if status in DID_NOT_FIT:
        return 1.0
    return 0.0 if status == records.OK else None


def _at_least(claim: str, value: float | None, limit: float, part: str) -> Check:
    return Check(claim=claim, value=value, limit=limit, at_least=True, part=part)


def _at_most(claim: str, value: float | None, limit: float, part: str) -> Check:
    return Check(claim=claim, value=value, limit=limit, at_least=False, part=part)


def check_case(case: Json) -> list[Check]:
    """The claims about one case."""
    label = case["case"]["label"]
    if "slowdown" in case["case"]["runs"]:
        return _check_slowdown(case)
    error = prediction_error(case)
    error = None if error is None else abs(error)
    slow = slowdown_error(case)
    checks = [_at_most("forward and backward from the stated speed, most", slow, SLOWDOWN, label)]
    is_about_speed = min(case["case"]["memory"]) == 1.0
    if is_about_speed:
        planned, even = throughput(case, "planned"), throughput(case, "even")
        alone = throughput(case, "alone")
        times_even = ratio(planned, even)
        passes = ratio(planned, passes_throughput(case))
        sum_claim = "planned over the sum of the GPUs alone"
        checks.append(_at_least(sum_claim, ratio(planned, alone), SUM_OF_SPEEDS, label))
        limit = TIMES_EVEN if tuple(case["case"]["speeds"]) == (1.0, 0.25) else None
        checks += [
            Check(claim="planned over the sum of forward and backward alone", value=passes,
                  limit=None, at_least=True, part=label),
            Check(claim="planned over the even split", value=times_even, limit=limit,
                  at_least=True, part=label),
        ]  # fmt: skip
    if waits_in_turns(case) is not None:
        claim = "step, ranks waiting in NCCL's kernels over waiting in a stream"
        ratio_of_waits = waits_ratio(case)
        checks.append(
            Check(claim=claim, value=ratio_of_waits, limit=None, at_least=True, part=label)
        )
    limits = {"memory": MEMORY_PREDICTION}
    if label in limits:
        checks.append(_at_most("step predicted, error of speed", error, limits[label], label))
    checks.append(_at_most("step predicted, error", error, PREDICTION, label))
    report = reported(case)
    if report is not None:
        claim = "step predicted, error by the engine's report (median)"
        checks.append(
            Check(claim=claim, value=abs(report["error"]), limit=None, at_least=False, part=label)
        )
    for run, words in (
        ("even", "the even split does not fit"),
        ("even_offload", "the even split does not fit with offload either"),
        ("no_offload", "the planned shards do not fit without offload"),
    ):
        if run in case["case"]["runs"] and not is_about_speed:
            checks.append(_at_least(words, did_not_fit(case, run), 1.0, label))
    for key, words, labels in (
        ("even_split", "the planner finds no even split", ("memory", "offload")),
        ("without_host", "the planner finds nothing without offload", ("offload",)),
    ):
        if label in labels:
            plan = result_of(case, "plan")
            value = None if plan is None else float(plan[0][key] is not None)
            checks.append(_at_least(words, value, 1.0, label))
    return checks


def check_all(cases: Sequence[Json]) -> list[Check]:
    """All claims."""
    return [check for case in cases for check in check_case(case)]
