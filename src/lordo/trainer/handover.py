"""What one worker hands to another that comes in the middle of a run: the same that a checkpoint holds, sent over their group.

torchft has two transports of its own; one unpickles what comes over HTTP, the other unpickles the description of the tensors. Here a
description is JSON, and the tensors are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchft.checkpointing import CheckpointTransport
from torchft.process_group import ProcessGroup

from lordo.trainer.checkpoint import STATE, WEIGHTS, Part, Snapshot


class Handed(Part):
    """What another worker has sent, read as its part of a checkpoint is."""

    def __init__(self, facts: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """`facts`: plain values. `tensors`: by name, those of WEIGHTS and of STATE."""
        self.facts, self._tensors = dict(facts), tensors

    def names(self, file: str) -> list[str]:
        """Names of the tensors in WEIGHTS or STATE."""
        return list(self._tensors[file])

    def tensor(self, file: str, name: str) -> Tensor:
        """One of them."""
        return self._tensors[file][name]


class Handover(CheckpointTransport[Any]):  # type: ignore[misc]
    """Sends what the Manager of torchft asks for, through the group that it has just made.

    Args:
        group: of the workers that are there.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Nothing is sent yet."""
        self.group = group

    def metadata(self) -> str:
        """Nothing: the group knows the way."""
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Send a snapshot, and the Manager's own counters, to each worker that lacks it."""
        snapshot: Snapshot = state_dict["user"]["default"]
        tensors = {WEIGHTS: snapshot.weights, STATE: snapshot.state}
        shapes = [[file, name, str(t.dtype), list(t.shape)] for file, named in tensors.items() for name, t in named.items()]
        header = json.dumps({"facts": snapshot.all_facts, "shapes": shapes, "torchft": state_dict["torchft"]}).encode()
        message = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for worker in dst_ranks:
            for part in (torch.tensor([len(message)]), message, *(_bytes(t) for named in tensors.values() for t in named.values())):
                if part.numel():
                    self.group.send([part], worker, 0).wait(timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Receive what `send_checkpoint` sends."""

        def fill(part: Tensor) -> Tensor:
            if part.numel():
                self.group.recv([part], src_rank, 0).wait(timeout)
            return part

        length = int(fill(torch.zeros(1, dtype=torch.int64)))
        header = json.loads(fill(torch.zeros(length, dtype=torch.uint8)).numpy().tobytes())
        tensors: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, STATE: {}}
        for file, name, tensor in _empty(header["shapes"]):
            fill(_bytes(tensor))
            tensors[file][name] = tensor
        return {"user": {"default": Handed(header["facts"], tensors)}, "torchft": header["torchft"]}

    def disallow_checkpoint(self) -> None:
        """Nothing is served any longer than it is sent."""

    def shutdown(self, wait: bool = True) -> None:
        """Nothing to stop."""


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as bytes."""
    return tensor.view(-1).view(torch.uint8)


def _empty(shapes: Sequence[tuple[str, str, str, list[int]]]) -> Iterator[tuple[str, str, Tensor]]:
    """Memory for each of the described tensors."""
    for file, name, dtype, shape in shapes:
        yield file, name, torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
