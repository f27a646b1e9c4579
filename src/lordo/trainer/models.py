"""Causal language models built from a config."""

import threading
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lordo.suggest import listed, unknown
from lordo.trainer.model_config import ModelConfig, Preset

_ONE_AT_A_TIME = threading.Lock()  # all threads share torch's generator


# The models of the paper (arXiv 2602.04396): decoders with rotary embeddings, SwiGLU, no biases, input and output embedding shared.
_COMMON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
}
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
PRESETS: dict[Preset, dict[str, Any]] = {
    "16m": _COMMON | dict(zip(_SIZES, (4, 256, 4, 768), strict=True)),
    "125m": _COMMON | dict(zip(_SIZES, (12, 768, 12, 2048), strict=True)),
    "720m": _COMMON | dict(zip(_SIZES, (12, 2048, 16, 5632), strict=True)),
}


def build_model(config: ModelConfig, *, seed: int, pretrained: bool = True) -> PreTrainedModel:
    """Build a model with float32 weights, random or from `config.weights`, on the CPU and in training mode.

    The same seed gives the same bits, whatever was drawn before; torch's CPU generator is put back as it was (it is
    borrowed meanwhile; other threads that build wait, others that draw from it must not).

    Args:
        config: which model. seed: of random weights. pretrained: whether `config.weights` are read; without, shapes are right and
            values random.

    Raises:
        ValueError: `model_type` is lacking or unknown, the type has no such setting, transformers refuses a value, or a folder or name
            cannot be opened.
    """
    settings, auto = transformers_config(config), cast(Any, AutoModelForCausalLM)  # its methods carry no types
    own = {} if config.attention is None else {"attn_implementation": config.attention}
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if config.weights is not None and pretrained:
            model: PreTrainedModel = _read_weights(config.weights, own)
        else:
            try:
                model = auto.from_config(settings, dtype=torch.float32, **own)
            except Exception as error:  # whatever a value of the user's set off in there
                raise ValueError(f"model.config: transformers cannot build this model: {_told(error)}") from error
    if config.gradient_checkpointing:
        keep_random_numbers = drops_out(config)  # saving torch's generator for nothing would disturb other threads
        # its new name in transformers 5; version 6 drops the old one
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "preserve_rng_state": keep_random_numbers})
    model.train()
    return model


def _read_weights(name: str, own: dict[str, Any]) -> PreTrainedModel:
    auto = cast(Any, AutoModelForCausalLM)
    try:
        model, told = auto.from_pretrained(name, dtype=torch.float32, output_loading_info=True, **own)
    except Exception as error:  # whatever a damaged folder or a lost connection sets off in there
        raise ValueError(f"model.weights = {name!r} cannot be opened: {_told(error)}; {_WHERE}") from error
    if told["missing_keys"]:
        raise ValueError(f"model.weights = {name!r} lacks {listed(told['missing_keys'])}: it is not, or not all of, such a model")
    read: PreTrainedModel = model
    return read


_WHERE = "give the folder of a model as transformers saves it, or its name on the hub"


def transformers_config(config: ModelConfig) -> PreTrainedConfig:
    """Turn the settings of a model into transformers' own config.

    transformers keeps any key it does not know and ignores it; here a key that its type does not have is an error.

    Raises:
        ValueError: as `build_model`.
    """
    if config.weights is not None:
        return _opened(config.weights, "model.weights")
    if isinstance(config.config, str):
        return _opened(config.config, "model.config")
    given: dict[str, Any] = {**(PRESETS[config.preset] if config.preset else {}), **(config.config or {})}
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


def _opened(name: str, place: str) -> PreTrainedConfig:
    """The config of a folder or of a name on the hub; its dtype is left to `train.precision`."""
    try:
        opened: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except Exception as error:  # whatever a damaged folder or a lost connection sets off in there
        raise ValueError(f"{place} = {name!r} cannot be opened: {_told(error)}; {_WHERE}") from error
    if opened.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{place} = {name!r} is a {opened.model_type}, which is no causal language model of transformers")
    opened.dtype = None
    return opened


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
    told = " ".join(f"{type(error).__name__}: {error}".split())
    return told if len(told) < 240 else f"{told[:240]}…"


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
