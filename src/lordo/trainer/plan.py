"""`lordo plan`: what every method would send, hold and take, from the recipe alone; nothing is run or downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table

from lordo.accounting import Weight, adamw_state_bytes, inside_step_bytes, on_device, parts_of, state_bytes, traffic
from lordo.methods import METHODS, Method, find
from lordo.optim.options import check_whole
from lordo.trainer.compare import member_config
from lordo.trainer.config import RunConfig
from lordo.trainer.link import BreakEven, Load, break_even, load_of
from lordo.trainer.options import RecipeParser
from lordo.trainer.prepared import outline
from lordo.trainer.settings import UsageError
from lordo.trainer.terminal import human_bytes, plain_table, wide_console
from lordo.trainer.units import bandwidth

NOTES = """\
Per worker, on average. T steps of M workers with K steps between synchronisations; N bytes averaged cost a ring all-reduce of
2 (M−1)/M · N, a basis costs a broadcast of (M−1)/M · its bytes. Memory is weights, gradients and optimizer state; activations
come on top. Seconds = compute + bytes · 8 / bandwidth, without latency; compute of a step = 6 · parameters · tokens / ({tflops:g} · 10¹²
per second). Where a worker is several devices everything is of one of them, the first, whose parts are the largest; what fully_shard sends
is not counted. With sync_overlap, averages cost what they take longer than the steps they overlap: of computing and sending the larger."""

BREAK_EVEN_NOTES = """\
One average of parameters and moments, waited for: below this bandwidth the bytes saved are worth more than the time of encoding and
decoding them, as measured just now on this machine (torch threads: {threads})."""


@dataclass(frozen=True)
class Plan:
    """What a run of one method would cost one worker.

    Attributes:
        sent: bytes in the whole run. inside: bytes of a step to other devices of the same worker.
        num_syncs: exchanges in it. state: bytes of optimizer state. memory: with weights and gradients.
        compute_seconds: of the whole run. load: what is waited for and what is not. link_seconds: spent waiting.
        round_steps: K. steps: T. ddp_sent, adamw_state: the references.
    """

    method: str
    sent: int
    inside: int
    num_syncs: int
    state: int
    memory: int
    compute_seconds: float
    load: Load
    link_seconds: float
    round_steps: int
    steps: int
    ddp_sent: int
    adamw_state: int

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.compute_seconds + self.link_seconds

    def over(self, bits_per_second: float) -> Plan:
        """The same over another link."""
        return replace(self, link_seconds=self.load.waiting_seconds(bits_per_second, self.compute_seconds / self.steps))


def plan(config: RunConfig, method: Method, *, bits_per_second: float, flops: float, shards: int = 1) -> Plan:
    """The costs of a method for a recipe, for one device of each worker.

    Args:
        config: the recipe. method: any row. bits_per_second: of each device's link. flops: sustained, per device and second.
        shards: devices among which a worker's weights are cut.

    Raises:
        ValueError: the method does not work with several devices in a worker.
    """
    own = member_config(config, method, (), lr=config.method.lr, seed=config.seed)
    shapes = outline(own)
    settings, weights = shapes.settings, parts_of(shapes.weights, shards)
    if shards > 1 and any(weight.is_lowrank for weight in weights):
        method.check_parts(settings)
    ddp, steps, workers = METHODS["ddp-adamw"], config.train.steps, config.workers
    sent = traffic(method, weights, settings, steps=steps, num_workers=workers, final_average=True).total()
    state = on_device(state_bytes(method, weights, settings, device="cpu" if config.train.device == "cpu" else "cuda"))
    tokens = config.sequences_per_worker * config.data.sequence_length
    each_step = step_seconds(weights, tokens, flops) / (shards * config.parallel.replicate)
    load = load_of(method, weights, settings, steps=steps, num_workers=workers)
    return Plan(
        method=method.name,
        sent=sent,
        inside=inside_step_bytes(weights),
        num_syncs=steps if method.averages_gradients else max(steps // settings["sync_every"], 1),
        state=state,
        memory=state + 2 * sum(w.part_numel * w.dtype.itemsize for w in weights),
        compute_seconds=steps * each_step,
        load=load,
        link_seconds=load.waiting_seconds(bits_per_second, each_step),
        round_steps=config.method.sync_every or settings["sync_every"],
        steps=steps,
        ddp_sent=traffic(ddp, weights, ddp.resolve({}), steps=steps, num_workers=workers).total(),
        adamw_state=adamw_state_bytes(weights),
    )


def step_seconds(weights: Sequence[Weight], tokens: int, flops: float) -> float:
    """Seconds of one step's forward and backward on one worker: 6 operations per parameter and token."""
    return 6 * sum(w.numel for w in weights) * tokens / flops


