"""Optimizer bytes on the device that trains, and the most that a step and a synchronisation allocate besides, against AdamW.

    python benchmarks/memory.py [--presets 16m,125m,720m] [--device cpu] [--save]

State is counted from the tensors of real optimizers (built without data, on torch's meta device: sizes are all that matters), rank =
smaller side / 8, everything on the device counted. Two figures each: the low-rank matrices alone, and the whole model, whose tied
embedding (49,152 entries, full-rank) keeps two full moments. Peaks are measured on one layer of each model, with two workers in this
process: what operations allocate at once, beside weights, gradients and state.
"""

import argparse
from typing import Any

import torch
from measure import PRESETS, VOCABULARY, PeakAllocation, about, matrices_of, save

import lordo
from lordo.accounting import adamw_state_bytes, measured_state_bytes, on_device, weights_of

ON_HOST = {"anchor_device": "cpu"}
COMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "GaLore": ("galore", {}),
    "LDAdam": ("ldadam", {}),
    "LoRDO": ("lordo", {}),
    "LoRDO, anchor in host memory": ("lordo", ON_HOST),
    "… and bfloat16 error": ("lordo", {**ON_HOST, "error_dtype": "bfloat16"}),
    "… and int8 error": ("lordo", {**ON_HOST, "error_dtype": "int8"}),
    "… int8 error, bfloat16 moments": ("lordo", {**ON_HOST, "error_dtype": "int8", "moment_dtype": "bfloat16"}),
    "… int6 error, bfloat16 moments": ("lordo", {**ON_HOST, "error_dtype": "int6", "moment_dtype": "bfloat16"}),
    "anchor in host memory, no error": ("lordo", {**ON_HOST, "error_feedback": False}),
    "… and bfloat16 moments, no error": ("lordo", {**ON_HOST, "error_feedback": False, "moment_dtype": "bfloat16"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--presets", default=",".join(PRESETS), help="whose shapes (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where peaks are measured, cpu or cuda (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write the result into benchmarks/results/")
    options = parser.parse_args()
    result = about(options.device) | {"presets": {}}
    for preset in options.presets.split(","):
        result["presets"][preset] = {"held": held(preset), "peaks": peaks(preset, options.device)}
    show(result)
    if options.save:
        save("memory", result)


def held(preset: str) -> dict[str, dict[str, int]]:
    """Bytes of state per combination: of the matrices, and of the whole model."""
    matrices = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in matrices_of(preset)]
    _, width, _ = PRESETS[preset]
    embedding = torch.nn.Parameter(torch.empty(VOCABULARY, width, device="meta"))
    found = {"AdamW": {"matrices": adamw_state_bytes(weights_of([{"params": matrices}]))}}
    found["AdamW"]["model"] = adamw_state_bytes(weights_of([{"params": [*matrices, embedding]}]))
    for name, (method, settings) in COMBINATIONS.items():
        found[name] = {}
        for part, rest in (("matrices", []), ("model", [{"params": [embedding], "rank": None}])):
            groups = [{"params": matrices, "rank": width // 8}, *rest]
            optimizer = lordo.DistributedOptimizer(groups, method, lr=1e-3, **settings)
            # on meta an anchor stays beside its weight; told apart here as on a device
            counted = measured_state_bytes(optimizer)
            if settings.get("anchor_device") == "cpu":
                counted.pop("anchor", None)
            found[name][part] = on_device(counted)
    return found


def peaks(preset: str, device: str) -> dict[str, dict[str, int]]:
    """Most bytes allocated at once by a step and by a synchronisation, and the bytes of the largest weight."""
    found = {}
    for name, (method, settings) in COMBINATIONS.items():
        if method == "lordo":
            found[name] = lordo.simulate(lambda workers, settings=settings: peak(preset, device, workers, settings), 2)[0]
    return found


def peak(preset: str, device: str, workers: Any, settings: dict[str, Any]) -> dict[str, int]:
    """The same for one combination, on one layer."""
    _, width, _ = PRESETS[preset]
    weights = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in matrices_of(preset, layers=1)]
    optimizer = lordo.LoRDO(weights, lr=1e-3, rank=width // 8, sync_every=2, workers=workers, **settings)
    seen = {}
    for step in range(1, 5):
        for p in weights:
            p.grad = torch.randn_like(p)
        if device == "cpu":
            with PeakAllocation() as counted:
                optimizer.step()
            most = counted.peak_bytes
        else:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            most = torch.cuda.max_memory_allocated() - before
        seen["sync" if step % 2 == 0 else "step"] = most
    return seen | {"largest weight": max(p.numel() * p.element_size() for p in weights)}


def show(result: dict[str, Any]) -> None:
    print(f"{result['machine']}, torch {result['torch']}; rank = smaller side / 8, float32 weights\n")
    for preset, found in result["presets"].items():
        adamw = found["held"]["AdamW"]
        print(f"{preset:<34}{'matrices':>12}{'× less':>8}{'model':>12}{'× less':>8}{'peak: step':>14}{'sync':>8}  × largest weight")
        for name, held_bytes in found["held"].items():
            cells = "".join(f"{held_bytes[part] / 1e6:>9.1f} MB{adamw[part] / held_bytes[part]:>8.2f}" for part in ("matrices", "model"))
            most = found["peaks"].get(name)
            ratios = (
                "".join(f"{most[kind] / most['largest weight']:>{width}.2f}" for kind, width in (("step", 13), ("sync", 7))) if most else ""
            )
            print(f"{name:<34}{cells}{ratios}")
        print()


if __name__ == "__main__":
    main()
