"""LoRDO in place of AdamW, in a training loop of your own on one machine: a low-rank Adam, nobody to wait for.

    python examples/alone.py

Prints which weights are low-rank and why, the loss on held-out text, and the bytes of optimizer state beside AdamW's.
"""

import os
from pathlib import Path

import torch
from torch import nn

import lordo
from lordo.accounting import adamw_state_bytes, measured_state_bytes, weights_of

CONTEXT, STEPS = 16, 300


def main():
    torch.set_num_threads(1)  # a model this small gains nothing from more
    torch.manual_seed(0)
    # Predict the next byte from the last CONTEXT bytes.
    model = nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(CONTEXT * 32, 192),
        nn.GELU(),
        nn.Linear(192, 192),
        nn.GELU(),
        nn.Linear(192, 256),
    )
    training, held_out = library_source()

    groups = lordo.param_groups(model, rank=24)
    print(groups)

    # This was: optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = lordo.LoRDO(groups, lr=6e-3, sync_every=32)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        loss_of(model, training).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # every 32 steps this renews the basis too
        optimizer.zero_grad()
        scheduler.step()

    with torch.no_grad():
        print(f"\nloss on held-out text after {STEPS} steps: {loss_of(model, held_out, batch_size=4096):.3f} nats per byte")
    held = measured_state_bytes(optimizer)
    print("optimizer state:", ", ".join(f"{name} {size:,}" for name, size in held.items()), "bytes")
    moments = held["exp_avg"] + held["exp_avg_sq"] + held["basis"]
    print(f"moments and basis: {moments:,} bytes, AdamW holds {adamw_state_bytes(weights_of(groups)):,}")


def library_source():
    """The text of Python's own library as bytes, nine tenths to train on and one tenth to keep."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text.tensor_split([len(text) * 9 // 10])


def loss_of(model, text, *, batch_size=64):
    """Cross-entropy of the byte after each of some random stretches of text."""
    starts = torch.randint(len(text) - CONTEXT, (batch_size, 1))
    stretches = text[starts + torch.arange(CONTEXT + 1)].long()
    return nn.functional.cross_entropy(model(stretches[:, :CONTEXT]), stretches[:, CONTEXT])


if __name__ == "__main__":
    main()
