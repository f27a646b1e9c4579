"""Time of one optimizer step beside AdamW, LDAdam and GaLore, and beside the least that such a step can take on this machine.

    python benchmarks/step.py [--preset 125m] [--layers N] [--repeats 9] [--threads N] [--device cpu] [--round] [--save]

One worker, float32, gradients given (no model is run), rank = smaller side / 8. One step of each contestant is timed in turn, again and
again, so that whatever else the machine does falls on all of them; the table shows medians and ratios. Steps of LoRDO are without a
synchronisation (K is out of reach), those of GaLore without its SVD. galore-torch takes part where it can be imported
(`pip install --no-deps galore-torch bitsandbytes`).

The floor: the products that the step needs (QᵀX and the lift, two for each matrix), measured by themselves, and the bytes that must move
at the machine's copy bandwidth, measured too. `--round` also times forward and backward of a model of these layers (it needs
transformers), and holds a refresh of all bases against a round of K = 32 steps.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from measure import PRESETS, about, interleaved, matrices_of, median, options_of, save

import lordo
from lordo.lowrank import canonical, leading_subspace

FOREACH, FUSED = "AdamW(foreach=True)", "AdamW(fused=True)"
LORDO, WITHOUT, SMALL = "LoRDO", "LoRDO(error_feedback=False)", "LoRDO(error_dtype='int8', moment_dtype='bfloat16')"
LDADAM, GALORE, GALORE_TORCH = "LDAdam (row ldadam)", "GaLore (row galore), no SVD", "galore-torch, no SVD"
REFRESH, FIRST, LIFT, COPY = "basis refresh of all matrices", "products QᵀX", "products Q·d", "copy of all weights"
NEVER, ROUND = 10**9, 32


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = matrices_of(options.preset, options.layers)
    rank = min(shapes[0]) // 8
    contestants = build(shapes, rank, options.device)
    if options.round:
        contestants["forward and backward, 1 sequence of 512"] = model_step(options.preset, options.layers, options.device)
    seconds = interleaved(contestants, repeats=options.repeats, device=options.device)
    layers = options.layers or PRESETS[options.preset][0]
    result = about(options.device) | {
        "shapes": f"{layers} layers of the {options.preset} model",
        "parameters": sum(m * n for m, n in shapes),
        "rank": rank,
        "repeats": options.repeats,
        "seconds": seconds,
        "floor": floors(shapes, rank, seconds),
    }
    show(result)
    if options.save:
        save(f"step-{options.preset}", result)


def parse() -> argparse.Namespace:
    parser = options_of(__doc__, layers=None, repeats=9, repeated="steps of each contestant")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--round", action="store_true", help="hold the refresh against a round of steps of a model")
    return parser.parse_args()


def build(shapes: list[tuple[int, int]], rank: int, device: str) -> dict[str, Callable[[], object]]:
    """What is timed, by name. All contestants share weights and gradients: a step changes numbers, not costs."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(0.02 * torch.randn(shape, generator=draw).to(device)) for shape in shapes]
    for p in weights:
        p.grad = 1e-3 * torch.randn(p.shape, generator=draw).to(device)

    def started(method: str, **settings: Any) -> lordo.DistributedOptimizer:
        optimizer = lordo.DistributedOptimizer(weights, method, lr=1e-5, rank=rank, **settings)
        optimizer.step()  # the first step computes the first bases
        return optimizer

    exact = started("lordo", sync_every=NEVER, omega=0.97)
    found = {
        FOREACH: torch.optim.AdamW(weights, lr=1e-5, foreach=True).step,
        FUSED: torch.optim.AdamW(weights, lr=1e-5, fused=True).step,
        LORDO: exact.step,
        WITHOUT: started("lordo", sync_every=NEVER, omega=0.97, error_feedback=False).step,
        SMALL: started("lordo", sync_every=NEVER, omega=0.97, error_dtype="int8", moment_dtype="bfloat16").step,
        LDADAM: started("ldadam").step,
        GALORE: started("galore", basis_every=NEVER, basis="subspace").step,
        **galore_torch(weights, rank),
        REFRESH: lambda: refresh(exact),
        **rates(exact),
    }
    return found


def galore_torch(weights: list[torch.nn.Parameter], rank: int) -> dict[str, Callable[[], object]]:
    """The published GaLore, if it is installed."""
    try:
        from galore_torch import GaLoreAdamW
    except ImportError:
        return {}
    group = {"params": weights, "rank": rank, "update_proj_gap": NEVER, "scale": 0.25, "proj_type": "std"}
    optimizer = GaLoreAdamW([group], lr=1e-5, no_deprecation_warning=True)
    optimizer.step()  # the SVD
    return {GALORE_TORCH: optimizer.step}


