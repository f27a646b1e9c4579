"""What is told of a run while it goes on, and to whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from lordo.trainer.measure import SyncMeasures


@dataclass
class Progress:
    """Where a run stands, averaged over workers where that makes sense; one line of `metrics.jsonl`.

    Attributes:
        step: t. workers: how many took part in it.
        loss: mean over workers of the training loss of this step, nats. loss_min, loss_max: over workers.
        lr: learning rate of this step. tokens: read by all workers so far. bytes_sent: per worker so far (of several devices: by each).
        seconds: since the first step. tokens_per_second: of all workers together, since the last record.
        steps_to_next_sync: 1 to K. gradient_norm: of worker 0, before clipping. skipped_steps: summed over workers.
        spikes: steps that workers left out for a loss out of proportion, summed over workers.
        left_out: shares that averages left out because a worker's numbers were not finite, summed over workers.
        validation_loss, perplexity: of the averaged model, where it was evaluated.
        overlap: of the bases before and after the last refresh. overlap_with_first: of the bases now and the first ones.
        kept_bases: weights whose basis the last refresh left alone.
        sync: what the last synchronisation since the last record did.
    """

    step: int
    workers: int
    loss: float
    loss_min: float
    loss_max: float
    lr: float
    tokens: int
    bytes_sent: int
    seconds: float
    tokens_per_second: float
    steps_to_next_sync: int
    gradient_norm: float
    skipped_steps: int
    left_out: int
    spikes: int
    validation_loss: float | None = None
    perplexity: float | None = None
    overlap: float | None = None
    overlap_with_first: float | None = None
    kept_bases: list[str] = field(default_factory=list)
    sync: SyncMeasures | None = None


class Observer(Protocol):
    """Somebody who is told how the run goes; only worker 0's is called."""

    def progressed(self, progress: Progress) -> None:
        """A step that is logged or evaluated is done."""
