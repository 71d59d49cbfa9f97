"""Draws a case from a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from support.gradient_ways import WAYS

from fuzz.cases import Build, Case, Event, ModelSpec, OptimizerSpec, Pairs, Step
from fuzz.phases import with_phases
from fuzz.precision import PRECISIONS
from fuzz.refusals import REFUSALS, Refusal

Micros = tuple[tuple[int, ...], ...]


def draw(seed: int, ranks: int | None = None) -> Case:
    """The case of a seed, the same everywhere; ``ranks`` replaces the drawn number."""
    case = _draw(seed, ranks)
    return case if case.refusal is not None else _with_muon(with_phases(case))


def _with_muon(case: Case) -> Case:
    """Gives Muon to half of the cases in which it is possible."""
    spec = case.optimizer
    is_possible = spec.client and spec.kind == "AdamW" and case.master == "fp32"
    if not is_possible or "layer_major" in repr(case):
        return case
    if random.Random(f"muon {case.seed}").random() < 0.5:
        return case
    spec = replace(spec, muon=True)
    then = None if case.then is None else replace(case.then, optimizer=spec)
    return replace(case, optimizer=spec, then=then)


def _draw(seed: int, ranks: int | None) -> Case:
    rng = random.Random(f"hytrain {seed}")
    drawn_ranks = rng.choice((1, 1, 2, 2, 2, 3))
    ranks = ranks or drawn_ranks
    stage = rng.choice((1, 2, 2, 3, 3, 3))
    mode = rng.choice(("hand", "hand", "train_batch"))
    bf16 = rng.random() < 0.5
    model = _model(rng, stage, mode)
    keys, micros, sizes = _batches(rng, ranks, mode)
    build = _build(rng, ranks, stage, mode, bf16)
    case = Case(
        seed=seed,
        ranks=ranks,
        model=model,
        bf16=bf16,
        clipping=rng.choice((0.0, 1e6, 0.3, 1e-4)),
        check_overflow=rng.choice((None, None, True, False)) if bf16 else None,
        # DeepSpeed has no sum over ranks with ZeRO-3.
        op=rng.choice((None, None, "mean", "mean" if stage == 3 else "sum")) if ranks > 1 else None,
        accum_dtype=rng.choice((None, None, "fp32")) if bf16 else None,
        mode=mode,
        batch_keys=keys,
        micro_samples=micros,
        micro_sizes=sizes,
        build=build,
        optimizer=_optimizer(rng),
        steps=(),
        delays=f"{rng.randrange(1, 10**6)}:{rng.choice((50, 300, 1000))}"
        if rng.random() < 0.3
        else "",
        # From other random streams: a seed's case is otherwise as before these choices existed.
        moments=random.Random(f"moments {seed}").choice(("fp32", "fp32", "bf16", "8bit")),
        master=_master(seed) if bf16 else "fp32",
        late=random.Random(f"late {seed}").choice((0.0, 0.0, 0.4, 1.0)),
        precision="" if bf16 else _precision(random.Random(f"precision {seed}"), model),
        short=random.Random(f"short {seed}").random() < 0.5,
        gradients=random.Random(f"gradients {seed}").choice(tuple(WAYS)),
        sequences=random.Random(f"sequences {seed}").random() < 0.3,
    )
    case = replace(case, steps=_steps(rng, case))
    if rng.random() < 0.04:
        found = rng.choice([each for each in REFUSALS if stage in each.stages])
        return _refused(case, found)
    is_spoiled = not case.checks_overflow and any(step.poison for step in case.steps)
    if drawn_ranks == ranks and not is_spoiled and rng.random() < 0.08:
        return replace(case, then=_following(rng, case))
    return case


def _master(seed: int) -> str:
    return random.Random(f"master {seed}").choice(("fp32", "fp32", "split"))


def _precision(rng: random.Random, model: ModelSpec) -> str:
    # On a CPU torch itself cannot add up sparse gradients in fp16.
    found = rng.choice(PRECISIONS)
    return "" if model.embed == "sparse" and found.startswith("fp16") else found


def _following(rng: random.Random, case: Case) -> Case:
    """Another job, which continues from a case's checkpoint."""
    ranks = rng.choice((1, 2, 3))
    keys, micros, sizes = _batches(rng, ranks, case.mode)
    build = _build(rng, ranks, _any_stage(rng, case), case.mode, case.bf16)
    build = replace(build, zero_init=_zero_init(rng, case, build))
    then = replace(
        case,
        ranks=ranks,
        op=case.op if ranks > 1 else None,
        batch_keys=keys,
        micro_samples=micros,
        micro_sizes=sizes,
        build=build,
        follows=True,
    )
    return replace(then, steps=_steps(rng, then))


