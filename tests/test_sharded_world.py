"""Two workers of two devices, in one world of processes: refusals, bytes, wire formats, decisions of a whole worker, checkpoints."""

import copy
import functools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import PeakAllocation
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lordo
from common import randn
from lordo.accounting import inside_step_bytes, measured_state_bytes, state_bytes, traffic, weights_of
from lordo.lowrank import FRESH_COLUMNS, ITERATIONS, SVD_LIMIT
from lordo.shards import local
from lordo.sync import refresh, wire
from test_processes import in_processes
from test_sharded import Weights, built, everything, train, whole

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo")

OPTIONS = {"sync_every": 4, "weight_decay": 0.01}


def on_mesh(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("worker", "shard"))


def sharded(mesh, **options):
    model = fully_shard(Weights(), mesh=mesh["shard"])
    return model, built(model, mesh["worker"], **(options or OPTIONS))


def in_one_world(rank, size, folder):
    mesh = on_mesh(2, 2)
    return {
        "refused": refused(mesh),
        "unlike": unlike(mesh),
        "differing": differing(mesh, rank),
        "held": [held(mesh, **options) for options in HELD],
        "wires": {wire: quantised(mesh, wire) for wire in ("float32", "bfloat16", "int8", "int4")}
        | {"bfloat16 weights": quantised(mesh, "float32", torch.bfloat16)}
        | {"int4, split": quantised(mesh, "int4", sync_split=True), "complete": quantised(mesh, "int4", sync_split=True, omega=1.0)}
        | {"complete in float32": quantised(mesh, "float32", omega=1.0)},
        "ruined": ruined(mesh, rank),
        "second side": second_side(mesh),
        "whole into parts": whole_into_parts(mesh),
        "refresh": refreshed(on_mesh(1, 4)),
        "runs": [in_runs(mesh, smallest) for smallest in (0, refresh.SMALLEST_RUN)],
        "resumed": resumed(mesh, folder),
        "saved": saved(mesh, folder),
        "four shards": loaded(on_mesh(1, 4), folder),
        "four workers": loaded(on_mesh(4, 1), folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def world(folder):
    return in_processes(functools.partial(in_one_world, folder=folder), 4, folder, seconds=300)


# ---- refusals


def sentence(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"


def refused(mesh):
    """What is said to layouts and settings that cannot work, at construction."""
    shard, worker = mesh["shard"], mesh["worker"]

    def lordo_on(*parameters, workers=worker, **options):
        return sentence(lambda: lordo.LoRDO(parameters, rank=2, workers=workers, **options))

    def spread(over, *placements):
        return nn.Parameter(distribute_tensor(torch.zeros(6, 9), over, placements))

    weight = fully_shard(nn.Linear(6, 9, bias=False), mesh=shard).weight
    two = DeviceMesh("cpu", mesh.mesh.tolist(), mesh_dim_names=("data", "tensor"))
    zero = nn.Parameter(torch.zeros(0))
    zero.ds_id = 0  # as DeepSpeed marks what it has partitioned
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = FullyShardedDataParallel(nn.Linear(6, 9), process_group=shard.get_group(), device_id=torch.device("cpu"))
        views = FullyShardedDataParallel(
            nn.Linear(6, 9), process_group=shard.get_group(), device_id=torch.device("cpu"), use_orig_params=True
        )
    return {
        "FSDP1": lordo_on(*flat.parameters()),
        "FSDP1, original parameters": lordo_on(*views.parameters()),
        "ZeRO": lordo_on(zero),
        "tensor parallel": lordo_on(spread(two, Shard(0), Shard(1))),
        "partly": lordo_on(weight, nn.Parameter(torch.zeros(6, 9))),
        "replicated": lordo_on(spread(shard, Replicate())),
        "two meshes": lordo_on(weight, fully_shard(nn.Linear(6, 9, bias=False), mesh=worker).weight),
        "world": lordo_on(weight, workers=dist.group.WORLD),
        "shard": lordo_on(weight, workers=shard),
        "int8": lordo_on(weight, error_dtype="int8"),
        "galore": sentence(lambda: lordo.DistributedOptimizer([weight], "galore", rank=2, workers=worker)),
        "right": lordo_on(weight),
        "all full-rank": sentence(lambda: lordo.DistributedOptimizer([weight], "ddp-lowrank", rank=8, workers=worker)),
    }


SAID = {
    "FSDP1": r"parameter of shape .* is part of a flattened buffer .* shard the model by torch.distributed.fsdp.fully_shard instead",
    "FSDP1, original parameters": r"is part of a flattened buffer",
    "ZeRO": r"is part of a flattened buffer",
    "tensor parallel": r"Shard\(dim=0\), Shard\(dim=1\)\) on a mesh of 2 dimensions; tensor parallelism is not supported: use ",
    "partly": r"is a plain tensor while .* is spread over devices.*apply .*fully_shard to the whole model",
    "replicated": r"Replicate\(\).* all of it on each device",
    "two meshes": r"are spread over different meshes",
    "world": r"workers joins the processes \d, \d, which share .* and are one worker: pass .* mesh\['worker'\]",
    "shard": r"workers joins the processes",
    "int8": r"error_dtype='int8' has one scale for each whole column",
    "galore": r"method 'galore' takes bases from its own gradients",
    "right": r"^nothing$",
    "all full-rank": r"^nothing$",
}


def unlike(mesh):
    """What is said to a gradient that was not averaged the way fully_shard does it."""
    weight = nn.Parameter(distribute_tensor(torch.zeros(6, 9), mesh["shard"], (Shard(0),)))
    optimizer = lordo.LoRDO([weight], rank=2, workers=mesh["worker"])
    weight.grad = distribute_tensor(torch.ones(6, 9), mesh["shard"], (Replicate(),))
    return sentence(optimizer.step)


def differing(mesh, rank):
    """Devices of a worker, and replicas in a worker, that do not do the same."""
    model = fully_shard(Weights(), mesh=mesh["shard"])
    settings = sentence(built(model, mesh["worker"], lr=0.02 if rank == 3 else 0.01).start)
    hybrid = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("worker", "replicate", "shard"))
    model = Weights()
    with torch.no_grad():
        model.w0.add_(float(rank == 3))
    model = fully_shard(model, mesh=hybrid["replicate", "shard"])
    return settings, sentence(built(model, hybrid["worker"]).start)


def test_devices_that_differ_are_told_in_what(world):
    """On all devices of all workers alike, though only one differs: the others would wait for it."""
    settings, weights = world[0]["differing"]
    assert settings == "lr is 0.01 on device 0 but 0.02 on device 1: give every device the same settings"
    assert weights.startswith("device 1 starts from other weights than device 0 (first difference in 'w0')")
    assert all(device["differing"] == (settings, weights) for device in world)


def test_a_gradient_laid_out_in_another_way_is_refused(world):
    assert all("is laid out over devices as (Replicate(),), the parameter as (Shard(dim=0),)" in device["unlike"] for device in world)


@pytest.mark.parametrize("case", SAID)
def test_what_cannot_work_is_refused_at_construction(world, case):
    for device in world:
        said = device["refused"][case]
        assert re.search(SAID[case], said), said


class Wrapped(nn.parallel.DistributedDataParallel):
    """What DDP is to isinstance, without the processes."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


def test_a_model_in_ddp_is_refused_where_workers_are_to_train_apart():
    groups = lordo.param_groups(Wrapped(nn.Linear(6, 9)), rank=2)
    lordo.LoRDO(groups)  # alone, DDP's averages are the only ones

    def work(workers):
        with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.* leave the wrapper out"):
            lordo.LoRDO(groups, workers=workers)

    lordo.simulate(work, 2)


# ---- bytes

HELD = [
    OPTIONS,
    {"sync_every": 3, "error_dtype": "bfloat16", "moment_dtype": "bfloat16", "sync_wire": "int8"},
    {"sync_every": 6, "sync_overlap": 2, "sync_fragments": 2, "sync_error_every": 6},
    {"method": "diloco", "sync_every": 5},
    {"method": "ddp-adamw"},
]


def held(mesh, **options):
    """Bytes held and sent: counted, and from shapes alone."""
    model, optimizer = sharded(mesh, **options)
    train(model, optimizer, range(1, 11))
    weights, settings, inside = weights_of(optimizer.param_groups), optimizer.defaults, optimizer.workers.inside
    sent = {tag: optimizer.workers.bytes_sent(tag) for tag, moved in optimizer.workers.moved.items() if moved}
    predicted = traffic(optimizer.method, weights, settings, steps=10, num_workers=2)
    before = inside.shards.bytes_sent("inside")
    train(model, optimizer, range(11, 12))  # no refresh
    return {
        "held": (dict(+measured_state_bytes(optimizer)), dict(state_bytes(optimizer.method, weights, settings))),
        "sent": (sent, dict(predicted)),
        "inside": (inside.shards.bytes_sent("inside") - before, inside_step_bytes(weights)),
    }


@pytest.mark.parametrize("case", range(len(HELD)))
def test_predicted_bytes_of_each_device_are_the_counted_bytes(world, case):
    for device in world:
        for counted, predicted in device["held"][case].values():
            assert counted == predicted
    parts = [device["held"][case]["held"][0] for device in world[:2]]
    assert parts[0] != parts[1]  # not every side is divisible


# ---- new bases

SIDE, LONG, LARGE_RANK = SVD_LIMIT + 8, 2 * SVD_LIMIT, 17
LARGE = [(SIDE, LONG), (LONG, SIDE), (SIDE, SIDE)]


def with_limits(limits, call):
    """Call with other limits than those below which tensors are too small to care: {(module, name): value}."""
    with pytest.MonkeyPatch.context() as patched:
        for (module, name), value in limits.items():
            patched.setattr(module, name, value)
        return call()


def refreshed(mesh):
    """What a device allocates for new bases of many weights, in numbers of the largest matrix, and what moves in one refresh.

    The least of some refreshes: gloo's threads let go of what was sent a moment later than this one does, now and then.
    """
    weights = [distribute_tensor(randn(*shape, seed=i), mesh["shard"], (Shard(0),)) for i, shape in enumerate(4 * LARGE)]
    weights = [nn.Parameter(w) for w in weights]
    for i, w in enumerate(weights):
        w.grad = distribute_tensor(randn(*w.shape, seed=20 + i), mesh["shard"], (Shard(0),))
    optimizer = lordo.LoRDO(weights, rank=LARGE_RANK, sync_every=4, workers=mesh["worker"])

    moved = optimizer.workers.inside.shards.moved

    def peak(seed):
        for w in weights:
            local(w).add_(randn(*local(w).shape, seed=seed))
        before = moved["basis"]
        with PeakAllocation() as seen:
            limits = {(refresh, "SMALLEST_RUN"): 0, (wire, "ALONE_ELEMENTS"): 0}
            with_limits(limits, lambda: optimizer.after[-1](optimizer, optimizer.workers, 4))
        return seen.peak_bytes / (4 * SIDE * LONG), moved["basis"] - before

    with torch.no_grad():
        optimizer.step()
        found = [peak(seed) for seed in range(4)]
    assert len({moves for _, moves in found}) == 1
    return {"peak": min(least for least, _ in found), "moved": found[0][1]}


def test_new_bases_of_any_number_of_weights_take_less_than_one_matrix(world):
    for device in world:
        assert 0 < device["refresh"]["peak"] < 1


def test_what_moves_for_new_bases_is_blocks_and_no_matrix(world):
    """Rows cut: blocks are brought together and handed out, an S-th of them from each device. Columns cut: sent to all, summed at one."""
    r, k, shards = LARGE_RANK, LARGE_RANK + FRESH_COLUMNS, 4
    moved = 0
    for shape in LARGE:
        m, n = sorted(shape)
        if shape[0] <= shape[1]:
            products = ITERATIONS * (2 * n * k + 2 * m * k // shards) + n * k + m * k // shards
            moved += products + 2 * m * r // shards
        else:
            products = ITERATIONS * (m * k + m * k) + m * k + k * k
            moved += products + m * r
    assert [device["refresh"]["moved"] for device in world] == 4 * [4 * 4 * moved]


def in_runs(mesh, smallest):
    """A training in which new bases are installed in as many runs as there can be, or in one."""

    def run():
        model, optimizer = sharded(mesh, basis="subspace", **OPTIONS)
        train(model, optimizer, range(1, 10))
        return everything(model, optimizer), optimizer.report.overlap

    return with_limits({(refresh, "SMALLEST_RUN"): smallest}, run)


def test_it_does_not_matter_in_how_many_runs_new_bases_come(world):
    for device in world:
        (many, many_overlap), (one, one_overlap) = device["runs"]
        torch.testing.assert_close(many, one, rtol=0, atol=1e-9)
        assert many_overlap == pytest.approx(one_overlap)


def test_runs_hold_every_weight_once_and_no_more_new_bases_than_a_quarter_of_a_matrix(monkeypatch):
    monkeypatch.setattr(refresh, "SMALLEST_RUN", 0)
    model = nn.Sequential(*(nn.Linear(*sides) for sides in ((9, 30), (30, 20), (20, 30), (30, 9), (9, 9), (9, 9), (9, 9))))
    optimizer = built(model, None)
    members = optimizer.named_members()
    runs = list(refresh.runs(optimizer, members, optimizer.workers, "float32"))
    assert [member for run in runs for member in run] == members
    sizes = [[optimizer.state[p]["basis"].numel() for _, p, _ in run if "basis" in optimizer.state[p]] for run in runs]
    assert all(sum(run) <= 600 // 4 for run in sizes)
    assert 1 < len(sizes) < sum(map(len, sizes))  # several, not one for each
    assert list(refresh.runs(optimizer, members, optimizer.workers, "int8")) == [members]


# ---- wire formats


def quantised(mesh, wire, dtype=torch.float64, **options):
    model = fully_shard(Weights(dtype), mesh=mesh["shard"])
    optimizer = built(model, mesh["worker"], **{"sync_every": 4, "sync_wire": wire, "sync_overlap": int(not options), **options})
    train(model, optimizer, range(1, 14))
    optimizer.average_parameters()
    return {name: local(p.detach()).clone() for name, p in model.named_parameters()}


WITHIN = {"bfloat16": 1e-2, "int8": 2e-2, "int4": 0.1, "bfloat16 weights": 3e-2, "int4, split": 0.1, "complete": 0.1}


@pytest.mark.parametrize("wire", WITHIN)
def test_rounded_averages_and_weights_are_the_same_on_all_workers(world, wire):
    """Device by device the same bits; and close to what full precision gives."""
    for first, second in ((0, 2), (1, 3)):
        one, other = world[first]["wires"][wire], world[second]["wires"][wire]
        exact = world[first]["wires"]["complete in float32" if wire == "complete" else "float32"]
        for name in one:
            assert torch.equal(one[name], other[name])
            torch.testing.assert_close(one[name].double(), exact[name], rtol=0, atol=WITHIN[wire])


# ---- one device's numbers are its worker's


def ruined(mesh, rank):
    """NaNs on device 3 alone: in a gradient, then in a weight before an average."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for wire in ("float32", "int8"):
            model, optimizer = sharded(mesh, sync_every=4, sync_wire=wire)
            train(model, optimizer, range(1, 3))
            model(3, optimizer.workers.rank).backward()
            if rank == 3:
                local(model.w1.grad).fill_(torch.nan)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 3:
                local(model.w0.detach()).fill_(torch.nan)
                optimizer.state[model.w2]["error"].fill_(torch.inf)
            optimizer.step()  # no gradients: only the average
            finite = all(bool(t.isfinite().all()) for t in everything(model, optimizer).values())
            train(model, optimizer, range(5, 10))
            finite = finite and all(bool(t.isfinite().all()) for t in everything(model, optimizer).values())
            found.append((optimizer.num_skipped_steps, optimizer.num_left_out, finite))
    return found


def test_a_nan_on_one_device_is_its_whole_workers(world):
    """Otherwise the devices of a worker would go different ways: one skips, or is left out, and the other is not."""
    for rank, device in enumerate(world):
        assert device["ruined"] == [(int(rank >= 2), int(rank >= 2), True)] * 2


# ---- checkpoints


def resumed(mesh, folder):
    """Each worker's own folder, in the middle of a round: names of what differs from the run that was not interrupted."""
    place, group = folder / f"worker{mesh.get_local_rank('worker')}", mesh["shard"].get_group()
    model, optimizer = sharded(mesh)
    train(model, optimizer, range(1, 7))
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=place, process_group=group)
    train(model, optimizer, range(7, 14))
    other, again = sharded(mesh)
    load_state(other, again, place, process_group=group)
    train(other, again, range(7, 14))
    straight, found = everything(model, optimizer), everything(other, again)
    return [name for name in straight if not torch.equal(straight[name], found[name])]


class TallAndWide(nn.Module):
    """Sides that two devices can halve."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(a, b, bias=False, dtype=torch.float64) for a, b in ((4, 12), (12, 6)))

    def forward(self, x):
        return self.down(self.up(x).tanh())


def second_side(mesh):
    """How far weights that are cut along their second side come from whole ones."""
    found = []
    for shard in (None, mesh["shard"]):
        model = TallAndWide()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(randn(*p.shape, seed=i))
        if shard is not None:
            fully_shard(model, mesh=shard, shard_placement_fn=lambda p: Shard(1))
        optimizer = lordo.LoRDO(lordo.param_groups(model, rank=2), lr=0.01, sync_every=3, workers=lordo.sync.Solo())
        for step in range(8):
            model(randn(8, 4, seed=step, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([whole(p) for p in model.parameters()])
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


def whole_into_parts(mesh):
    """A state saved without shards goes on in shards: how far from going on without."""
    model = Weights()
    optimizer = built(model, lordo.sync.Solo(), **OPTIONS)
    train(model, optimizer, range(1, 6))
    other = fully_shard(copy.deepcopy(model), mesh=mesh["shard"])
    again = built(other, lordo.sync.Solo(), **OPTIONS)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(6, 12))
    train(other, again, range(6, 12))
    straight, found = everything(model, optimizer), everything(other, again)
    return max(float((straight[name] - found[name]).abs().max()) for name in straight if straight[name].numel())


def load_state(model, optimizer, place, **where):
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=place, **where)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def saved(mesh, folder):
    model, optimizer = sharded(mesh)
    train(model, optimizer, range(1, 7))
    optimizer.average_state()
    found = everything(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder / "all")
    return found


def loaded(mesh, folder):
    """What is loaded from the checkpoint of all, and what comes of it."""
    model = fully_shard(Weights(), mesh=mesh["shard"]) if mesh else Weights()
    optimizer = built(model, mesh["worker"] if mesh else None, **OPTIONS)
    load_state(model, optimizer, folder / "all")
    before = everything(model, optimizer)
    train(model, optimizer, range(7, 10))
    return before, everything(model, optimizer)


@pytest.mark.parametrize("case", ["second side", "whole into parts"])
def test_it_is_the_same_training(world, case):
    assert all(device[case] < 1e-9 for device in world)


def test_each_worker_goes_on_from_its_own_folder_to_the_bit(world):
    assert [device["resumed"] for device in world] == [[], [], [], []]


def test_a_checkpoint_of_all_is_loaded_with_any_number_of_workers_and_shards(world, folder):
    expected, *others = [device["saved"] for device in world]
    for other in others:
        torch.testing.assert_close(other, expected, rtol=0, atol=1e-12)  # every worker holds the mean
    (alone,) = lordo.simulate(lambda workers: loaded(None, folder), 1)
    two = in_processes(functools.partial(on_two, folder=folder), 2, folder, seconds=300)
    for found in (alone, *two, *(device[name] for device in world for name in ("four shards", "four workers"))):
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)
    for device in world:
        torch.testing.assert_close(device["four shards"][1], alone[1], rtol=0, atol=1e-9)
    assert not torch.equal(world[0]["four workers"][1]["w0"], alone[1]["w0"])


def on_two(rank, size, folder):
    return loaded(on_mesh(2, 1), folder)
