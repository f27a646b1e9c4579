"""What of a worker is saved, and a worker put back to where it was saved; of one device of it, where several share its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lordo.optimizer import DistributedOptimizer
from lordo.shards import cut_dim, local, state_cut
from lordo.sync import Comm
from lordo.sync.dtensors import as_dtensor, own_part
from lordo.sync.rules import SyncReport
from lordo.trainer.checkpoint import STATE, WEIGHTS, Part, Share, Snapshot
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


def share_of(workers: Comm) -> Share:
    """Which part of a checkpoint is this device's."""
    return Share(workers.rank, workers.size, workers.inside.rank, workers.inside.size)


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
    state |= _random_states(model, workers)
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
    share = Share(0, 1) if for_all else share_of(workers)
    return Snapshot(place.step, share, _copied(_weights(model)), _copied(state), facts, _cuts(model, optimizer))


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, a tied one once, and the buffers that are saved."""
    buffers = dict(model.named_buffers())
    return {**dict(model.named_parameters()), **{name: t for name, t in model.state_dict().items() if name in buffers}}


def _optimizer_state(optimizer: DistributedOptimizer) -> list[tuple[str, Tensor]]:
    return [(f"{name}.{key}", tensor) for name, p, _ in optimizer.named_members() for key, tensor in optimizer.state[p].items()]


def _cuts(model: PreTrainedModel, optimizer: DistributedOptimizer) -> dict[str, int]:
    """Along which side the devices of a worker share a tensor, by its name; those that they do not share are left out."""
    cuts: dict[str, int | None] = {name: cut_dim(tensor) for name, tensor in _weights(model).items()}
    for name, p, _ in optimizer.named_members():
        state = optimizer.state[p]
        cuts |= {f"optimizer/{name}.{key}": state_cut(key, p, lowrank="basis" in state) for key in state}
    cuts |= {f"first_basis/{i}": state_cut("basis", p, lowrank=True) for i, p in enumerate(_with_bases(optimizer))}
    return {name: dim for name, dim in cuts.items() if dim is not None}


def _with_bases(optimizer: DistributedOptimizer) -> list[Tensor]:
    """The low-rank weights, sorted by name."""
    return [p for _, p, _ in optimizer.named_members() if "basis" in optimizer.state[p]]


def _random_states(model: PreTrainedModel, workers: Comm) -> dict[str, Tensor]:
    """The states of torch's generators: (replicas, …), since of those one alone writes."""
    states = {"random/cpu": torch.get_rng_state()}
    device, replicas = next(model.parameters()).device, workers.inside.replicas
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state(device)
    of_each = [states] if replicas is None else replicas.gather(states)
    return {name: torch.stack([each[name] for each in of_each]) for name in states}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(t.detach()).to("cpu", copy=True, memory_format=torch.contiguous_format) for name, t in tensors.items()}


def restore(parts: Sequence[Part], model: PreTrainedModel, optimizer: DistributedOptimizer) -> Place:
    """Put a worker back to where a checkpoint was taken, or into its share of one of another number of workers.

    Args:
        parts: as `checkpoint.parts` gives them for this device. model, optimizer: built as for a new run.

    Returns:
        Where the run stands.
    """
    workers, share = optimizer.workers, share_of(optimizer.workers)
    facts = parts[0].facts
    same = facts["workers"] == share.workers
    same_devices = facts["shards"] == share.shards
    own = parts[0] if same else parts[workers.rank % len(parts)]
    is_part = same and same_devices and share.shards > 1  # what is read is no whole tensor
    _write_weights(model, _read(own, WEIGHTS) if same else merged_weights(parts), are_parts=is_part)
    state = _read(own, STATE) if same else merged_state(parts, workers.rank)
    groups = own.facts["groups"] if same else _merged_groups(parts, workers)
    optimizer.load_state_dict(_state_dict(optimizer, state, groups, are_parts=is_part))
    optimizer.report = SyncReport(**_untupled(own.facts["report"]))
    _restore_random(own, model, workers, as_saved=same_devices and (same or workers.rank < len(parts)))
    workers.moved = Counter(facts["moved"])
    eras, start, moved, ahead = from_json(facts["eras"]), facts["start"], facts["moved_at_start"], facts["ahead"]
    if same and same_devices:
        workers.seconds.update(facts["timed"])
    elif facts["step"] > start:
        eras = (*eras, Era(facts["workers"], start, facts["step"], facts["sequences"], facts["sent"], ahead, shards=facts["shards"]))
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
        first_bases=_first_bases(own, optimizer, are_parts=is_part),
        round=_round(own) if same and same_devices else None,
        losses=own.facts["losses"],
        spikes=own.facts["spikes"] if same else sum(parts[i].facts["spikes"] for i in _counted(parts, workers)),
    )


