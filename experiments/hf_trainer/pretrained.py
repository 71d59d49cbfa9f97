"""Fine-tunes a pretrained chat model in TRL: hytrain beside ZeRO-2 offload and Trainer alone.

    python experiments/hf_trainer/pretrained.py --model SmolLM2-135M-Instruct --out DIR
    python experiments/hf_trainer/pretrained.py --gguf FILE.gguf --out DIR    # unpacked to bf16

The chats are Python's own documentation: what is asked for is a function, the answer its docstring.
One module in ten is held out. Systems run one after another, each in a process of its own, from the
same bf16 weights and with the same chats in the same order. Nothing is downloaded, except a model
that is not a folder. It needs trl and datasets, and gguf for such a file.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.records import Json
from experiments.common.runner import free_port

SYSTEMS: dict[str, Json] = {
    "hytrain fp32": {"section": {}},
    "hytrain bf16": {"section": {"moments": "bf16"}},
    "hytrain 8bit": {"section": {"moments": "8bit"}},
    "zero2_offload": {"section": None},
    # fp32 weights under bf16 autocast, torch's AdamW.
    "trainer_alone": {"deepspeed": False, "dtype": "float32"},
}
_NAMES = """
argparse ast asyncio base64 bisect calendar collections concurrent.futures configparser contextlib
copy csv dataclasses datetime decimal difflib email enum fractions ftplib functools gettext glob
gzip hashlib heapq html http.client imaplib importlib inspect io ipaddress itertools json logging
lzma mailbox math mimetypes multiprocessing operator os os.path pathlib pickle platform pprint
queue random re sched shelve shlex shutil signal smtplib socket sqlite3 ssl statistics string
struct subprocess sys tarfile tempfile textwrap threading time timeit tkinter tokenize traceback
types typing unittest urllib.parse urllib.request uuid wave weakref webbrowser xml.dom
xml.etree.ElementTree zipfile zlib
"""
MODULES = _NAMES.split()
QUESTION = "What does `{}` do in Python?"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--model", help="folder, or name on the hub, of a chat model with its tokenizer")
    add("--gguf", type=Path, help="a GGUF file to unpack, in place of --model")
    add("--only", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    add("--batch", type=int, default=16)
    add("--length", type=int, default=256, help="most tokens of a chat")
    add("--steps", type=int, default=300)
    add("--rate", type=float, default=5e-5)
    add("--seconds", type=float, default=400.0, help="that a system may take")
    add("--system", help=argparse.SUPPRESS)
    return parser.parse_args()


def chats() -> dict[str, list[Json]]:
    """Prompts and completions of the parts "train" and "held_out"."""
    found: dict[str, list[Json]] = {"train": [], "held_out": []}
    seen: set[str] = set()
    for name in MODULES:
        part = "held_out" if zlib.crc32(name.encode()) % 10 == 0 else "train"
        for path, thing in _public(name):
            text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
            if len(text) >= 30 and text not in seen:
                seen.add(text)
                asked = {"role": "user", "content": QUESTION.format(path)}
                told = {"role": "assistant", "content": text[:800]}
                found[part].append({"prompt": [asked], "completion": [told]})
    return found


def _public(name: str) -> list[tuple[str, Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except ImportError:
        return []
    things: list[tuple[str, Any]] = []
    for key, thing in sorted(vars(module).items()):
        if key.startswith("_") or not callable(thing):
            continue
        things.append((f"{name}.{key}", thing))
        if inspect.isclass(thing):
            of_class = sorted(vars(thing).items())
            things += [(f"{name}.{key}.{k}", v) for k, v in of_class if k[0] != "_" and callable(v)]
    return things


def unpack(file: Path, folder: Path) -> None:
    """Writes the weights of a GGUF file in bf16, with its tokenizer, to a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: Json = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=plain
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The model's answer to a question, without sampling."""
    asked = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device)
    made = model.generate(**ids, max_new_tokens=60, do_sample=False)
    return tokenizer.decode(made[0][ids.input_ids.shape[1] :], skip_special_tokens=True)


