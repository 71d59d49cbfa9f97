"""Layer by layer gives what one micro-batch after another gives, bit by bit."""

from __future__ import annotations

from typing import Any

import layer_major_models as models
import pytest
import torch
from layer_major_runs import assert_same, mlp_batch, train, train_both
from support.covering import everyday
from support.engines import split_on_cpu
from support.models import LENGTH, VOCABULARY, Mlp, make_batch, make_model
from torch import nn

from hytrain.optimizer.reduction import GradientReducer

pytestmark = pytest.mark.timeout(120)


def padded(number: int) -> dict[str, torch.Tensor]:
    """Token batches of different sizes and lengths, masked."""
    generator = torch.Generator().manual_seed(number)
    samples = 1 + number % 3
    tokens = torch.randint(1, VOCABULARY, (samples, LENGTH - number % 2), generator=generator)
    lengths = 2 + torch.randint(0, LENGTH - 4, (samples, 1), generator=generator)
    mask = torch.arange(tokens.shape[1]) < lengths
    labels = torch.where(mask, tokens, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask.long()}


@everyday({"kind": ("llama", "vit", "mlp"), "bf16": (False, True), "gpu_fraction": (0.0, 0.5, 1.0)})
def test_models(kind: str, bf16: bool, gpu_fraction: float) -> None:
    train_both(
        lambda: make_model(kind),
        lambda number: make_batch(kind, number),
        bf16=bf16,
        gpu_fraction=gpu_fraction,
    )


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
def test_split_master_weights(gpu_fraction: float) -> None:
    """Updates on the CPU may be previewed or late."""
    options: dict[str, Any] = {"bf16": True, "master": "split", "gpu_fraction": gpu_fraction}
    make = (lambda: make_model("llama"), lambda number: make_batch("llama", number))
    train_both(*make, **options)
    outcomes: list[Any] = []
    for share in (0.0, 0.5, 1.0):
        with split_on_cpu(share):
            outcomes.append(train(*make, **options))
    for other in outcomes[1:]:
        assert_same(outcomes[0], other)


@everyday({"activations": ("keep", "offload"), "clipping": (0.0, 0.01, 1e6)}, pairs=False)
def test_masks_and_unequal_micro_batches(activations: str, clipping: float) -> None:
    train_both(lambda: make_model("llama"), padded, activations=activations, clipping=clipping)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_numbers_of_micro_batches(micro_batches: int) -> None:
    train_both(Mlp, micro_batches=micro_batches)


@pytest.mark.parametrize(
    "make",
    [models.Dropped, models.Autocast, models.InPlace, models.Numbering],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_habits_of_models(make: Any, activations: str) -> None:
    train_both(make, activations=activations)


def test_dropout_was_really_drawn() -> None:
    class Undropped(models.Dropped):
        def __init__(self) -> None:
            super().__init__()
            self.apply(lambda m: setattr(m, "p", 0.0) if isinstance(m, nn.Dropout) else None)

    assert train(models.Dropped).losses != train(Undropped).losses


@pytest.mark.parametrize("make", [models.Talking, models.Between], ids=lambda make: make.__name__)
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_nested_arguments_side_inputs_and_skips(make: Any, activations: str) -> None:
    """Three gradients of one tensor: they are added up block by block."""
    train_both(make, bits=False, activations=activations)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_tied_weights(kind: str) -> None:
    """A tied weight's gradients from both ends are added up in another order."""
    train_both(lambda: make_model(kind), lambda number: make_batch(kind, number), bits=False)


def _without(*names: str) -> Any:
    def trained(model: nn.Module) -> list[nn.Parameter]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))
        return [p for p in model.parameters() if p.requires_grad]

    return trained


@pytest.mark.parametrize(
    "frozen",
    [("embed",), ("embed", "blocks.0", "blocks.1"), ("blocks.2",), (".up.",), ("head", "blocks.3")],
    ids=str,
)
def test_frozen_parameters(frozen: tuple[str, ...]) -> None:
    train_both(Mlp, trained=_without(*frozen))


def test_an_unused_parameter() -> None:
    class Unused(Mlp):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.unused = nn.Parameter(torch.ones(3))

    train_both(Unused)


def test_gradients_accumulate_in_fp32_where_asked() -> None:
    types = {"grad_accum_dtype": "fp32"}
    train_both(Mlp, bf16=True, data_types=types)


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
def test_direct_commit(
    monkeypatch: pytest.MonkeyPatch, gpu_fraction: float, is_short: bool
) -> None:
    """Nothing can be taken back then: the trial sends nothing before its end, however short the
    memory is."""
    monkeypatch.setattr(GradientReducer, "lacks_room", property(lambda _: is_short))
    direct: list[bool] = []
    train_both(
        Mlp,
        clipping=0.0,
        gpu_fraction=gpu_fraction,
        overflow_check=False,
        watch=lambda engine: direct.append(engine.optimizer.pipeline.norm.settings.direct),
    )
    assert direct == [True]


def test_a_step_without_any_valid_token() -> None:
    def nothing(number: int) -> dict[str, torch.Tensor]:
        batch = padded(number)
        return {**batch, "labels": torch.zeros_like(batch["labels"])}

    train_both(lambda: make_model("llama"), nothing)


def test_the_whole_batch_at_once_gives_the_same_gradient() -> None:
    """The other reference: plain torch, no engine, no micro-batches."""
    torch.manual_seed(11)
    plain = Mlp()
    inputs = torch.cat([mlp_batch(number)["inputs"] for number in range(3)])
    plain(inputs).backward()
    run = train(Mlp, steps=1)
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    found = torch.cat([run.gradients[0][index] for index in range(6)])
    assert float(found.double().norm()) == pytest.approx(float(expected.double().norm()), rel=1e-5)


@everyday({"kind": ("llama", "gpt2"), "on_host": (False, True), "activations": ("keep", "offload")})
def test_weights_that_are_gathered(kind: str, on_host: bool, activations: str) -> None:
    """ZeRO-3 on one rank, with weights on the device or streamed from the host."""
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 1,
        "stage3_max_reuse_distance": 0,
    }
    if on_host:
        zero["offload_param"] = {"device": "cpu"}

    def make(number: int) -> dict[str, Any]:
        return make_batch(kind, number)

    run = train(lambda: make_model(kind), make, activations=activations, zero_optimization=zero)
    assert run.refusal is None
    # As with the weights in one piece, layer by layer too.
    assert_same(run, train(lambda: make_model(kind), make))
