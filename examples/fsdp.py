"""Two workers of two devices: fully_shard inside a worker, LoRDO between workers.

    torchrun --nproc-per-node 4 examples/fsdp.py

Nothing but the two axes of the mesh differs from one device per worker. `--mixed-precision` computes in bfloat16 over float32
parameters, `--bfloat16` keeps parameters in bfloat16, `--checkpointing` forgets activations and computes them again, `--compile`
compiles every block; `--shards 4` makes all four devices one worker. Prints the loss on held-out text, and what each device sent and holds.
"""

import argparse
import gc

import torch
import torch.distributed as dist
from simulated import CONTEXT, library_source, loss_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lordo
from lordo.accounting import measured_state_bytes


class Block(nn.Module):
    """A residual block with one tall and one wide matrix."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def build(mesh, options):
    """The model, its blocks and the rest cut over the devices of this worker."""
    torch.manual_seed(0)  # every device builds the same weights before they are cut
    blocks = [Block(64) for _ in range(2)]
    if options.checkpointing:
        blocks = [checkpoint_wrapper(block) for block in blocks]
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 64), *blocks, nn.Linear(64, 256))
    if options.bfloat16:
        model.to(torch.bfloat16)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if options.mixed_precision else MixedPrecisionPolicy()
    )
    for block in blocks:
        if options.compile:
            block.compile(backend=options.compile)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(shape, options):
    """What each device of (workers, shards) does. Returns (held-out loss, bytes sent to other workers, to its own, bytes of state)."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("worker", "shard"))
    model = build(mesh["shard"], options)
    optimizer = lordo.LoRDO(lordo.param_groups(model, rank=16), lr=6e-3, sync_every=16, workers=mesh["worker"])
    workers, inside = optimizer.workers, optimizer.workers.inside

    training, held_out = library_source()
    text = training.tensor_split(workers.size)[workers.rank]  # each worker has text of its own
    draw = torch.Generator().manual_seed(inside.rank)  # and each of its devices a part of every batch
    for _ in range(options.steps):
        loss_of(model, text, draw, batch_size=32 // inside.size).backward()  # fully_shard averages gradients inside the worker
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the whole model's norm
        optimizer.step()
        optimizer.zero_grad()
    optimizer.average_parameters()

    with torch.no_grad():
        loss = loss_of(model, held_out, torch.Generator().manual_seed(99), batch_size=1024)
    within = inside.shards.bytes_sent() if inside.shards else 0
    return loss.item(), workers.bytes_sent(), within, sum(measured_state_bytes(optimizer).values())


def parsed(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=2, help="devices of a worker")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND")
    return parser.parse_args(arguments)


def main():
    options = parsed()
    dist.init_process_group("gloo")  # "nccl" where each process has a GPU of its own; the mesh below is of "cuda" then
    try:
        processes = dist.get_world_size()
        if processes % options.shards:
            raise SystemExit(f"--shards {options.shards} does not divide the {processes} processes")
        shape = (processes // options.shards, options.shards)
        loss, between, within, held = train(shape, options)
        if dist.get_rank() == 0:
            print(f"{shape[0]} workers of {shape[1]} devices, {options.steps} steps: loss {loss:.4f} nats per byte on held-out text")
            print(f"each device: {between:,} bytes sent to other workers, {within:,} to its own for LoRDO, {held:,} bytes of state")
    finally:
        dist.destroy_process_group()
        gc.collect()  # a clean end: gloo may abort at exit while anything still refers to a group


if __name__ == "__main__":
    main()
