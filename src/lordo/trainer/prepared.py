"""A run before it starts: its settings checked against the model, on shapes alone, and its text loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lordo.accounting import Weight, weights_of
from lordo.methods import Method, find
from lordo.optim import ParamGroups, param_groups
from lordo.optimizer import DistributedOptimizer
from lordo.sync import Comm, Solo
from lordo.trainer.compiling import check_compiles
from lordo.trainer.config import RunConfig
from lordo.trainer.data import VOCABULARY, spread
from lordo.trainer.data_config import DataConfig
from lordo.trainer.devices import cut_over
from lordo.trainer.memory import check_memory, need
from lordo.trainer.mix import Mix
from lordo.trainer.models import build_model, check_fits
from lordo.trainer.phases import changes_at
from lordo.trainer.splits import Splits
from lordo.trainer.text import load_text


@dataclass(frozen=True)
class Outline:
    """What shapes alone tell of a run: its method with all settings, and what is low-rank."""

    config: RunConfig
    method: Method
    settings: dict[str, Any]
    groups: ParamGroups
    weights: list[Weight]


@dataclass(frozen=True)
class Prepared(Outline):
    """A run whose settings, data and method were checked and loaded; what all workers share."""

    splits: Splits


def prepare(config: RunConfig, *, load: Callable[[DataConfig, int], Splits] = load_text) -> Prepared:
    """Check what can be checked before any worker starts, and load the text.

    Args:
        config: the run. load: how the text is read, by data settings and seed.

    Raises:
        ValueError: one sentence saying what cannot work and what to do.
    """
    shapes = outline(config)
    device = pick_device(config.train.device)
    check_memory(need(shapes.method, shapes.weights, shapes.settings, config, device), config, device)
    check_compiles(config, device)
    splits = load(config.data, config.seed)
    if config.data.mix:
        outline(config, vocabulary=splits.vocabulary)
    Mix(splits.train, 0, config.workers, config.seed)  # refuses fewer blocks than workers
    spread(splits.validation, config.train.eval_sequences)
    return Prepared(**vars(shapes), splits=splits)


def outline(config: RunConfig, *, vocabulary: int | None = None) -> Outline:
    """Check model, method and settings on shapes alone: nothing is allocated, read or downloaded.

    Args:
        config: the run. vocabulary: tokens of the data where that is known; None: bytes, or a mixture's tokenizer of unknown size.

    Raises:
        ValueError: one sentence saying what cannot work and what to do.
    """
    method = find(config.method.name)
    with torch.device("meta"):
        model, groups, optimizer = build(config, method, Solo())
        for phase in config.phase:  # refuses what the method does not have or its step cannot use
            optimizer.change_settings(**changes_at(phase.from_step, config))
    _check_rank(config, groups)
    if config.parallel.devices > 1 and any(route.rank is not None for route in groups.routes):
        method.check_parts(optimizer.defaults)
    if vocabulary is None and not config.data.mix:
        vocabulary = VOCABULARY
    check_fits(model, vocabulary=vocabulary, sequence_length=config.data.sequence_length)
    return Outline(config, method, optimizer.defaults, groups, weights_of(optimizer.param_groups))


def _check_rank(config: RunConfig, groups: ParamGroups) -> None:
    """Refuse a rank that leaves no weight low-rank: the method would be another one than its name says."""
    rank = config.method.rank
    if rank is not None and all(route.rank is None for route in groups.routes):
        smaller = [min(route.shape) for route in groups.routes if len(route.shape) == 2 and "smaller side" in route.reason]
        largest = f"the largest has a smaller side of {max(smaller)}" if smaller else "the model has none"
        raise ValueError(f"method.rank = {rank} is not below the smaller side of any matrix in the layers ({largest}): lower it")


def build(
    config: RunConfig, method: Method, workers: Comm, device: str | torch.device = "meta", mesh: DeviceMesh | None = None
) -> tuple[PreTrainedModel, ParamGroups, DistributedOptimizer]:
    """Model, parameter groups and optimizer of one worker, or of one of several devices of a worker.

    Args:
        config, method: of the run. workers: the connection to the others. device: of this process. mesh: the devices of the worker, if
            there are several.
    """
    given = config.method.settings()
    settings = method.resolve({"lr": config.method.lr, **given})
    dtype = torch.bfloat16 if config.train.precision == "bfloat16" else torch.float32
    built = build_model(config.model, seed=config.seed, pretrained=str(device) != "meta")
    if mesh is not None:
        model = cut_over(built.to(dtype), mesh, backend=config.model.compile)  # type: ignore[arg-type]
    else:
        model = built.to(device, dtype)  # type: ignore[arg-type]
        if config.model.compile is not None and str(device) != "meta":
            model.compile(backend=config.model.compile)  # in place: names stay as they are; workers of one process share what is compiled
    groups = param_groups(model, rank=settings["rank"])
    optimizer = DistributedOptimizer(groups, method, workers=workers, lr=config.method.lr, **given)
    return model, groups, optimizer


def pick_device(device: str) -> torch.device:
    """The device of this process: the CPU, or a GPU; workers in one process share it.

    Raises:
        ValueError: "cuda" where there is none.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError('train.device = "cuda", but torch sees no GPU here: take "auto" or "cpu"')
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))  # torchrun numbers the processes of a machine
