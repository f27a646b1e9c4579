"""The settings of one run: each is declared once, here, and its docstring is its help on the command line.

A run is one TOML file (see `recipes/`); `recipe.py` reads, changes and writes it.
None stands for "not given": TOML has no such value, so the key is simply left out.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from lordo.lowrank import BasisMethod
from lordo.updates import FullrankDenominator, FullrankSignal

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Scalar = bool | int | float | str | None


class ConfigError(ValueError):
    """The settings of a run cannot be used; the message is one sentence that says why and what to do."""


class UsageError(ValueError):
    """What was asked for cannot work; the message is one sentence that says why and what to do."""


class Settings(BaseModel):
    """One table of settings: an unknown key, a value of another type, NaN and infinity are errors; never changed."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Settings):
    """The model that is trained."""

    config: dict[str, Scalar]
    """A transformers config: `model_type`, such as "llama", and any of that type's settings; None leaves one out."""

    @field_validator("config")
    @classmethod
    def _leave_out_none(cls, config: dict[str, Scalar]) -> dict[str, Scalar]:
        return {key: value for key, value in config.items() if value is not None}


class DataConfig(Settings):
    """The text it is trained on, cut into blocks of byte tokens."""

    source: Literal["stdlib"] | Annotated[list[str], Field(min_length=1)]
    """"stdlib" (the Python standard library's own .py files) or a list of text files and folders of .txt, .py, .md."""

    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Tokens (here bytes) in a block; a block predicts all of its tokens but the first."""

    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """About this fraction of the files, never fewer than one, is kept for validation."""

    max_bytes: Count | None = None
    """Most bytes of text read, in whole files chosen by a hash of their names; None reads everything."""


class BatchConfig(Settings):
    """How much text one optimizer step reads."""

    per_worker_sequences: Count = 8
    """Blocks read by EACH worker in each optimizer step; all workers together read `workers` times as many."""


class MethodConfig(Settings):
    """The training method and its options; an option that is None takes the method's own default."""

    name: str = "lordo"
    """Which row of the table of methods."""

    lr: Positive
    """Peak learning rate of the local step."""

    rank: Count | None = None
    """Rank r of the low-rank optimizer states."""

    sync_every: Count | None = None
    """Optimizer steps between two averagings of the weights, at which the basis is renewed too."""

    sync_exp_avg_every: Count | None = None
    """Optimizer steps between two averagings of the first moments."""

    sync_exp_avg_sq_every: Count | None = None
    """Optimizer steps between two averagings of the second moments."""

    sync_error_every: Count | None = None
    """Optimizer steps between two averagings of what error feedback keeps."""

    betas: tuple[Decay, Decay] | None = None
    """Decay rates of the first and the second moment, each from 0 up to, not including, 1."""

    eps: NotNegative | None = None
    """Added to the root of the second moment."""

    weight_decay: NotNegative | None = None
    """Decoupled weight decay."""

    omega: Fraction | None = None
    """Share of the low-rank momentum in the step, from 0 to 1; 1 switches the full-rank term off."""

    error_feedback: bool | None = None
    """Whether each worker keeps what the projection drops and adds it to its next gradient."""

    fullrank_signal: FullrankSignal | None = None
    """What the full-rank term is made of."""

    fullrank_denominator: FullrankDenominator | None = None
    """What the full-rank term is divided by: the mean of Adam's denominator over a whole weight, or per channel."""

    basis: BasisMethod | None = None
    """How a basis is computed: "svd" is exact, "subspace" cheap, "auto" chooses by the size of the weight."""

    basis_every: Count | None = None
    """Steps between two bases of GaLore."""

    scale: NotNegative | None = None
    """Factor of GaLore's low-rank steps."""

    basis_interpolation: Fraction | None = None
    """LDAdam's ρ: share of the momentum, against the gradient, in what the basis is taken from."""

    outer: Literal["none", "nesterov"] | None = None
    """Outer optimizer applied to the averaged change of the weights."""

    outer_lr: Positive | None = None
    """Learning rate of the outer optimizer."""

    outer_momentum: Decay | None = None
    """Momentum of the outer optimizer, from 0 up to, not including, 1."""

    @field_validator("betas", mode="before")
    @classmethod
    def _pair(cls, betas: object) -> object:
        if betas is None:
            return None
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ValueError("should be two numbers, such as [0.9, 0.999]")
        return tuple(betas)

    def settings(self) -> dict[str, Any]:
        """Give the options that were set, by name; without `name` and `lr`."""
        return self.model_dump(exclude={"name", "lr"}, exclude_none=True)


class TrainConfig(Settings):
    """How long, on what, and what is told on the way."""

    steps: Count
    """Optimizer steps of each worker."""

    clip: Positive | None = 1.0
    """Largest global gradient norm of a worker, a longer gradient being scaled down; None ("none" in a file) does not clip."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from zero to its peak; part of `steps`."""

    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes on after the warm-up."""

    final_lr_fraction: Fraction = 0.1
    """Where a falling schedule ends, as a fraction of the peak."""

    eval_every: Count | None = None
    """Steps between two evaluations; None evaluates at the end only."""

    eval_sequences: Count | None = None
    """Validation blocks used by an evaluation; None uses all of them."""

    log_every: Count = 10
    """Steps between two lines of the log."""

    threads: Count | None = None
    """CPU threads of each process; None leaves the choice to torch."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto" takes a GPU when there is one."""

    @field_validator("clip", mode="before")
    @classmethod
    def _read_none(cls, clip: object) -> object:
        return None if clip == "none" else clip

    @field_serializer("clip", when_used="json")
    def _write_none(self, clip: float | None) -> float | str:
        return "none" if clip is None else clip

    @model_validator(mode="after")
    def _warm_up_is_part_of_the_run(self) -> "TrainConfig":
        if self.warmup_steps > self.steps:
            given = f"warmup_steps = {self.warmup_steps} is more than steps = {self.steps}"
            raise ValueError(f"{given}: lower warmup_steps or train for more steps")
        return self


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

    method: MethodConfig
    """The training method and its options."""

    train: TrainConfig
    """How long, on what, and what is told on the way."""

    compare: CompareConfig = CompareConfig()
    """What `lordo compare` runs."""

    @field_validator("name")
    @classmethod
    def _can_name_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError("should be letters, digits, and `_`, `.` or `-` after the first")
        return name
