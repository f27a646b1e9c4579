"""Time of one optimizer step on the 125M shapes, beside torch's AdamW.

    python benchmarks/step.py [--layers 12] [--repeats 15] [--threads N] [--device cpu] [--embedding] [--save]

One worker, float32, gradients given (no model is run). Of each contestant one step is timed in turn, again and again, so that
whatever else the machine does falls on all of them; the table shows medians, the spread, and ratios to AdamW(foreach=True).
The LoRDO step is one without a synchronisation (K is out of reach); a refresh of all bases is timed by itself, as the part of a
synchronisation that computes. `--save` writes the numbers to benchmarks/results/step-MACHINE.json.
"""

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lordo
from lordo.lowrank import canonical, leading_subspace

RESULTS = Path(__file__).parent / "results"
BASELINE = "AdamW(foreach=True)"
RANK, VOCABULARY, NEVER = 96, 49152, 10**9


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = shapes_125m(options.layers, embedding=options.embedding)
    contestants = build(shapes, options.device)
    seconds = measure(contestants, options.repeats, options.device)
    result = {
        "machine": machine(options.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lordo": lordo.__version__,
        "shapes": f"{options.layers} layers of width 768, MLP 2048" + (", embedding 49152" if options.embedding else ""),
        "parameters": sum(m * n for m, n in shapes),
        "repeats": options.repeats,
        "seconds": seconds,
    }
    show(result)
    if options.save:
        path = RESULTS / f"step-{re.sub(r'[^a-z0-9]+', '-', result['machine'].lower()).strip('-')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nsaved as {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each contestant (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--embedding", action="store_true", help="add the embedding, 49152 x 768, which is full-rank")
    parser.add_argument("--save", action="store_true", help="write the result into benchmarks/results/")
    return parser.parse_args()


def shapes_125m(layers: int, *, embedding: bool) -> list[tuple[int, int]]:
    """q, k, v, o; gate, up, down of each layer; and the embedding."""
    layer = [(768, 768)] * 4 + [(2048, 768)] * 2 + [(768, 2048)]
    return layer * layers + [(VOCABULARY, 768)] * embedding


def build(shapes: list[tuple[int, int]], device: str) -> dict[str, Callable[[], object]]:
    """What is timed, by name. All contestants share weights and gradients: a step changes numbers, not costs."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(0.02 * torch.randn(shape, generator=draw).to(device)) for shape in shapes]
    for p in weights:
        p.grad = 1e-3 * torch.randn(p.shape, generator=draw).to(device)

    matrices, embeddings = [p for p in weights if p.shape[0] < VOCABULARY], [p for p in weights if p.shape[0] == VOCABULARY]

    def lordo_optimizer(*, error_feedback: bool) -> lordo.LoRDO:
        """Rank is an eighth of the smaller side; an embedding is full-rank."""
        groups = [{"params": matrices}] + [{"params": embeddings, "rank": None}] * bool(embeddings)
        optimizer = lordo.LoRDO(groups, lr=1e-5, rank=RANK, sync_every=NEVER, omega=0.97, error_feedback=error_feedback)
        optimizer.step()  # the first step computes the first bases
        return optimizer

    with_error = lordo_optimizer(error_feedback=True)
    return {
        BASELINE: torch.optim.AdamW(weights, lr=1e-5, foreach=True).step,
        "AdamW(fused=True)": torch.optim.AdamW(weights, lr=1e-5, fused=True).step,
        "LoRDO": with_error.step,
        "LoRDO(error_feedback=False)": lordo_optimizer(error_feedback=False).step,
        "basis refresh of all matrices": lambda: refresh(with_error),
    }


def refresh(optimizer: lordo.LoRDO) -> None:
    """New bases from matrices of full rank (here the gradients), as a synchronisation computes them; installed at once."""
    for p, state in optimizer.state.items():
        if "basis" in state:
            new = leading_subspace(canonical(p.grad), state["basis"])
            optimizer.set_basis(p, new)


def measure(contestants: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each call, contestants taking turns; one round before the first is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(repeats + 1):
        for name, call in contestants.items():
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def machine(device: str) -> str:
    """Name of the GPU, or of the CPU as Linux tells it."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def show(result: dict) -> None:
    print(f"{result['machine']}, {result['threads']} threads, torch {result['torch']}")
    print(f"{result['shapes']}: {result['parameters'] / 1e6:.1f} M parameters, float32, rank = side/8\n")
    baseline = statistics.median(result["seconds"][BASELINE])
    print(f"{'step':<32}{'median ms':>10}{'fastest':>10}{'slowest':>10}{'ratio':>8}")
    for name, seconds in result["seconds"].items():
        median = statistics.median(seconds)
        print(f"{name:<32}{1e3 * median:>10.1f}{1e3 * min(seconds):>10.1f}{1e3 * max(seconds):>10.1f}{median / baseline:>8.2f}")


if __name__ == "__main__":
    main()
