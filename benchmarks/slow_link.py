"""Training over a link that is really slow: four workers in four network namespaces, each behind a shaped link.

    sudo python benchmarks/slow_link.py [--bandwidth 10,100,1000] [--contestants ddp-adamw,lordo-int4] [--steps 400] [--save]

Needs Linux, root and iproute2 (`ip`, and `tc` with the tbf qdisc). Each worker has a veth pair to a bridge in a namespace of its own;
both ends of the pair are shaped, so that a worker neither sends nor receives faster than the link. The recipe is tiny.toml with K = 32.
Two things are measured:

- on the link, over two rounds: tokens/s, the share of time spent waiting, bytes by the interface's own counter beside those the run
  counted, and how far the seconds are from what `lordo plan` makes of that compute;
- without a link, over all steps in one process: perplexity. What is averaged does not depend on the link, so one curve serves all of
  them. Perplexity after equal time reads it at the step that a contestant reaches on the link in the time the fastest one so far needs
  for all steps (the learning rate has not fallen yet there).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lordo.trainer.link import load_of
from lordo.trainer.loop import outline
from lordo.trainer.recipe import load
from lordo.trainer.summary import environment

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RECIPE = ROOT / "recipes" / "tiny.toml"
WORKERS, PORT, MTU = 4, 29533, 9000  # jumbo frames: headers are 1 % of the bytes, not 5 %
K, ROUNDS = 32, 2

LORDO = {"method.name": '"lordo"', "method.lr": "3e-3", "method.rank": "16", "method.sync_every": str(K)}
OWN_LR = {"ddp-adamw": "1e-3", "diloco": "5e-4"}
CONTESTANTS = {
    **{name: {"method.name": f'"{name}"', "method.lr": lr} for name, lr in OWN_LR.items()},
    "lordo-float32": LORDO,
    "lordo-int8": {**LORDO, "method.sync_wire": '"int8"'},
    "lordo-int4": {**LORDO, "method.sync_wire": '"int4"', "method.sync_overlap": str(K // 2)},
}
CONTESTANTS["diloco"]["method.sync_every"] = str(K)


@dataclass(frozen=True)
class OnLink:
    """What was measured of one contestant on one link."""

    contestant: str
    mbps: float
    steps: int
    tokens_per_second: float
    waiting: float
    counted: int
    on_interface: float
    predicted_seconds: float
    seconds: float


def main() -> None:
    options = parse()
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        sys.exit("slow_link.py needs root and iproute2 (ip, tc): run it as root on Linux")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted"))  # so that the namespaces go away then too
    contestants = options.contestants.split(",")
    for name in contestants:
        if name not in CONTESTANTS:
            sys.exit(f"unknown contestant '{name}' (choices: {', '.join(CONTESTANTS)})")
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: perplexities(name, options.steps, Path(folder)) for name in contestants} if options.steps else {}
        measured = []
        for mbps in map(float, options.bandwidth.split(",")):
            with namespaces(mbps) as names:
                for name in contestants:
                    measured.append(on_link(name, mbps, names, Path(folder)))
                    print(line(measured[-1], curves, measured, options.steps), flush=True)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        result = {"environment": environment(), "on_link": [vars(each) for each in measured], "perplexity": curves}
        (RESULTS / "slow-link.json").write_text(json.dumps(result, indent=1) + "\n")


# -- the network


def sh(command: str, *, check: bool = True) -> str:
    """Run one command; its output."""
    return subprocess.run(command.split(), check=check, capture_output=True, text=True).stdout


@contextmanager
def namespaces(mbps: float):
    """One namespace for each worker and one for the bridge; gone at the end, whatever happens."""
    hub, names = f"lordo-{os.getpid()}-hub", [f"lordo-{os.getpid()}-{worker}" for worker in range(WORKERS)]
    try:
        sh(f"ip netns add {hub}")
        sh(f"ip -n {hub} link add bridge type bridge")
        sh(f"ip -n {hub} link set bridge up")
        for worker, name in enumerate(names):
            sh(f"ip netns add {name}")
            sh(f"ip -n {hub} link add port{worker} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {name}")
            sh(f"ip -n {hub} link set port{worker} master bridge up")
            sh(f"ip -n {name} addr add 10.77.0.{worker + 1}/24 dev eth0")
            for device in ("lo", "eth0"):
                sh(f"ip -n {name} link set {device} up")
            burst = max(int(mbps * 1e6 / 8 * 0.005), 16_000)  # five milliseconds of the link, and never less than a few packets
            for place, device in ((name, "eth0"), (hub, f"port{worker}")):
                sh(f"tc -n {place} qdisc add dev {device} root tbf rate {mbps}mbit burst {burst} latency 200ms")
        yield names
    finally:
        for name in (*names, hub):
            sh(f"ip netns del {name}", check=False)


def bytes_out(name: str) -> int:
    """What a worker's interface has sent so far."""
    return int(sh(f"ip netns exec {name} cat /sys/class/net/eth0/statistics/tx_bytes"))


# -- runs


