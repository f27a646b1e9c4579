"""Four LoRDO workers in one process, to try out what distribution does to training before any cluster is there.

    python examples/simulated.py

`lordo.simulate` runs `train` once for each worker, in threads that take turns; the result repeats to the bit. Prints the
loss of the averaged model on held-out text, the bytes each worker sent, and how many times less that is than averaging
gradients at every step. `processes.py` and `mesh.py` hand the same `train` to real processes.
"""

import os
from pathlib import Path

import torch
from torch import nn

import lordo
from lordo.accounting import traffic, weights_of

CONTEXT, STEPS = 16, 320


def train(workers):
    """What each worker does; `workers` is its connection to the others. Returns (held-out loss, bytes sent, times less)."""
    torch.set_num_threads(1)  # a model this small gains nothing from more
    torch.manual_seed(0)  # every worker starts from the same weights; the optimizer checks that
    model = nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(CONTEXT * 32, 192),
        nn.GELU(),
        nn.Linear(192, 192),
        nn.GELU(),
        nn.Linear(192, 256),
    )
    groups = lordo.param_groups(model, rank=24)
    optimizer = lordo.LoRDO(groups, lr=6e-3, sync_every=32, workers=workers)
    workers = optimizer.workers  # None, a process group and a mesh all become an object with rank, size and counters

    training, held_out = library_source()
    shard = training.tensor_split(workers.size)[workers.rank]  # each worker has text of its own
    draw = torch.Generator().manual_seed(workers.rank)
    for _ in range(STEPS):
        loss_of(model, shard, draw, batch_size=32).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # local step, and the synchronisation when it is due
        optimizer.zero_grad()
    optimizer.average_parameters()  # sends nothing here: step 320 = 10 x 32 was a synchronisation

    with torch.no_grad():
        loss = loss_of(model, held_out, torch.Generator().manual_seed(99), batch_size=4096)
    ddp = lordo.METHODS["ddp-adamw"]
    every_step = traffic(ddp, weights_of(groups), ddp.resolve({}), steps=STEPS, num_workers=workers.size)
    return loss.item(), workers.bytes_sent(), every_step.total() / workers.bytes_sent()


def library_source():
    """The text of Python's own library as bytes, nine tenths to train on and one tenth to keep."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text.tensor_split([len(text) * 9 // 10])


def loss_of(model, text, draw, *, batch_size):
    """Cross-entropy of the byte after each of some random stretches of text."""
    starts = torch.randint(len(text) - CONTEXT, (batch_size, 1), generator=draw)
    stretches = text[starts + torch.arange(CONTEXT + 1)].long()
    return nn.functional.cross_entropy(model(stretches[:, :CONTEXT]), stretches[:, CONTEXT])


def tell(num_workers, loss, bytes_sent, times_less):
    print(f"{num_workers} workers, {STEPS} steps: loss {loss:.4f} nats per byte on held-out text")
    print(f"{bytes_sent:,} bytes sent per worker, {times_less:.1f} times less than averaging gradients at every step")


if __name__ == "__main__":
    results = lordo.simulate(train, num_workers=4)
    tell(4, *results[0])
