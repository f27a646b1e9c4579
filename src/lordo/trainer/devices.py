"""The devices of a worker: which processes they are, a model cut over them, and put together again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from lordo.sync import Group
from lordo.sync.dtensors import whole
from lordo.sync.inside import Inside
from lordo.trainer.config import ParallelConfig, RunConfig
from lordo.trainer.models import build_model
from lordo.trainer.settings import UsageError


def process_name(number: int, parallel: ParallelConfig) -> str:
    """What to call a process: its worker, and which device of that it is if there are several.

    Processes of a worker follow each other, those of one copy of the model next to each other: with torchrun, a machine's devices.
    """
    worker, device = divmod(number, parallel.devices)
    return f"worker {worker}" if parallel.devices == 1 else f"worker {worker} (device {device})"


def check_in_one_process(config: RunConfig) -> None:
    """Refuse workers of several devices where all workers share one process.

    Raises:
        UsageError: saying how to start them.
    """
    devices = config.parallel.devices
    if devices > 1:
        raise UsageError(
            f"a worker of {devices} devices (parallel.shards × parallel.replicate) is as many processes: start all {config.workers} by "
            f"torchrun --nproc-per-node {config.workers * devices} -m lordo train …, or on several machines by --nnodes too"
        )


@dataclass(frozen=True)
class Joined:
    """The processes of a run, as one of them sees them.

    Attributes:
        processes: all of them. workers: one of each worker, this one among them; it trains through these. mesh: the devices of its worker;
            None if that is this process alone.
    """

    processes: Group
    workers: Group
    mesh: DeviceMesh | None


def joined(processes: Group, config: RunConfig, device_type: str, timeout: timedelta) -> Joined:
    """What each of all processes has, for a type of devices; every exchange may take so long. All must have the same `parallel`."""
    parallel = config.parallel
    if parallel.devices == 1:
        return Joined(processes, processes, None)
    names = ("worker", "replicate", "shard")
    mesh = init_device_mesh(device_type, (config.workers, parallel.replicate, parallel.shards), mesh_dim_names=names)
    for name in names:
        _set_pg_timeout(timeout, mesh.get_group(name))
    workers, replicas, shards = (Group(mesh.get_group(name)) if mesh.size(i) > 1 or i == 0 else None for i, name in enumerate(names))
    assert workers is not None
    workers.inside = Inside(shards, replicas)
    return Joined(processes, workers, mesh["replicate", "shard"] if parallel.replicate > 1 else mesh["shard"])


def cut_over(model: PreTrainedModel, mesh: DeviceMesh, *, backend: str | None = None) -> PreTrainedModel:
    """Cut a model over the devices of a worker, each of its blocks by itself so that one at a time is gathered. Changes the model.

    Args:
        model: whole, the same on each device; in host memory, from which it moves block by block. mesh: the devices. backend: of
            torch.compile, for each block, or for the whole if there are none; None compiles nothing.
    """
    blocks = blocks_of(model)
    if backend is not None:
        for module in blocks or [model]:
            module.compile(backend=backend)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of a model that transformers, too, keeps on one device each: none within another, none that shares a weight with the rest.

    There may be none. An embedding tied to an output head is such a weight: `fully_shard` takes what is tied in one piece only.
    """
    names, blocks, within = model._no_split_modules or (), [], set[nn.Module]()
    everywhere = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for module in model.modules():  # what contains others comes before them
        here = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
        if type(module).__name__ in names and module not in within and all(here[p] == everywhere[p] for p in here):
            blocks.append(module)
            within.update(module.modules())
    return blocks


def put_together(model: PreTrainedModel, config: RunConfig) -> PreTrainedModel | None:
    """The whole of a model that was cut over the devices of a worker, on the CPU of the first of all processes; None on the others.

    All devices of the first worker call this together.
    """
    keeps = dist.get_rank() == 0
    weights = {}
    for name, tensor in model.state_dict().items():
        full = whole(tensor)
        if keeps:
            weights[name] = full.cpu()
    if not keeps:
        return None
    dtype = next(model.parameters()).dtype
    made: PreTrainedModel = build_model(config.model, seed=config.seed, pretrained=False).to(dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        made.load_state_dict(weights)
    made.generation_config = model.generation_config  # that of `model.weights`
    return made
