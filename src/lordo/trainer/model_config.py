"""The settings of `[model]`."""

from typing import Literal

from pydantic import field_validator, model_validator

from lordo.trainer.settings import Settings

Scalar = bool | int | float | str | None
Preset = Literal["16m", "125m", "720m"]
Compiler = Literal["inductor", "aot_eager", "eager"]


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

    compile: Compiler | None = None
    """torch.compile's backend for the model, "inductor" for speed: its first steps take a minute or more; None does not compile."""

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
