"""Training over a link that is really slow: four workers in four network namespaces, each behind a shaped link.

    sudo python benchmarks/slow_link.py [--bandwidth 10,100,1000] [--delay 0] [--rounds 3] [--contestants ddp-adamw,lordo-int4] [--save]

Needs Linux, root and iproute2 (`ip`, and `tc` with the tbf qdisc); see shaped_network.py. A worker neither sends nor receives faster
than the link. The recipe is tiny.toml with K = 32. Two things are measured:

- on the link, over some rounds: tokens/s, the share of time spent waiting, bytes by the interface's own counter beside those the run
  counted, and how far the seconds are from what `lordo plan` makes of that compute (it knows no delay);
- without a link, over all steps in one process: perplexity. What is averaged does not depend on the link, so one curve serves all of
  them. Perplexity after equal time reads it at the step that a contestant reaches on the link in the time the fastest one needs for all
  steps (the learning rate has not fallen yet there).

With --folder what was measured is kept and not measured again, so that an interrupted benchmark continues where it was.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from shaped_network import DEVICE, address, bytes_out, namespaces

from lordo.trainer.link import load_of
from lordo.trainer.prepared import outline
from lordo.trainer.recipe import load
from lordo.trainer.summary import environment

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RECIPE = ROOT / "recipes" / "tiny.toml"
WORKERS, PORT = 4, 29533
K, OVERLAP = 32, 2

LORDO = {"method.name": '"lordo"', "method.lr": "3e-3", "method.rank": "16", "method.sync_every": str(K)}
CONTESTANTS = {
    "ddp-adamw": {"method.name": '"ddp-adamw"', "method.lr": "1e-3"},
    "diloco": {"method.name": '"diloco"', "method.lr": "5e-4", "method.sync_every": str(K)},
    "lordo-float32": LORDO,
    "lordo-int8": {**LORDO, "method.sync_wire": '"int8"'},
    "lordo-int4": {**LORDO, "method.sync_wire": '"int4"'},
    "lordo-int4-overlap": {**LORDO, "method.sync_wire": '"int4"', "method.sync_overlap": str(OVERLAP)},
}
HAVE_NO_RANK = ("ddp-adamw", "diloco")


@dataclass(frozen=True)
class OnLink:
    """What was measured of one contestant on one link."""

    contestant: str
    mbps: float
    delay_ms: float
    steps: int
    tokens_per_second: float
    waiting: float
    counted: int
    on_interface: float
    seconds: float
    planned_seconds: float


def main() -> None:
    options = parse()
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        sys.exit("slow_link.py needs root and iproute2 (ip, tc): run it as root on Linux")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted"))  # so that the namespaces go away then too
    contestants = options.contestants.split(",")
    for name in contestants:
        if name not in CONTESTANTS:
            sys.exit(f"unknown contestant '{name}' (choices: {', '.join(CONTESTANTS)})")
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        measured = []
        for mbps in map(float, options.bandwidth.split(",")):
            with namespaces(WORKERS, mbps, options.delay) as places:
                for name in contestants:
                    measured.append(on_link(name, options, mbps, places, folder))
                    print(on_link_line(measured[-1]), flush=True)
        curves = {name: perplexities(name, options.steps, folder) for name in contestants} if options.steps else {}
    for line in quality_lines(measured, curves, options.steps):
        print(line)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        result = {"environment": environment(), "on_link": [asdict(each) for each in measured], "perplexity": curves}
        name = f"slow-link-{options.delay:g}ms.json" if options.delay else "slow-link.json"
        (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")


# -- runs


def command(name: str, steps: int, folder: Path, label: str, more: dict[str, str]) -> list[str]:
    """`lordo train` of a contestant, cut to some steps."""
    given = {"name": f'"{label}"', "output": f'"{folder}"', "train.steps": str(steps), "train.warmup_steps": str(min(20, steps))}
    given |= {"train.eval_every": str(steps), **CONTESTANTS[name], **more}
    options = [word for key, value in given.items() for word in (f"--{key}", value)]
    return [sys.executable, "-m", "lordo", "train", str(recipe_of(name, folder)), *options]


def recipe_of(name: str, folder: Path) -> Path:
    """tiny.toml without the settings that the contestant's method does not have."""
    path = folder / f"{name}.toml"
    lines = RECIPE.read_text(encoding="utf-8").split("[compare]")[0].splitlines()
    unknown = ("rank =", "sync_every =") if name in HAVE_NO_RANK else ()
    path.write_text("\n".join(text for text in lines if not text.startswith(unknown)) + "\n", encoding="utf-8")
    return path


def perplexities(name: str, steps: int, folder: Path) -> dict[int, float]:
    """Perplexity after some numbers of steps, trained in one process."""
    label = f"curve-{name}-{steps}"
    if not (folder / label / "summary.json").exists():
        words = command(name, steps, folder, label, {"train.eval_every": "10", "train.eval_sequences": "128"})
        subprocess.run(words, check=True, capture_output=True, cwd=ROOT)
    lines = (folder / label / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(text) for text in lines]
    return {record["step"]: record["perplexity"] for record in records if record.get("perplexity") is not None}


