"""Arguments of initialize that are not of their kinds are refused, and the model is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import Mlp, make_model
from torch import nn
from training import untouched

import hytrain
from hytrain.engine.config_checks import misspelt_keys
from hytrain.errors import ConfigError, HyTrainError

pytestmark = pytest.mark.timeout(60)
Given = dict[str, Any]
JSON = make_config()
NO_OPTIMIZER = make_config(optimizer=None)


class _Odd(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(weight)


def _on_meta(_: nn.Module) -> Given:
    with torch.device("meta"):
        return {"model": nn.Linear(4, 4)}


def _twice(model: nn.Module) -> list[nn.Parameter]:
    every = list(model.parameters())
    return [*every, every[0]]


def _elsewhere() -> torch.optim.lr_scheduler.StepLR:
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    return torch.optim.lr_scheduler.StepLR(other, 1)


WRONG: dict[str, tuple[Callable[[nn.Module], Given], str]] = {
    "none": (lambda _: {"model": None}, "model is of the type NoneType"),
    "class": (lambda _: {"model": Mlp}, r"model is the class Mlp.*pass Mlp\(\.\.\.\)"),
    "function": (lambda _: {"model": lambda x: x}, "model is of the type function"),
    "weights": (lambda m: {"model": m.state_dict()}, "model is of the type OrderedDict"),
    "no parameters": (lambda _: {"model": nn.ReLU()}, "a ReLU, has no parameters"),
    "meta": (_on_meta, "'weight' is on the meta device"),
    "lazy": (lambda _: {"model": nn.LazyLinear(3)}, "'weight' has no shape yet"),
    "sparse": (lambda _: {"model": _Odd(torch.eye(4).to_sparse())}, "'weight' is sparse"),
    "complex": (
        lambda _: {"model": _Odd(torch.ones(4, dtype=torch.complex64))},
        r"'weight' is torch\.complex64.*view_as_real",
    ),
    "empty": (lambda _: {"model_parameters": []}, "model_parameters is empty"),
    "read before": (
        lambda m: {"model_parameters": iter(())},
        "model_parameters is empty.*can be read once",
    ),
    "twice": (lambda m: {"model_parameters": _twice(m)}, "is given twice"),
    "in two groups": (
        lambda m: {"model_parameters": [{"params": m.parameters()}, {"params": _twice(m)[-1]}]},
        "is given twice",
    ),
    "empty groups": (lambda _: {"model_parameters": [{"params": []}]}, "groups are empty"),
    "no params": (lambda _: {"model_parameters": [{"lr": 1.0}]}, "has no 'params', only lr"),
    "a module": (lambda m: {"model_parameters": m}, "is a Mlp: pass model.parameters"),
    "a method": (lambda m: {"model_parameters": m.parameters}, "is a method: pass"),
    "one": (lambda m: {"model_parameters": next(m.parameters())}, "is a Parameter: pass"),
    "one group": (lambda m: {"model_parameters": {"params": _twice(m)}}, "is a dict: pass"),
    "names": (lambda m: {"model_parameters": list(m.state_dict())}, "is not a parameter"),
    "products": (lambda m: {"model_parameters": [2 * p for p in m.parameters()]}, "is not a para"),
    "name of an optimizer": (lambda _: {"optimizer": "adam"}, "optimizer is, or gives, 'adam'"),
    "section": (lambda _: {"optimizer": {"type": "AdamW"}}, "optimizer is, or gives, {'type'"),
    "gives none": (
        lambda _: {"optimizer": lambda parameters: None, "config": NO_OPTIMIZER},
        "optimizer is, or gives, None",
    ),
    "takes nothing": (
        lambda _: {"optimizer": lambda: None, "config": NO_OPTIMIZER},
        "optimizer is called with one argument",
    ),
    "eps 0": (
        lambda m: {"optimizer": torch.optim.AdamW(m.parameters(), eps=0.0)},
        'parameter group 0 has "eps" 0.0',
    ),
    "name of a schedule": (lambda _: {"lr_scheduler": "cos"}, "lr_scheduler is, or gives, 'cos'"),
    "gives a name": (lambda _: {"lr_scheduler": lambda _: "cos"}, "gives, 'cos'"),
    "class of a schedule": (
        lambda _: {"lr_scheduler": torch.optim.lr_scheduler.StepLR},
        "lr_scheduler is called with one argument.*'step_size'",
    ),
    "another's schedule": (
        lambda _: {"lr_scheduler": _elsewhere()},
        "made for another optimizer.*StepLR",
    ),
    "unknown": (lambda _: {"optimiser": 1}, '"optimiser" is no argument.*did you mean "optimizer"'),
    "mpu": (lambda _: {"mpu": 5}, "mpu is 5"),
    "mesh": (lambda _: {"mesh_param": 5}, "mesh_param is 5"),
    "data": (lambda _: {"training_data": 5}, "training_data is 5"),
    "collate": (lambda _: {"collate_fn": 5}, "collate_fn is 5"),
    "no config": (lambda _: {"config": None}, "no configuration was given"),
    "two configs": (lambda _: {"config_params": JSON}, "2 configurations were given"),
    "empty config": (lambda _: {"config": {}}, "is empty: write a JSON object"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_an_argument_that_cannot_be_used(name: str) -> None:
    model = make_model("mlp")
    make, match = WRONG[name]
    keywords: Given = {"model": model, "config": JSON, **make(model)}
    if not {"model_parameters", "optimizer"} & set(keywords):
        owner = keywords["model"]
        keywords["model_parameters"] = (
            owner if isinstance(owner, nn.Module) else model
        ).parameters()
    if name.startswith("gives"):  # a callable is called when DeepSpeed has converted the model
        model = nn.ReLU()
    with untouched(model, HyTrainError, f"(?s){match}"):
        hytrain.initialize(**keywords)


@pytest.mark.parametrize(
    "words", ["", "[1]", "null", '{"hytrain": {', '{"hytrain": {}, "hytrain": {}}', "\0"]
)
def test_a_file_that_is_no_configuration(words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(words)
    with pytest.raises(ConfigError, match=r"the configuration .*config\.json"):
        hytrain.initialize(model=make_model("mlp"), config=str(path))


def test_what_can_be_used() -> None:
    """Callables, named parameters and groups that are generators: as DeepSpeed takes them."""
    model = make_model("mlp")
    count = len(list(model.parameters()))

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    groups = iter([{"params": model.parameters(), "lr": 0.5}])
    for keywords in (
        {"model_parameters": model.named_parameters(), "lr_scheduler": schedule},
        {"model_parameters": groups},
        {
            "model_parameters": model.named_parameters(),
            "optimizer": torch.optim.AdamW,
            "config": NO_OPTIMIZER,
        },
    ):
        with built(model, **{"config": JSON, **keywords}) as engine:
            assert sum(len(group["params"]) for group in engine.optimizer.param_groups) == count
    model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64), False))
    with built(model, JSON):
        assert model.phase.dtype == torch.complex64


def test_a_key_of_the_section_at_the_top_level() -> None:
    said = misspelt_keys(make_config(trace={"dir": "x"}, checkpoint={}))
    assert said == [("trace", "hytrain.trace")]


def test_a_misspelt_key_beside_the_right_one() -> None:
    said = misspelt_keys(make_config(gradient_cliping=0.5))
    assert said == [("gradient_cliping", "gradient_clipping")]
