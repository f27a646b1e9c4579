"""Workers that are processes: a torch.distributed group or one axis of a DeviceMesh."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Every torch optimizer imports this when the first one is built. If there is a group by then, its functions have that as a default and hold
# it to the end, when gloo aborts. So it comes first, before there is a group (if lordo is imported before one is made).
import torch.distributed.nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from lordo.sync.comm import Comm, Solo, WorkerError


class Group(Comm):
    """The processes of a group.

    The group is looked up by name at each call and never held: gloo aborts at interpreter exit when an object still holds
    a group (pytorch issue 190489).

    Attributes:
        waiting: in which call this worker is, and since when (time.monotonic); None outside of calls.
        longest_gap: the longest time in seconds between two calls so far; None before the second one.
    """

    waiting: tuple[str, float] | None = None
    longest_gap: float | None = None
    _last_exchange: float | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        """A group this process belongs to."""
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._name = group.group_name

    @property
    def processes(self) -> list[int]:
        """Numbers of its processes among all."""
        return dist.get_process_group_ranks(self._group)

    @property
    def _group(self) -> dist.ProcessGroup:
        return _resolve_process_group(self._name)

    @contextmanager
    def _waiting(self, call: str) -> Iterator[None]:
        """Say in which call another worker failed this one, and note how long calls are apart."""
        now = time.monotonic()
        if self._last_exchange is not None:
            self.longest_gap = max(self.longest_gap or 0.0, now - self._last_exchange)
        self.waiting = call, now
        try:
            yield
            self.waiting, self._last_exchange = None, time.monotonic()
        except RuntimeError as error:
            raise WorkerError(f"worker {self.rank}: {call} failed, probably because another worker failed or left: {error}") from error

    def sum_(self, tensor: Tensor) -> None:
        """Sum over the group; gloo and nccl give every process the same bits."""
        with self._waiting("a sum"):
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group)

    def sum_at_(self, tensor: Tensor, *, target: int) -> None:
        """Sum at one member of the group."""
        with self._waiting(f"a sum for worker {target}"):
            dist.reduce(tensor, op=dist.ReduceOp.SUM, group=self._group, group_dst=target)

    def broadcast_(self, tensor: Tensor, *, source: int) -> None:
        """From group member `source` to all."""
        with self._waiting(f"a broadcast from worker {source}"):
            dist.broadcast(tensor, group=self._group, group_src=source)

    def exchange(self, messages: Sequence[Tensor], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        """An all-to-all of bytes, on its way while this process goes on."""
        outgoing = torch.cat(list(messages))
        incoming = outgoing.new_empty(sum(sizes))
        with self.transfer(), self._waiting("an exchange"):
            work = dist.all_to_all_single(incoming, outgoing, list(sizes), [m.numel() for m in messages], group=self._group, async_op=True)

        def arrived() -> list[Tensor]:
            with self.transfer(), self._waiting("an exchange"):
                work.wait()
            return list(torch.split(incoming, list(sizes)))

        return arrived

    def route_(self, out: Tensor, tensor: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """Send each member its own piece of a flat tensor, and take in one from each: the pieces fill `out`, without copies.

        Args:
            out, tensor: one-dimensional, contiguous, of one type. out_sizes: elements from each member. sizes: elements to each.
        """
        with self.transfer(), self._waiting("an exchange of parts"):
            dist.all_to_all_single(out, tensor, list(out_sizes), list(sizes), group=self._group)

    def gather(self, note: Any) -> list[Any]:
        """Pickled small objects of all processes."""
        notes: list[Any] = [None] * self.size
        with self.transfer(), self._waiting("comparing notes"):
            dist.all_gather_object(notes, note, group=self._group)
        return notes


def warn_if_not_alone(num_devices: int) -> None:
    """`workers=None` in one of several processes that are not one worker is nearly always a mistake, and nothing else would tell.

    Args:
        num_devices: of this worker.
    """
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if processes > num_devices:
        warnings.warn(
            f"workers=None: this process trains alone, though it is one of {processes}; pass workers=torch.distributed.group.WORLD "
            "(after init_process_group) to train together",
            RuntimeWarning,
            stacklevel=4,
        )


def as_comm(workers: Any) -> Comm:
    """Turn what a user passes as `workers` into a Comm.

    Args:
        workers: None (alone), a `torch.distributed` process group, a one-dimensional DeviceMesh, or a Comm.

    Raises:
        TypeError, ValueError: anything else; a mesh of several dimensions; a group this process is not part of.
    """
    if workers is None:
        return Solo()
    if isinstance(workers, Comm):
        return workers
    if isinstance(workers, DeviceMesh):
        if workers.ndim != 1:
            names = workers.mesh_dim_names
            example = f"mesh[{names[0]!r}]" if names else "a mesh with mesh_dim_names, indexed by the name of the worker axis"
            raise ValueError(f"workers must be a one-dimensional mesh; got {workers.ndim} dimensions: pass {example}")
        return Group(workers.get_group())
    if workers is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not part of the group passed as workers: build the optimizer on its members only")
    if isinstance(workers, dist.ProcessGroup):
        return Group(workers)
    raise TypeError(
        "workers must be None, a torch.distributed process group (dist.group.WORLD), a one-dimensional DeviceMesh or what "
        f"lordo.simulate hands out; got {type(workers).__name__}"
    )