def on_link(name: str, options: argparse.Namespace, mbps: float, places: list[str], folder: Path) -> OnLink:
    """Train some rounds over the shaped links, one process in each namespace."""
    steps = K * options.rounds if name != "ddp-adamw" else max(4, min(K, int(K * mbps / 100)))
    label = f"link-{name}-{mbps:g}-{options.delay:g}-{steps}"
    kept = folder / f"{label}.json"
    if kept.exists():
        return OnLink(**json.loads(kept.read_text(encoding="utf-8")))
    shutil.rmtree(folder / label, ignore_errors=True)
    words = command(name, steps, folder, label, {"train.threads": "1", "train.log_every": str(steps)})
    before = [bytes_out(place) for place in places]
    codes = launch(words, places, folder / f"{label}.log")
    if any(codes):
        sys.exit(f"{label}: the processes ended with {codes}\n{(folder / f'{label}.log').read_text()[-2000:]}")
    sent = [bytes_out(place) - start for place, start in zip(places, before, strict=True)]
    summary = json.loads((folder / label / "summary.json").read_text(encoding="utf-8"))
    seconds, waited = sum(summary["seconds"].values()), summary["seconds"]["communication"]
    shapes = outline(load(folder / label / "config.toml"))
    sends = load_of(shapes.method, shapes.weights, shapes.settings, steps=steps, num_workers=WORKERS)
    busy = seconds - waited
    one = OnLink(
        contestant=name,
        mbps=mbps,
        delay_ms=options.delay,
        steps=steps,
        tokens_per_second=summary["tokens"] / seconds,
        waiting=waited / seconds,
        counted=sum(summary["bytes_sent"].values()),
        on_interface=sum(sent) / WORKERS,
        seconds=seconds,
        planned_seconds=busy + sends.waiting_seconds(mbps * 1e6, busy / steps),
    )
    kept.write_text(json.dumps(asdict(one)), encoding="utf-8")
    return one


def launch(words: list[str], places: list[str], log: Path) -> list[int]:
    """One process in each namespace, all in one group; their exit codes. The first one's output goes into the log."""
    shared = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
    shared |= {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    processes = []
    with log.open("w", encoding="utf-8") as file:
        for rank, place in enumerate(places):
            own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = file if rank == 0 else subprocess.DEVNULL
            inside = ["ip", "netns", "exec", place, *words]
            processes.append(subprocess.Popen(inside, env=own, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True))
    try:
        return [process.wait(timeout=1800) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


# -- the table


def on_link_line(one: OnLink) -> str:
    """One contestant on one link, as a line."""
    return (
        f"{one.mbps:6g} Mbit/s  {one.contestant:18} {one.tokens_per_second:8,.0f} tokens/s  waiting {one.waiting:6.1%}  "
        f"counted {one.counted / 1e6:8.3f} MB, interface {one.on_interface / 1e6:8.3f} MB ({one.on_interface / one.counted - 1:+.1%})  "
        f"seconds {one.seconds:7.2f}, planned {one.planned_seconds:7.2f} ({one.planned_seconds / one.seconds - 1:+.1%})"
    )


def quality_lines(measured: list[OnLink], curves: dict[str, dict[int, float]], steps: int) -> list[str]:
    """Perplexity of each contestant after all steps, and after the seconds that the fastest one needs for them."""
    lines = []
    for one in measured if curves else ():
        rates = {each.contestant: each.steps / each.seconds for each in measured if each.mbps == one.mbps}
        budget, curve = steps / max(rates.values()), curves[one.contestant]
        reached = max((step for step in curve if step <= rates[one.contestant] * budget * 1.0001), default=None)
        at_time = "nothing yet" if reached is None else f"{curve[reached]:.3f} (step {reached})"
        lines.append(
            f"{one.mbps:6g} Mbit/s  {one.contestant:18} perplexity after {steps} steps {curve[steps]:.3f}, after {budget:.0f} s {at_time}"
        )
    return lines


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--bandwidth", default="10,100,1000", help="links in Mbit/s (default: 10,100,1000)")
    p.add_argument("--delay", type=float, default=0, help="one-way delay in ms (default: 0)")
    p.add_argument("--rounds", type=int, default=3, help=f"rounds of {K} steps on each link (default: 3)")
    p.add_argument("--contestants", default=",".join(CONTESTANTS), help=f"of {', '.join(CONTESTANTS)} (default: all)")
    p.add_argument("--steps", type=int, default=400, help="steps of the perplexity curves (default: 400; 0 leaves them out)")
    p.add_argument("--folder", type=Path, help="keep what was measured here (default: a temporary folder)")
    p.add_argument("--save", action="store_true", help="write benchmarks/results/slow-link.json")
    return p.parse_args()


if __name__ == "__main__":
    main()