def _read(part: Part, file: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a part, one after another: of weights that devices share, all of them may not fit into memory."""
    return ((name, part.tensor(file, name)) for name in part.names(file) if file == WEIGHTS or name.startswith("optimizer/"))


@torch.no_grad()
def _write_weights(model: PreTrainedModel, values: Iterable[tuple[str, Tensor]], *, are_parts: bool) -> None:
    left = _weights(model)
    for name, value in values:
        tensor = left.pop(name)
        local(tensor).copy_(value if are_parts else own_part("weight", value, tensor, lowrank=False))
    assert not left, f"not in the checkpoint: {', '.join(left)}"


def _state_dict(
    optimizer: DistributedOptimizer, state: Iterable[tuple[str, Tensor]], groups: list[dict[str, Any]], *, are_parts: bool
) -> dict[str, Any]:
    """As `optimizer.load_state_dict` takes it."""
    ids = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    by_parameter: dict[int, dict[str, Tensor]] = {}
    members = {name: p for name, p, _ in optimizer.named_members()}
    for full, tensor in state:
        name, _, key = full.removeprefix("optimizer/").rpartition(".")
        p, lowrank = members[name], "basis" in optimizer.state[members[name]]
        part = tensor if are_parts else own_part(key, tensor, p, lowrank=lowrank)
        if part.numel() < tensor.numel():
            part = part.clone()  # or all of the tensor would stay in memory with it
        by_parameter.setdefault(ids[id(p)], {})[key] = as_dtensor(key, part, p, lowrank=lowrank)
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


def _restore_random(part: Part, model: PreTrainedModel, workers: Comm, *, as_saved: bool) -> None:
    """Put torch's generators back, or give a device that is new its own."""
    replica = workers.inside.replicas.rank if workers.inside.replicas else 0
    states = part.tensor(STATE, "random/cpu")
    if not as_saved or replica >= len(states):
        torch.manual_seed(stable_hash("new worker", part.facts["step"], workers.rank, workers.inside.device) % 2**63)
        return
    torch.set_rng_state(states[replica].clone())
    device = next(model.parameters()).device
    if device.type == "cuda" and "random/cuda" in part.names(STATE):
        torch.cuda.set_rng_state(part.tensor(STATE, "random/cuda")[replica].clone(), device)


def _round(part: Part) -> Round | None:
    facts = part.facts["round"]
    if facts is None:
        return None
    latest = SyncMeasures(**facts["latest"]) if facts["latest"] else None
    return Round(part.tensor(STATE, "round/start").clone(), facts["moved"], latest)


def _first_bases(part: Part, optimizer: DistributedOptimizer, *, are_parts: bool) -> tuple[Tensor, ...]:
    if not any(name.startswith("first_basis/") for name in part.names(STATE)):
        return ()
    bases = []
    for i, p in enumerate(_with_bases(optimizer)):
        saved = part.tensor(STATE, f"first_basis/{i}")
        bases.append((saved if are_parts else own_part("basis", saved, p, lowrank=True)).to(p.device, copy=True))
    return tuple(bases)