def _zero_init(rng: random.Random, case: Case, build: Build) -> bool:
    # DeepSpeed's zero.Init takes no parameter without a dimension, and no strided one.
    is_plain = not case.model.scalar and not case.model.strided
    return build.stage == 3 and is_plain and rng.random() < 0.4


def _any_stage(rng: random.Random, case: Case) -> int:
    """A stage in which another engine may continue."""
    return rng.choice((1, 2) if case.op == "sum" else (1, 2, 3))


def _steps(rng: random.Random, case: Case) -> tuple[Step, ...]:
    steps: list[Step] = []
    count = rng.randint(2, 5)
    now, is_fresh = case.build, True  # this step's engine, and whether it has made no step
    for number in range(count):
        steps.append(
            _step(
                rng, replace(case, build=now), is_fresh, is_last=number == count - 1, before=steps
            )
        )
        is_fresh = False
        for event in steps[-1].after:
            if event.build is not None:
                now, is_fresh = event.build, True
    return tuple(steps)


def _refused(case: Case, refusal: Refusal) -> Case:
    """A case whose only fault is this key."""
    own = tuple((1,) for _ in range(case.ranks))
    return replace(
        case,
        mode="hand",
        batch_keys="deepspeed",
        micro_samples=own,
        micro_sizes=(),
        build=replace(case.build, section=(), zero=()),
        refusal=(refusal.path, refusal.value, refusal.says),
    )


# -- the model -----------------------------------------------------------------------------------


def _model(rng: random.Random, stage: int, mode: str) -> ModelSpec:
    count = rng.choice((1, 2, 2, 3, 3, 4, 5))
    embed = rng.choice(("linear", "linear", "linear", "table", "table", "none", "sparse"))
    head = rng.choice(("linear", "linear", "none", "tied"))
    if embed in ("none", "sparse") and head == "tied":
        head = "linear"
    width = rng.choice((1, 3, 5, 7, 8, 17))
    frozen = rng.choice(("none", "none", "none", "some", "blocks", "embed", "head"))
    if (frozen == "embed" and embed == "none") or (frozen == "head" and head != "linear"):
        frozen = "none"
    if frozen == "embed" and head == "tied":
        frozen = "none"
    if frozen in ("blocks", "embed") and embed == "none" and head == "none":
        frozen = "none"
    if frozen == "blocks" and count == 1 and embed == "none" and head == "none":
        frozen = "none"
    recompute = rng.choice(("none", "none", "none", "reentrant", "not_reentrant"))
    if recompute == "reentrant" and (embed == "none" or frozen not in ("none", "head")):
        recompute = "not_reentrant"  # nothing before a block asks for a gradient
    twice = tuple(n for n in range(count) if rng.random() < 0.5) if rng.random() < 0.2 else ()
    outside = rng.choice(("none", "none", "none", "penalty", "linear", "transpose", "product"))
    places = [where for where, is_there in (("embed", embed), ("head", head)) if is_there != "none"]
    outside_of = rng.choice([*places, "block"])
    return ModelSpec(
        seed=rng.randrange(10**6),
        width=width,
        inner=tuple(rng.choice((1, 2, 4, 7, 16, 33)) for _ in range(count)),
        stack=rng.choice(("list", "list", "sequential", "dict", "attributes")),
        embed=embed,
        head=head,
        norm=rng.choice(("none", "layer", "rms")),
        bias=rng.random() < 0.6,
        root=rng.random() < 0.2,
        scalar=rng.random() < 0.3,
        single=rng.random() < 0.2,
        unused=rng.choice(("none", "none", "none", "root", "block", "module")),
        frozen=frozen,
        twice=twice,
        recompute=recompute,
        outside=outside,
        outside_of=outside_of if outside != "none" else "none",
        shared=count > 2 and rng.random() < 0.1,
        strided=rng.random() < 0.1,
        dropout=mode == "hand" and rng.random() < 0.15,
    )