def refresh(optimizer: lordo.DistributedOptimizer) -> None:
    """New bases from matrices of full rank (here the gradients), as a synchronisation computes them; installed at once."""
    for p, state in optimizer.state.items():
        new = leading_subspace(canonical(p.grad), state["basis"])
        assert new is not None
        optimizer.set_basis(p, new)


def rates(optimizer: lordo.DistributedOptimizer) -> dict[str, Callable[[], object]]:
    """The products of a step by themselves, and a copy of all weights: of what the floor is made."""
    matrices = [(canonical(p.data), canonical(p.grad), state["basis"], state["exp_avg"]) for p, state in optimizer.state.items()]
    places = [torch.empty_like(u) for _, _, _, u in matrices]
    copies = [torch.empty_like(p) for p in optimizer.state]

    def first() -> None:
        for (_, X, Q, _), g in zip(matrices, places, strict=True):
            torch.mm(Q.mT, X, out=g)

    def lift() -> None:
        for W, _, Q, u in matrices:
            W.addmm_(Q, u, alpha=-1e-9)

    def copy() -> None:
        for p, target in zip(optimizer.state, copies, strict=True):
            target.copy_(p.data)

    return {FIRST: torch.no_grad()(first), LIFT: torch.no_grad()(lift), COPY: torch.no_grad()(copy)}


def floors(shapes: list[tuple[int, int]], rank: int, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Least seconds of a step: both products, and W, G (and S) and what has the shape of a moment (u, v, and h) read and written once."""
    full = 4 * sum(m * n for m, n in shapes)
    moment = 4 * sum(rank * max(shape) for shape in shapes)
    bandwidth = 2 * full / median(seconds, COPY)
    products = median(seconds, FIRST) + median(seconds, LIFT)
    return {
        LORDO: products + (5 * full + 6 * moment) / bandwidth,
        WITHOUT: products + (3 * full + 4 * moment) / bandwidth,
    }


def model_step(preset: str, layers: int | None, device: str) -> Callable[[], object]:
    """Forward and backward of a Llama of these layers, without its embedding's vocabulary (256 entries), one sequence of 512 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    all_layers, width, mlp = PRESETS[preset]
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers or all_layers, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).to(device)
    tokens = torch.randint(256, (1, 512), device=device)

    def step() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    return step


def show(result: dict[str, Any]) -> None:
    seconds, floor = result["seconds"], result["floor"]
    print(f"{result['machine']}, {result['threads']} threads, torch {result['torch']}")
    print(f"{result['shapes']}: {result['parameters'] / 1e6:.1f} M parameters, float32, rank {result['rank']}\n")
    against = {"× foreach": FOREACH, "× LDAdam": LDADAM, "× GaLore": GALORE, "× its code": GALORE_TORCH}
    heads = "".join(f"{head:>11}" for head in against)
    print(f"{'step':<54}{'median ms':>10}{'fastest':>9}{'slowest':>9}{heads}{'× floor':>9}")
    for name, each in seconds.items():
        own = median(seconds, name)
        cells = [f"{own / median(seconds, other):.2f}" if other in seconds else "" for other in against.values()]
        cells.append(f"{own / floor[name]:.2f}" if name in floor else "")
        spread = f"{1e3 * own:>10.1f}{1e3 * min(each):>9.1f}{1e3 * max(each):>9.1f}"
        print(f"{name:<54}{spread}{''.join(f'{cell:>11}' for cell in cells[:-1])}{cells[-1]:>9}")
    full = 4 * result["parameters"]
    print(f"\ncopy bandwidth {2 * full / median(seconds, COPY) / 1e9:.1f} GB/s (read and written)")
    operations = 2 * result["parameters"] * result["rank"]
    rate = 2 * operations / (median(seconds, FIRST) + median(seconds, LIFT)) / 1e9
    print(
        f"products with Q {rate:.0f} GFLOP/s; floor {1e3 * floor[LORDO]:.1f} ms with error feedback, {1e3 * floor[WITHOUT]:.1f} ms without"
    )
    passes = [name for name in seconds if name.startswith("forward")]
    if passes:
        model = median(seconds, passes[0])
        whole = ROUND * (model + median(seconds, LORDO))
        print(f"a refresh is {median(seconds, REFRESH) / whole:.1%} of a round of {ROUND} steps, forward and backward included")
        print(f"the step is {median(seconds, LORDO) / (model + median(seconds, LORDO)):.1%} of a whole training step")


if __name__ == "__main__":
    main()
