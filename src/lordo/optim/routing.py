"""Which weights are low-rank, and why: by module type, tying and shape, never by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lordo.optim.options import check_whole

# Prefixes that wrappers put before a parameter's name (torch.compile, DistributedDataParallel).
WRAPPER_PREFIXES = ("_orig_mod.", "module.")


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers add, so that wrapping changes neither matching nor saving."""
    for prefix in WRAPPER_PREFIXES:
        name = name.removeprefix(prefix).replace("." + prefix, ".")
    return name


def clean_names(names: Sequence[str]) -> list[str]:
    """All names cleaned, or as they are where two of them would become one."""
    clean = [clean_name(name) for name in names]
    return clean if len(set(clean)) == len(clean) else list(names)


def is_lowrank(shape: torch.Size | tuple[int, ...], rank: int | None) -> bool:
    """A weight is low-rank if it is a matrix whose smaller side is larger than the rank."""
    return rank is not None and len(shape) == 2 and rank < min(shape)


@dataclass(frozen=True)
class Route:
    """Where one parameter goes: its name, shape, rank (None: full-rank) and the reason."""

    name: str
    shape: tuple[int, ...]
    rank: int | None
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; printing them shows the table of what goes where and why.

    Attributes:
        routes: the route of every parameter of the model. in_ddp: whether the model averages gradients at every step by itself.
    """

    def __init__(self, groups: list[dict[str, Any]], routes: list[Route], *, in_ddp: bool) -> None:
        """Groups as torch optimizers take them, and what else is known of the model."""
        super().__init__(groups)
        self.routes, self.in_ddp = routes, in_ddp

    def table(self) -> str:
        """One line a parameter: name, shape, rank, reason; parameters that differ by layer number only share a line."""
        return routing_table(self.routes)

    __str__ = table


def param_groups(model: nn.Module, *, rank: int | None) -> ParamGroups:
    """Split a model's trainable parameters into a low-rank and a full-rank group.

    Full-rank are: embeddings, output heads (tied to an embedding, or a linear layer as wide as the vocabulary), anything that
    is not a matrix, and matrices whose smaller side is at most `rank`. Frozen parameters are left out.

    Args:
        model: any module; wrappers' prefixes (torch.compile, DDP) are dropped from the names.
        rank: r of the low-rank weights; None makes everything full-rank.

    Returns:
        Two groups (or one) of named parameters, ready for `LoRDO`; `print(groups)` shows the table.

    Raises:
        ValueError: rank below 1, or a model without trainable parameters.
    """
    if rank is not None:
        check_whole("rank", rank, hint=", or None for full-rank only")
    routes: list[Route] = []
    lowrank: list[tuple[str, Tensor]] = []
    fullrank: list[tuple[str, Tensor]] = []
    for name, parameter, reason in _reasons(model, rank):
        route = Route(name, tuple(parameter.shape), rank if reason == "matrix" else None, reason)
        routes.append(route)
        if reason == "frozen":
            continue
        (lowrank if route.rank else fullrank).append((name, parameter))
    if not lowrank and not fullrank:
        raise ValueError("the model has no parameter with requires_grad=True: nothing to optimize")
    groups: list[dict[str, Any]] = [{"params": lowrank, "rank": rank}] if lowrank else []
    if fullrank:
        groups.append({"params": fullrank, "rank": None})
    return ParamGroups(groups, routes, in_ddp=isinstance(model, nn.parallel.DistributedDataParallel))


def _reasons(model: nn.Module, rank: int | None) -> Iterator[tuple[str, Tensor, str]]:
    """Every parameter once, with the reason of its route; "matrix" is the low-rank one."""
    by_type = _vocabulary_weights(model)
    names, parameters = zip(*model.named_parameters(), strict=True) if any(True for _ in model.parameters()) else ((), ())
    for name, parameter in zip(clean_names(names), parameters, strict=True):  # a tied weight is listed once
        yield name, parameter, by_type.get(parameter) or _reason_of_shape(parameter, rank)


def _reason_of_shape(parameter: Tensor, rank: int | None) -> str:
    if not parameter.requires_grad:
        return "frozen"
    if parameter.ndim != 2:
        kinds = {0: "scalar", 1: "vector", 3: "3-D tensor (such as stacked experts): only a matrix has a basis"}
        kind = kinds.get(parameter.ndim, f"{parameter.ndim}-D tensor")
        return f"full-rank: {kind}"
    if rank is None:
        return "full-rank: rank is None"
    if min(parameter.shape) <= rank:
        return f"full-rank: smaller side {min(parameter.shape)} <= rank {rank}"
    return "matrix"


def _vocabulary_weights(model: nn.Module) -> dict[Tensor, str]:
    """Embeddings, and the linear layers that turn hidden states back into vocabulary entries."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    reasons = {m.weight: "full-rank: embedding" for m in embeddings if m.weight.requires_grad}
    vocabularies = {m.num_embeddings for m in embeddings}
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    tied = [m for m in linears if m.weight in reasons]
    if head is None and not tied:  # no head is known: the last linear layer as wide as a vocabulary, since layers come before it
        head = next((m for m in reversed(linears) if m.out_features in vocabularies and m.out_features != m.in_features), None)
    for module in linears:
        if module.weight in reasons:
            reasons[module.weight] = "full-rank: embedding tied to the output head"
        elif module is head:
            reasons[module.weight] = "full-rank: output head"
    return reasons


def routing_table(routes: list[Route]) -> str:
    """The routes as aligned text, parameters of equal shape and reason in different layers folded into one line."""
    folded: dict[tuple[str, tuple[int, ...], str], list[Route]] = {}
    for route in routes:
        pattern = ".".join("*" if part.isdigit() else part for part in route.name.split("."))
        folded.setdefault((pattern, route.shape, route.reason), []).append(route)
    rows = [("parameter", "count", "shape", "rank", "why")]
    for (pattern, shape, reason), members in folded.items():
        sides = "×".join(map(str, shape)) or "scalar"
        rows.append((pattern, str(len(members)), sides, str(members[0].rank or "full"), reason))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows)