# -- batches -------------------------------------------------------------------------------------


def _batches(rng: random.Random, ranks: int, mode: str) -> tuple[str, Micros, tuple[int, ...]]:
    """Returns whose keys are used, the samples of ranks' micro-batches, and their most per rank."""
    if mode == "hand" or rng.random() < 0.4:
        count, size = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3))
        if mode == "hand":
            own = tuple(tuple(rng.randint(1, 3) for _ in range(count)) for _ in range(ranks))
            return "deepspeed", own, ()
        return "deepspeed", ((size,) * count,) * ranks, ()
    while True:
        sizes = tuple(rng.choice((0, 1, 2, 3, 4, 5)) for _ in range(ranks))
        if sum(sizes):
            break
    most = tuple(rng.choice((1, 2, 3)) for _ in range(ranks))
    if rng.random() < 0.3:
        sizes, most = (sizes[0] or 2,) * ranks, (most[0],) * ranks
    own = tuple(
        tuple(min(m, size - at) for at in range(0, size, m))
        for size, m in zip(sizes, most, strict=True)
    )
    return "hytrain", own, most


# -- the engine ----------------------------------------------------------------------------------


def _build(rng: random.Random, ranks: int, stage: int, mode: str, bf16: bool) -> Build:
    kinds = (0.0, 1.0, 0.5, 0.3, round(rng.random(), 3), "solve")
    gpu = tuple(rng.choice(kinds) for _ in range(ranks))
    fractions = None
    if rng.random() < 0.5:
        raw = [rng.choice((1, 1, 2, 5, 20)) for _ in range(ranks)]
        fractions = tuple(value / sum(raw) for value in raw)
    return Build(
        stage=stage,
        gpu=gpu if rng.random() < 0.6 else (gpu[0],) * ranks,
        fractions=fractions,
        zero=_zero_keys(rng, stage),
        section=_section(rng, ranks, mode),
        offload=_some(
            rng,
            0.6,
            cpu_threads=(None, 1, 2),
            chunk_elements=(1024, 1088, 1 << 16),
            overlap_forward=(True, False),
        ),
        top=_top_keys(rng, bf16),
    )


def _some(rng: random.Random, share: float, **values: tuple[Any, ...]) -> Pairs:
    """Some of the keys, each with one of its values."""
    return tuple((key, rng.choice(each)) for key, each in values.items() if rng.random() < share)


_SIZES = (0, 1, 40, 300, 10**9)


def _zero_keys(rng: random.Random, stage: int) -> Pairs:
    keys = _some(
        rng,
        0.15,
        overlap_comm=(True, False),
        contiguous_gradients=(True, False),
        reduce_scatter=(True, False),
        reduce_bucket_size=(1, 1000),
        allgather_bucket_size=(1, 1000),
        allgather_partitions=(True, False),
        round_robin_gradients=(True, False),
        ignore_unused_parameters=(True,),  # False refuses the drawn models' unused ones
    )
    if stage < 3:
        return keys
    if rng.random() < 0.5:
        pinned = {"pin_memory": rng.random() < 0.5} if rng.random() < 0.5 else {}
        keys += (("offload_param", {"device": "cpu", **pinned}),)
    elif rng.random() < 0.2:
        keys += (("offload_param", {"device": "none"}),)
    # DeepSpeed's default keeps every layer of a model of this size on every rank.
    if rng.random() < 0.85:
        keys += (("stage3_param_persistence_threshold", rng.choice((0, 0, 1, 20, 100))),)
    return keys + _some(
        rng,
        0.5,
        stage3_prefetch_bucket_size=_SIZES,
        stage3_max_live_parameters=_SIZES,
        stage3_max_reuse_distance=_SIZES,
        stage3_model_persistence_threshold=_SIZES,
        stage3_gather_16bit_weights_on_model_save=(True, False),
    )


