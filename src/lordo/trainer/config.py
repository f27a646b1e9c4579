"""The settings of one run: each is declared once, and its docstring is its help on the command line.

A run is one TOML file (see `recipes/`); `recipe.py` reads, changes and writes it. Its larger tables are in files of their own.
None stands for "not given": TOML has no such value, so the key is simply left out.
"""

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from lordo.trainer.data_config import DataConfig
from lordo.trainer.method_config import MethodConfig, PhaseConfig
from lordo.trainer.model_config import ModelConfig
from lordo.trainer.settings import Count, Positive, Settings, folder_name
from lordo.trainer.train_config import TrainConfig


class BatchConfig(Settings):
    """How much text one optimizer step reads."""

    per_worker_sequences: Count | None = None
    """Blocks read by EACH worker in each optimizer step; all workers together read `workers` times as many."""

    global_tokens: Count | None = None
    """Tokens read by ALL workers together in each optimizer step, instead of `per_worker_sequences`; with neither given, that is 8."""

    accumulate: Count = 1
    """Parts into which a worker cuts its blocks of one step, their gradients added up: less memory, the same step."""

    @model_validator(mode="after")
    def _one_of_them(self) -> "BatchConfig":
        if self.per_worker_sequences is not None and self.global_tokens is not None:
            raise ValueError("per_worker_sequences and global_tokens say the same thing twice: leave one of them out")
        return self


class ParallelConfig(Settings):
    """How many devices, each a process of its own, make up one worker."""

    shards: Count = 1
    """Devices that share one copy of a worker's model, each with a part of every weight (torch's fully_shard)."""

    replicate: Count = 1
    """Copies of the model in a worker, each of `shards` devices; gradients are averaged over them at every step."""

    @property
    def devices(self) -> int:
        """Devices of a worker."""
        return self.shards * self.replicate

    @property
    def unit(self) -> str:
        """What bytes and sequences are counted for: a "worker", or a "device" where that is one of several."""
        return "worker" if self.devices == 1 else "device"


class CompareConfig(Settings):
    """What `lordo compare` runs; each may also be given as an option of that command."""

    methods: Annotated[list[str], Field(min_length=1)] = ["lordo", "local-adamw", "ddp-lowrank", "ddp-adamw"]
    """Methods compared, rows of `lordo methods`."""

    seeds: Count = 1
    """Seeds of each method: the recipe's seed, and those that follow it."""

    lr: dict[str, Annotated[list[Positive], Field(min_length=1)]] = {}
    """Learning rates tried, per method (or "all"); none takes the recipe's. All are tried with the first seed, the best with the rest."""

    bandwidth: list[str] = ["100Mbps", "1Gbps", "10Gbps"]
    """Links for which the seconds of a run are modelled."""

    vary: list[str] = []
    """Settings varied: ["method.rank=8,16"]; settings in one string vary together: ["workers=4,8 batch.per_worker_sequences=8,4"]."""


class RunConfig(Settings):
    """One run."""

    name: str
    """Name of the run and of its folder: letters, digits, and `_`, `.` or `-` after the first."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Decides the initial weights, the split into training and validation files, and the order of the blocks."""

    workers: Count = 4
    """Number of workers."""

    output: Annotated[str, Field(min_length=1)] = "runs"
    """Folder in which the run's own folder is made."""

    model: ModelConfig
    """The model that is trained."""

    data: DataConfig
    """The text it is trained on."""

    batch: BatchConfig = BatchConfig()
    """How much text one optimizer step reads."""

    parallel: ParallelConfig = ParallelConfig()
    """How many devices make up a worker."""

    method: MethodConfig
    """The training method and its options."""

    phase: list[PhaseConfig] = []
    """Changes of the method's options on the way."""

    train: TrainConfig
    """How long, on what, and what is told on the way."""

    compare: CompareConfig = CompareConfig()
    """What `lordo compare` runs."""

    @field_validator("name")
    @classmethod
    def _can_name_a_folder(cls, name: str) -> str:
        return folder_name(name)

    @property
    def sequences_per_worker(self) -> int:
        """Blocks that each worker reads in an optimizer step."""
        tokens = self.batch.global_tokens
        return (self.batch.per_worker_sequences or 8) if tokens is None else tokens // (self.workers * self.data.sequence_length)

    @property
    def sequences_per_device(self) -> int:
        """Blocks that each device of a worker reads in an optimizer step."""
        return self.sequences_per_worker // self.parallel.devices

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all workers together read in an optimizer step."""
        return self.workers * self.sequences_per_worker * self.data.sequence_length

    @model_validator(mode="after")
    def _batch_can_be_dealt_out(self) -> "RunConfig":
        tokens, block = self.batch.global_tokens, self.workers * self.data.sequence_length
        if tokens is not None and tokens % block:
            near = max(tokens // block, 1) * block
            raise ValueError(
                f"batch.global_tokens = {tokens} is not a multiple of workers × data.sequence_length = {self.workers} × "
                f"{self.data.sequence_length}: take {near} or {near + block}"
            )
        devices, accumulate = self.parallel.devices, self.batch.accumulate
        if self.sequences_per_worker % devices:
            raise ValueError(
                f"the {self.sequences_per_worker} sequences of a worker cannot be dealt out to its {devices} devices (parallel.shards × "
                f"parallel.replicate): take a multiple of {devices}"
            )
        if self.sequences_per_device % accumulate:
            raise ValueError(
                f"batch.accumulate = {accumulate} does not divide the {self.sequences_per_device} sequences of a {self.parallel.unit}: "
                "take a divisor of that number"
            )
        return self

    @model_validator(mode="after")
    def _phases_are_in_order(self) -> "RunConfig":
        for number, phase in enumerate(self.phase):
            earlier = self.phase[number - 1].from_step if number else 1
            if phase.from_step <= earlier:
                raise ValueError(f"phase[{number}].from_step = {phase.from_step} does not come after {earlier}: put the phases in order")
            if phase.from_step > self.train.steps:
                raise ValueError(
                    f"phase[{number}].from_step = {phase.from_step} is after the last step, {self.train.steps}: "
                    "lower it, leave the phase out, or train for more steps"
                )
            if not phase.settings():
                raise ValueError(f"phase[{number}] changes nothing: give it a setting of [method], or leave it out")
        return self
