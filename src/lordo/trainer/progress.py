"""The progress of a run, shown while it goes on and recorded."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lordo.trainer.config import RunConfig
from lordo.trainer.folder import RunFolder
from lordo.trainer.records import Progress
from lordo.trainer.terminal import human_bytes


class ProgressLine:
    """Shows the progress: one line that changes where there is a terminal, a line for each record where there is none."""

    def __init__(self, console: Console, folder: RunFolder, config: RunConfig) -> None:
        """Show on a console, and record into a folder."""
        # as wide as the terminal really is: a live line that wraps cannot be taken back
        self.console = Console() if console.is_terminal else console
        self.folder, self.config = folder, config
        self._live = Live(console=self.console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> ProgressLine:
        """Start the live line."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()

    def progressed(self, progress: Progress) -> None:
        """Show and record."""
        self.folder.record(progress)
        line = progress_line(progress, self.config.train.steps, self.config.workers)
        if self._live is None or progress.validation_loss is not None:
            self.console.print(line, highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


def progress_line(progress: Progress, steps: int, workers: int) -> str:
    """How a run of `steps` steps with `workers` workers goes.

    Step, loss with its spread over workers, speed of all, bytes sent by each, steps to the next synchronisation; within 80 columns.
    """
    parts = [
        f"step {progress.step:>{len(str(steps))}}/{steps}",
        f"loss {progress.loss:.3f} ({progress.loss_min:.2f}–{progress.loss_max:.2f})",
        f"{progress.tokens_per_second:,.0f} tokens/s",
        f"{human_bytes(progress.bytes_sent)} sent each",
        f"sync in {progress.steps_to_next_sync}",
    ]
    if progress.workers != workers:
        parts.insert(1, f"{progress.workers} of {workers} workers")
    if progress.validation_loss is not None:
        parts.append(f"validation loss {progress.validation_loss:.4f}")
    if progress.skipped_steps:
        parts.append(f"{progress.skipped_steps} steps skipped (gradient not finite)")
    if progress.left_out:
        parts.append(f"{progress.left_out} shares left out (not finite)")
    return "  ".join(parts)