def _section(rng: random.Random, ranks: int, mode: str) -> Pairs:
    keys = _some(
        rng, 0.2, wait_in_stream=(True, False), layers=({"class": "Block"}, {"class": None})
    )
    solver = dict(
        _some(
            rng,
            0.3,
            method=("pipeline", "closed_form"),
            alpha=(None, 0.1, 2.0),
            interval=(1, 2),
            gpu_memory_reserve_bytes=(0, None),
            host_memory_reserve_bytes=(0, None),
            start=(None, [int(8 * rng.random()) for _ in range(ranks)]),
        )
    )
    if solver:
        keys += (("solver", solver),)
    if rng.random() < (0.5 if mode == "train_batch" else 0.1):
        keys += (("accumulation", "layer_major"),)
        keys += _some(rng, 0.6, activations=("keep", "offload"))
    return keys


def _top_keys(rng: random.Random, bf16: bool) -> Pairs:
    keys = _some(
        rng,
        0.15,
        timers=({"throughput": {"synchronized": True}}, {"throughput": {"synchronized": False}}),
        zero_force_ds_cpu_optimizer=(True, False),
        zero_allow_untested_optimizer=(True,),
        prescale_gradients=(False,),
        gradient_predivide_factor=(1.0,),
        wall_clock_breakdown=(False,),
    )
    return keys