def train(options: argparse.Namespace) -> None:
    """Trains one system and writes its result."""
    import contextlib

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    import hytrain

    system = SYSTEMS[options.system]
    section = system.get("section")
    is_gpu = torch.cuda.is_available()
    config: Json = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": section is None,
    }
    if section is not None:
        config["hytrain"] = section
    else:
        names = ("lr", "betas", "eps", "weight_decay")
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(names, "auto")}
    ends: list[float] = []

    class Times(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if is_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    arguments = SFTConfig(
        str(options.out / "trainer"),
        deepspeed=config if system.get("deepspeed", True) else None,
        bf16=True,
        use_cpu=not is_gpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        max_length=options.length,
        max_steps=options.steps,
        learning_rate=options.rate,
        warmup_steps=options.steps // 10,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 5),
        logging_steps=max(1, options.steps // 30),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = system.get("dtype", "bfloat16")
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    data = {part: Dataset.from_list(rows) for part, rows in chats().items()}
    question = data["held_out"][0]["prompt"][0]["content"]
    before = answer(model.eval(), tokenizer, question)
    with hytrain.register() if section is not None else contextlib.nullcontext():
        trainer = SFTTrainer(
            model, arguments, train_dataset=data["train"], eval_dataset=data["held_out"],
            processing_class=tokenizer, callbacks=[Times()],
        )  # fmt: skip
        trainer.train()
        trainer.save_model(str(options.out / "model"))
    history = trainer.state.log_history
    del trainer, model
    trained = AutoModelForCausalLM.from_pretrained(options.out / "model", dtype="bfloat16")
    after = answer(trained.to("cuda" if is_gpu else "cpu").eval(), tokenizer, question)
    kept: Json = {"ends": ends, "chats": {part: len(rows) for part, rows in data.items()}}
    kept |= {"question": question, "before": before, "after": after, "history": history}
    (options.out / "log.json").write_text(json.dumps(kept))


def main() -> None:
    """Prints a line for each system, and writes result.json."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.system:
        train(options)
        return
    if options.gguf is not None:
        options.model = str((options.out / "pretrained").resolve())
        if not Path(options.model).exists():
            unpack(options.gguf.resolve(), Path(options.model))
    if options.model is None:
        raise SystemExit("give --model or --gguf")
    results: dict[str, Json] = {}
    for name in options.only:
        results[name] = run(options, name)
        print(name, json.dumps(results[name]), flush=True)
        (options.out / "result.json").write_text(json.dumps(results, indent=1) + "\n")


def run(options: argparse.Namespace, name: str) -> Json:
    """Runs a system in a process of its own, and returns its result."""
    folder = options.out / name.replace(" ", "_")
    folder.mkdir(exist_ok=True)
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **one_rank, "MASTER_PORT": str(free_port())}
    numbers = ("batch", "length", "steps", "rate")
    arguments = [f"--{key}={getattr(options, key)}" for key in numbers]
    command = [sys.executable, __file__, "--system", name, "--model", options.model]
    begun = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        ended = subprocess.run(
            [*command, "--out", str(folder), *arguments], env=environment, stdout=log,
            stderr=subprocess.STDOUT, timeout=options.seconds,
        )  # fmt: skip
    found: Json = {"rc": ended.returncode, "seconds": round(time.monotonic() - begun, 1)}
    if ended.returncode:
        return found | {"log": (folder / "log.txt").read_text()[-800:]}
    kept = json.loads((folder / "log.json").read_text())
    ends, history = kept.pop("ends"), kept.pop("history")
    taken = [b - a for a, b in itertools.pairwise(ends)]
    found["step_seconds"] = statistics.median(taken[len(taken) // 2 :])
    for key in ("loss", "eval_loss"):
        found[key] = [float(one[key]) for one in history if key in one]
    return found | kept


if __name__ == "__main__":
    main()
