"""What ``engine.train_batch`` does beside gradients: errors, counts, losses of odd kinds."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from support.comparisons import assert_same_states
from support.covering import everyday
from support.engines import built, make_config
from support.models import Mlp, make_batch, make_model
from training import FRACTIONS, UserError, backward, inputs

from hytrain.errors import CheckpointError, UnsupportedError

MODES = ["micro_batch_major", "layer_major"]
pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("mode", MODES)]

State = dict[str, dict[str, torch.Tensor]]


def _config(mode: str, **options: Any) -> dict[str, Any]:
    options = {"accumulation": 2, "bf16": False, "clipping": 0.5, **options}
    return make_config(hytrain={"accumulation": mode}, **options)


def _rows(batch: dict[str, torch.Tensor]) -> int:
    return len(batch["inputs"])


def _pair(number: int) -> list[dict[str, torch.Tensor]]:
    return [inputs(2 * number), inputs(2 * number + 1)]


class Failing(Mlp):
    """Fails in the forward of that number, counted from when it is set."""

    def __init__(self, error: type[BaseException]) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.error = error
        self.fails_in = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise self.error("of the user's")
        return super().forward(inputs)


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
@everyday(
    {"error": (UserError, torch.OutOfMemoryError, KeyboardInterrupt), "first": (0, 1)}, pairs=False
)
def test_a_failed_step_leaves_nothing_behind(
    mode: str, gpu_fraction: float, error: type[BaseException], first: int
) -> None:
    """With failures in the second micro-batch from some step on, and without any."""
    states: list[State] = []
    for fails in (True, False):
        model = Failing(error)
        with built(model, _config(mode, gpu_fraction=gpu_fraction)) as engine:
            for number in range(4):
                if fails and number >= first:
                    model.fails_in = 2
                    with pytest.raises(error):
                        engine.train_batch(iter(_pair(90)), _rows)
                    model.fails_in = 0
                engine.train_batch(iter(_pair(number)), _rows)
                assert engine.global_steps == number + 1
            states.append(engine.fp32_state_dict())
    assert_same_states(*states)


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_a_refused_step_leaves_nothing_behind(mode: str, gpu_fraction: float) -> None:
    """Its gradients are there, and step() refuses the parameter groups."""
    states: list[State] = []
    for refuses in (True, False):
        with built(make_model("mlp"), _config(mode, gpu_fraction=gpu_fraction)) as engine:
            for number in range(3):
                if refuses and number:
                    group = engine.optimizer.param_groups[0]
                    last = group["params"].pop()
                    with pytest.raises(UnsupportedError, match="other parameters"):
                        engine.train_batch(iter(_pair(90)), _rows)
                    group["params"].append(last)
                engine.train_batch(iter(_pair(number)), _rows)
                assert engine.global_steps == number + 1
            states.append(engine.fp32_state_dict())
    assert_same_states(*states)


def _check_steps_by_hand(engine: Any) -> None:
    """Steps of two micro-batches each."""
    before = engine.global_steps
    for made in (0, 1):
        backward(engine, 3)
        engine.step()
        backward(engine, 4)
        assert engine.global_steps == before + made
        engine.step()
        assert engine.global_steps == before + made + 1


def test_a_failed_step_takes_micro_batches_made_by_hand_with_it(mode: str) -> None:
    """The next step by hand has all of its micro-batches."""
    model = Failing(UserError)
    with built(model, _config(mode)) as engine:
        backward(engine, 0)
        engine.step()
        model.fails_in = 2
        with pytest.raises(UserError):
            engine.train_batch(iter(_pair(1)), _rows)
        _check_steps_by_hand(engine)


def test_a_step_that_raises_the_error_of_a_save(mode: str) -> None:
    """It was made, and the next one begins with its first micro-batch."""
    with built(make_model("mlp"), _config(mode)) as engine:
        failed = Mock(**{"check.side_effect": CheckpointError("of the save")})
        with patch.object(engine, "_saver", failed), pytest.raises(CheckpointError):
            engine.train_batch(iter(_pair(1)), _rows)
        assert engine.global_steps == 1
        _check_steps_by_hand(engine)


def test_micro_batches_made_by_hand_before_are_part_of_the_step(mode: str) -> None:
    """The next step by hand has all of its micro-batches."""
    with built(make_model("mlp"), _config(mode)) as engine:
        backward(engine, 0)
        engine.step()
        engine.train_batch(iter(_pair(1)), _rows)
        assert engine.global_steps == 1
        _check_steps_by_hand(engine)


class OneElement(Mlp):
    """Returns its loss as a tensor of shape [1]."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).reshape(1)


def test_a_loss_of_one_element(mode: str) -> None:
    runs: list[tuple[list[torch.Tensor], State]] = []
    for kind in (Mlp, OneElement):
        torch.manual_seed(0)
        with built(kind(), _config(mode)) as engine:
            losses = [engine.train_batch(iter(_pair(n)), _rows) for n in range(3)]
            assert all(loss.shape == () for loss in losses)
            runs.append((losses, engine.fp32_state_dict()))
    assert runs[0][0] == runs[1][0]
    assert_same_states(runs[0][1], runs[1][1])


@pytest.mark.parametrize("empty", [(1,), (0,), (0, 1)])
def test_micro_batches_without_a_valid_token(mode: str, empty: tuple[int, ...]) -> None:
    """They have no part in the loss; where there is nothing else, there is no mean."""
    batches = [make_batch("llama", number) for number in range(2)]
    for number in empty:
        batches[number]["labels"] = torch.full_like(batches[number]["labels"], -100)
    plain = make_model("llama")
    rest = [batch for number, batch in enumerate(batches) if number not in empty]
    with built(make_model("llama"), _config(mode, clipping=0.0)) as engine:
        found: dict[int, torch.Tensor] = {}
        engine.optimizer.passes.reducer.on_reduced_gradient = lambda state, shard: (
            found.__setitem__(state.index, shard.clone())
        )
        loss = float(engine.train_batch(iter(batches)))
        if not rest:
            assert loss != loss
            assert all(not shard.any() for shard in found.values())
            return
        expected = plain(**rest[0]).loss
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        for state in engine.optimizer.layer_states:
            for slot in state.layout.slots:
                gradient = gradients[slot.name]
                assert gradient is not None
                ours = found[state.index][slot.offset : slot.offset + slot.numel]
                torch.testing.assert_close(ours, gradient.flatten(), rtol=1e-4, atol=1e-7)
