"""What of a worker is saved, and a worker put back to where it was saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lordo.optimizer import DistributedOptimizer
from lordo.sync import Comm
from lordo.sync.rules import SyncReport
from lordo.trainer.checkpoint import STATE, WEIGHTS, Part, Snapshot
from lordo.trainer.data import stable_hash
from lordo.trainer.eras import Era, from_json, sent_since, to_json
from lordo.trainer.measure import Round, SyncMeasures
from lordo.trainer.merge import merged_state, merged_weights

# Counters of parameter groups that add up over workers: those of workers that leave pass to worker 0.
_ADDED_UP = ("skipped_steps", "left_out")


@dataclass
class Place:
    """Where a run stands, beside weights and optimizer state.

    Attributes:
        step: steps taken. eras: earlier stretches with another number of workers. start: the step after which the present one began.
        moved: what collectives had moved then, per tag. ahead: blocks read since then besides those of the steps: thrown away.
        seconds: of training so far. loss, gradient_norm: of the last step, on this worker.
        first_bases: of the low-rank weights, sorted by name. round: what is measured of the present round of steps.
        losses: this worker's last ones, if spikes are looked for. spikes: steps it left out for them.
    """

    step: int = 0
    eras: tuple[Era, ...] = ()
    start: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    ahead: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    gradient_norm: float = float("nan")
    first_bases: tuple[Tensor, ...] = ()
    round: Round | None = None
    losses: list[float] = field(default_factory=list)
    spikes: int = 0

    def position(self, step: int, sequences: int) -> int:
        """Blocks that this worker has read in the present stretch before a step, `sequences` at each."""
        return (step - 1 - self.start) * sequences + self.ahead


def snapshot(place: Place, model: PreTrainedModel, optimizer: DistributedOptimizer, *, sequences: int, for_all: bool = False) -> Snapshot:
    """A copy, in CPU memory, of all that this worker needs to go on to the bit.

    Args:
        place: where it stands. model, optimizer: of this worker. sequences: blocks it reads at each step.
        for_all: it is to be the whole checkpoint, from which any number of workers can go on.
    """
    workers = optimizer.workers
    state = {f"optimizer/{name}": tensor for name, tensor in _optimizer_state(optimizer)}
    state |= {f"first_basis/{i}": basis for i, basis in enumerate(place.first_bases)}
    if place.round is not None:
        state["round/start"] = place.round.start
    state["random/cpu"] = torch.get_rng_state()
    device = next(model.parameters()).device
    if device.type == "cuda":
        state["random/cuda"] = torch.cuda.get_rng_state(device)
    facts = {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "eras": to_json(place.eras),
        "start": place.start,
        "position": (place.step - place.start) * sequences + place.ahead,
        "ahead": place.ahead,
        "sequences": sequences,
        "moved": dict(workers.moved),
        "moved_at_start": place.moved,
        "sent": sent_since(workers, place.moved),
        "timed": dict(workers.seconds),
        "seconds": place.seconds,
        "report": {key: value for key, value in asdict(optimizer.report).items() if key != "left_out"},
        "round": {"moved": place.round.moved, "latest": place.round.latest and asdict(place.round.latest)} if place.round else None,
        "losses": place.losses,
        "spikes": place.spikes,
        "loss": place.loss,
        "gradient_norm": place.gradient_norm,
    }
    worker, size = (0, 1) if for_all else (workers.rank, workers.size)
    return Snapshot(place.step, worker, size, _copied(_weights(model)), _copied(state), facts)


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, a tied one once, and the buffers that are saved."""
    buffers = dict(model.named_buffers())
    return {**dict(model.named_parameters()), **{name: t for name, t in model.state_dict().items() if name in buffers}}


def _optimizer_state(optimizer: DistributedOptimizer) -> list[tuple[str, Tensor]]:
    return [(f"{name}.{key}", tensor) for name, p, _ in optimizer.named_members() for key, tensor in optimizer.state[p].items()]


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in tensors.items()}


