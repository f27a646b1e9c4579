"""LoRDO in the Trainer of transformers: two workers, each on text of its own, averaged every 16 steps.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

Prints the loss of the averaged model on held-out text, as the Trainer's evaluation found it, and the bytes each worker sent. Needs
transformers and accelerate (`pip install -e '.[transformers]'`). With a GPU for each process, take `use_cpu=True` out.
"""

import gc
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import lordo
from lordo.integrations.transformers import attach

BLOCK, STEPS = 32, 40


def main():
    torch.set_num_threads(1)  # a model this small gains nothing from more
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=6e-3,
            lr_scheduler_type="constant",
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        train(args)
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def train(args):
    torch.manual_seed(0)  # every worker starts from the same weights; the optimizer checks that
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=BLOCK,
        )
    ).to(args.device)
    training, held_out = blocks()

    optimizer = lordo.LoRDO(lordo.param_groups(model, rank=8), lr=args.learning_rate, sync_every=16, workers=dist.group.WORLD)
    trainer = Trainer(model=model, args=args, optimizers=(optimizer, None), train_dataset=training, eval_dataset=held_out)
    attach(trainer)  # no DDP averaging; evaluation and saving see the mean of the workers' weights
    trainer.train()

    if trainer.is_world_process_zero():
        losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        print(f"{optimizer.workers.size} workers, {STEPS} steps: loss {losses[-1]:.4f} nats per byte on held-out text")
        sent = optimizer.workers.bytes_sent() - optimizer.workers.bytes_sent("evaluation")
        print(f"{sent:,} bytes sent per worker")


def blocks():
    """The text of Python's own library in blocks of bytes: most to train on, every fiftieth to keep."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:20]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = [{"input_ids": block, "labels": block} for block in text.split(BLOCK)[:5000]]
    return [row for i, row in enumerate(rows) if i % 50], rows[::50]


if __name__ == "__main__":
    main()
