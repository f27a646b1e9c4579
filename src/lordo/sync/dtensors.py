"""Weights that are DTensors: which of them a worker can train, and its optimizer state as DTensors for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lordo.shards import cut_dim, state_cut
from lordo.sync.comm import Comm
from lordo.sync.group import Group
from lordo.sync.inside import Inside

FULLY_SHARD = "torch.distributed.fsdp.fully_shard"


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is spread over a mesh of devices."""
    return hasattr(tensor, "device_mesh")


def check_layout(name: str, p: Any) -> None:
    """Refuse a parameter of which this device has a part that is no run of whole rows or columns.

    Raises:
        TypeError: one sentence.
    """
    if getattr(p, "_fsdp_flattened", False) or hasattr(p, "ds_id"):
        raise TypeError(
            f"{name} is part of a flattened buffer (FullyShardedDataParallel or ZeRO), in which matrices cannot be told apart: "
            f"shard the model by {FULLY_SHARD} instead"
        )
    if not is_dtensor(p):
        return
    cuts = sum(not each.is_replicate() for each in p.placements)
    if cuts == 1 and cut_dim(p) is not None and p.device_mesh.ndim <= 2:
        return
    found = f"{name} is laid out as {tuple(p.placements)} on a mesh of {p.device_mesh.ndim} dimensions"
    if cuts == 0:
        raise TypeError(f"{found}, all of it on each device: for one worker of several devices use {FULLY_SHARD}")
    raise TypeError(
        f"{found}; tensor parallelism is not supported: use {FULLY_SHARD} alone, over the shard axis of the mesh or over (replicate, shard)"
    )


def inside_of(named: Sequence[tuple[str, Tensor]], workers: Comm, known: Inside) -> Inside:
    """The devices that make up this worker, from its parameters.

    Args:
        named: all parameters. workers: the Comm between workers. known: what was found so far, used where it fits.

    Raises:
        TypeError, ValueError: a parameter that cannot be used, parameters on several meshes, a worker axis that joins parts of one weight.
    """
    for name, p in named:
        check_layout(name, p)
    plain = [name for name, p in named if not is_dtensor(p)]
    spread: list[tuple[str, Any]] = [(name, p) for name, p in named if is_dtensor(p)]
    if not spread:
        return known
    name, p = spread[0]
    if plain:
        raise TypeError(
            f"{plain[0]} is a plain tensor while {name} is spread over devices, as with tensor parallelism or ignored parameters: "
            f"apply {FULLY_SHARD} to the whole model"
        )
    for other, q in spread:
        if q.device_mesh != p.device_mesh or _axes(q) != _axes(p):
            raise TypeError(f"{name} and {other} are spread over different meshes: apply {FULLY_SHARD} with one mesh to the whole model")
    _check_worker_axis(name, p, workers)
    shard, replicate = _axes(p)
    if known.size == p.device_mesh.size(shard) and known.size > 1:
        return known
    return Inside(_axis(p.device_mesh, shard), None if replicate is None else _axis(p.device_mesh, replicate))


def place_of(p: Any) -> tuple[int, int, int]:
    """Into how many parts a parameter is cut, which one this device has, and along which dimension."""
    if not is_dtensor(p):
        return 1, 0, 0
    shard, _ = _axes(p)
    return p.device_mesh.size(shard), p.device_mesh.get_local_rank(shard), p.placements[shard].dim


def _axes(p: Any) -> tuple[int, int | None]:
    """Mesh dimensions along which a parameter is cut, and along which it is repeated."""
    (shard,) = (i for i, each in enumerate(p.placements) if each.is_shard())
    return shard, next((i for i in range(p.device_mesh.ndim) if i != shard), None)


def _axis(mesh: Any, dim: int) -> Group | None:
    return Group(mesh.get_group(dim)) if mesh.size(dim) > 1 else None


def _check_worker_axis(name: str, p: Any, workers: Comm) -> None:
    if not isinstance(workers, Group):
        return
    both = sorted(set(workers.processes) & set(p.device_mesh.mesh.flatten().tolist()))
    if both != [dist.get_rank()]:
        raise ValueError(
            f"workers joins the processes {', '.join(map(str, both))}, which share {name} and are one worker: pass the axis of the mesh "
            "between workers, such as mesh['worker']"
        )


# ---- state in checkpoints


def as_dtensor(key: str, value: Tensor, p: Any, *, lowrank: bool) -> Tensor:
    """A tensor of a parameter's state as checkpoints see it: all of it, of which this device has a part."""
    if not is_dtensor(p) or key in ("step", "sent_step"):
        return value
    from torch.distributed.tensor import DTensor  # loaded already, or there would be no such parameter

    dim, mesh = state_cut(key, p, lowrank=lowrank), p.device_mesh
    shape = list(value.shape)
    if dim is not None:
        shape[dim] = p.shape[cut_dim(p)]
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(value.contiguous(), mesh, _placements(p, dim), run_check=False, shape=torch.Size(shape), stride=strides)


def own_part(key: str, value: Tensor, p: Any, *, lowrank: bool) -> Tensor:
    """The counterpart of `as_dtensor`: this device's part of a tensor that was laid out in whatever way; also of a plain, whole one."""
    if not is_dtensor(p) or key in ("step", "sent_step"):
        return whole(value)
    dim = state_cut(key, p, lowrank=lowrank)
    if is_dtensor(value):
        laid: Any = value
        if laid.device_mesh == p.device_mesh:
            part: Tensor = laid.redistribute(p.device_mesh, _placements(p, dim)).to_local()
            return part
        value = whole(value)
    if dim is None:
        return value
    mesh, (shard, _) = p.device_mesh, _axes(p)
    parts = torch.chunk(value, mesh.size(shard), dim=dim)
    mine = mesh.get_local_rank(shard)
    return parts[mine] if mine < len(parts) else value.narrow(dim, 0, 0)


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which this device may have a part only; its devices together, detached from gradients."""
    full: Tensor = tensor.detach().full_tensor() if is_dtensor(tensor) else tensor
    return full


def _placements(p: Any, dim: int | None) -> tuple[Any, ...]:
    """Placements of a tensor that is cut along a dimension where the parameter is."""
    from torch.distributed.tensor import Replicate, Shard

    shard, _ = _axes(p)
    return tuple(Shard(dim) if i == shard and dim is not None else Replicate() for i in range(p.device_mesh.ndim))


def named_of(group: Any) -> Iterable[tuple[str, Tensor]]:
    """(what to call it, parameter) of what is trained in a group."""
    names = group.get("param_names") or [None] * len(group["params"])
    for name, p in zip(names, group["params"], strict=True):
        if p.requires_grad:
            yield f"parameter '{name}'" if name else f"a parameter of shape {tuple(p.shape)}", p
