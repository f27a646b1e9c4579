"""Several methods on the same model, the same initial weights and the same text, one after another, each result kept."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console

from lordo.methods import Method, find
from lordo.trainer.config import CompareConfig, RunConfig
from lordo.trainer.data_config import DataConfig
from lordo.trainer.devices import check_in_one_process
from lordo.trainer.folder import RunFolder, load_summary
from lordo.trainer.launch import run_in_threads
from lordo.trainer.method_config import MethodConfig
from lordo.trainer.options import read_value
from lordo.trainer.prepared import outline, pick_device, prepare
from lordo.trainer.recipe import load, override
from lordo.trainer.settings import ConfigError, UsageError
from lordo.trainer.splits import Splits
from lordo.trainer.summary import Summary
from lordo.trainer.text import load_text
from lordo.trainer.units import bandwidth

# What a comparison sets by itself, and the option for it.
OWN_OPTIONS = {"method.lr": "--lr", "seed": "--seeds", "method.name": "--methods", "name": "--name", "output": "--output"}

Variant = tuple[tuple[str, Any], ...]  # settings that a comparison varies, by dotted name


@dataclass(frozen=True)
class Member:
    """One run of a comparison."""

    method: str
    variant: Variant
    lr: float
    seed: int
    config: RunConfig
    path: Path

    @property
    def label(self) -> str:
        """The method and what is varied: members that differ by learning rate and seed alone share it."""
        return label(self.method, self.variant)


@dataclass
class Result:
    """How a member ended: a summary, or why there is none."""

    member: Member
    summary: Summary | None = None
    failure: str | None = None

    @property
    def perplexity(self) -> float:
        """Validation perplexity; infinite where the member failed."""
        return self.summary.perplexity if self.summary and self.failure is None else math.inf


@dataclass
class Row:
    """A line of the comparison's table: one method (and variant) at its best learning rate, over the seeds.

    Attributes:
        results: one a seed, the first seed first, at the best learning rate. grid: one a learning rate, at the first seed.
    """

    label: str
    method: str
    variant: Variant
    results: list[Result]
    grid: list[Result] = field(default_factory=list)

    @property
    def finished(self) -> list[Summary]:
        """Summaries of the seeds that ended well."""
        return [r.summary for r in self.results if r.summary is not None and r.failure is None]

    @property
    def perplexity(self) -> float:
        """Mean over seeds."""
        return mean(s.perplexity for s in self.finished) if self.finished else math.inf

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for a single one."""
        return stdev(s.perplexity for s in self.finished) if len(self.finished) > 1 else 0.0

    @property
    def best_lr(self) -> float:
        """The learning rate of this row."""
        return self.results[0].member.lr

    @property
    def on_edge(self) -> bool:
        """Whether the best learning rate is the smallest or the largest of several tried: a better one may lie beyond."""
        return len(self.tried) > 1 and self.best_lr in (min(self.tried), max(self.tried))

    @property
    def failures(self) -> list[str]:
        """Why members failed, those at other learning rates included."""
        members = {(r.member.lr, r.member.seed): r for r in (*self.grid, *self.results)}
        return [f"lr {lr:g}, seed {seed}: {r.failure}" for (lr, seed), r in members.items() if r.failure is not None]

    @property
    def tried(self) -> dict[float, float]:
        """Learning rates, and the perplexity of each at the first seed."""
        return {r.member.lr: r.perplexity for r in self.grid}


def label(method: str, variant: Variant) -> str:
    """ "lordo", or "lordo rank=8"."""
    return " ".join([method, *(f"{name.split('.')[-1]}={value}" for name, value in variant)])


def check(config: RunConfig, options: CompareConfig) -> None:
    """Find what can be found before anything runs.

    Raises:
        UsageError: an unknown method or unit; a setting varied in a way that cannot be.
    """
    try:
        for name in (*options.methods, *(n for n in options.lr if n != "all")):
            find(name)
        for text in options.bandwidth:
            bandwidth(text)
        for method in map(find, options.methods):
            for variant in variants_of(method, options.vary):
                shapes = outline(member_config(config, method, variant, lr=config.method.lr, seed=config.seed))
                check_in_one_process(shapes.config)
                pick_device(shapes.config.train.device)
    except ConfigError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


def compare(config: RunConfig, options: CompareConfig, folder: Path, console: Console) -> list[Row]:
    """Run all members that are not finished yet; returns the rows of the table, in the order asked for.

    For each method, and each variant of it, every learning rate is tried with the first seed; the best one then with the others.
    """
    seeds = [config.seed + i for i in range(options.seeds)]
    rows = []
    pairs = [(method, variant) for method in map(find, options.methods) for variant in variants_of(method, options.vary)]
    for method, variant in pairs:
        name = method.name

        def result(lr: float, seed: int, method: Method = method, variant: Variant = variant) -> Result:
            return run_member(_member(config, folder, method, variant, lr, seed), console)

        grid = {lr: result(lr, seeds[0]) for lr in learning_rates(config, options, name)}
        best = min(grid, key=lambda lr: grid[lr].perplexity)
        results = [grid[best], *(result(best, seed) for seed in seeds[1:])]
        rows.append(Row(label(name, variant), name, variant, results, list(grid.values())))
    return rows


def learning_rates(config: RunConfig, options: CompareConfig, method: str) -> list[float]:
    """Those asked for for this method, for all, or the recipe's one."""
    return sorted(set(options.lr.get(method) or options.lr.get("all") or [config.method.lr]))


def variants(vary: Sequence[str]) -> list[Variant]:
    """All combinations of what is varied; ["workers=4,8 batch.per_worker_sequences=8,4"] varies two settings together.

    Raises:
        UsageError: not of the form name=value,value,…; lists of unequal length varied together.
    """
    axes = [_together(text) for text in vary]
    return [tuple(pair for point in points for pair in point) for points in product(*axes)]