def restore(parts: Sequence[Part], model: PreTrainedModel, optimizer: DistributedOptimizer) -> Place:
    """Put a worker back to where a checkpoint was taken, or into its share of one of another number of workers.

    Args:
        parts: this worker's own, or those of all workers if there were more or fewer then. model, optimizer: built as for a new run.

    Returns:
        Where the run stands.
    """
    workers = optimizer.workers
    facts = parts[0].facts
    same = facts["workers"] == workers.size
    own = parts[0] if same else parts[workers.rank % len(parts)]
    weights = {name: own.tensor(WEIGHTS, name) for name in own.names(WEIGHTS)} if same else merged_weights(parts)
    with torch.no_grad():
        for name, tensor in _weights(model).items():
            tensor.copy_(weights[name])
    names = [name for name in own.names(STATE) if name.startswith("optimizer/")]
    state = {name: own.tensor(STATE, name) for name in names} if same else merged_state(parts, workers.rank)
    optimizer.load_state_dict(_state_dict(optimizer, state, own.facts["groups"] if same else _merged_groups(parts, workers)))
    optimizer.report = SyncReport(**_untupled(own.facts["report"]))
    _restore_random(own, model, as_saved=same or workers.rank < len(parts), worker=workers.rank)
    workers.moved = Counter(facts["moved"])
    eras, start, moved, ahead = from_json(facts["eras"]), facts["start"], facts["moved_at_start"], facts["ahead"]
    if same:
        workers.seconds.update(facts["timed"])
    elif facts["step"] > start:
        eras = (*eras, Era(facts["workers"], start, facts["step"], facts["sequences"], facts["sent"], ahead))
        start, moved, ahead = facts["step"], facts["moved"], 0
    return Place(
        step=facts["step"],
        eras=eras,
        start=start,
        moved=moved,
        ahead=ahead,
        seconds=facts["seconds"],
        loss=own.facts["loss"],
        gradient_norm=own.facts["gradient_norm"],
        first_bases=_first_bases(own, optimizer),
        round=_round(own) if same else None,
        losses=own.facts["losses"],
        spikes=own.facts["spikes"] if same else sum(parts[i].facts["spikes"] for i in _counted(parts, workers)),
    )


def _state_dict(optimizer: DistributedOptimizer, state: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """As `optimizer.load_state_dict` takes it."""
    ids = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    by_parameter: dict[int, dict[str, Tensor]] = {}
    names = {name: ids[id(p)] for name, p, _ in optimizer.named_members()}
    for full, tensor in state.items():
        name, _, key = full.removeprefix("optimizer/").rpartition(".")
        by_parameter.setdefault(names[name], {})[key] = tensor
    numbers = iter(range(len(ids)))
    return {
        "state": by_parameter,
        "param_groups": [
            {**_untupled(saved), "params": [next(numbers) for _ in own["params"]]}
            for saved, own in zip(groups, optimizer.param_groups, strict=True)
        ],
    }


def _untupled(group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where settings have tuples."""
    return {key: tuple(value) if isinstance(value, list) and key != "param_names" else value for key, value in group.items()}


def _merged_groups(parts: Sequence[Part], workers: Comm) -> list[dict[str, Any]]:
    """Groups for another number of workers: each keeps its own counts, new ones start from zero, worker 0 takes those of who leaves."""
    old, rank, counted = len(parts), workers.rank, _counted(parts, workers)
    groups = [dict(group) for group in parts[rank % old].facts["groups"]]
    for number, group in enumerate(groups):
        for counter in _ADDED_UP:
            group[counter] = sum(parts[worker].facts["groups"][number][counter] for worker in counted)
    return groups


def _counted(parts: Sequence[Part], workers: Comm) -> list[int]:
    """Numbers of the workers whose counts a worker goes on with."""
    own = [workers.rank] if workers.rank < len(parts) else []
    return own + list(range(workers.size, len(parts))) if workers.rank == 0 else own


def _restore_random(part: Part, model: PreTrainedModel, *, as_saved: bool, worker: int) -> None:
    """Put torch's generators back, or give a worker that is new its own."""
    if not as_saved:
        torch.manual_seed(stable_hash("new worker", part.facts["step"], worker) % 2**63)
        return
    torch.set_rng_state(part.tensor(STATE, "random/cpu").clone())
    device = next(model.parameters()).device
    if device.type == "cuda" and "random/cuda" in part.names(STATE):
        torch.cuda.set_rng_state(part.tensor(STATE, "random/cuda").clone(), device)


def _round(part: Part) -> Round | None:
    facts = part.facts["round"]
    if facts is None:
        return None
    latest = SyncMeasures(**facts["latest"]) if facts["latest"] else None
    return Round(part.tensor(STATE, "round/start").clone(), facts["moved"], latest)


def _first_bases(part: Part, optimizer: DistributedOptimizer) -> tuple[Tensor, ...]:
    bases = [optimizer.state[p]["basis"] for _, p, _ in optimizer.named_members() if "basis" in optimizer.state[p]]
    saved = {name for name in part.names(STATE) if name.startswith("first_basis/")}
    return tuple(part.tensor(STATE, f"first_basis/{i}").to(basis.device, copy=True) for i, basis in enumerate(bases) if saved)
