"""Trains a case on this rank, and notes what is to be compared. Nothing else is waited for."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_ranks
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from support.engines import built, device, environment, split_on_cpu
from support.gradient_ways import taking_gradients
from support.sequences import sequence_ranks_of
from support.short_memory import short_of_memory
from torch import nn

from fuzz import between, precision
from fuzz.cases import Build, Case, Event, OptimizerSpec, Step
from fuzz.models import (
    FuzzModel,
    UserError,
    batch_of,
    dropout_seed,
    set_gradient,
    set_values,
)
from hytrain.errors import (
    AbortedBackwardError,
    HyTrainError,
    StatesOffloadedError,
    UnsupportedError,
)
from hytrain.formats.trace_file import read_trace
from hytrain.model.layer_state import LayerState


@dataclass
class Layout:
    """The places of a rank's shards.

    Attributes:
        shards: (begin, end) of each layer.
        slots: (name, offset, elements) of each layer's parameters.
    """

    shards: list[tuple[int, int]]
    slots: list[list[tuple[str, int, int]]]


@dataclass
class StepTrace:
    """What a step has shown on one rank.

    Attributes:
        gradients: reduced, by layer; what the update was made with.
        groups: hyper-parameters before step().
        outcome: (scale, norm, coefficient); None if not decided on the host.
        skipped: step() has updated nothing.
        losses: each micro-batch's (or the global batch's).
        loss_scale: the scale before the step.
    """

    layout: int
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    outcome: tuple[float, float, float] | None = None
    skipped: bool = False
    losses: list[Any] = field(default_factory=list)
    loss_scale: float = 1.0

    def settle(self) -> None:
        """Copies tensors from the device to the host: at the end, since that waits."""
        self.gradients = {index: gradient.cpu() for index, gradient in self.gradients.items()}
        self.losses = [float(loss) for loss in self.losses]


@dataclass
class Trace:
    """What a rank has seen."""

    layouts: list[Layout] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    seen: list[tuple[str, Any]] = field(default_factory=list)
    """(what, values) of each event, in order."""
    refused: str | None = None


def parameter_groups(model: FuzzModel, spec: OptimizerSpec) -> list[dict[str, Any]]:
    """The parameters that the optimizer is given, dealt to the groups one after another."""
    rng = random.Random(len(spec.groups))
    trained = [p for p in model.parameters() if p.requires_grad]
    anchor = model.anchor()
    trained = [p for p in trained if p is anchor or rng.random() <= spec.share]
    count = min(len(spec.groups), len(trained))
    keys = ("lr", "eps", "weight_decay")
    groups: list[dict[str, Any]] = [
        {
            "params": trained[number::count],
            "betas": (beta1, beta2),
            **dict(zip(keys, (lr, eps, decay), strict=True)),
        }
        for number, (lr, beta1, beta2, eps, decay) in enumerate(spec.groups[:count])
    ]
    return _with_muon(groups) if spec.muon else groups


class MuonWithAuxAdam(torch.optim.Optimizer):
    """An optimizer that hytrain asks for its groups; its step is never called."""


def _with_muon(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moves every second matrix to one more group; no group is left without a parameter."""
    muons: list[Any] = []
    for group in groups:
        group["use_muon"] = False
        params = group["params"]
        for number, parameter in enumerate(list(params)):
            shape = vars(parameter).get("ds_shape", parameter.shape)
            if number % 2 and len(shape) >= 2:
                muons.append(parameter)
        group["params"] = [p for p in params if all(p is not muon for muon in muons)]
    if not muons:
        return groups
    own = {"params": muons, "use_muon": True, "momentum": 0.9, "ns_method": "gram"}
    return [*groups, {**groups[0], **own}]


def rate_factor(step: int) -> float:
    """The factor of the learning rate, set by hand and by torch's schedule."""
    return 1.0 + 0.5 * math.sin(step)


