"""What cannot be done is refused with the key's name, before the model is touched."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from support.engines import make_config
from support.models import Mlp, make_model
from support.ports import free_port
from support.scripts import run_script
from training import untouched

import hytrain
from hytrain.engine.config_checks import misspelt_keys
from hytrain.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.timeout(60)


def refused(config: dict[str, Any], match: str, kind: type[Exception], **keywords: Any) -> None:
    """initialize() raises, and the model is what it was."""
    model = make_model("mlp")
    if "optimizer" in keywords:
        keywords["optimizer"] = keywords["optimizer"](model.parameters())
    else:
        keywords.setdefault("model_parameters", model.parameters())
    with untouched(model, kind, match):
        hytrain.initialize(model=model, config=config, **keywords)


SECTIONS: list[tuple[Any, str]] = [
    ({"gpu_fraktion": 0.5}, r'hytrain\.gpu_fraktion: unknown key; did you mean "gpu_fraction"'),
    ({"gpu_fraction": 0.5, "offload": {"threads": 2}}, r"hytrain\.offload\.threads: unknown key"),
    ({"gpu_fraction": "auto"}, r"hytrain\.gpu_fraction = 'auto'"),
    ({"gpu_fraction": "solved"}, r"hytrain\.gpu_fraction"),
    ({"solver": {"alpha": 0.0}}, r"hytrain\.solver\.alpha"),
    ({"solver": {"alpha": float("inf")}}, r"hytrain\.solver\.alpha = inf"),
    ({"solver": {"alpha": "fast"}}, r"hytrain\.solver\.alpha = 'fast'"),
    ({"solver": {"interval": 0}}, r"hytrain\.solver\.interval"),
    ({"solver": {"interval": 1.5}}, r"hytrain\.solver\.interval = 1\.5"),
    ({"solver": {"gpu_memory_reserve_bytes": -1}}, r"\.gpu_memory_reserve_bytes = -1"),
    ({"solver": {"host_memory_reserve_bytes": "1G"}}, r"\.host_memory_reserve_bytes = '1G'"),
    ({"solver": {"metod": "pipeline"}}, r'solver\.metod: unknown key; did you mean "method"'),
    ({"solver": {"method": "closed-form"}}, r"hytrain\.solver\.method = 'closed-form'"),
    ({"solver": 3}, r"hytrain\.solver"),
    ({"moments": "int8"}, r"moments = 'int8': must be \"fp32\", \"bf16\" or \"8bit\""),
    ({"gpu_fraction": 1.01}, r"hytrain\.gpu_fraction = 1\.01: must be a number in \[0, 1\]"),
    ({"gpu_fraction": -0.1}, r"hytrain\.gpu_fraction = -0\.1: must be a number in \[0, 1\]"),
    ({"gpu_fraction": float("nan")}, r"hytrain\.gpu_fraction = nan"),
    ({"gpu_fraction": None}, r"hytrain\.gpu_fraction = None"),
    ({"gpu_fraction": 0, "shard_fractions": [0.5, 0.4]}, r"shard_fractions.*must sum to 1"),
    ({"gpu_fraction": 0, "shard_fractions": [1.5, -0.5]}, r"shard_fractions.*must be above 0"),
    ({"gpu_fraction": 0, "shard_fractions": [0.5, 0.5]}, r"has 2 numbers but the job has 1 ranks"),
    ({"gpu_fraction": 0, "shard_fractions": "equal"}, r"hytrain\.shard_fractions"),
    ({"gpu_fraction": 0, "offload": {"chunk_elements": 1100}}, r"multiple of 64"),
    ({"gpu_fraction": 0, "offload": {"cpu_threads": 0}}, r"cpu_threads = 0"),
    ({"gpu_fraction": 0, "layers": {"class": "Nowhere"}}, r'"hytrain\.layers\.class" is "Nowhere"'),
    ({"gpu_fraction": True}, r"hytrain\.gpu_fraction = True: must be a number"),
    ({"gpu_fraction": "0.5"}, r"hytrain\.gpu_fraction = '0\.5': must be a number"),
    ({"gpu_fraction": 0, "offload": {"cpu_threads": "4"}}, r"cpu_threads = '4'"),
    ({"gpu_fraction": 0, "offload": {"cpu_threads": True}}, r"cpu_threads = True"),
    ({"gpu_fraction": 0, "offload": {"cpu_threads": 10**9}}, r"cpu_threads = 1000000000"),
    ({"gpu_fraction": 0, "offload": {"chunk_elements": 2**70}}, r"chunk_elements = \d+"),
    ({"gpu_fraction": 0, "offload": {"overlap_forward": "no"}}, r"overlap_forward = 'no'"),
    ({"gpu_fraction": 0, "shard_fractions": ["1.0"]}, r"shard_fractions\.0 = '1\.0'"),
    ({"gpu_fraction": 0, "batch_sizes": [True]}, r"batch_sizes\.0 = True"),
    ({"gpu_fraction": 0, "batch_sizes": [10**30]}, r"batch_sizes\.0 = 10+: "),
    ({"solver": {"interval": "1"}}, r"hytrain\.solver\.interval = '1'"),
    ({"gpu_fraction": 0, "layers": {"class": "Blok"}}, r'"Blok".*did you mean "Block"'),
    ({"gpu_fraction": 10**400}, r"hytrain\.gpu_fraction = \d+: must be a number"),
    ({"gpu_fraction": 0, "offload": {"cpu_threads": 1025}}, r"cpu_threads = 1025"),
    ({"activations": "offload"}, r"save_on_cpu\(pin_memory=True\)"),
    ({"gpu_fraction": 0, "offload": 5}, r"hytrain\.offload = 5: must be a JSON object"),
    ({"gpu_fraction": 0, "shard_fractions": 1.0}, r"must be a JSON list"),
    ({"checkpoint": {"async": "yes"}}, r"checkpoint\.async = 'yes': must be true or false"),
    ({"checkpoint": {"sigterm_dir": " "}}, r"checkpoint\.sigterm_dir = ' ': must name a folder"),
    ({"trace": {"kernels": 0}}, r"trace\.kernels = 0: must be true or false"),
    ({"trace": {"threads": "no"}}, r"trace\.threads = 'no'"),
    ({"trace": {"steps": ["1", "3"]}}, r"trace\.steps\.0 = '1': must be a whole number"),
    (0.5, r'"hytrain" must be a JSON object, got float'),
]


def test_one_line_for_one_wrong_value() -> None:
    with pytest.raises(ConfigError) as raised:
        hytrain.HyTrainConfig.from_deepspeed({"hytrain": {"gpu_fraction": "auto"}})
    assert str(raised.value).count("gpu_fraction") == 1


def test_the_section_inside_of_another() -> None:
    config = make_config()
    config["zero_optimization"]["hytrain"] = config.pop("hytrain")
    refused(config, r'"hytrain" is inside of "zero_optimization": move it', ConfigError)


def _adam(**parameters: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": parameters}}


OF_DEEPSPEED: list[tuple[dict[str, Any], str]] = [
    (_adam(lr="auto"), r'"optimizer\.params\.lr" is "auto"'),
    (_adam(lr="1e-3"), r"optimizer\.params\.lr\" is '1e-3'"),
    (_adam(lr=-1.0), r'"optimizer\.params\.lr" is -1\.0'),
    (_adam(lr=float("nan")), r'"optimizer\.params\.lr" is nan'),
    (_adam(betas=[0.9]), r'"optimizer\.params\.betas" is \[0\.9\]: give two numbers'),
    (_adam(betas=[0.9, 1.0]), r'"optimizer\.params\.betas"'),
    (_adam(betas="auto"), r'"optimizer\.params\.betas" is "auto"'),
    (_adam(weight_decay="auto"), r'"optimizer\.params\.weight_decay" is "auto"'),
    (_adam(learning_rate=1.0), r'"optimizer\.params\.learning_rate" is no parameter'),
    (_adam(wieght_decay=1.0), r'did you mean "weight_decay"'),
    (_adam(max_grad_norm=1.0), r'set "gradient_clipping"'),
    ({"optimizer": {"type": "AdamW", "params": 1}}, r'"optimizer\.params" is 1'),
    ({"optimizer": "AdamW"}, r"\"optimizer\" is 'AdamW'"),
    ({"gradient_clipping": -1}, r'"gradient_clipping" is -1'),
    ({"gradient_clipping": "auto"}, r'"gradient_clipping" is "auto"'),
    ({"gradient_clipping": True}, r'"gradient_clipping" is True'),
    ({"bf16": {"enabled": "auto"}}, r"\"bf16\.enabled\" is 'auto'"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        r'"scheduler\.params\.warmup_num_steps" is "auto"',
    ),
    ({"train_micro_batch_size_per_gpu": None}, "how large a batch is"),
    ({"train_micro_batch_size_per_gpu": "auto"}, r'"train_micro_batch_size_per_gpu" is "auto"'),
    ({"gradient_clipping": None}, r'"gradient_clipping" is None'),
    (_adam(lr=None), r'"optimizer\.params\.lr" is None'),
    (_adam(adam_w_mode="no"), r"\"optimizer\.params\.adam_w_mode\" is 'no': write true or false"),
    ({"gradient_clipping": float("inf")}, r'"gradient_clipping" is inf: give a finite number'),
    ({"steps_per_print": 0}, r'"steps_per_print" is 0'),
    ({"steps_per_print": "x"}, r"\"steps_per_print\" is 'x'"),
    ({"bf16": True}, r'"bf16" is True: write a JSON object, "bf16": \{"enabled": true\}'),
    ({"scheduler": "WarmupLR"}, r"\"scheduler\" is 'WarmupLR': write a JSON object"),
    ({"scheduler": {"type": "WarmupLr"}}, r'did you mean "WarmupLR"'),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
        r'"scheduler\.params\.warmup_steps" is no parameter.*did you mean "warmup_num_steps"',
    ),
    ({"scheduler": {"type": "WarmupDecayLR"}}, r"missing a required argument: 'total_num_steps'"),
    ({"data_types": {"grad_accum_dtype": "fp8"}}, r"\"data_types\.grad_accum_dtype\" is 'fp8'"),
    ({"zero_optimization": {"stag": 2}}, r'"zero_optimization\.stag" is no key.*mean "stage"'),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memry": True}}},
        r'"zero_optimization\.offload_optimizer\.pin_memry" is no key.*mean "pin_memory"',
    ),
    ({"bf16": {"enabled": True, "foo": 1}}, r'"bf16\.foo" is no key that DeepSpeed knows'),
    ({"gradient_accumulation_steps": 0}, r'"gradient_accumulation_steps" is 0'),
    ({"train_micro_batch_size_per_gpu": 10**30}, r'_per_gpu" is 10+: give .* below 2\*\*31'),
    ({"gradient_clipping": 10**400}, r'"gradient_clipping" is 10+: give a finite number'),
    (_adam(eps=0), r'"optimizer\.params\.eps" is 0: give a number above 0'),
    (_adam(eps=1e-50), r'"optimizer\.params\.eps" is 1e-50: give a number above 0'),
    ({"hyTrain": {}}, r'has sections "hytrain" and "hyTrain"'),
    ({"gpu_fraction": 0.5}, r'"gpu_fraction" is a key of the section "hytrain"'),
    (
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
        r'"train_batch_size": 7.*cannot hold together.*7 != 2 \* ',
    ),
]


@pytest.mark.parametrize(("change", "match"), OF_DEEPSPEED, ids=lambda value: str(value)[:60])
def test_a_value_of_deepspeeds_keys(change: dict[str, Any], match: str) -> None:
    config = make_config() | change
    if "zero_optimization" in change:
        config["zero_optimization"] = (
            make_config()["zero_optimization"] | config["zero_optimization"]
        )
    refused(config, f"(?s){match}", ConfigError)


def test_a_misspelt_key_of_deepspeeds_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert misspelt_keys({"gradient_cliping": 1.0}) == [("gradient_cliping", "gradient_clipping")]
    assert misspelt_keys({"optimizer": {"tpye": "Adam"}}) == [("optimizer.tpye", "optimizer.type")]
    assert not misspelt_keys(
        {**make_config(), "aio": {}, "compile": {}, "my_notes": {}, "fp32": {}, "owner": 1}
    )
    with caplog.at_level("WARNING", "hytrain"):
        refused(
            make_config(wall_clock_brakdown=True, amp={"enabled": True}), "Apex", UnsupportedError
        )
    assert '"wall_clock_brakdown" is no key of DeepSpeed' in caplog.text


def test_a_folder_that_cannot_be_written_is_said_before_the_job(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    section = {"gpu_fraction": 0, "checkpoint": {"sigterm_dir": str(file / "saves")}}
    match = r'"hytrain\.checkpoint\.sigterm_dir" is .*nothing can be written'
    refused(make_config() | {"hytrain": section}, match, ConfigError)


@pytest.mark.parametrize(("section", "match"), SECTIONS, ids=lambda value: str(value)[:50])
def test_the_section(section: Any, match: str) -> None:
    refused(make_config() | {"hytrain": section}, f"(?s){match}", ConfigError)


@pytest.mark.parametrize("name", ["hytrian", "HyTrain", "hytrains", "hy_train"])
def test_a_section_that_is_nearly_called_hytrain(name: str) -> None:
    config = make_config()
    config[name] = config.pop("hytrain")
    refused(config, f'"{name}" but none called "hytrain"', ConfigError)


# Each feature of DeepSpeed that is refused: the path in the JSON, and a value that asks for it.
FEATURES: list[tuple[str, Any]] = [
    ("hybrid_engine.enabled", True),
    ("expert_parallel.enabled", True),
    ("tensor_parallel.autotp_size", 2),
    ("pipeline.stages", 2),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}),
    ("zero_optimization.cpu_offload_param", True),
    ("zero_optimization.offload_param.device", "cpu"),
    ("zero_optimization.offload_param.device", "nvme"),
    ("zero_optimization.offload_optimizer.super_offload", True),
    ("zero_optimization.mics_shard_size", 4),
    ("zero_optimization.zero_hpz_partition_size", 4),
    ("zero_optimization.zero_quantized_weights", True),
    ("zero_optimization.zero_quantized_gradients", True),
    ("bf16.bf16_master_weights_and_grads", True),
    ("bf16.bf16_optimizer_states", True),
    ("fp16.fp16_master_weights_and_grads", True),
    ("amp.enabled", True),
    ("compile.deepcompile", True),
    ("prescale_gradients", True),
    ("sparse_gradients", True),
    ("elasticity.enabled", True),
    ("compression_training", {"weight_quantization": {"shared_parameters": {"enabled": True}}}),
    ("quantize_training.enabled", True),
    ("eigenvalue.enabled", True),
    ("checkpoint.writer", {"type": "fast"}),
    ("zero_optimization.stage", 0),
    ("zero_optimization.offload_optimizer.device", "nvme"),
    ("zero_optimization.offload_optimizer.device", "none"),
    ("zero_optimization.offload_optimizer.ratio", 0.5),
    ("gradient_predivide_factor", 2.0),
    ("optimizer.type", "Lamb"),
    ("optimizer.type", "OneBitAdam"),
]


@pytest.mark.parametrize(("path", "value"), FEATURES, ids=str)
def test_features_of_deepspeed(path: str, value: Any) -> None:
    config: dict[str, Any] = make_config()
    target = config
    *parents, key = path.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[key] = value
    refused(config, f'"{path}" is .*', UnsupportedError)


def test_every_refused_feature_has_its_case() -> None:
    from hytrain.engine.unsupported import _REFUSED

    assert {path for path, _ in _REFUSED} <= {path for path, _ in FEATURES}


@pytest.mark.parametrize("path", ["fp16", "torch_autocast", "hybrid_engine"])
def test_a_feature_that_is_switched_off_is_accepted(path: str) -> None:
    model = make_model("mlp")
    config = make_config() | {path: {"enabled": False}}
    engine, *_ = hytrain.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.destroy()


@pytest.mark.parametrize("value", ["int8", 16, True])
def test_a_communication_dtype_that_there_is_not(value: Any) -> None:
    match = '"communication_data_type" is .*: write fp32 or bf16 or fp16'
    refused(make_config(communication_data_type=value), match, ConfigError)


def test_two_precisions() -> None:
    match = '"fp16.enabled" and "bf16.enabled" are both true'
    refused(make_config(fp16={"enabled": True}), match, ConfigError)


def test_no_offload_section() -> None:
    config = make_config(zero_optimization={"stage": 2})
    refused(config, r'"zero_optimization\.offload_optimizer\.device" is missing', UnsupportedError)


def test_no_optimizer() -> None:
    refused(make_config(optimizer=None), "no optimizer was given", ConfigError)


def test_a_configuration_that_cannot_be_read() -> None:
    for name in ("/nowhere/config.json", "nope.json", "nope"):
        refused(name, f"there is no file {name}: give", ConfigError)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "the optimizer is torch.optim.*SGD"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.Adam(p, maximize=True), "maximize=True"),
    ],
    ids=["SGD", "amsgrad", "maximize"],
)
def test_a_clients_optimizer_that_is_no_plain_adam(kind: Any, match: str) -> None:
    refused(make_config(optimizer=None), match, UnsupportedError, optimizer=kind)


def test_an_optimizer_whose_eps_is_a_pair_is_refused_by_its_name() -> None:
    model = make_model("mlp")  # as Adafactor's is
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "eps": (1e-30, 1e-3)}])
    with pytest.raises(UnsupportedError, match=r"the optimizer is torch.optim.*SGD"):
        hytrain.initialize(model=model, optimizer=optimizer, config=make_config(optimizer=None))


def test_parameters_of_another_model() -> None:
    other = make_model("mlp")
    config = make_config(bf16=False)
    with pytest.raises(ConfigError, match="are not parameters of the model"):
        hytrain.initialize(
            model=make_model("mlp"), model_parameters=other.parameters(), config=config
        )


def test_nothing_to_train() -> None:
    model = make_model("mlp").requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing can be trained"):
        hytrain.initialize(
            model=model, model_parameters=list(model.parameters()), config=make_config(bf16=False)
        )


def test_step_with_a_closure() -> None:
    model = make_model("mlp")
    engine, *_ = hytrain.initialize(
        model=model, model_parameters=model.parameters(), config=make_config()
    )
    with pytest.raises(UnsupportedError, match="closure"):
        engine.optimizer.step(lambda: None)
    engine.destroy()


class _Expert(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        # Made without its __init__, which wants process groups; what it is, is enough.
        self.moe = kind.__new__(kind)
        torch.nn.Module.__init__(self.moe)
        self.head = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("kind", [MoE, MOELayer])
def test_layers_of_deepspeed_moe(kind: type[torch.nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match=r"module 'moe' is a layer of deepspeed\.moe"):
        hytrain.initialize(model=_Expert(kind), config=make_config())


def test_models_built_for_zero_3() -> None:
    with deepspeed.zero.Init(config_dict_or_path=make_config(stage=3), dtype=torch.float32):
        model = Mlp()
    with pytest.raises(UnsupportedError, match=r"partitioned under deepspeed\.zero\.Init"):
        hytrain.initialize(model=model, config=make_config())


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is not None, reason="with mpi4py DeepSpeed asks MPI"
)
def test_a_script_without_a_launcher_is_told_how_to_start_it() -> None:
    text = (
        "import hytrain, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "hytrain.initialize(\n"
        f"    model=model, model_parameters=model.parameters(), config={make_config()!r}\n"
        ")\n"
    )
    run = run_script(text)
    assert "ConfigError: the script was started without a launcher" in run.stderr
    assert "torchrun --nproc_per_node" in run.stderr


def test_a_rank_tells_what_it_was_told_while_others_do_not_join() -> None:
    """As where two ranks have one number: torch would wait for half an hour, and say nothing."""
    text = (
        "import logging, os, hytrain, torch\n"
        "from hytrain.engine import deepspeed_internals\n"
        "class End(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        print(record.getMessage(), flush=True)\n"
        "        os._exit(0)\n"
        "deepspeed_internals._WARN_SECONDS = 0.2\n"
        "deepspeed_internals.logger.addHandler(End())\n"
        "model = torch.nn.Linear(4, 4)\n"
        "hytrain.initialize(\n"
        f"    model=model, model_parameters=model.parameters(), config={make_config()!r}\n"
        ")\n"
    )
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    told["MASTER_PORT"] = str(free_port())
    run = run_script(text, timeout=40, LOCAL_RANK="0", **told)
    assert f"host {socket.gethostname()} was told RANK=0, WORLD_SIZE=2, MASTER_ADDR" in run.stdout
    assert f"MASTER_PORT={told['MASTER_PORT']}. Have all ranks been started" in run.stdout


@pytest.mark.parametrize("release", ["0.19.6", "0.20.0"])
def test_a_deepspeed_whose_internals_are_others_is_refused_on_import(
    release: str, tmp_path: Path
) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text("initialize = None\n")
    (tmp_path / f"deepspeed-{release}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {release}\n"
    (tmp_path / f"deepspeed-{release}.dist-info/METADATA").write_text(metadata)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from hytrain import initialize"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50
    )
    assert f"UnsupportedError: DeepSpeed {release} is installed" in done.stderr.splitlines()[-1]
    assert "deepspeed>=0.19.7,<0.20" in done.stderr
