"""Walks through a case's script with the reference, and compares it with what the ranks saw.

The gradient and the update are compared apart, since whole trajectories are chaotic: a step's
reduced gradients are the plain model's at the same weights, within the rounding of their sums; and
weights, moments and training copies are those of a serial update with these reduced gradients, bit
for bit (on a GPU, where state has been on it, within the roundings of two kernels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from support.comparisons import assert_same_bits, ulp
from support.engines import device

from fuzz import between
from fuzz.cases import Case, Event, Step
from fuzz.models import batch_of, set_gradient, set_values
from fuzz.player import Layout, StepTrace, Trace, rate_factor
from fuzz.precision import autocasting, compute_dtype, copy_dtype
from fuzz.reference import Reference, Sums


class Judge:
    """Compares one case; raises an AssertionError if something differs."""

    def __init__(self, case: Case, traces: Sequence[Trace], kept: Any = None) -> None:
        """
        Args:
            case: the script.
            traces: the ranks' traces.
            kept: :attr:`kept` of the job that this one follows.
        """
        self.case = case
        self.traces = traces
        self.reference = Reference(case)
        if kept is not None:
            self.reference.state, self.reference.steps, self.reference.scale.state = kept
        self._position = 0
        self._where = "at the beginning"
        self._sums: dict[str, Sums] = {}
        self._is_poisoned = False
        self._has_gradients = False
        self._largest_rate = 0.0
        self.hooks = between.Hooks(self.reference.model)
        self.is_bitwise = device().type == "cpu" or not _was_on_gpu(case)

    @property
    def kept(self) -> Any:
        """State, number of steps and loss scale, for the job that follows this one."""
        return self.reference.state, self.reference.steps, self.reference.scale.state

    def check(self) -> None:
        """Compares the whole case."""
        refusals = [trace.refused for trace in self.traces]
        if self.case.refusal is not None:
            assert all(refusals), f"{self.case.refusal} was accepted"
            assert all(self.case.refusal[2] in str(r) for r in refusals), f"{refusals}"
            return
        lengths = [len(trace.seen) for trace in self.traces]
        assert len(set(lengths)) == 1, f"the ranks have seen different things: {lengths}"
        self._expect_fp32()
        for event in (*self.case.hooked, *self.case.before):
            self._where = f"before the first step, {event.kind}"
            self._event(event)
        for number, step in enumerate(self.case.steps):
            self._where = f"in step {number}"
            self._step(number, step)
            for event in step.after:
                self._where = f"in step {number}, {event.kind} after it"
                self._event(event)
        self._where = "at the end"
        self._expect_fp32()
        self._expect_copies()

    # -- what was seen ---------------------------------------------------------------------------

    def next_seen(self, what: str) -> list[Any]:
        """Returns the next thing that each rank has seen."""
        found = [trace.seen[self._position] for trace in self.traces]
        self._position += 1
        assert all(each[0] == what for each in found), f"{self._where}: {what}, not {found}"
        return [each[1] for each in found]

    def _same(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.shape == expected.shape, f"{self._where}: {name}: {actual.shape}"
        name = f"{self._where}: {name}"
        if self.is_bitwise:
            assert_same_bits(name, actual.contiguous(), expected.contiguous())
            return
        steps = max(1, self.reference.steps)
        wide = expected.float()
        bound = steps * (2 * ulp(wide) + 16 * 2.0**-23 * (self._largest_rate + wide.abs()))
        bound += torch.finfo(expected.dtype).eps * wide.abs() * (expected.dtype != torch.float32)
        error = (actual.float() - wide).abs()
        same = (actual == expected) | (actual.isnan() & expected.isnan())  # infinities too
        bad = ~(error <= bound) & ~same
        assert not bool(bad.any()), f"{name}: off by {float(error[bad].max()):.3g}"

    def _expect_fp32(self) -> None:
        found = self.next_seen("fp32")
        assert not any(found[1:]), f"{self._where}: other ranks than 0 have the state"
        for name in self.reference.state:
            for kind, expected in self.reference.tensors(name):
                self._same(f"{kind} of {name}", found[0][name][kind].flatten(), expected)

    def _expect_copies(self) -> None:
        for rank, found in enumerate(self.next_seen("copies")):
            for name, value in self._weights().items():
                self._same(f"copy of {name} on rank {rank}", found[name], value)

    def _weights(self) -> dict[str, torch.Tensor]:
        """All parameters, frozen ones too."""
        reference = self.reference
        return {
            name: reference.copy_of(name) if name in reference.state else p.detach().cpu()
            for name, p in reference.model.named_parameters()
        }

    # -- a step ----------------------------------------------------------------------------------

    def _step(self, number: int, step: Step) -> None:
        reference = self.reference
        reference.take_weights()
        self._reset()
        traces = [trace.steps[number] for trace in self.traces]
        scales = {trace.loss_scale for trace in traces}
        assert scales == {reference.scale.value}, f"{self._where}: loss scales {scales}"
        if self.case.mode == "train_batch":
            self._global_batch(number, step, traces)
        else:
            self._by_hand(number, step, traces)
        self._check_rates(number, traces[0])
        self._end(traces)

    def _reset(self) -> None:
        self._sums = self.reference.sums()
        self._is_poisoned = False
        self._has_gradients = False

    def _by_hand(self, number: int, step: Step, traces: Sequence[StepTrace]) -> None:
        for micro in range(step.micros or self.case.num_micro_batches):
            for rank in range(self.case.ranks):
                if rank not in step.idle:
                    self._micro_batch(number, rank, micro, step, traces[rank])
            self._has_gradients = True
            if step.poison is not None and step.poison[1] == micro:
                self._is_poisoned = True
            for at, event in step.inside:
                if at == micro:
                    self._where = f"in step {number}, {event.kind} after micro-batch {micro}"
                    self._event(event)
            self._where = f"in step {number}"

    def _micro_batch(
        self, number: int, rank: int, micro: int, step: Step, trace: StepTrace
    ) -> None:
        losses = self.reference.losses(number, rank, micro, step)
        for index, loss in enumerate(losses):
            at = micro * len(losses) + index
            self.same_loss(f"of micro-batch {micro} of rank {rank}", trace.losses[at], loss)
        if step.style == "sum":
            losses = [sum(losses[1:], losses[0])]
        for loss in losses[step.style == "dropped" :]:
            self._add(loss / (step.micros or self.case.num_micro_batches))

    def _add(self, loss: torch.Tensor) -> None:
        first = self._over_ranks if self._is_divided_first else 1.0
        for name, gradient in self.reference.gradients(loss).items():
            self._sums[name].add(gradient * first)

    def same_loss(self, what: str, actual: float, expected: torch.Tensor | float) -> None:
        value = float(expected.detach() if isinstance(expected, torch.Tensor) else expected)
        is_same = math.isclose(actual, value, rel_tol=self.reference.noise, abs_tol=1e-30)
        is_same = is_same or (math.isnan(actual) and math.isnan(value)) or actual == value
        assert is_same, f"{self._where}: the loss {what} is {actual!r}, not {value!r}"

    def same_values(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Asserts that two computations of the same values agree."""
        rounding = max(self.reference.noise, self.reference.rounding)
        bound = 4 * rounding * float(expected.abs().max()) + 1e-30
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        bad = ~((actual - expected).abs() <= bound) & ~same
        assert not bool(bad.any()), f"{self._where}: {what}: {actual} is not {expected}"

    def _global_batch(self, number: int, step: Step, traces: Sequence[StepTrace]) -> None:
        samples_of = [self.case.samples_of(step, rank) for rank in range(self.case.ranks)]
        total = sum(map(sum, samples_of))
        mean = 0.0
        for rank, own in enumerate(samples_of):
            for micro, samples in enumerate(own):
                (loss,) = self.reference.losses(number, rank, micro, step)
                mean += float(loss.detach()) * samples / total
                self._add(loss * torch.tensor(samples / total, dtype=torch.float64).float())
        self._has_gradients = True
        self._is_poisoned = step.poison is not None
        for rank, trace in enumerate(traces):
            self.same_loss(f"of the global batch on rank {rank}", trace.losses[0], mean)

    def _check_rates(self, number: int, trace: StepTrace) -> None:
        spec = self.case.optimizer
        for group, values in zip(trace.groups, spec.groups, strict=False):
            self._largest_rate = max(self._largest_rate, group["lr"])
            factor = 1.0
            if spec.schedule == "hand":
                factor = rate_factor(number)
            elif spec.schedule == "lambda":
                factor = rate_factor(self.reference.steps)
            elif spec.schedule == "warmup":
                continue
            expected = values[0] * factor
            assert math.isclose(group["lr"], expected, rel_tol=1e-9), (
                f"{self._where}: the rate is {group['lr']}, not {expected}"
            )

    def _end(self, traces: Sequence[StepTrace]) -> None:
        skips = [trace.skipped for trace in traces]
        if not self._has_gradients:  # zero_grad() has dropped them
            assert all(skips), f"{self._where}: a step without gradients was made: {skips}"
            return
        found = self._reduced(traces)
        squares = sum(float(g.double().pow(2).sum()) for g in found.values())
        norm = math.sqrt(squares) * self._unscale if math.isfinite(squares) else squares
        is_finite = math.isfinite(norm)
        is_poisoned = self._is_poisoned or not all(s.is_finite for s in self._sums.values())
        assert is_finite is not is_poisoned or self._may_overflow(), f"{self._where}: norm {norm}"
        skip = self.case.checks_overflow and not is_finite
        assert skips == [skip] * len(skips), f"{self._where}: skipped {skips}, norm {norm}"
        if is_finite:
            for name, sums in self._sums.items():
                self._same_gradient(name, found[name].float(), sums)
        if not skip:
            self.reference.update(found, self._scale(traces, norm), traces[0])
        self.reference.scale.end_step(skipped=skip)

    def _may_overflow(self) -> bool:
        """Whether sums of finite gradients may be more than fp16 holds, in one order or another."""
        most = torch.finfo(torch.float16).max
        is_fp16 = compute_dtype(self.case) == torch.float16
        return is_fp16 and any(float(s.size.max()) > most / 4 for s in self._sums.values())

    @property
    def _over_ranks(self) -> float:
        """The factor that turns a sum over ranks into the step's gradient, a mean or a sum."""
        is_sum = self.case.mode == "train_batch" or self.case.op == "sum"
        return 1.0 if is_sum else 1.0 / self.case.ranks

    @property
    def _is_divided_first(self) -> bool:
        """Whether a mean is divided before it is reduced: in fp16 the sum might be infinite."""
        return copy_dtype(self.case) == torch.float16

    @property
    def _unscale(self) -> float:
        """The factor of reduced gradients in the update."""
        rest = 1.0 if self._is_divided_first else self._over_ranks
        return rest / self.reference.scale.value

    def _reduced(self, traces: Sequence[StepTrace]) -> dict[str, torch.Tensor]:
        """Returns the whole reduced gradients by name, joined from the ranks' shards."""
        layouts: list[Layout] = [
            trace.layouts[step.layout] for trace, step in zip(self.traces, traces, strict=True)
        ]
        found: dict[str, torch.Tensor] = {}
        for index, slots in enumerate(layouts[0].slots):
            parts: list[torch.Tensor] = []
            at = 0
            for rank, (layout, step) in enumerate(zip(layouts, traces, strict=True)):
                begin, end = layout.shards[index]
                assert begin == at, f"{self._where}: shards of layer {index} do not meet"
                at = end
                assert index in step.gradients, (
                    f"{self._where}: layer {index} ({slots[0][0]}) was left out on rank {rank}"
                )
                assert step.gradients[index].numel() == end - begin
                parts.append(step.gradients[index])
            flat = torch.cat(parts)
            for name, offset, numel in slots:
                found[name] = flat[offset : offset + numel]
        missing = set(self._sums) ^ set(found)
        assert not missing, f"{self._where}: parameters {missing}"
        return found

    def _same_gradient(self, name: str, actual: torch.Tensor, sums: Sums) -> None:
        bound = self.reference.bound(sums)
        error = (actual - sums.total).abs()
        assert bool((error <= bound).all()), (
            f"{self._where}: the gradient of {name} is off by {float(error.max()):.3g} where "
            f"{float((error / bound).max()):.3g} times the bound, the largest is {sums.largest:.3g}"
        )

    def _scale(self, traces: Sequence[StepTrace], norm: float) -> float:
        """Returns the factor of the gradients in the update, which follows from their norm."""
        coefficient = self.reference.clip_coefficient(norm)
        expected = coefficient * self._unscale
        outcomes = [trace.outcome for trace in traces]
        if outcomes[0] is None:
            return expected
        assert len(set(map(str, outcomes))) == 1, f"{self._where}: outcomes {outcomes}"
        scale, seen, _ = outcomes[0]
        assert math.isclose(seen, norm, rel_tol=1e-9, abs_tol=1e-30) or not math.isfinite(norm), (
            f"{self._where}: the norm is {seen}, not {norm}"
        )
        assert math.isclose(scale, expected, rel_tol=1e-7, abs_tol=1e-30), (
            f"{self._where}: the scale is {scale}, not {expected}"
        )
        return scale

    # -- events ----------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        if event.kind in between.JUDGED:
            between.JUDGED[event.kind](self, event)
            return
        judge = getattr(self, f"_judge_{event.kind}", None)
        if judge is not None:
            judge(event)

    def _judge_fp32(self, _event: Event) -> None:
        self._expect_fp32()

    def _judge_copies(self, _event: Event) -> None:
        self._expect_copies()

    def _judge_peek(self, _event: Event) -> None:
        weights = self._weights()
        for rank, found in enumerate(self.next_seen("peek")):
            for name, value in found.items():
                self._same(f"{name} on rank {rank}", value, weights[name])

    def _judge_module_state(self, _event: Event) -> None:
        for rank, found in enumerate(self.next_seen("module_state")):
            assert found or rank, f"{self._where}: rank 0 has none"
            for name, value in self._weights().items() if found else ():
                self._same(f"{name} on rank {rank}", found[name], value)

    def _judge_eval(self, _event: Event) -> None:
        self._evaluate(is_training=False)

    def _judge_eval_one(self, _event: Event) -> None:
        self._evaluate(is_training=True)

    def _evaluate(self, *, is_training: bool) -> None:
        self.reference.take_weights()
        model = self.reference.model.train(is_training)
        for rank, (number, loss) in enumerate(self.next_seen("eval")):
            if loss is None:
                continue
            torch.manual_seed(number)
            with torch.no_grad(), autocasting(self.case):
                expected = model(**batch_of(self.case, 900 + number, rank, 0, None))
            self.same_loss(f"of an evaluation on rank {rank}", loss, expected)
        model.train()

    def _judge_set_gradient(self, _event: Event) -> None:
        name = self.next_seen("set_gradient")[0]
        value = set_gradient(self.reference.shapes[name]).flatten() / self._unscale
        self.reference.set_gradient(self._sums[name], value)

    def _judge_write(self, event: Event) -> None:
        what = self.traces[0].seen[self._position][0]
        if what == "safe_set":
            self._judge_safe_set(event)
            return
        written = self.next_seen(what)[0]
        for name in self.reference.state if written is None else (written,):
            values = set_values(self.reference.shapes[name], event).flatten()
            old, new = self.reference.copy_of(name).flatten(), values.to(self.reference.dtype)
            # A value that was there already was not written: it keeps its fp32 bits. For split
            # master weights nobody can tell where the weights are whole.
            is_kept = self.case.master == "fp32" or what == "write"
            master = self.reference.state[name][0] if is_kept else new.float()
            self.reference.state[name][0] = torch.where(old == new, master, new.float())

    _judge_copy = _judge_load_module = _judge_write

    def _judge_save16(self, _event: Event) -> None:
        is_written, found = self.next_seen("save16")[0]
        for name, value in self._weights().items() if is_written else ():
            self._same(f"{name} in a file", found[name], value)

    def _judge_safe_get(self, _event: Event) -> None:
        for rank, (name, values) in enumerate(self.next_seen("safe_get")):
            expected = self.reference.tensors(name)
            for (kind, flat), value in zip(expected, values, strict=True):
                self._same(f"{kind} of {name} on rank {rank}", value.flatten(), flat)

    def _judge_gradient(self, _event: Event) -> None:
        for name, value in self.next_seen("gradient"):
            if self._sums[name].is_finite:
                self._same_gradient(name, value.flatten() / self._unscale, self._sums[name])

    def _judge_safe_set(self, event: Event) -> None:
        name = self.next_seen("safe_set")[0]
        values = set_values(self.reference.shapes[name], event).flatten()
        self.reference.state[name][0] = values.clone()
        self.reference.set_first_moment(name, values / 8)

    def _judge_zero_grad(self, _event: Event) -> None:
        self.next_seen("zero_grad")
        self._reset()

    def _judge_save(self, _event: Event) -> None:
        self.next_seen("save")
        self.reference.save()

    def _judge_load(self, _event: Event) -> None:
        self.next_seen("load")
        self.reference.load()

    def _judge_reload(self, event: Event) -> None:
        if event.number % 2:
            self._expect_fp32()


def _was_on_gpu(case: Case) -> bool:
    """Whether state may have been updated by the GPU's kernel."""
    events: list[Event] = [event for step in case.steps for event in step.after]
    builds = [case.build, *(event.build for event in events if event.build is not None)]
    return any(any(build.gpu) for build in builds) or any(e.kind == "move" for e in events)