def main(arguments: list[str]) -> int:
    """Print the plan of every method asked for.

    Raises:
        UsageError, ConfigError: what was asked for cannot work.
    """
    config, asked = parser().read(arguments)
    try:
        methods = [find(name) for name in (asked.methods.split(",") if asked.methods else METHODS)]
        shards = config.parallel.shards if asked.shards is None else asked.shards
        check_whole("--shards", shards)
        if shards * config.parallel.replicate > 1 and not asked.methods:
            methods = [method for method in methods if method.basis_from in (None, "sync")]
        links = asked.bandwidth.split(",")
        if asked.tflops <= 0:
            raise ValueError(f"--tflops must be above zero; got {asked.tflops:g}")
        speeds = [bandwidth(link) for link in links]
        flops = asked.tflops * 1e12
        plans = [plan(config, method, bits_per_second=speeds[0], flops=flops, shards=shards) for method in methods]
        first = outline(config)
        if asked.break_even and not (first.method.averages and config.workers > 1):
            raise ValueError(
                f"--break-even needs a method that averages rarely, and more than one worker; got '{first.method.name}', {config.workers}"
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    console = wide_console()
    numel = sum(w.numel for w in first.weights)
    num_devices = shards * config.parallel.replicate
    devices = f" of {num_devices} devices" if num_devices > 1 else ""
    console.print(f"{config.name}: {numel:,} parameters, {config.workers} workers{devices}, {config.train.steps} steps", highlight=False)
    console.print(first.groups.table(), highlight=False, soft_wrap=True)
    for link, speed in zip(links, speeds, strict=True):
        console.print(table([p.over(speed) for p in plans], f"{link} per {'worker' if num_devices == 1 else 'device'}"))
    console.print(NOTES.format(tflops=asked.tflops), highlight=False, soft_wrap=True)
    if asked.break_even:
        console.print(break_even_table(break_even(first.method, first.weights, first.settings, num_workers=config.workers)))
        console.print(BREAK_EVEN_NOTES.format(threads=torch.get_num_threads()), highlight=False, soft_wrap=True)
    return 0


def break_even_table(rows: Sequence[BreakEven]) -> Table:
    """The wire formats, and the bandwidth under which each pays for its own compute."""
    drawn = plain_table("sync_wire", "sent", "saved", "encoding", "pays below", title="break-even of the wire formats, per synchronisation")
    for row in rows:
        drawn.add_row(
            row.wire, human_bytes(row.sent), human_bytes(row.saved), f"{row.seconds:.3g} s", f"{row.bits_per_second / 1e6:,.0f} Mbps"
        )
    return drawn


def table(plans: Sequence[Plan], link: str) -> Table:
    """The plans as a table; `link`: its bandwidth, and whose it is."""
    inside = ["inside/step"] if any(p.inside for p in plans) else []
    drawn = plain_table(
        *("method", "sent/step", "sent/sync (mean)", "sent", *inside),
        *("× less", "optimizer", "× less", "memory", "s/round", "s in all", "waiting"),
        title=f"at {link}",
    )
    for p in plans:
        drawn.add_row(
            p.method,
            human_bytes(p.sent / p.steps),
            human_bytes(p.sent / p.num_syncs),
            human_bytes(p.sent),
            *(human_bytes(p.inside) for _ in inside),
            f"{p.ddp_sent / p.sent:.2f}" if p.sent else "–",
            human_bytes(p.state),
            f"{p.adamw_state / p.state:.2f}",
            human_bytes(p.memory),
            f"{p.seconds / p.steps * p.round_steps:.4g}",
            f"{p.seconds:.4g}",
            f"{p.link_seconds / p.seconds:.1%}",
        )
    return drawn


def parser() -> RecipeParser:
    """The options of `plan`; every other one is a setting of the recipe."""
    p = RecipeParser(
        "lordo plan",
        "What every method would send, hold and take. Any setting of the recipe may be given too (--workers 8).",
    )
    p.add_argument("--bandwidth", default="1Gbps", metavar="B,B", help="links to plan for (default: 1Gbps)")
    p.add_argument("--methods", metavar="A,B", help="methods to plan (default: all)")
    p.add_argument(
        "--shards", type=int, metavar="N", help="devices of a worker, each with its part of every weight (default: the recipe's)"
    )
    p.add_argument("--break-even", action="store_true", help="the bandwidth under which each wire format pays for its own compute")
    p.add_argument("--tflops", type=float, default=100.0, help="sustained 10¹² operations per second of one device (default: 100)")
    return p
