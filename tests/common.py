"""What the tests of the core share: random tensors that leave the global generator alone, and training on given gradients."""

import io
import math
from collections.abc import Sequence

import torch
from torch import Tensor

import lordo


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian numbers from a generator of their own."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def orthonormal(m: int, r: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random (m, r) matrix with orthonormal columns."""
    return torch.linalg.qr(randn(m, r, seed=seed, dtype=torch.float64))[0].to(dtype)


def with_spectrum(singular_values: Sequence[float], m: int, n: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """An (m, n) matrix with the given singular values (fewer than m: the rest are zero)."""
    k = len(singular_values)
    left, right = orthonormal(m, k, seed=seed, dtype=torch.float64), orthonormal(n, k, seed=seed + 1, dtype=torch.float64)
    return (left * torch.tensor(singular_values, dtype=torch.float64) @ right.mT).to(dtype)


def parameters(*shapes: tuple[int, ...], seed: int = 0, scale: float = 0.1, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Parameters of the given shapes, the same for the same seed."""
    return [torch.nn.Parameter(scale * randn(*shape, seed=seed + i, dtype=dtype)) for i, shape in enumerate(shapes)]


def give_gradients(params: Sequence[Tensor], *, step: int, worker: int = 0) -> None:
    """Put a gradient into every parameter that depends on step, worker and position alone."""
    for i, p in enumerate(params):
        p.grad = randn(*p.shape, seed=10_000 * step + 100 * worker + i, dtype=p.dtype)


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: range | int, *, worker: int = 0) -> None:
    """Step on the gradients of `give_gradients`; a number of steps counts from 1."""
    for step in range(1, steps + 1) if isinstance(steps, int) else steps:
        give_gradients(params, step=step, worker=worker)
        optimizer.step()


def everything(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and all state of an optimizer, copied, under one flat name each."""
    found = {}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"{i}"] = p.detach().clone()
        found |= {f"{i}.{key}": value.clone() for key, value in optimizer.state.get(p, {}).items()}
    return found


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Both hold the same tensors under the same names, dtypes included, to the bit."""
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert tensor.shape == second[name].shape, name
        assert torch.equal(tensor, second[name]), f"{name} differs by up to {(tensor - second[name]).abs().max()}"


def run_workers(shapes, *, num_workers: int, steps: int, dtype=torch.float32, **options) -> list[lordo.LoRDO]:
    """Train the same parameters on several simulated workers, each on gradients of its own; their optimizers."""

    def one_worker(workers):
        params = parameters(*shapes, dtype=dtype)
        optimizer = lordo.LoRDO(params, workers=workers, **options)
        train(optimizer, params, steps, worker=workers.rank)
        return optimizer

    return lordo.simulate(one_worker, num_workers)


def scaled_step(scaler, optimizer, params, *, step, worker=0, inf=False):
    """One step with a GradScaler on a loss whose gradients are those of `give_gradients`."""
    optimizer.zero_grad()
    G = [randn(*p.shape, seed=10_000 * step + 100 * worker + i, dtype=p.dtype) for i, p in enumerate(params)]
    scaler.scale(sum((p * g).sum() for p, g in zip(params, G, strict=True))).backward()
    if inf:
        params[0].grad.view(-1)[0] = math.inf
    scaler.step(optimizer)
    scaler.update()


def reloaded(state_dict):
    """Through a file, as a checkpoint is: without pickled objects."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
