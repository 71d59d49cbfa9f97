"""What `hytrain plan` says if nothing fits: each option that it names has been planned with."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hytrain.formats.moment_kinds import MasterName, MomentsName, smaller_states
from hytrain.tools.cli.plan_subject import planned, profile_of

_GIB = 1024**3
_STREAMED = "--stage 3 --offload-param cpu"


class _Change(NamedTuple):
    """A change of what was asked for: form of training, state and host memory."""

    form: str
    options: Mapping[str, Any]
    moments: MomentsName
    master: MasterName
    times: int = 1
    """Factor of the present host memory."""


def misfit_words(
    arguments: argparse.Namespace, config: Mapping[str, Any], profile: Any, options: Any, plan: Any
) -> str:
    """How much is missing and what to try, in one line; then where it is missing.

    Args:
        arguments: the command's.
        config: DeepSpeed's; empty if none is given.
        profile: the ranks'.
        options: those that do not fit.
        plan: what they lack.
    """
    from hytrain.tools.infeasible import Infeasible

    missing, reason, tried = plan.missing, plan.reason, list[str]()
    if plan.samples:  # for this batch other memory may be missing
        _, less = planned(profile, replace(options, batch=plan.samples))
        if isinstance(less, Infeasible):
            missing = less.missing
            reason += f"; with --batch {plan.samples}, {less.reason}"
        else:
            tried.append(f"--batch {plan.samples} or less ({_step_words(less)})")
    tried += _Remedies(arguments, config, profile, options).found()
    head = "Does not fit" + f": {missing:.2f} GiB missing" * (missing >= 0.01)
    head += f"; try {', or '.join(tried)}" * bool(tried)
    return f"{head}.\n{reason[0].upper()}{reason[1:]}."


def _step_words(plan: Any) -> str:
    by_layer = "" if plan.accumulation == "micro_batch_major" else ", layer by layer"
    return f"{plan.predicted_seconds:.3g} s a step{by_layer}"


class _Remedies:
    """Other options for what does not fit; the arguments are those of :func:`misfit_words`."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        config: Mapping[str, Any],
        profile: Any,
        options: Any,
    ) -> None:
        self._arguments, self._config, self._options = arguments, config, options
        self._own, self._host = profile.model.moments, profile.hosts[0].memory_bytes
        self._ranks = sum(len(host.ranks) for host in profile.hosts)
        self._profiles = {self._own: profile}
        can_split = profile.model.dtype == "bf16" and arguments.out is None
        states = smaller_states(self._own, options.master, can_split=can_split)
        # A profile has the times of updates with its own moments only.
        self._states = [one for one in states if arguments.gpus or one[0] == self._own]

    def found(self) -> list[str]:
        """The smallest change with which a plan fits into the present memory.

        With data sheets also the least additional host memory with which a plan fits, if there is
        no such change, or if it changes the state: then the least that keeps the state as it is.
        """
        own, forms = self._states[0], {"": {}} | dict(self._heavier())
        here = [_Change(*form, *own) for form in self._lighter()]
        here += [_Change(*form, *state) for form in forms.items() for state in self._states]
        found, words = self._first(here)
        if not self._arguments.gpus or (found and (found.moments, found.master) == own):
            return words
        more = (
            _Change(form, forms[form], *state, times)
            for times in (2, 4, 8, 16, 32)
            for form in ("", _STREAMED)
            if form in forms
            for state in ([own] if found else self._states)
        )
        return words + self._first(more)[1]

    def _lighter(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Flags that make a step shorter, and the options that they mean."""
        options = self._options
        if options.offload_param:
            yield "without --offload-param", {"offload_param": False}
        if options.stage == 3:
            # One GPU shards nothing in stage 3, and keeps gradients there that stage 2 sends away.
            words = "--stage 2" + " without --offload-param" * options.offload_param
            yield words, {"stage": 2, "offload_param": False}

    def _heavier(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Flags that take less memory and more time, and the options that they mean."""
        if self._options.stage != 3 and self._ranks > 1:
            yield "--stage 3", {"stage": 3}
        if not self._options.offload_param:
            yield _STREAMED, {"stage": 3, "offload_param": True}

    def _first(self, changes: Iterable[_Change]) -> tuple[_Change | None, list[str]]:
        """The first change with which a plan is found, and its words; None and [] without one."""
        from hytrain.tools.infeasible import Infeasible
        from hytrain.tools.planner.infeasibility import lacks_memory
        from hytrain.tools.planner.profile_problem import problem_from

        for change in changes:
            profile = self._profile(change.moments, change.times)
            master = change.master
            options = replace(self._options, master=master, **change.options)
            # The search may take seconds to find nothing, and there are many changes.
            if lacks_memory(problem_from(profile, options)):
                continue
            _, plan = planned(profile, options)
            if not isinstance(plan, Infeasible):
                return change, [f"{self._words(change)} ({_step_words(plan)})"]
        return None, []

    def _profile(self, moments: MomentsName, times: int) -> Any:
        if moments not in self._profiles:
            other = argparse.Namespace(**{**vars(self._arguments), "moments": moments})
            self._profiles[moments], _ = profile_of(other, self._config)
        profile = self._profiles[moments]
        hosts = (
            host.model_copy(update={"memory_bytes": times * host.memory_bytes})
            for host in profile.hosts
        )
        return profile.model_copy(update={"hosts": tuple(hosts)})

    def _words(self, change: _Change) -> str:
        """The flags that make a change."""
        words = [change.form] if change.form else []
        words += [f"--moments {change.moments}"] if change.moments != self._own else []
        words += [f"--master {change.master}"] if change.master != self._options.master else []
        if change.times > 1:
            words.append(f"--host-memory {change.times * self._host / _GIB:g}")
        path = self._arguments.deepspeed_config
        return " ".join(words) + (f", and {path} to match," if path else "")
