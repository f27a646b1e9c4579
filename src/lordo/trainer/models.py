"""Causal language models built from a config."""

import threading
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lordo.suggest import unknown
from lordo.trainer.config import ModelConfig

_ONE_AT_A_TIME = threading.Lock()  # all threads share torch's generator


def build_model(config: ModelConfig, *, seed: int) -> PreTrainedModel:
    """Build a model with random float32 weights, on the CPU and in training mode.

    The same seed gives the same bits, whatever was drawn before; torch's CPU generator is put back as it was (it is
    borrowed meanwhile; other threads that build wait, others that draw from it must not).

    Raises:
        ValueError: `model_type` is lacking or unknown, the type has no such setting, or transformers refuses a value.
    """
    settings, auto = transformers_config(config), cast(Any, AutoModelForCausalLM)  # its methods carry no types
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model: PreTrainedModel = auto.from_config(settings, dtype=torch.float32)
        except Exception as error:  # whatever a value of the user's set off in there
            raise ValueError(f"model.config: transformers cannot build this model: {_told(error)}") from error
    model.train()
    return model


def transformers_config(config: ModelConfig) -> PreTrainedConfig:
    """Turn the settings of a model into transformers' own config.

    transformers keeps any key it does not know and ignores it; here a key that its type does not have is an error.

    Raises:
        ValueError: as `build_model`.
    """
    given = dict(config.config)
    model_type = given.pop("model_type", None)
    if model_type is None:
        raise ValueError('model.config lacks model_type; add one, such as model_type = "llama"')
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"model.config: {unknown('model_type', str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}")
    made = _made(str(model_type), given)
    if made.dtype not in (None, torch.float32):
        raise ValueError(f"model.config: dtype = {str(made.dtype)!r}, but train.precision decides that here; leave dtype out")
    _check_keys(given, made, _made(str(model_type), {}))
    return made


def _made(model_type: str, given: dict[str, Any]) -> PreTrainedConfig:
    try:
        made: PreTrainedConfig = AutoConfig.for_model(model_type, **given)
    except Exception as error:  # whatever a value of the user's set off in there
        raise ValueError(f"model.config: transformers refuses it: {_told(error)}") from error
    return made


def _check_keys(given: dict[str, Any], made: PreTrainedConfig, default: PreTrainedConfig) -> None:
    """Refuse a key that was only stored: one that is in the config made with it, but is no setting of its type."""
    known = {key for key in (*default.to_dict(), *default.attribute_map) if not key.startswith("_")}
    for key in given:
        if key in made.to_dict() and key not in known:
            raise ValueError(f"model.config: {unknown(f'{made.model_type} setting', key, known)}")


def _told(error: Exception) -> str:
    """Give an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def drops_out(config: ModelConfig) -> bool:
    """Whether a model of this config draws random numbers when it trains."""
    settings = transformers_config(config).to_dict()
    words = ("dropout", "pdrop", "drop_rate", "layerdrop")
    return any(isinstance(value, float) and value > 0 and any(word in key for word in words) for key, value in settings.items())


def check_fits(model: PreTrainedModel, *, vocabulary: int | None, sequence_length: int) -> None:
    """Check that a model can read blocks of `sequence_length` tokens, each from 0 up to, not including, `vocabulary` (None: not known).

    Raises:
        ValueError: its vocabulary or its positions are too few.
    """
    settings = model.config.get_text_config()
    if vocabulary is not None and settings.vocab_size < vocabulary:
        raise ValueError(
            f"model.config: vocab_size = {settings.vocab_size} is less than the {vocabulary} tokens of the data; raise it to {vocabulary}"
        )
    positions = getattr(settings, "max_position_embeddings", None)  # None: a model without a limit
    if positions is not None and sequence_length > positions:
        raise ValueError(
            f"data.sequence_length = {sequence_length} is more than the model's max_position_embeddings = {positions}; "
            "lower the first or raise the second"
        )
