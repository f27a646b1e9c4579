"""Tokens per second and peak memory of the trainer's loop beside a bare PyTorch loop of the same model with torch's AdamW.

    python benchmarks/loop.py [--preset 16m] [--steps 30] [--sequences 4] [--length 256] [--threads N] [--device cpu] [--save]

One worker, float32. The trainer runs `ddp-adamw`, whose step is AdamW's, with everything that a run has: batches from the shuffled mixture,
the schedule, the check for gradients that are not finite, counters, a line of the log at every tenth step. The bare loop has blocks in a
tensor, forward, backward, clipping, `torch.optim.AdamW`. Steps of both alternate in one process, so that whatever else the machine does
falls on both; the table shows medians. `lordo` runs beside them in the same way, synchronisations of one worker included.

Peak memory is measured in a process for each: most that the process ever held, less what it held before the first step.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.multiprocessing as mp
from measure import PRESETS, about, save, wait

from lordo.sync import Solo
from lordo.trainer.config import RunConfig
from lordo.trainer.loop import train
from lordo.trainer.models import build_model
from lordo.trainer.prepared import Prepared, prepare
from lordo.trainer.recipe import load
from lordo.trainer.records import Progress
from lordo.trainer.saving import Keeping
from lordo.trainer.stopping import StopPoint

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.toml"
BARE, TRAINER, LORDO = "bare loop, torch.optim.AdamW", "trainer, ddp-adamw", "trainer, lordo"
METHODS = {TRAINER: "ddp-adamw", LORDO: "lordo"}
BAR = 0.9
UNCOUNTED = 3  # first steps


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    memory = {name: peak(name, options) for name in (BARE, *METHODS)}
    seconds = {name: alternating(name, options) for name in METHODS}
    result = about(options.device) | {
        "model": f"{options.preset} with 8,192 tokens",
        "tokens": options.sequences * options.length,
        "seconds": seconds,
        "peak_bytes": memory,
        "bar": BAR,
    }
    show(result)
    if options.save:
        save(f"loop-{options.preset}", result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="16m", help="which model, under 8,192 tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=4, help="of one step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the result into benchmarks/results/")
    return parser.parse_args()


def run_config(method: str, options: argparse.Namespace, *, steps: int) -> RunConfig:
    """The run of one method, on the text of Python's own library."""
    return load(
        RECIPE,
        {
            "workers": 1,
            "model.preset": options.preset,
            "model.config": {"vocab_size": 8192},
            "data.sequence_length": options.length,
            "batch.per_worker_sequences": options.sequences,
            "method.name": method,
            "method.lr": 1e-4,
            "method.rank": None if method == "ddp-adamw" else 32,
            "method.sync_every": None if method == "ddp-adamw" else 16,
            "train.steps": steps,
            "train.warmup_steps": 0,
            "train.log_every": 10,
            "train.eval_every": None,
            "train.eval_sequences": 1,
            "train.threads": options.threads,
            "train.device": options.device,
        },
    )


class Quiet:
    """An observer that shows nothing."""

    def progressed(self, progress: Progress) -> None:
        """A line of the log."""


class Turns(StopPoint):
    """Asked before each step of the trainer, it lets the bare loop do one of its own, and times both."""

    def __init__(self, bare: Callable[[], object], device: str) -> None:
        """Nothing is timed yet."""
        super().__init__()
        self.bare, self.device = bare, device
        self.seconds: dict[str, list[float]] = {TRAINER: [], BARE: []}
        self.since: float | None = None

    def begin(self, step: int) -> bool:
        """The trainer's last step is done, and its next one comes after this."""
        wait(self.device)
        now = time.perf_counter()
        if self.since is not None:
            self.seconds[TRAINER].append(now - self.since)
        start = time.perf_counter()
        self.bare()
        wait(self.device)
        self.since = time.perf_counter()
        self.seconds[BARE].append(self.since - start)
        return super().begin(step)


def alternating(name: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of the steps of the trainer with one method, and of the bare loop between them."""
    prepared = prepare(run_config(METHODS[name], options, steps=options.steps + UNCOUNTED + 1))
    turns = Turns(bare_loop(prepared, options.device), options.device)
    run_trainer(prepared, turns)
    return {who: each[UNCOUNTED : UNCOUNTED + options.steps] for who, each in turns.seconds.items()}


def run_trainer(prepared: Prepared, stop: StopPoint) -> None:
    """All steps of a run, without checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        train(prepared, Solo(), Quiet(), keeping=Keeping(Path(folder), None, print), stop=stop)


def bare_loop(prepared: Prepared, device: str) -> Callable[[], object]:
    """One step of the loop that anybody would write."""
    config = prepared.config
    model = build_model(config.model, seed=config.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.method.lr, betas=(0.9, 0.99), weight_decay=0.0)
    blocks, size = prepared.splits.train[0].blocks, config.sequences_per_worker
    position = 0

    def step() -> None:
        nonlocal position
        tokens = blocks[position : position + size].to(device).long()
        position += size
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak(name: str, options: argparse.Namespace) -> int:
    """Bytes held at most during a few steps, less those before them, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "peak"
        mp.start_processes(_peak, args=(name, options, str(result)), nprocs=1, start_method="spawn")
        return int(result.read_text())


def _peak(_: int, name: str, options: argparse.Namespace, result: str) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
    prepared = prepare(run_config(METHODS.get(name, "ddp-adamw"), options, steps=6))
    before = held(options.device)
    if name == BARE:
        step = bare_loop(prepared, options.device)
        for _step in range(6):
            step()
    else:
        run_trainer(prepared, StopPoint())
    Path(result).write_text(str(held(options.device) - before))


def held(device: str) -> int:
    """Most bytes that this process has held so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show(result: dict) -> None:
    """The table."""
    tokens = result["tokens"]
    print(f"{result['model']}, {tokens} tokens a step, {result['machine']}, {result['threads']} threads, torch {result['torch']}\n")
    print(f"{'loop':<32} {'tokens/s':>10} {'bare loop beside it':>20} {'share':>7} {'peak MB':>9}")
    for name, seconds in result["seconds"].items():
        own, bare = (tokens / statistics.median(seconds[who]) for who in (TRAINER, BARE))
        print(f"{name:<32} {own:>10,.0f} {bare:>20,.0f} {own / bare:>7.1%} {result['peak_bytes'][name] / 1e6:>9,.0f}")
    print(f"{BARE:<32} {'':>10} {'':>20} {'':>7} {result['peak_bytes'][BARE] / 1e6:>9,.0f}")
    print(f"\nthe bar for {TRAINER}: {result['bar']:.0%}")


if __name__ == "__main__":
    main()
