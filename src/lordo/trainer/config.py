"""The settings of one run: each is declared once, here, and its docstring is its help on the command line.

A run is one TOML file (see `recipes/`); `recipe.py` reads, changes and writes it.
None stands for "not given": TOML has no such value, so the key is simply left out.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from lordo.lowrank import BasisMethod
from lordo.optim.error import ErrorDtype
from lordo.optim.options import MomentDtype
from lordo.sync.formats import WireFormat
from lordo.sync.rules import AnchorDevice
from lordo.updates import FullrankDenominator, FullrankSignal

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Scalar = bool | int | float | str | None
Preset = Literal["16m", "125m", "720m"]


class ConfigError(ValueError):
    """The settings of a run cannot be used; the message is one sentence that says why and what to do."""


class UsageError(ValueError):
    """What was asked for cannot work; the message is one sentence that says why and what to do."""


class Settings(BaseModel):
    """One table of settings: an unknown key, a value of another type, NaN and infinity are errors; never changed."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _folder_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError("should be letters, digits, and `_`, `.` or `-` after the first")
    return name


class ModelConfig(Settings):
    """The model that is trained: a preset, a transformers config, or weights that were trained before."""

    preset: Preset | None = None
    """One of the paper's models; `config` may change its settings."""

    config: dict[str, Scalar] | str | None = None
    """A table: `model_type`, such as "llama", and that type's settings. Or the folder or the hub's name of any causal language model."""

    weights: str | None = None
    """Folder or the hub's name of a causal language model to start from, config included; None starts from random weights."""

    attention: Literal["sdpa", "eager"] | None = None
    """How attention is computed; None takes torch's fused kernels (sdpa) where the model has them."""

    gradient_checkpointing: bool = False
    """Whether each layer's activations are computed again for the gradient, not kept: less memory, a third more time."""

    @field_validator("config")
    @classmethod
    def _leave_out_none(cls, config: dict[str, Scalar] | str | None) -> dict[str, Scalar] | str | None:
        return {key: value for key, value in config.items() if value is not None} if isinstance(config, dict) else config

    @model_validator(mode="after")
    def _one_beginning(self) -> "ModelConfig":
        if self.weights is not None and (self.preset is not None or self.config is not None):
            raise ValueError("weights bring their own config: leave preset and config out")
        if self.preset is not None and isinstance(self.config, str):
            raise ValueError("preset and config name two models: leave one of them out")
        if self.preset is None and self.config is None and self.weights is None:
            raise ValueError('give preset (such as "16m"), config (a table, a folder or a name on the hub) or weights')
        return self


class MixConfig(Settings):
    """One source of a mixture of text."""

    source: Annotated[str, Field(min_length=1)]
    """A file or a folder of .parquet, .jsonl or text files, or a dataset's name on the Hugging Face hub, such as "owner/name"."""

    name: str | None = None
    """What it is called, and its folder in the corpus; None takes the end of `source` and `subset`."""

    subset: str | None = None
    """Of a dataset on the hub: which of its configurations."""

    split: str = "train"
    """Of a dataset on the hub: which of its splits."""

    text_column: str = "text"
    """Which column of a parquet or jsonl file or a dataset holds the text."""

    weight: Positive = 1.0
    """Its share of the blocks that are read, relative to the other sources' weights."""

    @field_validator("name")
    @classmethod
    def _can_name_a_folder(cls, name: str | None) -> str | None:
        return name if name is None else _folder_name(name)


