"""What the benchmarks share: fair timing, processes on this machine, the machine's own rates, its name, and where results are kept."""

import argparse
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lordo
from lordo.shards import local

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 49152

# layers, width, MLP of the paper's models
PRESETS = {"16m": (4, 256, 768), "125m": (12, 768, 2048), "720m": (12, 2048, 5632)}


def options_of(description: str, *, layers: int | None, repeats: int, repeated: str, preset: str = "125m") -> argparse.ArgumentParser:
    """The options that benchmarks on the shapes of a model have in common.

    Args:
        description: the benchmark's docstring. layers: by default, None for all. repeats: how often by default. repeated: what is.
        preset: by default.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default=preset, help="whose shapes (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=layers, help=f"layers of it (default: {layers or 'all'})")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"timed {repeated} (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the result into benchmarks/results/")
    return parser


def among_processes(measure: Callable[[argparse.Namespace], dict], options: argparse.Namespace, num_processes: int) -> dict:
    """What the first of some processes finds with `measure(options)`: forked, joined by gloo over loopback, one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (measure, options, num_processes, f"{folder}/meeting", f"{folder}/result")
        mp.start_processes(_work, args=arguments, nprocs=num_processes, start_method="fork")
        found: dict = torch.load(f"{folder}/result", weights_only=True)
    return found


def _work(rank: int, measure: Callable, options: argparse.Namespace, num_processes: int, meeting: str, result: str) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_processes)
    try:
        found = measure(options)
        if rank == 0:
            torch.save(found, result)
    finally:
        dist.destroy_process_group()


def slowest(call: Callable[[], object]) -> float:
    """Seconds from when all processes are there to when the last is done."""
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def matrices_of(preset: str, layers: int | None = None) -> list[tuple[int, int]]:
    """Shapes of the matrices that are low-rank: q, k, v, o; gate, up, down of each layer."""
    all_layers, width, mlp = PRESETS[preset]
    return ([(width, width)] * 4 + [(mlp, width)] * 2 + [(width, mlp)]) * (layers or all_layers)


def interleaved(contestants: Mapping[str, Callable[[], object]], *, repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each call, contestants taking turns, so that whatever else the machine does falls on all; a first round is not counted."""
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
    """Until an accelerator has done what it was told."""
    if device != "cpu":
        torch.accelerator.synchronize()


def median(seconds: Mapping[str, list[float]], name: str) -> float:
    """Median seconds of one contestant."""
    return statistics.median(seconds[name])


class PeakAllocation(TorchDispatchMode):
    """Most bytes alive at once that operations have allocated while it was on, what they use inside themselves left out."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation and look at what it returned."""
        result = func(*args, **(kwargs or {}))
        given = {local(t).untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and local(t).untyped_storage().data_ptr() not in given:
                storage = local(t).untyped_storage()
                self._alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result


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


def about(device: str) -> dict[str, Any]:
    """Versions and machine, so that a result can be placed."""
    versions = {"torch": torch.__version__, "lordo": lordo.__version__}
    return {"machine": machine(device), "device": device, "threads": torch.get_num_threads(), **versions}


def save(benchmark: str, result: dict[str, Any]) -> None:
    """Write a result to benchmarks/results/BENCHMARK-MACHINE.json."""
    name = re.sub(r"[^a-z0-9]+", "-", result["machine"].lower()).strip("-")
    path = RESULTS / f"{benchmark}-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nsaved as {path}")
