"""The update worker by itself, against a serial loop: random schedules with random delays."""

from __future__ import annotations

import ctypes
import math
import random
import time
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from support.comparisons import assert_same_bits

from hytrain import _C
from hytrain.errors import WorkerError
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit, sum_of_squares
from hytrain.offload.arena import Arena

pytestmark = pytest.mark.timeout(120)
full = pytest.mark.parity_full

CHUNK = 96
CPU = torch.device("cpu")


@dataclass
class Layer:
    """A layer's state, its training copy, and the serial loop's state."""

    index: int
    size: int
    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor
    expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    gradient: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    sum_of_squares: torch.Tensor = field(default_factory=lambda: torch.zeros(1).double())


class Bench:
    """A worker on the host with its layers."""

    def __init__(self, sizes: list[int], seed: int, max_delay_us: int, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self.away: set[int] = set()
        """Layers that are on the "device"."""
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.worker = _C.UpdateWorker.on_host(2, seed, max_delay_us)
        num_chunks = sum(-(-size // chunk) for size in sizes)
        self.arena = Arena(256 * 1024 + num_chunks * chunk * 8, CPU)
        slots = num_chunks + 3
        number = self.worker.add_slot_class(chunk * 2)
        # In two parts: memory that comes later is as good.
        for count in (slots - 2, 2):
            base = self.arena.take(count * chunk * 2)
            self.worker.add_slots(number, base, chunk * 2, count)
        base = self.arena.take(3 * chunk * 2)
        self.worker.add_slots(self.worker.outgoing, base, chunk * 2, 3)
        self.layers = [self._layer(index, size) for index, size in enumerate(sizes)]
        self.worker.start()

    def normal(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator)

    def _layer(self, index: int, size: int) -> Layer:
        p, m, v = self.normal(size), torch.zeros(size), torch.zeros(size)
        weights = p.bfloat16()
        layer = Layer(index, size, p, m, v, weights, (p.clone(), m.clone(), v.clone()))
        chunks = [
            _C.Chunk(
                n=min(self.chunk, size - at),
                shard_offset=at,
                weights=weights.data_ptr() + 2 * at,
                weights_dtype=_C.DType.bfloat16,
                group=0,
                slot_class=0,
            )
            for at in range(0, size, self.chunk)
        ]
        state = _C.StateArrays(p.data_ptr(), m.data_ptr(), v.data_ptr())
        norm = self.arena.take(8)
        self.worker.add_layer(f"layer {index}", _C.DType.bfloat16, 0, norm, state, chunks)
        return layer

    @property
    def here(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.index not in self.away]

    def close(self) -> None:
        self.worker.close()
        self.arena.close()

    # -- what a step consists of ---------------------------------------------------------------

    def send(self, layer: Layer, gradient: torch.Tensor, hyper: AdamHyper) -> None:
        layer.gradient = gradient
        layer.sum_of_squares = torch.tensor([sum_of_squares(gradient)], dtype=torch.float64)
        self.worker.submit_update(
            layer.index,
            gradient.data_ptr(),
            0,
            layer.sum_of_squares.data_ptr(),
            _C.StepRecord(1.0, [hyper.native()]),
            False,
        )

    def withdraw(self, layer: Layer) -> torch.Tensor:
        """The gradient comes back, and the weights are those of the last step."""
        if self.worker.cancel_update(layer.index):
            returned = layer.gradient
            self.worker.wait_complete(layer.index)
        else:
            returned = torch.zeros_like(layer.gradient)
            self.worker.submit(layer.index, _C.Pass.withdraw, returned.data_ptr(), 0)
            self.worker.wait_complete(layer.index)
        assert_same_bits("withdrawn gradient", returned, layer.gradient)
        self.check_weights(layer)
        return returned

    def skip(self) -> None:
        for layer in self.here:
            if not self.worker.cancel_update(layer.index):
                self.worker.submit(layer.index, _C.Pass.drop)

    def finish(self, scale: float, hyper: AdamHyper) -> None:
        self.worker.finalize(_C.StepRecord(scale, [hyper.native()]))
        for layer in self.layers:
            commit(*layer.expected, Gradient(layer.gradient, scale, hyper))

    def check_weights(self, layer: Layer) -> None:
        assert_same_bits("training copy", layer.weights, layer.expected[0].bfloat16())

    def flush(self) -> None:
        self.worker.wait_all()
        for layer in self.layers:
            if self.worker.has_pending(layer.index):
                self.worker.submit(layer.index, _C.Pass.commit)
        self.worker.wait_all()
        for layer in self.layers:
            assert not self.worker.has_pending(layer.index)
            for name, actual, expected in zip(
                "pmv", (layer.p, layer.m, layer.v), layer.expected, strict=True
            ):
                assert_same_bits(f"{name} of layer {layer.index}", actual, expected)

    def random_moves(self) -> None:
        """Of layers that may leave."""

    def release(self) -> None:
        """What others may have now is overwritten, as the allocator's next user would."""

    def random_step(self, hyper: AdamHyper) -> bool:
        """One step of a random life; whether it was made (not skipped)."""
        rng = self.rng
        self.random_moves()
        # Previews stop at once, in the middle, or never.
        self.worker.begin_step(rng.choice([0.0, 150.0, math.inf]))
        for layer in reversed(self.layers):
            layer.gradient = self.normal(layer.size).bfloat16()
            if layer.index not in self.away:
                self.send(layer, layer.gradient, hyper)
        if self.here and rng.random() < 0.3:
            for layer in rng.sample(self.here, rng.randint(1, len(self.here))):
                self.send(layer, self.withdraw(layer), hyper)
        if self.here and rng.random() < 0.3:
            self.worker.wait_issued(rng.choice(self.here).index)
        made = rng.random() > 0.25
        if made:
            final = replace(hyper, lr=hyper.lr * rng.choice([1.0, 1.0, 0.5]))
            self.finish(rng.choice([1.0, 1.0, 0.37]), final)
        else:
            self.skip()
        if rng.random() < 0.5:
            self.random_moves()  # before anybody has waited for the weights
        for layer in self.layers:  # the next forward
            self.worker.wait_complete(layer.index)
            self.check_weights(layer)
        self.release()
        if rng.random() < 0.2:
            self.flush()
        return made


class MovingBench(Bench):
    """A worker whose layers leave for the "device" and come back between steps."""

    def __init__(self, sizes: list[int], seed: int, max_delay_us: int) -> None:
        super().__init__(sizes, seed, max_delay_us)
        self.num_moves = 0
        self._left: list[tuple[int, tuple[torch.Tensor, ...]]] = []

    def move(self, layer: Layer) -> None:
        old = (layer.p, layer.m, layer.v)
        # What is there before the state comes must not be read.
        layer.p, layer.m, layer.v = (torch.full((layer.size,), math.nan) for _ in range(3))
        arrays, was = (
            _C.StateArrays(p.data_ptr(), m.data_ptr(), v.data_ptr())
            for p, m, v in ((layer.p, layer.m, layer.v), old)
        )
        if layer.index in self.away:
            self.away.remove(layer.index)
            self.worker.submit_arrive(layer.index, arrays, was, 0)
        else:
            self.away.add(layer.index)
            self.worker.submit_leave(layer.index, arrays, 0, 0)
        self.num_moves += 1
        self._left.append((layer.index, old))

    def release(self) -> None:
        """State that has left its place is overwritten, as the allocator's next user would."""
        for index, old in self._left:
            if not self.worker.is_moving(index):
                for tensor in old:
                    tensor.fill_(math.nan)
        self._left = [pair for pair in self._left if self.worker.is_moving(pair[0])]

    def random_moves(self) -> None:
        for layer in self.rng.sample(self.layers, self.rng.randint(0, len(self.layers))):
            self.move(layer)
            if self.rng.random() < 0.3:
                self.worker.wait_moved(layer.index)
                assert not self.worker.is_moving(layer.index)
            if self.rng.random() < 0.2:
                self.move(layer)  # and back at once
            self.release()

    def finish(self, scale: float, hyper: AdamHyper) -> None:
        for layer in self.layers:
            if layer.index in self.away:
                self.worker.wait_moved(layer.index)
                gradient = Gradient(layer.gradient, scale, hyper)
                commit(layer.p, layer.m, layer.v, gradient, out=layer.weights)
        super().finish(scale, hyper)


class ShrinkingBench(Bench):
    """A worker whose slots are given back while it works; their memory is another's then."""

    def __init__(self, sizes: list[int], seed: int, max_delay_us: int, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        super().__init__(sizes, seed, max_delay_us)
        self.slots = sum(-(-size // CHUNK) for size in sizes) + 3
        first = self.arena.address
        self._there = [(first, self.slots * CHUNK * 2)]
        self._going: list[tuple[int, int]] = []
        self.num_gone = 0

    def swap(self) -> None:
        """Others come, and all that were there are to go."""
        base, size = self.arena.take(self.slots * CHUNK * 2), self.slots * CHUNK * 2
        self.worker.add_slots(0, base, CHUNK * 2, self.slots)
        for begin, num_bytes in self._there:
            self.worker.retire_slots(0, begin, num_bytes)
        self._going += self._there
        self._there = [(base, size)]

    def release(self) -> None:
        for begin, num_bytes in list(self._going):
            if not self.worker.is_retiring(begin):
                # Whoever still read a gradient from here would get NaN.
                ctypes.memset(begin, 0xFF, num_bytes)
                self._going.remove((begin, num_bytes))
                self.num_gone += 1


@pytest.mark.parametrize("max_delay_us", [0, 60])
@pytest.mark.parametrize("seed", range(4))
def test_slots_that_are_given_back(seed: int, max_delay_us: int) -> None:
    bench = ShrinkingBench([CHUNK * 3, 33, CHUNK * 2 + 1, CHUNK], seed, max_delay_us)
    steps_made = 0
    for number in range(40):
        if number % 4 == 1:
            bench.swap()
        steps_made += bench.random_step(AdamHyper(lr=1e-2, weight_decay=0.1, step=steps_made + 1))
        bench.release()
    bench.flush()  # no gradient is pending: none of those that are to go keeps one
    while bench.num_gone < 10:  # the test's time limit ends it
        bench.release()
    assert bench.num_gone == 10
    bench.close()


def test_slots_are_given_back_where_no_job_comes_any_more() -> None:
    bench = ShrinkingBench([CHUNK], 0, 0)
    bench.swap()
    while bench.num_gone == 0:  # the test's time limit ends it
        bench.release()
    bench.close()


def test_a_layer_leaves_with_its_pending_gradient_applied() -> None:
    bench = MovingBench([CHUNK * 2, CHUNK], 0, 100)
    hyper = AdamHyper(lr=1e-2, step=1)
    bench.worker.begin_step(math.inf)
    for layer in bench.layers:
        bench.send(layer, bench.normal(layer.size).bfloat16(), hyper)
    Bench.finish(bench, 0.5, hyper)
    bench.move(bench.layers[0])  # the second preview may not even have begun
    bench.worker.wait_moved(0)
    assert not bench.worker.has_pending(0)
    assert bench.worker.has_pending(1)
    assert_same_bits("p", bench.layers[0].p, bench.layers[0].expected[0])
    bench.flush()
    spans = [(span.layer, span.job_pass) for span in bench.worker.take_spans()]
    assert spans.count((0, _C.Pass.leave)) == 1
    bench.move(bench.layers[0])
    bench.worker.begin_step(math.inf)
    for layer in bench.layers:
        bench.send(layer, bench.normal(layer.size).bfloat16(), replace(hyper, step=2))
    bench.finish(1.0, replace(hyper, step=2))
    bench.worker.wait_all()
    committed = {
        s.layer: s.committed for s in bench.worker.take_spans() if s.job_pass == _C.Pass.update
    }
    assert committed == {0: False, 1: False}  # one has come, the other was flushed
    bench.flush()
    bench.close()


def test_a_step_that_is_not_final_cannot_leave() -> None:
    bench = MovingBench([CHUNK, CHUNK], 0, 0)
    bench.worker.begin_step(math.inf)
    for layer in bench.layers:
        bench.send(layer, bench.normal(layer.size).bfloat16(), AdamHyper(lr=1e-3))
    bench.worker.wait_all()
    bench.move(bench.layers[1])
    with pytest.raises(WorkerError, match=r"at layer 'layer 1': a step that is not final"):
        bench.worker.wait_moved(1)
    bench.close()


def test_whatever_is_called_after_a_fault_raises_it() -> None:
    bench = MovingBench([CHUNK, CHUNK], 0, 0)
    bench.worker.fail_at(1)
    bench.move(bench.layers[1])
    record = _C.StepRecord(1.0, [AdamHyper(lr=1e-3).native()])
    for call in (
        lambda: bench.worker.wait_moved(1),
        bench.worker.wait_all,
        bench.worker.check_error,
        lambda: bench.worker.add_slots(0, 0, 64, 1),
        lambda: bench.worker.begin_step(math.inf),
        lambda: bench.worker.finalize(record),
        lambda: bench.worker.submit(0, _C.Pass.commit),
        lambda: bench.worker.cancel_update(0),
        lambda: bench.worker.is_moving(0),
        lambda: bench.worker.is_fetched(0),
        lambda: bench.worker.wait_fetched([0]),
        lambda: bench.worker.has_pending(0),
    ):
        with pytest.raises(WorkerError, match=r"at layer 'layer 1': injected fault"):
            call()
    bench.close()


@pytest.mark.parametrize(
    ("seed", "max_delay_us"),
    [(0, 0), (1, 60), (2, 0), *(pytest.param(seed, 60, marks=full) for seed in (3, 4))],
)
@pytest.mark.parametrize("kind", [Bench, MovingBench])
def test_random_schedules(kind: type[Bench], seed: int, max_delay_us: int) -> None:
    bench = kind([CHUNK * 3, 33, CHUNK * 2 + 1, CHUNK], seed, max_delay_us)
    steps_made = 0
    for _ in range(60):
        hyper = AdamHyper(lr=1e-2, weight_decay=0.1, step=steps_made + 1)
        steps_made += bench.random_step(hyper)
    bench.flush()
    assert 0 < steps_made < 60
    assert not isinstance(bench, MovingBench) or bench.num_moves > 100
    bench.close()


@pytest.mark.parametrize("moves", [False, True])
def test_close_in_the_middle_of_everything(moves: bool) -> None:
    for seed in range(10):
        bench = MovingBench([CHUNK * 4] * 3, seed, 300)
        bench.worker.begin_step(math.inf)
        for layer in bench.layers:
            if moves:
                bench.move(layer)
                bench.move(layer)
            else:
                bench.send(layer, bench.normal(layer.size).bfloat16(), AdamHyper(lr=1e-3))
        bench.close()
        for call in (bench.worker.wait_all, partial(bench.worker.is_moving, 0)):
            with pytest.raises(WorkerError, match="closed"):
                call()


def test_a_layer_without_chunks_is_refused() -> None:
    worker = _C.UpdateWorker.on_host(1, 0, 0)
    with pytest.raises(ValueError, match="has no chunks"):
        worker.add_layer("empty", _C.DType.float32, 0, 0, _C.StateArrays(), [])


def test_statistics_count_each_pass() -> None:
    bench = Bench([CHUNK * 2, CHUNK], 0, 0)
    bench.worker.begin_step(math.inf)
    for layer in bench.layers:
        bench.send(layer, bench.normal(layer.size).bfloat16(), AdamHyper(lr=1e-3))
    bench.worker.wait_all()
    statistics = bench.worker.take_statistics()
    assert statistics.elements == 3 * CHUNK
    assert statistics.jobs == 2
    assert statistics.kernel_ns > 0
    spans = bench.worker.take_spans()
    assert sorted(span.layer for span in spans) == [0, 1]
    assert all(span.begin_ns + span.kernel_ns <= span.end_ns for span in spans)
    assert bench.worker.take_statistics().elements == 0
    bench.close()


def test_the_order_of_layers_stays_open_until_they_are_begun() -> None:
    """Gradients of lower layers come while the worker is behind: they go before those that have
    waited longer, but for the two whose copies have been begun. Forward needs them first."""
    size = 1 << 21
    bench = Bench([size] * 10, 0, 0, chunk=size)
    gradient = bench.normal(size).bfloat16()
    hyper = AdamHyper(lr=1e-3)

    def send(layers: range) -> int:
        for index in layers:
            record = _C.StepRecord(1.0, [hyper.native()])
            bench.worker.submit_update(index, gradient.data_ptr(), 0, 0, record, False)
        return time.monotonic_ns()

    try:
        for _ in range(200):
            bench.worker.begin_step(math.inf)
            came = send(range(9, 3, -1))
            spans: list[_C.JobSpan] = []
            while not spans:  # the first layer's
                spans += bench.worker.take_spans()
            rest = send(range(3, -1, -1))
            bench.worker.wait_all()
            spans += bench.worker.take_spans()
            bench.worker.finalize(_C.StepRecord(1.0, [hyper.native()]))
            for index in range(10):
                bench.worker.submit(index, _C.Pass.commit)
            bench.worker.wait_all()
            bench.worker.take_spans()
            # What had to be there before the worker looked for it, on a busy machine too.
            if came < spans[0].end_ns and rest < spans[1].end_ns:
                order = [span.layer for span in spans]
                assert {0, 1, 2, 3} <= set(order[:7]), order
                return
        pytest.fail("the lower layers' gradients always came too late")
    finally:
        bench.close()