def variants_of(method: Method, vary: Sequence[str]) -> list[Variant]:
    """The variants of one method: what it does not have is not varied, so that no run is made twice."""
    foreign = {f"method.{name}" for name in MethodConfig.model_fields if name not in (*method.settings, "name")}
    own = [tuple((name, value) for name, value in variant if name not in foreign) for variant in variants(vary)]
    return list(dict.fromkeys(own))


def _together(text: str) -> list[Variant]:
    columns = []
    for part in text.split():
        name, equals, values = part.partition("=")
        if not equals or not values:
            raise UsageError(f"cannot vary {part!r}: write name=value,value,… such as method.rank=8,16,32")
        if name in OWN_OPTIONS:
            raise UsageError(f"cannot vary {name}: give {OWN_OPTIONS[name]} instead")
        columns.append([(name, read_value(value)) for value in values.split(",")])
    if len({len(column) for column in columns}) > 1:
        raise UsageError(f"cannot vary {text!r} together: the lists are not of one length")
    return list(zip(*columns, strict=True))


def member_config(config: RunConfig, method: Method, variant: Variant, *, lr: float, seed: int) -> RunConfig:
    """The recipe with this method: settings it does not have are left out, so that one recipe serves all methods."""
    settings: dict[str, Any] = {f"method.{name}": None for name in config.method.settings() if name not in method.settings}
    phases = [{name: value for name, value in phase.settings().items() if name in method.settings} for phase in config.phase]
    settings["phase"] = [{"from_step": phase.from_step, **own} for phase, own in zip(config.phase, phases, strict=True) if own]
    return override(config, {**settings, **dict(variant), "method.name": method.name, "method.lr": lr, "seed": seed})


def _member(config: RunConfig, folder: Path, method: Method, variant: Variant, lr: float, seed: int) -> Member:
    own = member_config(config, method, variant, lr=lr, seed=seed)
    name = "-".join([method.name, *(f"{key.split('.')[-1]}{value}" for key, value in variant), f"lr{lr:g}", f"seed{seed}"])
    path = folder / "members" / name
    return Member(method.name, variant, lr, seed, override(own, {"name": name, "output": str(folder / "members")}), path)


def run_member(member: Member, console: Console) -> Result:
    """Run a member, or take its result from an earlier, interrupted call.

    Raises:
        UsageError: the folder holds a result made with other settings.
    """
    kept = _kept(member)
    if kept is not None:
        return kept
    console.rule(f"{member.label}, lr {member.lr:g}, seed {member.seed}", align="left")
    try:
        prepared = prepare(member.config, load=_text)
        summary = run_in_threads(prepared, RunFolder(member.config, path=member.path), console, keep_model=False)
        assert summary is not None  # nobody asks a member to stop in good order
    except (UsageError, ConfigError):
        raise
    except Exception as error:  # whatever befell this member, the others go on
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        console.print(f"failed: {reason}", highlight=False, soft_wrap=True)
        return Result(member, failure=reason)
    return _ended(member, summary)


def _kept(member: Member) -> Result | None:
    """The result of a finished member; what an interrupted one left is removed."""
    if not member.path.exists():
        return None
    summary = load_summary(member.path)
    if summary is None:
        shutil.rmtree(member.path)
        return None
    if _without_compare(load(member.path / "config.toml")) != _without_compare(member.config):
        raise UsageError(f"{member.path} holds a result made with other settings: choose another --name, or remove that folder")
    return _ended(member, summary)


def _without_compare(config: RunConfig) -> RunConfig:
    """The settings that decide a member's result: a comparison may grow by methods, seeds and learning rates."""
    return config.model_copy(update={"compare": CompareConfig()})


def _ended(member: Member, summary: Summary) -> Result:
    diverged = not math.isfinite(summary.validation_loss)
    return Result(member, summary, failure="diverged: the validation loss is not finite" if diverged else None)


@cache
def _splits(data: str, seed: int) -> Splits:
    return load_text(DataConfig.model_validate_json(data), seed)


def _text(data: DataConfig, seed: int) -> Splits:
    """Text, read once for all members of a seed."""
    return _splits(data.model_dump_json(), seed)


def modelled_seconds(summary: Summary, bits_per_second: float) -> float:
    """Seconds of a run on machines of this speed joined by a link: compute of one worker, then its bytes over the link.

    M workers in one process, so many at once, took M / at_once times as long as one alone. Latency is left out.
    """
    busy = sum(summary.seconds.get(kind, 0.0) for kind in ("compute", "basis refresh", "encoding"))
    share = summary.at_once / summary.workers if summary.at_once else 1.0
    return busy * share + summary.sent * 8 / bits_per_second


def each_metric(row: Row, name: str) -> Iterable[tuple[list[int], list[float]]]:
    """Steps and values of a recorded quantity, for each finished seed."""
    for result in row.results:
        if result.failure is None:
            lines = [json.loads(line) for line in (result.member.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            seen = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            yield [step for step, _ in seen], [value for _, value in seen]


def mean_curve(row: Row, name: str) -> tuple[list[int], list[float]]:
    """Steps at which all seeds recorded a quantity, and its mean over the seeds."""
    seeds = [dict(zip(steps, values, strict=True)) for steps, values in each_metric(row, name)]
    steps = sorted(set.intersection(*(set(each) for each in seeds))) if seeds else []
    return steps, [mean(each[step] for each in seeds) for step in steps]


def mean_at(row: Row, name: str, steps: Sequence[int]) -> list[float]:
    """The mean over the seeds of a recorded quantity at some of the recorded steps."""
    found = dict(zip(*mean_curve(row, name), strict=True))
    return [found[step] for step in steps]
