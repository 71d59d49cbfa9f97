"""What a script does between two steps, beside torch: on two ranks, and streamed on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_ranks
from deepspeed.utils import groups
from harness import on_ranks
from support.beside_torch import training_beside_torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hytrain.errors import GradientOrderError, RankFailedError, UnsupportedError

pytestmark = pytest.mark.timeout(240)

WIDTH = 8


def _data(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).device)


def _net(*, is_normed: bool = False) -> nn.Module:
    torch.manual_seed(2)
    norm = [nn.LayerNorm(WIDTH)] if is_normed else []
    blocks = [nn.Sequential(*norm, nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks)


def _one(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(_data(model, number, rank)).pow(2).mean()


def _sum_of(forwards: int, number: int) -> Callable[[Any, int], torch.Tensor]:
    return lambda model, rank: sum(  # pyright: ignore
        _one(model, number + 100 * each, rank) for each in range(forwards)
    )


def _input_gradient(engine: Any, plain: Any, number: int, rank: int, way: str) -> None:
    """Through one forward; it must be torch's, and leave nothing behind."""
    found: list[torch.Tensor] = []
    for model in (engine, plain):
        x = _data(model, number, rank).requires_grad_(True)
        if way == "frozen":
            for parameter in model.parameters():
                parameter.requires_grad_(False)
        if way == "eval":
            model.eval()
        loss = model(x).pow(2).mean()
        if way == "frozen":
            loss.backward()
            assert x.grad is not None
            found.append(x.grad.cpu())
        else:
            found.append(torch.autograd.grad(loss, x)[0].cpu())
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model.train()
    torch.testing.assert_close(*found)


def input_gradients(
    way: str, forwards: int, stage: int, zero: dict[str, Any] | None = None
) -> None:
    """Before the first step, between steps, and after all of them."""
    with training_beside_torch(_net(), stage, zero=zero) as beside:
        for number in range(4):
            _input_gradient(beside.engine, beside.plain, 50 + number, beside.rank, way)
            beside.step(_sum_of(forwards, number))