def _optimizer(rng: random.Random) -> OptimizerSpec:
    client = rng.random() < 0.4
    groups = tuple(
        (
            rng.choice((1e-2, 3e-2, 1e-3)),
            rng.choice((0.9, 0.8, 0.5)),
            rng.choice((0.999, 0.95)),
            rng.choice((1e-8, 1e-6, 1e-3)),
            rng.choice((0.0, 0.1, 0.3)),
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    )
    kind = rng.choice(("AdamW", "AdamW", "Adam"))
    return OptimizerSpec(
        kind=kind,
        client=client,
        groups=groups,
        schedule=rng.choice(("constant", "hand", "lambda", "warmup")),
        bias_correction=rng.choice((None, None, True, False)) if not client else None,
        adam_w_mode=rng.choice((None, True, False)) if not client and kind == "Adam" else None,
        share=rng.choice((1.0, 1.0, 1.0, 1.0, 0.6)),
    )


# -- steps ---------------------------------------------------------------------------------------


def _step(
    rng: random.Random, case: Case, is_fresh: bool, *, is_last: bool, before: list[Step]
) -> Step:
    # Documented: losses of one forward are another kind than those of two, with a first one too.
    is_first = is_fresh or all(each.style == "sum" for each in before)
    skip = _skips(rng, case, is_first)
    style, idle, fault = "plain", (), None
    by_hand = case.mode == "hand"
    stage = case.build.stage
    if by_hand and case.num_micro_batches == 1:
        if rng.random() < 0.25:
            styles = ("two", "sum", "retain", "past", "module", "no_sync")
            style = rng.choice(styles if stage == 1 else styles[:-1])
        if style == "no_sync" and len(before) % 2 and not case.is_direct:
            style = "no_sync_last"
        if style == "sum" and case.model.recompute == "reentrant":
            style = "two"
        if style == "sum" and case.ranks > 1 and any(each.style == "two" for each in before):
            style = "two"  # README: under ZeRO-3 what followed as many forwards is expected again
        if style == "plain" and case.ranks > 1 and stage < 3 and rng.random() < 0.1:
            idle = (rng.randrange(case.ranks),)
    if (by_hand or case.ranks == 1) and rng.random() < 0.12:
        fault = _fault(rng, case)
    poison = None
    if rng.random() < 0.12 and (case.checks_overflow or is_last):
        rank = rng.randrange(case.ranks)
        count = len(case.micro_samples[rank])
        if count and rank not in idle:
            value = rng.choice((float("inf"), float("-inf"), float("nan")))
            poison = (rank, rng.randrange(count), value)
    inside: list[tuple[int, Event]] = []
    # A rank that makes no backward has no gradients, and those of the other ranks wait for it.
    may_look = by_hand and not case.is_direct and style == "plain" and not idle
    if may_look:
        for micro in range(case.num_micro_batches):
            if rng.random() < 0.15:
                event = _inside_event(rng, case, is_poisoned=poison is not None)
                if event.kind == "eval_one" and any(any(own) for own in skip):
                    continue  # what a forward has left out waits for all ranks
                inside.append((micro, event))
    saved = any(e.kind == "save" for step in before for e in step.after)
    return Step(
        factor=rng.choice((0.01, 1.0, 10.0)),
        skip=skip,
        style=style,
        idle=idle,
        poison=poison,
        fault=fault,
        inside=tuple(inside),
        after=_after(rng, case, saved),
    )


def _skips(rng: random.Random, case: Case, is_fresh: bool) -> Any:
    """The blocks that each rank leaves out in each micro-batch."""
    nothing = tuple(tuple(() for _ in own) for own in case.micro_samples)
    blocks = len(case.model.inner)
    model = case.model
    is_by_layer = dict(case.build.section).get("accumulation") == "layer_major"
    if rng.random() > 0.3 or blocks < 2:
        return nothing
    if case.build.stage == 3 and is_by_layer and case.mode == "train_batch":
        return nothing
    # The first backward must be one with the most uses.
    is_counted = model.shared or model.twice
    if is_fresh and case.build.stage == 3 and case.ranks > 1 and is_counted:
        return nothing
    if model.recompute == "reentrant" and is_fresh:
        return nothing  # its hooks fire once a call
    # Something that is trained stays in every forward: FuzzModel.anchor().
    has_others = model.head != "none" and model.frozen != "head"
    has_others |= model.embed != "none" and model.frozen != "embed"
    first = 0 if has_others else 1
    chosen = tuple(n for n in range(first, blocks) if rng.random() < 0.4)
    if rng.random() < 0.5:  # all alike
        skip = tuple(tuple(chosen for _ in own) for own in case.micro_samples)
    else:
        skip = tuple(
            tuple(chosen if rng.random() < 0.5 else () for _ in own) for own in case.micro_samples
        )
    # Documented: on several ranks no gradient may come later in a backward than in the first one,
    # as that of a weight that was used outside of its block only.
    outside = blocks // 2
    can_be_late = is_fresh and case.build.stage == 3 and case.ranks > 1
    is_outside = model.outside != "none" and model.outside_of == "block"
    if can_be_late and is_outside and all(outside in own[0] for own in skip if own):
        return tuple(tuple(tuple(n for n in each if n != outside) for each in own) for own in skip)
    return skip


def _fault(rng: random.Random, case: Case) -> tuple[str, bool] | None:
    kind = rng.choice(("forward", "backward"))
    if kind == "forward":
        return kind, False
    model = case.model
    has_gradient = model.embed != "none" and model.frozen in ("none", "head")
    if case.is_direct or not has_gradient or case.ranks > 1:
        return None
    return kind, case.mode == "hand" and rng.random() < 0.5


def _inside_event(rng: random.Random, case: Case, *, is_poisoned: bool) -> Event:
    kinds = ["sync", "eval", "safe_get", "zero_grad", "collective", "copies"]
    if not is_poisoned:
        kinds += ["gradient", "gradient", "set_gradient"]
    if case.build.stage < 3:
        kinds += ["eval_one", "peek"]
    return Event(rng.choice(kinds), rng.randrange(1000))


def _after(rng: random.Random, case: Case, saved: bool) -> tuple[Event, ...]:
    kinds = ["sync", "fp32", "copies", "module_state", "safe_get", "safe_set", "eval", "move",
             "save", "load", "reload", "round_trip", "collective", "write", "zero_after",
             "save16", "peek", "peek"]  # fmt: skip
    events: list[Event] = []
    while rng.random() < 0.3:
        kind = rng.choice(kinds)
        if kind == "load" and not (saved or any(e.kind == "save" for e in events)):
            continue
        build = None
        if kind == "reload":
            stage = _any_stage(rng, case)
            build = _build(rng, case.ranks, stage, case.mode, case.bf16)
            build = replace(build, zero_init=_zero_init(rng, case, build))
        events.append(Event(kind, rng.randrange(1000), round(rng.random(), 3), build))
    return tuple(events)