def config_of(case: Case, build: Build, rank: int) -> dict[str, Any]:
    """The DeepSpeed configuration of one rank."""
    zero = {"stage": build.stage, "offload_optimizer": {"device": "cpu"}, **dict(build.zero)}
    section: dict[str, Any] = {"gpu_fraction": build.gpu[rank], **dict(build.section)}
    section["offload"] = dict(build.offload)
    section["moments"] = case.moments
    section["master"] = case.master
    if case.async_saves:
        section["checkpoint"] = {"async": True}
    if build.fractions is not None:
        section["shard_fractions"] = list(build.fractions)
    config: dict[str, Any] = {
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "gradient_clipping": case.clipping,
        "hytrain": section,
        **dict(build.top),
    }
    config.update(precision.sections(case))
    if case.accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": case.accum_dtype}
    if case.op is not None:
        config["gradient_allreduce_op"] = case.op
    if case.batch_keys == "hytrain":
        section["batch_sizes"] = [sum(own) for own in case.micro_samples]
        section["micro_batch_sizes"] = list(case.micro_sizes)
    else:
        config["train_micro_batch_size_per_gpu"] = 1
        config["gradient_accumulation_steps"] = case.accumulation or case.num_micro_batches
    _add_optimizer(config, case.optimizer)
    return config