def _fail_forward(engine: Any) -> None:
    """The user's code ends it midway."""

    def fail(*_: object) -> None:
        raise KeyError("of the user's own")

    hook = engine.module[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        engine(_data(engine, 0, 0))
    hook.remove()


def numbers_of_forwards(stage: int, *, gathers: str = "each", fails: bool = False) -> None:
    """A forward that is dropped, one, two or three in a loss, losses run back one by one.

    ``fails``: before the first step the user's code ends a forward.
    """
    with training_beside_torch(_net(), stage, gathers=gathers) as beside:
        if fails:
            _fail_forward(beside.engine)
        for number, forwards in enumerate((2, 1, 3, 1, 2)):
            beside.engine(_data(beside.engine, 70, beside.rank))
            beside.step(_sum_of(forwards, number))
            one, other = (_one(beside.engine, 80 + n, beside.rank) for n in (0, 1))
            beside.engine.backward(one)
            beside.engine.backward(other)
            beside.engine.zero_grad()
            beside.engine.step()  # skipped


def second_order(stage: int, *, is_normed: bool, zero: dict[str, Any] | None = None) -> None:
    """A gradient penalty, with plain steps between."""

    def penalty(model: Any, rank: int) -> torch.Tensor:
        x = _data(model, number, rank).requires_grad_(True)
        output = model(x)
        (gradient,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
        return output.pow(2).mean() + 0.1 * gradient.pow(2).mean()

    with training_beside_torch(_net(is_normed=is_normed), stage, zero=zero) as beside:
        for number in range(5):
            beside.step(_sum_of(1, number) if number in (0, 3) else penalty)
        if stage == 3:
            transformed = torch.func.grad(lambda x: beside.engine(x).sum())
            with pytest.raises(UnsupportedError, match=r"in a transform of torch\.func"):
                transformed(_data(beside.engine, 0, 0))


class _Skipping(nn.Module):
    """Blocks, of which a forward may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_net())
        self.skipped: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number in self.skipped else block(x)
        return x


def frozen_between_others(stage: int, zero: dict[str, Any] | None = None) -> None:
    """Backward goes through weights that had gradients in the first step, and have none now."""
    with training_beside_torch(_Skipping(), stage, zero=zero) as beside:
        models = beside.engine.module, beside.plain
        for number in range(6):
            for model in models:
                model.skipped = () if number else (2,)
                model.blocks[1].requires_grad_(number not in (2, 3))
                model.blocks[2].requires_grad_(number not in (3, 4))
            beside.step(_sum_of(1, number))


def late_hooks(stage: int) -> None:
    """They mask rows of a gradient, whenever they were registered, and can be taken off."""
    with training_beside_torch(_net(), stage) as beside:
        handles: list[Any] = []
        for number in range(6):
            if number == 2:
                for model in (beside.engine.module, beside.plain):
                    weight = model[1][0].weight
                    handles.append(weight.register_post_accumulate_grad_hook(_only_last_row))
            if number == 5:
                for handle in handles:
                    handle.remove()
            beside.step(_sum_of(1, number))


def _only_last_row(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad[:-1] = 0


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.sees = self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            if self.sees and block is self.blocks[0]:
                x = x + self.tower(x)
            if self.skips:
                break
        return x


@pytest.mark.parametrize(("ranks_used", "stage"), [(2, 2), (3, 3)])
@on_ranks(lambda ranks_used: ranks_used)
def test_towers(ranks_used: int, stage: int) -> None:
    """A layer that no rank, one rank or both use, from the first step on or later."""
    torch.manual_seed(2)
    model = _Towers()
    assert dist.get_world_size() == ranks_used
    seen = ((), (0,), (0, 1), (1,), (), (0, 1), (1,))  # by which ranks, step for step

    def choose(model: Any, rank: int) -> None:
        plain = getattr(model, "module", model)
        plain.sees, plain.skips = rank in seen[number], (rank + number) % 3 == 0

    def loss(model: Any, rank: int) -> torch.Tensor:
        choose(model, rank)
        return _one(model, number, rank)

    with training_beside_torch(model, stage) as beside:
        for number in (*range(len(seen)), 1, 3, 0):
            beside.step(loss)
            if number % 2:
                choose(beside.plain, beside.rank)
                _input_gradient(beside.engine, beside.plain, number, beside.rank, "grad")


class _Cut(nn.Module):
    """Backward goes back to a block, some of the others are left out, and one may be read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.first = 0
        self.left_out: tuple[int, ...] = ()
        self.reads = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x.detach() if number == self.first else x
            x = x if number in self.left_out else torch.tanh(block(x))
        return x * self.blocks[2].weight.mean() if self.reads else x  # pyright: ignore


@pytest.mark.parametrize("prefetch", [0, 300])
@on_ranks(2)
def test_what_all_ranks_reach_first_any_may_leave_out_later(prefetch: int) -> None:
    """Layers that the first backward has not come to: they are in the plans of later ones."""
    torch.manual_seed(2)
    steps = ((2, {}), (0, {}), (0, {1: (1, 2)}), (0, {0: (2,), 1: (1,)}), (3, {}), (0, {0: (1,)}))
    zero = {
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_max_live_parameters": 0,
        "offload_param": {"device": "cpu"},
    }
    with training_beside_torch(_Cut(), 3, zero=zero) as beside:
        for number, (first, left_out) in enumerate(steps):
            beside.step(_cut(number, first=first, left_out=left_out))


def _cut(number: int, *, left_out: dict[int, tuple[int, ...]], **settings: Any) -> Any:
    def loss(model: Any, rank: int) -> torch.Tensor:
        plain = getattr(model, "module", model)
        vars(plain).update(settings, left_out=left_out.get(rank, ()))
        return _one(model, number, rank)

    return loss


@on_ranks(2)
def test_what_all_ranks_leave_out_at_first_any_may_use_later() -> None:
    """As layers that are dropped at random, where forwards of all of them have come before."""
    torch.manual_seed(2)
    both = {0: (1, 2), 1: (1, 2)}
    steps: tuple[dict[int, tuple[int, ...]], ...] = (both, {1: (1, 3)}, both, {0: (2, 3), 1: ()})
    with training_beside_torch(_Cut(), 3) as beside:
        for _ in range(2):
            beside.engine(_data(beside.plain, 0, 0))
        for number, left_out in enumerate(steps):
            beside.step(_cut(number, left_out=left_out))


@on_ranks(2)
def test_ranks_that_leave_out_other_layers_begin_to_read_a_weight() -> None:
    torch.manual_seed(2)
    with training_beside_torch(_Cut(), 3) as beside:
        for number in range(4):
            left_out = {0: (1,), 1: (3,)} if number > 1 else {}
            beside.step(_cut(number, left_out=left_out, reads=number > 1))


class _Reader(nn.Linear):
    """A block that may read the weight of another one."""

    other: tuple[nn.Linear, ...] = ()  # no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(super().forward(x))
        return x + sum(other.weight.mean() for other in self.other)


@on_ranks(2)
def test_a_weight_that_a_later_pass_is_the_first_to_read_in_another_layer() -> None:
    """One rank still holds the next layer's gather back for its update; the other has begun it."""
    torch.manual_seed(2)
    model = nn.Sequential(*[_Reader(WIDTH, WIDTH) for _ in range(4)])
    section = {"gpu_fraction": float(dist.get_rank() == 0)}
    with training_beside_torch(model, 3, section=section) as beside:
        for number in range(4):
            for each in (model, beside.plain) if number == 2 else ():
                each[0].other = (each[2],)  # pyright: ignore
            beside.step(_sum_of(1, number))


class _Tiled(nn.Module):
    """A block that checkpoints its MLP in pieces."""

    pieces = 2
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = [
            checkpoint(self.mlp, y, use_reentrant=self.reentrant) for y in x.chunk(self.pieces)
        ]
        return x + torch.cat(pieces)


class _TiledLayers(_Tiled):
    """A model whose tiles go through two layers, in front of which there is another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


def tiles(
    stage: int,
    numbers: tuple[tuple[int, ...], ...],
    zero: dict[str, Any] | None = None,
    *,
    reentrant: bool = True,
    of_layers: bool = False,
) -> None:
    """Parts of a block, or of layers, that are recomputed several times: in each step, and on each
    rank."""
    torch.manual_seed(2)
    blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Tiled(), _Tiled())
    model: nn.Module = _TiledLayers() if of_layers else blocks
    mine = [tiled for tiled in model.modules() if isinstance(tiled, _Tiled)]
    with training_beside_torch(model, stage, zero=zero) as beside:
        for number, pieces in enumerate(numbers):
            for tiled in mine:
                tiled.pieces, tiled.reentrant = pieces[dist.get_rank()], reentrant
            beside.step(_sum_of(1, number))


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_sequence_group(stage: int) -> None:
    """Ranks that share sequences: gradients are those of one process with the whole of each."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    sequence_ranks.initialize_sequence_parallel(sequence_parallel_size=2)
    try:
        with training_beside_torch(model, stage, mpu=sequence_ranks) as beside:
            assert beside.engine.train_batch_size() == 1  # both ranks have parts of one sample
            for number in range(3):
                beside.step(_sum_of(1, number))
    finally:
        sequence_ranks._release_sequence_parallel_groups()
        groups.mpu = None


stages = pytest.mark.parametrize("stage", [2, 3])


@pytest.mark.parametrize(
    ("way", "forwards", "stage"), [("eval", 2, 3), ("frozen", 1, 3), ("grad", 2, 2), ("grad", 1, 3)]
)
@on_ranks(2)
def test_input_gradients(way: str, forwards: int, stage: int) -> None:
    input_gradients(way, forwards, stage)


@pytest.mark.parametrize(
    ("stage", "gathers", "fails"),
    [(2, "each", False), (3, "each", True), (3, "kept", False), (3, "kept", True)],
)
@on_ranks(2)
def test_numbers_of_forwards(stage: int, gathers: str, fails: bool) -> None:
    numbers_of_forwards(stage, gathers=gathers, fails=fails)


@pytest.mark.parametrize(("stage", "is_normed"), [(2, True), (3, False), (3, True)])
@on_ranks(2)
def test_second_order(stage: int, is_normed: bool) -> None:
    second_order(stage, is_normed=is_normed)


@stages
@on_ranks(2)
def test_late_hooks(stage: int) -> None:
    late_hooks(stage)


@stages
@on_ranks(2)
def test_frozen_between_others(stage: int) -> None:
    frozen_between_others(stage)


@stages
@on_ranks(2)
def test_tiles(stage: int) -> None:
    """In changing number, but never more than in a rank's first step; or not reentrant."""
    tiles(stage, ((4, 2), (4, 2), (1, 2), (2, 1), (4, 2)))
    tiles(stage, ((1, 2), (4, 1), (2, 4)), reentrant=False)


@pytest.mark.parametrize(
    ("numbers", "reuse"),
    [(((1, 1), (2, 2), (4, 4)), 0), (((1, 2), (4, 1), (2, 4)), 10**9)],
    ids=["equal", "unequal, gathered throughout"],
)
@stages
@on_ranks(2)
def test_tiles_of_layers(stage: int, numbers: tuple[tuple[int, ...], ...], reuse: int) -> None:
    """A layer's gradient may come after the next one's backward, that of an earlier tile."""
    zero = {"stage3_max_reuse_distance": reuse} if stage == 3 else None
    tiles(stage, numbers, zero, reentrant=False, of_layers=True)


class _Gradientless(torch.autograd.Function):
    """Its input's gradient is undefined, though autograd runs through it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore
        return None


class _Learns(nn.Linear):
    learns = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.learns else _Gradientless.apply(self.weight)
        return nn.functional.linear(x, weight, self.bias)  # pyright: ignore


@stages
@on_ranks(2)
def test_an_undefined_gradient_on_one_rank(stage: int) -> None:
    """It will not come, though its node is in the graph: the other rank must not wait for it."""
    torch.manual_seed(2)
    model = nn.Sequential(*(_Learns(WIDTH, WIDTH) for _ in range(3)))
    with training_beside_torch(model, stage) as beside:
        for number in range(4):

            def loss(model: nn.Module, rank: int, number: int = number) -> torch.Tensor:
                for module in model.modules():
                    if isinstance(module, _Learns):
                        module.learns = rank == 0 or number % 2 == 0
                return _sum_of(1, number)(model, rank)

            beside.step(loss)


@pytest.mark.parametrize("grown", [(4, 4), (2, 4)], ids=["both", "second"])
@stages
@on_ranks(2)
def test_more_tiles_than_in_the_first_step(stage: int, grown: tuple[int, int]) -> None:
    """They cannot be reduced any more: each rank ends with an error that says what to do."""
    with pytest.raises((GradientOrderError, RankFailedError), match="use_reentrant=False"):
        tiles(stage, ((2, 2), (1, 1), grown))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("streams", [False, True])
def test_one_rank(streams: bool) -> None:
    stage, zero = (3, {"offload_param": {"device": "cpu"}}) if streams else (2, {})
    for way in ("grad", "frozen"):
        input_gradients(way, 2, stage, zero)
    second_order(stage, is_normed=True, zero=zero)
    tiles(stage, ((1,), (2,), (4,), (3,), (4,)), zero)
    frozen_between_others(stage, zero)
    late_hooks(stage)
