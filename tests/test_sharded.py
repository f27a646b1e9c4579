"""Workers of several devices: fully_shard cuts the weights, and nothing about the mathematics changes.

The worlds of processes are few, since they cost seconds to start, and each checks many things.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lordo
from common import randn
from test_processes import in_processes

pytestmark = [
    pytest.mark.usefixtures("rng_untouched"),
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"),
]

# wide, tall, square; a first side smaller than the number of shards (one that is low-rank, one that is not) or not divisible by it; a tall
# weight whose parts are wide or square; a vector shorter than the shards; a tensor of three dimensions
SHAPES = ((7, 12), (13, 6), (8, 8), (3, 9), (3, 2), (12, 6), (2,), (5,), (3, 2, 4))
RANK = 2
STEPS = 17
CASES = {
    # 100 steps in float32, the others in float64. Training itself makes much of a difference by rounding where the r-th singular value of a
    # change is close to the next: 10⁴ times with some settings, 3 times with these, measured by starting from weights that differ by 1e-11
    "long": {"sync_every": 25, "basis": "subspace", "weight_decay": 0.01, "fullrank_signal": "gradient"},
    "plain": {"sync_every": 4, "weight_decay": 0.01},
    "paper": {"sync_every": 5, "fullrank_signal": "gradient", "fullrank_denominator": "mean", "sync_exp_avg_every": 3},
    "no error": {"sync_every": 5, "error_feedback": False, "fullrank_denominator": "mean"},
    "overlap": {"sync_every": 6, "sync_overlap": 2, "sync_fragments": 2, "sync_error_every": 5, "basis": "subspace"},
}


class Weights(nn.Module):
    """Parameters of given shapes; a step's gradient is that of a loss which every device can form alone."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        for i, shape in enumerate(SHAPES):
            self.register_parameter(f"w{i}", nn.Parameter(0.3 * randn(*shape, seed=i, dtype=dtype)))

    def forward(self, step, worker):
        """A quadratic with its minimum in another place for each worker, noise on top, and curvatures that tell directions apart."""
        total = 0
        for i, p in enumerate(self.parameters()):
            noise = randn(*p.shape, seed=1000 * step + 10 * worker + i, dtype=p.dtype)
            goal = randn(*p.shape, seed=50 + i, dtype=p.dtype) + 0.3 * noise
            bend = 0.2 + randn(*p.shape, seed=90 + i, dtype=p.dtype).square()
            total = total + (bend * (p - goal).square()).sum()
        return total


def built(model, workers, method="lordo", lr=0.01, **options):
    rank = RANK if "rank" in lordo.METHODS[method].settings else None
    return lordo.DistributedOptimizer(lordo.param_groups(model, rank=rank), method, lr=lr, workers=workers, **options)


def train(model, optimizer, steps, *, clip=1.0):
    """Train, and give the norms of the gradients back."""
    norms = []
    for step in steps:
        model(step, optimizer.workers.rank).backward()
        norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), clip))))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(model, optimizer):
    """Whole weights, and of the state what does not depend on the signs of basis vectors."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    states = optimizer.state_dict()["state"]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    for name, state in zip(names, states.values(), strict=True):
        parts = {key: whole(value) for key, value in state.items()}
        if "basis" in parts:
            Q = parts.pop("basis")
            found |= {f"{name}.span": Q @ Q.mT, f"{name}.momentum": Q @ parts.pop("exp_avg")}
            parts.pop("exp_avg_sq")
            if "error_projection" in parts:
                E, lifted = parts["error"], Q @ parts.pop("error_projection")
                parts["error"] = E - (lifted.mT if E.shape[0] > E.shape[1] else lifted)
            parts = {key: value for key, value in parts.items() if not key.startswith("sent_exp")}
        found |= {f"{name}.{key}": value for key, value in parts.items()}
    return found


def run(case, workers, shard=lambda model: model):
    """A whole training: what it ends with, and the norms on the way."""
    model = shard(Weights(torch.float32 if case == "long" else torch.float64))
    optimizer = built(model, workers, **CASES[case])
    norms = train(model, optimizer, range(1, (100 if case == "long" else STEPS) + 1))
    return everything(model, optimizer), norms


@functools.cache
def unsharded(case, num_workers):
    """The same without shards: workers as threads."""
    return lordo.simulate(lambda workers: run(case, workers), num_workers)


def same(sharded, case, num_workers, worker):
    """Everything to rounding; in float32, after 100 steps and three refreshes, the weights to 1e-5."""
    weights, norms = unsharded(case, num_workers)[worker]
    found = sharded[0]
    if case == "long":
        weights = {name: weights[name] for name in weights if "." not in name}
        found = {name: found[name] for name in weights}
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-5 if case == "long" else 1e-9)
    torch.testing.assert_close(sharded[1][0], norms[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(sharded[1], norms, rtol=1e-5 if case == "long" else 1e-9, atol=0)


def on(mesh):
    return lambda model: fully_shard(model, mesh=mesh)


def as_one_worker(rank, size):
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("worker", "shard"))
    return {case: run(case, mesh["worker"], on(mesh["shard"])) for case in CASES}


def test_three_devices_are_one_worker(tmp_path):
    for result in in_processes(as_one_worker, 3, tmp_path, seconds=300):
        for case in CASES:
            same(result[case], case, 1, 0)


def as_two_workers(rank, size):
    """Two workers of as many devices as there are; with four, also one worker of four, and workers with replicas inside."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("worker", "shard"))
    found = {case: run(case, mesh["worker"], on(mesh["shard"])) for case in CASES if case != "long"}
    if size < 4:
        return found
    for name, shape in {"replicas and shards": (1, 2, 2), "replicas": (2, 2, 1)}.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("worker", "replicate", "shard"))
        found[name] = run("plain", mesh["worker"], on(mesh["replicate", "shard"]))
    return found | {"four shards": as_one_worker(rank, size)}


@pytest.mark.parametrize("shards", [1, 2])
def test_two_workers_of_some_devices_are_two_workers(shards, tmp_path):
    for rank, result in enumerate(in_processes(as_two_workers, 2 * shards, tmp_path, seconds=300)):
        for case in CASES.keys() - {"long"}:
            same(result[case], case, 2, rank // shards)
        if shards == 2:
            same(result["replicas and shards"], "plain", 1, 0)
            same(result["replicas"], "plain", 2, rank // 2)
            for case in CASES:
                same(result["four shards"][case], case, 1, 0)
