"""Time of one synchronisation of LoRDO, everything in, beside one plain all-reduce of as many bytes.

    python benchmarks/sync.py [--preset 125m] [--layers 2] [--workers 4] [--repeats 7] [--save]

As many processes as workers on this machine, joined by gloo over loopback, one thread each. A synchronisation averages the weights and
both moments, computes the new bases (each matrix by one worker), sends them, and rotates the moments. What it is held against is one
all_reduce (and the division that makes a mean of it) of one flat tensor with as many bytes as the synchronisation sends.
"""

import argparse
import statistics

import torch
import torch.distributed as dist
from measure import about, among_processes, matrices_of, options_of, save, slowest

import lordo

EVERY = 32


def main() -> None:
    options = parse()
    result = about("cpu") | {"threads": 1, "workers": options.workers} | among_processes(measure, options, options.workers)
    show(result)
    if options.save:
        save(f"sync-{options.preset}", result)


def parse() -> argparse.Namespace:
    parser = options_of(__doc__, layers=2, repeats=7, repeated="synchronisations")
    parser.add_argument("--workers", type=int, default=4, help="processes (default: %(default)s)")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict:
    shapes = matrices_of(options.preset, options.layers)
    rank = min(shapes[0]) // 8
    draw = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(0.02 * torch.randn(shape, generator=draw)) for shape in shapes]
    optimizer = lordo.LoRDO(weights, lr=1e-4, rank=rank, sync_every=EVERY, workers=dist.group.WORLD)
    own = torch.Generator().manual_seed(1 + dist.get_rank())

    def train() -> None:
        """Local steps to the brink of a synchronisation, so that the weights really differ."""
        for p in weights:
            p.grad = 1e-3 * torch.randn(p.shape, generator=own)
        if not optimizer.steps_taken:
            optimizer.step()
        for _ in range(2):
            optimizer.local_step()

    def synchronise() -> None:
        for rule in optimizer.after:
            rule(optimizer, optimizer.workers, EVERY)

    train()
    synchronise()
    before = optimizer.workers.bytes_sent()
    train()
    synchronise()
    num_bytes = optimizer.workers.bytes_sent() - before
    # a ring all-reduce of N bytes sends 2 (M−1)/M · N from each worker
    flat = torch.zeros(num_bytes * options.workers // (2 * (options.workers - 1)) // 4)

    def plain() -> None:
        dist.all_reduce(flat)
        flat.div_(options.workers)

    seconds: dict[str, list[float]] = {"synchronisation": [], "plain all-reduce": [], "of which basis refresh": []}
    for _ in range(options.repeats):
        train()
        refresh = optimizer.workers.seconds["basis refresh"]
        seconds["synchronisation"].append(slowest(synchronise))
        seconds["of which basis refresh"].append(optimizer.workers.seconds["basis refresh"] - refresh)
        seconds["plain all-reduce"].append(slowest(plain))
    return {"parameters": sum(m * n for m, n in shapes), "rank": rank, "bytes_sent": num_bytes, "seconds": seconds}


def show(result: dict) -> None:
    print(f"{result['machine']}, {result['workers']} processes of one thread, gloo over loopback, torch {result['torch']}")
    print(f"{result['parameters'] / 1e6:.1f} M parameters, rank {result['rank']}: {result['bytes_sent'] / 1e6:.1f} MB sent per worker\n")
    plain = statistics.median(result["seconds"]["plain all-reduce"])
    print(f"{'':<28}{'median ms':>10}{'fastest':>10}{'slowest':>10}{'ratio':>8}")
    for name, seconds in result["seconds"].items():
        own = statistics.median(seconds)
        print(f"{name:<28}{1e3 * own:>10.1f}{1e3 * min(seconds):>10.1f}{1e3 * max(seconds):>10.1f}{own / plain:>8.2f}")


if __name__ == "__main__":
    main()