def _add_optimizer(config: dict[str, Any], spec: OptimizerSpec) -> None:
    if spec.schedule == "warmup":
        keys = {"warmup_num_steps": 3, "warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2}
        config["scheduler"] = {"type": "WarmupLR", "params": keys}
    if spec.client:
        if config.get("zero_force_ds_cpu_optimizer"):  # of torch's there is an error, as it says
            del config["zero_force_ds_cpu_optimizer"]
        if spec.muon:
            config["zero_allow_untested_optimizer"] = True
        return
    lr, beta1, beta2, eps, decay = spec.groups[0]
    params = {"lr": lr, "betas": [beta1, beta2], "eps": eps, "weight_decay": decay}
    for key in ("bias_correction", "adam_w_mode"):
        value = getattr(spec, key)
        if value is not None:
            params[key] = value
    config["optimizer"] = {"type": spec.kind, "params": params}


def _refuse(config: dict[str, Any], path: str, value: Any) -> None:
    *folders, key = path.split(".")
    section = config
    for name in folders:
        section[name] = dict(section.get(name) or {})
        section = section[name]
    if value == "remove":
        section.pop(key)
    else:
        section[key] = value


class Player:
    """Plays one case on one rank."""

    def __init__(
        self, case: Case, folder: Path, disturb: Callable[[Any], None] | None = None
    ) -> None:
        """
        Args:
            case: what to train.
            folder: for checkpoints, the same on all ranks.
            disturb: called with the engine before forwards, backwards and steps.
        """
        self.case = case
        self.rank = dist.get_rank()
        self.folder = folder
        self.trace = Trace()
        self._disturb = disturb or (lambda _engine: None)
        self._recorded: dict[int, torch.Tensor] = {}
        self._stack = contextlib.ExitStack()
        self._tags = 0
        self._saved = ""
        self._round_trip: Any = None
        self._poison: float | None = None
        self._toggles: list[Event] = []
        self.hooks = between.Hooks()
        self.engine: Any = None

    def play(self) -> Trace:
        """Plays the whole case."""
        delays = environment("HYTRAIN_DELAYS", self.case.delays)
        ways = taking_gradients(self.case.gradients)
        with precision.allowed(), delays, ways, self._stack:
            if self.case.short and self.case.ranks > 1:
                self._stack.enter_context(short_of_memory())
            if self.case.has_sequence_group:
                self._stack.enter_context(sequence_ranks_of(self.case.ranks))
                sequence_ranks.initialize_sequence_parallel(self.case.ranks)
            try:
                self.hooks.live += self.case.hooked
                self._build(self.case.build, seed=9 if self.case.follows else 0)
            except HyTrainError as error:
                if self.case.refusal is None:
                    raise
                self.trace.refused = f"{type(error).__name__}: {error}"
                return self.trace
            if self.case.follows:
                found, _ = self.engine.load_checkpoint(str(self.folder), tag="end")
                assert found is not None
            self.note("fp32", self._state())
            for event in self.case.before:
                self._event(event)
            for number, step in enumerate(self.case.steps):
                self._step(number, step)
                for event in step.after:
                    self._event(event)
            self.note("fp32", self._state())
            self.note("copies", self._copies())
            if self.case.then is not None:
                self.engine.save_checkpoint(str(self.folder), tag="end")
            for step in self.trace.steps:
                step.settle()
        # The engine is closed: whatever was begun is in its file, and in the format's order.
        for path in self.folder.glob(f"trace*/trace_rank{self.rank}.json"):
            read_trace(path)
        return self.trace

    def note(self, what: str, value: Any) -> None:
        """Records something whose value the judge knows."""
        self.trace.seen.append((what, value))

    # -- the engine ------------------------------------------------------------------------------

    def _build(self, build: Build, seed: int) -> None:
        self.build = build
        config = config_of(self.case, build, self.rank)
        if self.case.traced is not None:
            # Also of engines after the first one: their traces are other files.
            folder = self.folder / f"trace{len(self.trace.layouts)}"
            trace = {"dir": str(folder), "steps": list(self.case.traced)}
            config["hytrain"]["trace"] = trace
        with self._construction(build, config):
            model = FuzzModel(self.case.model, seed)
        model.anchor().register_hook(self._strike)
        self.model = model
        self.hooks.move_to(model)
        if self.case.refusal is not None:
            _refuse(config, *self.case.refusal[:2])
        spec = self.case.optimizer
        keywords: dict[str, Any] = {"model_parameters": parameter_groups(model, spec)}
        if spec.client:
            groups = parameter_groups(model, spec)
            kind = getattr(torch.optim, spec.kind)
            made = MuonWithAuxAdam(groups, {}) if spec.muon else kind(groups, lr=1e-3)
            keywords = {"optimizer": made}
        if spec.schedule == "lambda":
            keywords["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, rate_factor
            )
        if self.case.has_sequence_group:
            keywords["mpu"] = sequence_ranks
        self._engine_context = built(model, config, **keywords)
        with split_on_cpu(self.case.late):
            self.engine = self._engine_context.__enter__()
        self._stack.callback(self.engine.destroy)
        for event in self._toggles:
            between.toggle(model, event)
        self._accumulation = self.case.accumulation or self.case.num_micro_batches
        self.engine.optimizer.passes.reducer.on_reduced_gradient = self._observe
        states: list[LayerState] = self.engine.optimizer.layer_states
        layout = Layout(
            [(state.begin, state.end) for state in states],
            [[(slot.name, slot.offset, slot.numel) for slot in s.layout.slots] for s in states],
        )
        self.trace.layouts.append(layout)

    def _construction(self, build: Build, config: dict[str, Any]) -> Any:
        if not build.zero_init:
            return contextlib.nullcontext()
        # It also reads the batch's keys, of which it knows only DeepSpeed's.
        known = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        return deepspeed.zero.Init(config_dict_or_path={**config, **known})

    def _observe(self, state: LayerState, gradient: torch.Tensor) -> None:
        self._disturb(self.engine)
        self._recorded[state.index] = gradient.detach().clone()

    def _strike(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._poison is None:
            return gradient
        gradient = gradient.clone()
        values = gradient._values() if gradient.is_sparse else gradient
        values.view(-1)[-1] = self._poison
        return gradient

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters, with their names."""
        groups = self.engine.optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"]}
        return [(n, p) for n, p in self.model.named_parameters() if id(p) in trained]

    def _parameter(self, event: Event) -> tuple[str, nn.Parameter]:
        """The trained parameter that an event is about."""
        parameters = self.parameters()
        return parameters[event.number % len(parameters)]

    # -- a step ----------------------------------------------------------------------------------

    def _step(self, number: int, step: Step) -> None:
        trace = StepTrace(len(self.trace.layouts) - 1)
        self.trace.steps.append(trace)
        spec = self.case.optimizer
        if spec.schedule == "hand":
            for group, values in zip(self.engine.optimizer.param_groups, spec.groups, strict=False):
                group["lr"] = values[0] * rate_factor(number)
        self._accumulate(step.micros or self.case.num_micro_batches)
        if step.fault is not None:
            self._fail(*step.fault)
        self._recorded.clear()
        trace.loss_scale = self.engine.optimizer.loss_scale
        if self.case.mode == "train_batch":
            self._train_batch(number, step, trace)
        else:
            self._by_hand(number, step, trace)
        self._end_step(trace)

    def _accumulate(self, count: int) -> None:
        if count != self._accumulation:
            samples = 1 if self.case.has_sequence_group else self.case.ranks
            self.engine.set_train_batch_size(count * samples)
            self._accumulation = count

    def _end_step(self, trace: StepTrace) -> None:
        optimizer = self.engine.optimizer
        trace.skipped = bool(optimizer.overflow)
        if self._recorded and not optimizer.pipeline.norm.settings.direct:
            outcome = optimizer.pipeline.norm.read_decision()
            trace.outcome = (outcome.scale, outcome.norm, outcome.coefficient)
        trace.gradients = dict(self._recorded)

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.engine.optimizer.param_groups
        ]

    def batch(self, number: int, micro: int, step: Step, part: int = 0) -> dict[str, Any]:
        """This rank's micro-batch; ``part``: the forward, in styles with several."""
        return batch_of(self.case, number, self.rank, micro, step, part)

    def _by_hand(self, number: int, step: Step, trace: StepTrace) -> None:
        engine = self.engine
        count = len(self.case.samples_of(step, self.rank))
        for micro in range(count):
            if self.rank not in step.idle:
                self._arm(step, micro)
                self._disturb(engine)
                losses = self._forward_backward(number, micro, step)
                trace.losses += [loss.detach() for loss in losses]
                del losses
                self._poison = None
            for at, event in step.inside:
                if at == micro:
                    self._event(event)
            self._disturb(engine)
            if micro + 1 == count:
                trace.groups = self._groups()
            engine.step()

    def _forward_backward(self, number: int, micro: int, step: Step) -> list[torch.Tensor]:
        engine = self.engine
        if step.style in SINGLE:
            torch.manual_seed(dropout_seed(number, self.rank, micro, 0))
            model = engine.module if step.style == "module" else engine
            batch = self.batch(number, micro, step)
            is_plain = step.style != "penalty"
            loss = model(**batch) if is_plain else self._penalized(model, batch)
            self._disturb(engine)
            if step.style in ("past", "module"):
                self.scale_loss(loss).backward()
            else:
                engine.backward(loss, retain_graph=step.style == "retain")
            return [loss]
        losses: list[torch.Tensor] = []
        unreduced = {"no_sync": 0, "no_sync_last": 1}.get(step.style)
        for part in range(step.num_forwards):
            torch.manual_seed(dropout_seed(number, self.rank, micro, part))
            with engine.no_sync() if part == unreduced else contextlib.nullcontext():
                losses.append(engine(**self.batch(number, micro, step, part)))
                if unreduced is not None:
                    engine.backward(losses[-1])
        if step.style == "sum":
            engine.backward(sum(losses[1:], losses[0]))
        elif step.style == "dropped":
            engine.backward(losses[1])
        elif step.style == "two":
            for loss in losses:
                engine.set_gradient_accumulation_boundary(loss is losses[-1])
                engine.backward(loss)
            engine.set_gradient_accumulation_boundary(None)
        return losses

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the scaled loss; the loss itself if nothing is scaled: scale() would refuse."""
        return self.engine.scale(loss) if self.engine.optimizer.scaling.is_used else loss

    def _penalized(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        value = self.engine.optimizer.loss_scale
        return between.penalized(self.model, model, batch, self.scale_loss, value)

    def _arm(self, step: Step, micro: int) -> None:
        if step.poison is not None and step.poison[:2] == (self.rank, micro):
            self._poison = step.poison[2]

    def _train_batch(self, number: int, step: Step, trace: StepTrace) -> None:
        count = len(self.case.samples_of(step, self.rank))

        def batches() -> Iterator[dict[str, Any]]:
            for micro in range(count):
                yield self.batch(number, micro, step)

        trace.groups = self._groups()
        # Outside, nobody knows which backward is which micro-batch's: all of them are poisoned.
        if step.poison is not None and step.poison[0] == self.rank:
            self._poison = step.poison[2]
        self._disturb(self.engine)
        loss = self.engine.train_batch(batches(), num_valid=lambda batch: len(batch["inputs"]))
        self._poison = None
        trace.losses.append(loss)

    def _fail(self, kind: str, steps: bool) -> None:
        """The user's code raises; the user catches it, and repeats the step."""
        self.model.fault = kind
        batch = batch_of(self.case, 77, self.rank, 0, None)
        try:
            if self.case.mode == "train_batch":
                self.engine.train_batch(iter([batch] * 9), num_valid=lambda _batch: 1)
            self.engine.backward(self.engine(**batch))
        except UserError:
            pass
        else:
            raise AssertionError("the user's error was swallowed")
        finally:
            self.model.fault = None
        if steps:
            try:
                self.engine.step()
            except AbortedBackwardError:
                pass
            else:
                raise AssertionError("step() after an aborted backward was accepted")

    # -- events ----------------------------------------------------------------------------------

    def _event(self, event: Event) -> None:
        self._disturb(self.engine)
        if event.kind in between.PLAYED:
            between.PLAYED[event.kind](self, event)
        else:
            getattr(self, f"_do_{event.kind}")(event)

    def _state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            name: {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
            for name, tensors in self.engine.fp32_state_dict().items()
        }

    def _copies(self) -> dict[str, torch.Tensor]:
        with self.engine.gathered_parameters():
            return {n: p.detach().cpu().clone() for n, p in self.model.named_parameters()}

    def _do_eval_one(self, event: Event) -> None:
        """Evaluates on one rank alone, in cases in which it need not wait for others."""
        if self.rank == event.number % self.case.ranks:
            with torch.no_grad():
                self._disturb(self.engine)
                batch = batch_of(self.case, 900 + event.number, self.rank, 0, None)
                torch.manual_seed(event.number)
                self.note("eval", (event.number, float(self.engine(**batch))))
        else:
            self.note("eval", (event.number, None))

    def _do_set_gradient(self, event: Event) -> None:
        name, parameter = self._parameter(event)
        shape = torch.Size(vars(parameter).get("ds_shape", parameter.shape))
        safe_set_full_grad(parameter, set_gradient(shape).to(device()))
        self.note("set_gradient", name)

    def _do_write(self, event: Event) -> None:
        """Writes a parameter, with ZeRO-3 as its users do."""
        if self.build.stage < 3:
            self._do_safe_set(event)
            return
        # DeepSpeed broadcasts bytes of the parameter, and there is no such view of a scalar.
        parameters = [(name, p) for name, p in self.parameters() if vars(p)["ds_shape"]]
        name, parameter = parameters[event.number % len(parameters)]
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if self.rank == 0:
                parameter.copy_(set_values(parameter.shape, event))
        self.note("write", name)

    def _do_copy(self, event: Event) -> None:
        """Writes a parameter without the engine, if the weights are not sharded."""
        if self.engine.optimizer.weights.is_sharded:
            self._do_write(event)
            return
        name, parameter = self._parameter(event)
        with torch.no_grad():
            parameter.copy_(set_values(parameter.shape, event))
        self.note("overwrite", name)

    def _do_load_module(self, event: Event) -> None:
        if self.engine.optimizer.weights.is_sharded:
            self._do_write(event)
            return
        trained = {id(p) for _, p in self.parameters()}
        self.engine.wait_for_checkpoint()  # a save refuses that frozen weights change meanwhile
        self.engine.module.load_state_dict(
            {
                name: set_values(p.shape, event) if id(p) in trained else p.detach()
                for name, p in self.model.named_parameters(remove_duplicate=False)
            }
        )
        self.note("overwrite", None)

    def _do_toggle(self, event: Event) -> None:
        self._toggles.append(event)
        between.toggle(self.model, event)

    def _do_zero_after(self, event: Event) -> None:
        """Zeroes gradients as most loops do, though none are left."""
        (self.engine if event.number % 2 else self.engine.optimizer).zero_grad()

    def _do_save16(self, _event: Event) -> None:
        is_written = self.engine.save_16bit_model(str(self.folder), "weights.pt")
        keys = dict(self.build.zero)
        key = "stage3_gather_16bit_weights_on_model_save"
        assert is_written or (self.build.stage == 3 and not keys.get(key, False))
        found: dict[str, torch.Tensor] = {}
        if is_written and self.rank == 0:
            found = torch.load(self.folder / "weights.pt", map_location="cpu")
        self.note("save16", (is_written, {n: t for n, t in found.items() if t.numel()}))

    def _do_sync(self, _event: Event) -> None:
        self.engine.synchronize()

    def _do_away(self, event: Event) -> None:
        """Moves states off the device, perhaps in two calls; what needs them is refused."""
        states = None if event.states is None else list(event.states)
        pins, blocks = bool(event.number % 2), bool(event.number % 3)
        self.engine.offload_states(states, pin_memory=pins, non_blocking=not blocks)
        if event.number % 5 == 0:
            self.engine.offload_states(pin_memory=pins)
        if event.number % 5 == 0 or states is None:
            with contextlib.suppress(StatesOffloadedError):
                self.engine(**batch_of(self.case, 800, self.rank, 0, None))
                raise AssertionError("a forward without its weights was accepted")
        self.engine.reload_states(non_blocking=not blocks)

    def _do_collective(self, event: Event) -> None:
        """Runs a collective of the user's own."""
        tensor = torch.full((3,), float(self.rank + event.number), device=device())
        dist.all_reduce(tensor)
        expected = sum(rank + event.number for rank in range(self.case.ranks))
        assert tensor.tolist() == [float(expected)] * 3

    def _do_fp32(self, _event: Event) -> None:
        self.note("fp32", self._state())

    def _do_copies(self, _event: Event) -> None:
        self.note("copies", self._copies())

    def _do_peek(self, event: Event) -> None:
        """Reads weights as a logger or an average does: without a call to the engine before."""
        found: dict[str, torch.Tensor] = {}
        parameters = self.parameters()
        for name, parameter in parameters[event.number % len(parameters) :]:
            try:
                found[name] = parameter.data.detach().cpu().clone()
            except UnsupportedError:
                assert self.engine.optimizer.weights.is_sharded
        self.note("peek", found)

    def _do_module_state(self, _event: Event) -> None:
        found = self.engine.module_state_dict()
        self.note("module_state", {name: t.detach().cpu().clone() for name, t in found.items()})
        handed = {n: t.cpu().clone() for n, t in self.engine.iterate_weights(bucket_bytes=4096)}
        for name, tensor in found.items():  # a poisoned step may have left NaN
            torch.testing.assert_close(
                handed[name], tensor.cpu(), rtol=0, atol=0, equal_nan=True, check_stride=False
            )

    def _do_eval(self, event: Event) -> None:
        self.engine.eval()
        with torch.no_grad():
            loss = self.engine(**batch_of(self.case, 900 + event.number, self.rank, 0, None))
        self.engine.train()
        self.note("eval", (event.number, float(loss)))

    def _do_safe_get(self, event: Event) -> None:
        name, parameter = self._parameter(event)
        values = [safe_get_full_fp32_param(parameter)]
        values += [safe_get_full_optimizer_state(parameter, k) for k in self._states(parameter)]
        self.note("safe_get", (name, [value.detach().cpu().clone() for value in values]))

    def _states(self, parameter: Any) -> list[str]:
        return [key for key in self.engine.optimizer.state[parameter] if key != "step"]

    def _do_gradient(self, event: Event) -> None:
        name, parameter = self._parameter(event)
        self.note("gradient", (name, safe_get_full_grad(parameter).detach().cpu().clone()))

    def _do_safe_set(self, event: Event) -> None:
        name, parameter = self._parameter(event)
        shape = vars(parameter).get("ds_shape", parameter.shape)
        values = set_values(torch.Size(shape), event)
        safe_set_full_fp32_param(parameter, values.to(device()))
        first, *_ = self._states(parameter)
        safe_set_full_optimizer_state(parameter, (values / 8).to(device()), first)
        self.note("safe_set", name)

    def _do_zero_grad(self, event: Event) -> None:
        (self.engine if event.number % 2 else self.engine.optimizer).zero_grad()
        self._recorded.clear()
        self.note("zero_grad", None)

    def _do_move(self, event: Event) -> None:
        value: Any = event.value
        with split_on_cpu((0.0, 0.5, 1.0)[event.number % 3]):
            self.engine.set_gpu_fraction("solve" if event.number % 4 == 0 else value)

    def _do_round_trip(self, _event: Event) -> None:
        self.engine.optimizer.load_state_dict(copy.deepcopy(self.engine.optimizer.state_dict()))

    def _do_save(self, _event: Event) -> None:
        self._tags += 1
        self._saved = f"tag{self._tags}"
        assert self.engine.save_checkpoint(str(self.folder), tag=self._saved)
        self.note("save", None)

    def _do_load(self, _event: Event) -> None:
        found, _ = self.engine.load_checkpoint(str(self.folder), tag=self._saved)
        assert found is not None
        self.note("load", None)

    def _do_reload(self, event: Event) -> None:
        assert event.build is not None
        self._tags += 1
        tag = f"reload{self._tags}"
        self.engine.save_checkpoint(str(self.folder), tag=tag)
        self.engine.destroy()
        self._build(event.build, seed=1 + self._tags)
        found, _ = self.engine.load_checkpoint(str(self.folder), tag=tag)
        assert found is not None
        if event.number % 2:
            self.note("fp32", self._state())


SINGLE = ("plain", "retain", "past", "module", "penalty")
"""Styles of one forward and one backward."""