def command(name: str, steps: int, folder: Path, label: str, **more: str) -> list[str]:
    """`lordo train` of a contestant, cut to some steps."""
    given = {"name": f'"{label}"', "output": f'"{folder}"', "train.steps": str(steps), "train.warmup_steps": str(min(20, steps))}
    given |= {"train.eval_every": str(steps), **CONTESTANTS[name], **more}
    return [
        sys.executable,
        "-m",
        "lordo",
        "train",
        str(recipe_of(name, folder)),
        *(w for k, v in given.items() for w in (f"--{k}", v)),
    ]


def recipe_of(name: str, folder: Path) -> Path:
    """tiny.toml without the settings that the contestant's method does not have."""
    path = folder / f"{name}.toml"
    lines = RECIPE.read_text(encoding="utf-8").split("[compare]")[0].splitlines()
    unknown = ("rank =", "sync_every =") if name in OWN_LR else ()
    path.write_text("\n".join(text for text in lines if not text.startswith(tuple(unknown))) + "\n", encoding="utf-8")
    return path


def perplexities(name: str, steps: int, folder: Path) -> dict[int, float]:
    """Perplexity after some numbers of steps, trained in one process."""
    words = command(name, steps, folder, f"curve-{name}", **{"train.eval_every": "10", "train.eval_sequences": "128"})
    subprocess.run(words, check=True, capture_output=True, cwd=ROOT)
    lines = (folder / f"curve-{name}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(text) for text in lines]
    curve = {record["step"]: record["perplexity"] for record in records if record.get("perplexity") is not None}
    print(f"{name}: perplexity {curve[steps]:.3f} after {steps} steps", flush=True)
    return curve


def on_link(name: str, mbps: float, names: list[str], folder: Path) -> OnLink:
    """Train some rounds over the shaped links, one process in each namespace."""
    steps = K * ROUNDS if name != "ddp-adamw" else max(4, min(K, int(K * mbps / 100)))
    label = f"link-{name}-{mbps:g}"
    before = [bytes_out(each) for each in names]
    processes = []
    for rank, place in enumerate(names):
        environment_ = {
            **os.environ,
            **{
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORKERS),
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": str(PORT),
            },
            **{"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        }
        words = [
            "ip",
            "netns",
            "exec",
            place,
            *command(name, steps, folder, label, **{"train.threads": "1", "train.log_every": str(steps)}),
        ]
        output = None if rank == 0 else subprocess.DEVNULL
        log = (folder / f"{label}.log").open("w") if output is None else output
        processes.append(subprocess.Popen(words, env=environment_, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True))
    try:
        codes = [process.wait(timeout=1800) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if any(codes):
        sys.exit(f"{label}: the processes ended with {codes}\n{(folder / f'{label}.log').read_text()[-2000:]}")
    sent = [bytes_out(each) - start for each, start in zip(names, before, strict=True)]
    summary = json.loads((folder / label / "summary.json").read_text(encoding="utf-8"))
    seconds, spent = sum(summary["seconds"].values()), summary["seconds"]
    shapes = outline(load(folder / label / "config.toml"))
    busy = seconds - spent["communication"]
    waiting = load_of(shapes.method, shapes.weights, shapes.settings, steps=steps, num_workers=WORKERS).waiting_seconds(
        mbps * 1e6, busy / steps
    )
    counted = sum(summary["bytes_sent"].values())
    return OnLink(
        contestant=name,
        mbps=mbps,
        steps=steps,
        tokens_per_second=summary["tokens"] / seconds,
        waiting=spent["communication"] / seconds,
        counted=counted,
        on_interface=sum(sent) / WORKERS,
        predicted_seconds=busy + waiting,
        seconds=seconds,
    )


# -- the table


def line(one: OnLink, curves: dict[str, dict[int, float]], measured: list[OnLink], steps: int) -> str:
    """One contestant on one link, as a line."""
    text = (
        f"{one.mbps:6g} Mbit/s  {one.contestant:14} {one.tokens_per_second:8,.0f} tokens/s  waiting {one.waiting:6.1%}  "
        f"counted {one.counted / 1e6:8.3f} MB, interface {one.on_interface / 1e6:8.3f} MB ({one.on_interface / one.counted - 1:+.1%})  "
        f"seconds {one.seconds:7.2f}, planned {one.predicted_seconds:7.2f} ({one.predicted_seconds / one.seconds - 1:+.1%})"
    )
    if not curves:
        return text
    rates = {each.contestant: each.steps / each.seconds for each in measured if each.mbps == one.mbps}
    budget = steps / max(rates.values())  # so far on this link
    reached = [step for step in curves[one.contestant] if step <= rates[one.contestant] * budget]
    at_time = f"{curves[one.contestant][max(reached)]:.3f} (step {max(reached)})" if reached else "none yet"
    return f"{text}  perplexity after equal tokens {curves[one.contestant][steps]:.3f}, after {budget:.0f} s {at_time}"


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--bandwidth", default="10,100,1000", help="links in Mbit/s (default: 10,100,1000)")
    p.add_argument("--contestants", default=",".join(CONTESTANTS), help=f"of {', '.join(CONTESTANTS)} (default: all)")
    p.add_argument("--steps", type=int, default=400, help="steps of the perplexity curves (default: 400; 0 leaves them out)")
    p.add_argument("--save", action="store_true", help="write benchmarks/results/slow-link.json")
    return p.parse_args()


if __name__ == "__main__":
    main()
