"""The README's script on random weights: 8 B beside 8-bit Adam on the GPU, 4 B beside DeepSpeed.

    python experiments/hf_trainer/readme_script.py --gpu-gib 78 --out DIR
    python experiments/hf_trainer/readme_script.py --toy --out DIR     # on a CPU

The script is read from README.md. Only its model (Qwen 3's shapes, random weights), its data (chats
of random words, cut at 1,024 tokens), the number of steps and the limit of the GPU are replaced.
Nothing is downloaded. It needs trl and datasets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.hardware import REPOSITORY
from experiments.common.records import GIB, Json
from experiments.common.runner import free_port

SHAPES: dict[str, Json] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
}
COMMON: Json = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                "head_dim": 128, "vocab_size": 151936}  # fmt: skip
TOY: Json = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
WORDS = ["layer", "moment", "gradient", "update", "weights", "host", "memory", "step", "norm"]
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)
ADAM: Json = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
SYSTEMS: dict[str, Json] = {
    "readme": {"model": "8B", "steps": 80, "saves": True},
    "hytrain 8B": {"model": "8B", "steps": 50},
    # bf16 weights without masters, all state on the GPU; it needs bitsandbytes.
    "adamw_bnb_8bit 8B": {"model": "8B", "steps": 30, "section": None, "deepspeed": False,
                          "optim": "adamw_bnb_8bit"},
    "hytrain 4B": {"model": "4B", "steps": 80, "section": {}},
    # Trainer's own optimizer would be torch's, on the CPU: DeepSpeed's CPU Adam is faster.
    "zero2_offload 4B": {"model": "4B", "steps": 14, "section": None},
    # fp32 weights under bf16 autocast, all state on the GPU, which is not limited.
    "trainer_alone 4B": {"model": "4B", "steps": 30, "section": None, "deepspeed": False,
                         "dtype": "float32", "limited": False},
}  # fmt: skip
HEAD = '''
import json as _json, os as _os, time as _time, torch as _torch
from transformers import TrainerCallback as _Callback

if _torch.cuda.is_available() and "GPU_SHARE" in _os.environ:
    _torch.cuda.set_per_process_memory_fraction(float(_os.environ["GPU_SHARE"]))


class _Times(_Callback):
    """Waits for the device after each step."""

    ends = []

    def on_step_end(self, *_, **__):
        if _torch.cuda.is_available():
            _torch.cuda.synchronize()
        self.ends.append(_time.perf_counter())

    def on_train_end(self, _arguments, state, *_, **__):
        peak = _torch.cuda.max_memory_allocated() if _torch.cuda.is_available() else 0
        kept = {"ends": self.ends, "peak_bytes": peak, "log": state.log_history}
        with open(_os.environ["TIMES"], "w") as file:
            _json.dump(kept, file)


'''


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--only", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    add("--gpu-gib", type=float, help="limit of the GPU, but for Trainer alone")
    add("--toy", action="store_true", help="small models on a CPU, four steps")
    return parser.parse_args()


def make_model(folder: Path, shape: Json) -> None:
    """Writes random weights, made on the device, and a tokenizer whose tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, **special)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def make_chats(file: Path) -> None:
    """Writes chats of two messages each, longer than a sample may be."""
    generator = random.Random(0)
    with file.open("w") as output:
        for _ in range(2000):
            talk = [
                {"role": role, "content": " ".join(generator.choices(WORDS, k=120))}
                for role in ("user", "assistant")
            ]
            print(json.dumps({"messages": talk}), file=output)


def write_script(folder: Path, model: Path, chats: Path, system: Json, *, on_cpu: bool) -> Path:
    """Writes the README's script and JSON with this system's changes."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    script = next(text for kind, text in blocks if kind == "python" and "SFTTrainer" in text)
    config = json.loads(next(text for kind, text in blocks if kind == "json"))
    steps = 4 if on_cpu else system["steps"]
    more = 'logging_steps=10, report_to="none",'
    more += f' optim="{system["optim"]}",' if "optim" in system else ""
    replaced = {
        '"Qwen/Qwen3-8B"': repr(str(model)),
        '"trl-lib/Capybara"': f'"json", data_files={str(chats)!r}',
        "    bf16=True,": f"    bf16=True, {more}" + (" use_cpu=True," if on_cpu else ""),
        "max_steps=200,": f"max_steps={steps},",
        "    trainer.train()": "    trainer.add_callback(_Times())\n    trainer.train()",
    }
    replaced |= {'"bfloat16"': f'"{system["dtype"]}"'} if "dtype" in system else {}
    section = system.get("section", config.pop("hytrain"))
    if not system.get("saves", False):
        replaced["    trainer.save_model"] = "    0 and trainer.save_model"
    if not system.get("deepspeed", True):
        replaced['    deepspeed="ds_config.json",\n'] = ""
    if section is None:
        replaced["with hytrain.register():"] = "if True:"
        config |= {"optimizer": ADAM, "zero_force_ds_cpu_optimizer": True}
    else:
        config["hytrain"] = section
    for old, new in replaced.items():
        if old not in script:
            raise ValueError(f"README.md's script has no {old!r} any more: change this file")
        script = script.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds_config.json").write_text(json.dumps(config, indent=1))
    (folder / "train.py").write_text(HEAD + script)
    return folder


def run(folder: Path, system: Json, share: float | None) -> Json:
    """Runs one system in a process of its own; its step time is the median of its last steps."""
    environment = {**os.environ, "TIMES": str((folder / "times.json").resolve())}
    launch = [sys.executable]
    if system.get("deepspeed", True):
        launch += ["-m", "deepspeed.launcher.runner", "--num_accelerators", "1"]
        launch += ["--master_port", str(free_port())]
    if share is not None and system.get("limited", True):
        environment["GPU_SHARE"] = str(share)
    begun = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        ended = subprocess.run(
            [*launch, "train.py"], cwd=folder, env=environment, stdout=log,
            stderr=subprocess.STDOUT, timeout=400.0,
        )  # fmt: skip
    found: Json = {"rc": ended.returncode, "seconds": time.monotonic() - begun}
    lines = (folder / "log.txt").read_text().splitlines()
    found["said"] = [line for line in lines if line.startswith("hytrain")]
    if ended.returncode == 0:
        kept = json.loads((folder / "times.json").read_text())
        taken = [b - a for a, b in zip(kept["ends"], kept["ends"][1:], strict=False)]
        last = taken[-min(20, len(taken) // 2) :]
        found |= {"step_seconds": statistics.median(last), "timed": len(last)}
        found |= {"peak_gib": kept["peak_bytes"] / GIB}
        found["losses"] = [one["loss"] for one in kept["log"] if "loss" in one]
    return found


def main() -> None:
    """Prints a line for each system, and writes result.json."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    chats = (options.out / "chats.jsonl").resolve()
    make_chats(chats)
    share = None
    if options.gpu_gib is not None:
        import torch

        share = options.gpu_gib * GIB / torch.cuda.mem_get_info()[1]
    results: dict[str, Any] = {}
    for name in options.only:
        system = SYSTEMS[name]
        model = (options.out / system["model"]).resolve()
        if not model.exists():
            made = SHAPES[system["model"]] | COMMON | (TOY if options.toy else {})
            make_model(model, made)
        folder = write_script(
            options.out / name.replace(" ", "_"), model, chats, system, on_cpu=options.toy
        )
        results[name] = run(folder, system, share)
        print(name, json.dumps(results[name]), flush=True)
        (options.out / "result.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
