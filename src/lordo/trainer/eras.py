"""A run's history: the stretches between which its number of workers, or of their devices, changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lordo.sync import Comm
from lordo.sync.wire import sent_bytes


@dataclass(frozen=True)
class Era:
    """Steps that were trained with one number of workers, each of so many devices.

    workers: how many. start, end: trained were the steps start + 1 … end. sequences: blocks that each worker read at each step.
    sent: bytes each worker sent meanwhile, by kind. ahead: blocks that each read and threw away, going back to a checkpoint.
    shards: devices that shared a worker's weights; `sent` is what the first of them sent.
    synced: the last step after which they synchronised, if that is not the end: what was due at the end, the workers of the next did.
    """

    workers: int
    start: int
    end: int
    sequences: int
    sent: dict[str, int] = field(default_factory=dict)
    ahead: int = 0
    synced: int | None = None
    shards: int = 1

    @property
    def used(self) -> int:
        """Blocks that each worker read."""
        return (self.end - self.start) * self.sequences + self.ahead


def stretches(eras: Iterable[Era]) -> list[tuple[int, int]]:
    """(number of workers, blocks that each read) of eras, those that follow each other with one number of workers taken together."""
    found: list[tuple[int, int]] = []
    for era in eras:
        before = found.pop()[1] if found and found[-1][0] == era.workers else 0
        found.append((era.workers, before + era.used))
    return found


def sent_since(workers: Comm, before: Mapping[str, int]) -> dict[str, int]:
    """Bytes each worker sent, by kind, since collectives had moved as much as `before` says, per tag.

    Rounded as a whole run is, so that stretches add up to the byte.
    """
    return {tag: sent_bytes(moved, workers.size) - sent_bytes(before.get(tag, 0), workers.size) for tag, moved in workers.moved.items()}


def bytes_sent(eras: Iterable[Era]) -> Counter[str]:
    """Bytes each worker sent in some eras, by kind."""
    return sum((Counter(era.sent) for era in eras), start=Counter())


def to_json(eras: Iterable[Era]) -> list[dict[str, Any]]:
    """As plain values."""
    return [asdict(era) for era in eras]


def from_json(values: Iterable[dict[str, Any]]) -> tuple[Era, ...]:
    """From plain values."""
    return tuple(Era(**each) for each in values)