class DataConfig(Settings):
    """The text it is trained on: `source`, small and read as bytes at each start, or a `mix`, tokenized once by `lordo prepare`."""

    source: Literal["stdlib"] | Annotated[list[str], Field(min_length=1)] | None = None
    """"stdlib" (the Python standard library's own .py files) or a list of text files and folders of .txt, .py, .md."""

    mix: list[MixConfig] = []
    """Sources of text with their weights; needs `lordo prepare` before training."""

    tokenizer: str = "bytes"
    """Of a mixture: "bytes", a folder with a tokenizer as transformers saves it, or the name of one on the Hugging Face hub."""

    corpus: Annotated[str, Field(min_length=1)] | None = None
    """Of a mixture: the folder into which `lordo prepare` writes its tokens."""

    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Tokens in a block; a block predicts all of its tokens but the first."""

    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """About this fraction of the files (of a mixture: of each source's documents), never fewer than one, is kept for validation."""

    max_bytes: Count | None = None
    """Of `source`: most bytes of text read, in whole files chosen by a hash of their names; None reads everything."""

    @model_validator(mode="after")
    def _source_or_mix(self) -> "DataConfig":
        if (self.source is None) == (not self.mix):
            raise ValueError('give either source (such as "stdlib", or a list of files and folders) or [[data.mix]] entries')
        if self.mix and self.corpus is None:
            raise ValueError('[[data.mix]] needs corpus, the folder for its tokens, such as corpus = "corpora/mine"')
        if self.mix and self.max_bytes is not None:
            raise ValueError("max_bytes limits source; what is taken of [[data.mix]] is limited by: lordo prepare RECIPE --max-tokens N")
        if not self.mix and (self.tokenizer != "bytes" or self.corpus is not None):
            raise ValueError("tokenizer and corpus need [[data.mix]] entries; source is read as bytes")
        return self


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


class StepSettings(Settings):
    """Options of the local step that may change on the way; None leaves one as it is."""

    lr: Positive | None = None
    """Peak learning rate of the local step."""

    betas: tuple[Decay, Decay] | None = None
    """Decay rates of the first and the second moment, each from 0 up to, not including, 1."""

    eps: NotNegative | None = None
    """Added to the root of the second moment."""

    weight_decay: NotNegative | None = None
    """Decoupled weight decay."""

    omega: Fraction | None = None
    """Share of the low-rank momentum in the step, from 0 to 1; 1 switches the full-rank term off."""

    fullrank_signal: FullrankSignal | None = None
    """What the full-rank term is made of."""

    fullrank_denominator: FullrankDenominator | None = None
    """What the full-rank term is divided by: the mean of Adam's denominator over a whole weight, or per channel."""

    scale: NotNegative | None = None
    """Factor of GaLore's low-rank steps."""

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


class PhaseConfig(StepSettings):
    """From a step on, other options of the method; the schedule of the learning rate goes on."""

    from_step: Annotated[int, Field(ge=2)]
    """First step, counted from 1, with these options; they stay until a later phase changes them."""

    def settings(self) -> dict[str, Any]:
        """Give the options that were set, by name."""
        return self.model_dump(exclude={"from_step"}, exclude_none=True)


class MethodConfig(StepSettings):
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

    sync_wire: WireFormat | None = None
    """How averaged weights travel: "float32", "bfloat16", "int8" or "int4", quantised ones with a scale for each 64 numbers."""

    sync_wire_moments: WireFormat | None = None
    """The same for the moments; follows sync_wire unless given."""

    sync_wire_basis: WireFormat | None = None
    """The same for bases and the first gradient; bfloat16 unless given, or float32 where sync_wire is that."""

    sync_split: bool | None = None
    """Whether what changed inside the basis travels as r×n numbers in full precision, and only the rest in the wire format."""

    sync_overlap: Annotated[int, Field(ge=0)] | None = None
    """Steps of training while an average is on its way; 0 waits for it."""

    sync_fragments: Count | None = None
    """Groups into which the weights are divided; each is averaged every sync_every steps, at steps of its own."""

    error_feedback: bool | None = None
    """Whether each worker keeps what the projection drops and adds it to its next gradient."""

    error_dtype: ErrorDtype | None = None
    """In what the error is held: "float32", or, rounded at random, "bfloat16", "int8" or "int6" (both with a scale for each column)."""

    moment_dtype: MomentDtype | None = None
    """In what both moments are held: "float32", or "bfloat16", rounded at random."""

    anchor_device: AnchorDevice | None = None
    """Where the weights of the last synchronisation are kept: "same" as the weights, or "cpu" (pinned when there is a GPU)."""

    basis: BasisMethod | None = None
    """How a basis is computed: "svd" is exact, "subspace" cheap, "auto" chooses by the size of the weight."""

    basis_every: Count | None = None
    """Steps between two bases of GaLore."""

    basis_interpolation: Fraction | None = None
    """LDAdam's ρ: share of the momentum, against the gradient, in what the basis is taken from."""

    outer: Literal["none", "nesterov"] | None = None
    """Outer optimizer applied to the averaged change of the weights."""

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

    decay_steps: Count | None = None
    """Steps at the end over which a falling schedule falls, the learning rate being at its peak before; None: all after the warm-up."""

    final_lr_fraction: Fraction = 0.1
    """Where a falling schedule ends, as a fraction of the peak."""

    eval_every: Count | None = None
    """Steps between two evaluations; None evaluates at the end only."""

    eval_sequences: Count | None = None
    """Validation blocks used by an evaluation; None uses all of them."""

    log_every: Count = 10
    """Steps between two lines of the log."""

    precision: Literal["float32", "bfloat16-autocast", "bfloat16"] = "float32"
    """"bfloat16-autocast" computes in bfloat16 with float32 weights; "bfloat16" keeps the weights in it too, beside a float32 anchor."""

    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Where the log goes besides `metrics.jsonl`: TensorBoard (into the run's folder), W&B (project lordo; WANDB_MODE as always)."""

    checkpoint_every: Count | None = None
    """Steps between two checkpoints, from which a run can go on; None writes one only when it is asked to stop."""

    spike_factor: Annotated[float, Field(gt=1)] | None = None
    """A worker leaves a step out whose loss is more than this times the median of its last 64; None leaves none out."""

    spike_action: Literal["skip", "rollback"] = "skip"
    """What follows such a loss: nothing else, or at the end of the round all go back to the last checkpoint before it, with other text."""

    keep_last: Count = 2
    """Checkpoints that are kept; older ones are removed when a newer one is complete."""

    timeout_seconds: Positive | None = None
    """How long another process may be silent, or be waited for in an exchange; None: a minute, and five times the longest round so far."""

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
    def _there_is_something_to_go_back_to(self) -> "TrainConfig":
        if self.spike_action == "rollback" and (self.spike_factor is None or self.checkpoint_every is None):
            lacking = "spike_factor" if self.spike_factor is None else "checkpoint_every"
            raise ValueError(f'spike_action = "rollback" needs {lacking}: set it, or leave spike_action out')
        return self

    @model_validator(mode="after")
    def _warm_up_is_part_of_the_run(self) -> "TrainConfig":
        if self.warmup_steps > self.steps:
            given = f"warmup_steps = {self.warmup_steps} is more than steps = {self.steps}"
            raise ValueError(f"{given}: lower warmup_steps or train for more steps")
        if self.decay_steps is not None and self.schedule == "constant":
            raise ValueError(f'decay_steps = {self.decay_steps}, but schedule = "constant" never falls: take "linear" or "cosine"')
        if self.decay_steps is not None and self.warmup_steps + self.decay_steps > self.steps:
            given = f"warmup_steps = {self.warmup_steps} and decay_steps = {self.decay_steps} are more than steps = {self.steps}"
            raise ValueError(f"{given} together: lower one of them or train for more steps")
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

    phase: list[PhaseConfig] = []
    """Changes of the method's options on the way."""

    train: TrainConfig
    """How long, on what, and what is told on the way."""

    compare: CompareConfig = CompareConfig()
    """What `lordo compare` runs."""

    @field_validator("name")
    @classmethod
    def _can_name_a_folder(cls, name: str) -> str:
        return _folder_name(name)

    @property
    def sequences_per_worker(self) -> int:
        """Blocks that each worker reads in an optimizer step."""
        tokens = self.batch.global_tokens
        return (self.batch.per_worker_sequences or 8) if tokens is None else tokens // (self.workers * self.data.sequence_length)

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
        if self.sequences_per_worker % self.batch.accumulate:
            raise ValueError(
                f"batch.accumulate = {self.batch.accumulate} does not divide the {self.sequences_per_worker} sequences of a worker: "
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
