"""Hands the weights to a second process's model every few steps: by CUDA IPC on a GPU.

deepspeed examples/handover.py --model Qwen/Qwen3-1.7B --text my.txt
"""

import argparse
from pathlib import Path

import torch
import torch.multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import hytrain


def serve(name, device, weights, taken, questions, answers):
    """Stands in for an inference engine: takes weights by name, answers with a sample's loss."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16").to(device).eval()
    own = model.state_dict()
    with torch.no_grad():
        while (question := questions.get()) is not None:
            while (item := weights.get()) is not None:
                own[item[0]].copy_(item[1])
                if item[1].is_cuda:
                    torch.cuda.synchronize()  # the copy ends before the trainer goes on
                del item
                taken.put(True)
            sample = torch.tensor([question], device=device)
            answers.put(model(input_ids=sample, labels=sample).loss.item())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
    parser.add_argument("--text", default="README.md", help="a file to train on")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    options = parser.parse_args()

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "gradient_clipping": 1.0,
        "hytrain": {"metrics": "out/metrics.jsonl"},
    }
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
    ids = tokenizer(Path(options.text).read_text(), return_tensors="pt").input_ids[0]
    samples = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    engine, *_ = hytrain.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()  # from_pretrained leaves eval mode
    is_first = engine.global_rank == 0
    if is_first:
        context = torch.multiprocessing.get_context("spawn")
        weights, taken, questions, answers = (context.Queue() for _ in range(4))
        arguments = (options.model, str(engine.device), weights, taken, questions, answers)
        server = context.Process(target=serve, args=arguments, daemon=True)
        server.start()

    def hand_over(sample):
        if is_first:
            questions.put(sample.tolist())
        for named in engine.iterate_weights():  # a collective: all ranks take all tensors
            if is_first:
                name, tensor = named
                # Sending a CPU tensor moves it to shared memory: send a copy, not the weights.
                weights.put((name, tensor if tensor.is_cuda else tensor.clone()))
                taken.get()  # a tensor is valid until the next one is asked for
        if is_first:
            weights.put(None)
            return answers.get()

    for step in range(1, options.steps + 1):
        batch = samples[torch.randint(len(samples), (2,))].to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if step % 5 == 0:
            there = hand_over(samples[0])
            sample = samples[:1].to(engine.device)
            with torch.no_grad():
                here = engine(input_ids=sample, labels=sample).loss.item()
            if is_first:
                print(f"step {step}: loss {here:.4f}, in the second process {there:.4f}")
    if is_first:
        questions.put(None)
        server.join()
    engine.destroy()


if __name__ == "__main__":
    main()
