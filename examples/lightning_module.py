"""LoRDO in Lightning: two workers, each on text of its own, averaged every 16 steps.

    torchrun --nproc-per-node 2 examples/lightning_module.py

Prints the loss of the averaged model on held-out text, as the Trainer's validation found it, and the bytes each worker sent. Needs
lightning (`pip install -e '.[lightning]'`). With a GPU for each process, take `accelerator="cpu"` out.
"""

import gc
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lordo
from lordo.integrations.lightning import LoRDOCallback

CONTEXT, STEPS = 16, 96


class NextByte(LightningModule):
    """Predicts the next byte from the last CONTEXT bytes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(256, 32),
            nn.Flatten(),
            nn.Linear(CONTEXT * 32, 192),
            nn.GELU(),
            nn.Linear(192, 256),
        )

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return lordo.LoRDO(lordo.param_groups(self, rank=24), lr=6e-3, sync_every=16, workers=dist.group.WORLD)


def main():
    torch.set_num_threads(1)  # a model this small gains nothing from more
    torch.manual_seed(0)  # every worker starts from the same weights; the optimizer checks that
    training, held_out = stretches()
    module = NextByte()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            strategy="ddp",
            max_steps=STEPS,
            val_check_interval=STEPS // 2,
            callbacks=[LoRDOCallback()],  # no DDP averaging; validation and checkpoints see the mean of the workers' weights
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(training, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=256))
    if trainer.is_global_zero:
        workers = trainer.optimizers[0].workers
        loss = float(trainer.callback_metrics["validation_loss"])
        print(f"{workers.size} workers, {STEPS} steps: loss {loss:.4f} nats per byte on held-out text")
        print(f"{workers.bytes_sent() - workers.bytes_sent('evaluation'):,} bytes sent per worker")
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()


def stretches():
    """Stretches of the text of Python's own library, each with the byte that follows; every tenth is kept."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:20]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = text[: 10_000 * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    kept = torch.arange(len(rows)) % 10 == 0
    return (TensorDataset(part[:, :CONTEXT], part[:, CONTEXT]) for part in (rows[~kept], rows[kept]))


if __name__ == "__main__":
    main()
