"""The settings of `[train]`."""

from typing import Annotated, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from lordo.trainer.settings import Count, Fraction, Positive, Settings


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
