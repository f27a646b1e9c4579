"""The local step, a synchronisation and a refresh where one worker is several devices: seconds beside whole weights, and peaks of memory.

    python benchmarks/sharded.py [--preset 720m] [--layers 1] [--shards 4] [--repeats 7] [--save]

As many processes as shards on this machine, joined by gloo over loopback, one thread each. The step of the parts is held against a step of
whole weights that each process takes by itself at the same time, so that both have the same share of the cores; what it may cost is
1/shards of that, 1.3 times over, and the sums inside the worker, timed alone. Gradients are given; fully_shard's own traffic is not in it.
Peaks are what operations of one device allocate at once, beside weights, gradients and state.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import PeakAllocation, about, among_processes, matrices_of, options_of, save, slowest
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import lordo
from lordo.accounting import inside_step_bytes, measured_state_bytes, weights_of
from lordo.sync import Solo

EVERY = 32
ALLOWED = 1.3


def main() -> None:
    options = parse()
    result = about("cpu") | {"threads": 1, "shards": options.shards} | among_processes(measure, options, options.shards)
    show(result)
    if options.save:
        save(f"sharded-{options.preset}", result)


def parse() -> argparse.Namespace:
    parser = options_of(__doc__, layers=1, repeats=7, repeated="steps", preset="720m")
    parser.add_argument("--shards", type=int, default=4, help="processes (default: %(default)s)")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict:
    shapes = matrices_of(options.preset, options.layers)
    rank = min(shapes[0]) // 8
    mesh = init_device_mesh("cpu", (options.shards,))
    whole = [drawn(shape, seed=i) for i, shape in enumerate(shapes)]
    parts = [distribute_tensor(t, mesh, (Shard(0),)) for t in whole]
    contestants = {name: optimizer_of(tensors, rank) for name, tensors in (("whole weights", whole), ("parts", parts))}
    contestants["whole weights"].step()
    first_step = highest(contestants["parts"].step)
    inside = contestants["parts"].workers.inside
    sums = [torch.zeros(rank, max(shape)) for shape in shapes if shape[0] <= shape[1]]
    calls: dict[str, Callable[[], None]] = {name: optimizer.local_step for name, optimizer in contestants.items()}
    calls["sums"] = lambda: inside.total_([("inside", t) for t in sums])
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(options.repeats + 1):
        for name, call in calls.items():
            taken = slowest(call)
            if turn:  # the first one allocates
                seconds[name].append(taken)
    optimizer = contestants["parts"]
    return {
        "parameters": sum(m * n for m, n in shapes),
        "rank": rank,
        "seconds": seconds,
        "inside_bytes": inside_step_bytes(weights_of(optimizer.param_groups)),
        "largest_matrix_bytes": 4 * max(m * n for m, n in shapes),
        "state_bytes": measured_state_bytes(optimizer).total(),
        "peaks": {
            "first step": first_step,
            "step": highest(optimizer.local_step),
            "synchronisation with refresh": highest(lambda: [rule(optimizer, optimizer.workers, EVERY) for rule in optimizer.after]),
        },
    }


def drawn(shape: tuple[int, int], *, seed: int) -> Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def optimizer_of(tensors: list[Tensor], rank: int) -> lordo.LoRDO:
    """An optimizer of weights that have gradients."""
    weights = [torch.nn.Parameter(t.clone()) for t in tensors]
    for i, p in enumerate(weights):
        gradient = 1e-3 * drawn(tuple(p.shape), seed=100 + i)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient
    return lordo.LoRDO(weights, lr=1e-4, rank=rank, sync_every=EVERY, workers=Solo())


def highest(call: Callable[[], object]) -> int:
    """Peak of what a call allocates, on the device that has most of it."""
    with PeakAllocation() as seen:
        call()
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, seen.peak_bytes)
    return max(peaks)


def show(result: dict) -> None:
    size, inside = result["parameters"] / 1e6, result["inside_bytes"] / 1e6
    print(f"{result['machine']}, {result['shards']} processes of one thread, gloo over loopback, torch {result['torch']}")
    print(f"{size:.1f} M parameters, rank {result['rank']}: {inside:.1f} MB sent inside the worker at a step\n")
    print(f"{'':<28}{'median ms':>10}{'fastest':>10}{'slowest':>10}")
    for name, seconds in result["seconds"].items():
        print(f"{name:<28}{1e3 * statistics.median(seconds):>10.1f}{1e3 * min(seconds):>10.1f}{1e3 * max(seconds):>10.1f}")
    whole, parts, sums = (statistics.median(result["seconds"][name]) for name in ("whole weights", "parts", "sums"))
    allowed = ALLOWED * whole / result["shards"] + sums
    print(f"\nallowed: {ALLOWED} × {1e3 * whole:.1f} / {result['shards']} + {1e3 * sums:.1f} = {1e3 * allowed:.1f} ms")
    print(f"parts take {parts / allowed:.2f} × that\n")
    state, matrix = result["state_bytes"], result["largest_matrix_bytes"]
    print(f"{state / 1e6:.1f} MB of state on the first device, {matrix / 1e6:.1f} MB in the largest matrix")
    for name, peak in result["peaks"].items():
        print(f"allocated besides by a {name}: {peak / 1e6:.1f} MB, {peak / matrix:.2f} × the largest matrix")


if __name__ == "__main__":
    main()
