"""The settings of one run: each is declared once, here, and its docstring is its help on the command line.

A run is one TOML file (see `recipes/`). `load` reads and checks it, `dump` writes the settings back.
None stands for "not given": TOML has no such value, so the key is simply left out.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator
from pydantic.fields import FieldInfo

from lordo.lowrank import BasisMethod
from lordo.suggest import listed, nearest
from lordo.updates import FullrankDenominator, FullrankSignal

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Scalar = bool | int | float | str | None


class ConfigError(ValueError):
    """The settings of a run cannot be used; the message is one sentence that says why and what to do."""


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


# ---- reading


def load(path: str | os.PathLike[str], overrides: Mapping[str, object] = {}) -> RunConfig:
    """Read the settings of a run from a TOML file.

    Args:
        path: the file.
        overrides: settings that replace those of the file, by dotted name: `{"method.lr": 1e-3, "workers": 2}`.

    Returns:
        The checked settings; equal to those that `dump` wrote.

    Raises:
        ConfigError: the file is missing or is not TOML, or a setting is unknown, lacking, of a wrong type, or out of
            range. The message is one sentence that begins with the path.
    """
    file = Path(path)
    document = _parsed(_text(file), file)
    for name, value in overrides.items():
        _override(document, name, value, file)
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        changed = f" (with {', '.join(overrides)} changed)" if overrides else ""
        raise ConfigError(f"{file}{changed}: {_sentence(error, document)}") from error


def override(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """Give a copy of the settings with some replaced, by dotted name; None takes a setting out.

    Raises:
        ConfigError: as `load`, without the path.
    """
    document = config.model_dump()
    for name, value in settings.items():
        _override(document, name, value, Path(config.name))
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_sentence(error, document)) from error


def _text(file: Path) -> str:
    if file.is_dir():
        raise ConfigError(f"{file} is a folder, not a recipe; {_recipes(file)}")
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; {_recipes(file.parent, like=file.name)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}); a recipe is a TOML file") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _recipes(folder: Path, like: str = "") -> str:
    """Say which recipes a folder has, and which of them is most like a given name."""
    if not folder.is_dir():
        return f"neither does the folder {folder}"
    names = [entry.name for entry in folder.glob("*.toml")]
    if not names:
        return f"there is no .toml file in {folder}"
    close = like and (nearest(like, names) or nearest(f"{like}.toml", names))
    there = f"{folder} has: {listed(names)}"
    return f"did you mean '{folder / close}'? ({there})" if close else there


def _parsed(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = re.search(r"at line (\d+)", str(error))
        line = told[1] if told else len(text.splitlines())  # at the end of the document
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise ConfigError(f"{file}, line {line}: not TOML: {reason}") from error


def _override(document: dict[str, Any], name: str, value: object, file: Path) -> None:
    """Set one setting by its dotted name; changes `document`."""
    *tables, key = name.split(".")
    table = document
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: cannot set {name!r}, because {part!r} is a setting, not a table")
    table[key] = value


# ---- what is wrong, in one sentence

Place = tuple[str | int, ...]
"""Where a setting is: the names of its tables, its own name, and a number inside a list."""


def _sentence(error: ValidationError, document: Mapping[str, Any]) -> str:
    """Say the first thing that is wrong; unknown names first, since a mistyped name is also a lacking one."""
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    kind, loc = errors[0]["type"], errors[0]["loc"]
    if kind == "extra_forbidden":
        return _no_such_setting(loc)
    if kind == "missing":
        return _lacking(loc)
    if kind == "value_error" and loc in _tables():  # a law between the settings of one table
        return f"[{_name(loc)}] {_joined([errors[0]['msg']])}"
    return _not_allowed([(_place(each["loc"], document), each["msg"]) for each in errors], document)


def _no_such_setting(loc: Place) -> str:
    *table, key = loc
    owner = f"[{_name(table)}] has" if table else "there is"
    settings = list(_fields(table))
    close = nearest(str(key), settings)
    homes = [home for home in _tables() if str(key) in _fields(home)]
    if homes and not nearest(str(key), settings, likeness=0.85):  # the very name elsewhere, unless this is a slip of the finger
        hint = f"it belongs to [{_name(homes[0])}]" if homes[0] else "it belongs above the first table"
    else:
        hint = f"did you mean {close!r}?" if close else f"the settings are: {listed(settings)}"
    return f"{owner} no setting {key!r}; {hint}"


def _lacking(loc: Place) -> str:
    *table, key = loc
    field = _fields(table)[str(key)]
    if _is_table(field.annotation):
        needed = [name for name, inner in _fields(loc).items() if inner.is_required()]
        return f"the table [{_name(loc)}] is missing; add it, with: {listed(needed)}"
    owner = f"[{_name(table)}] lacks" if table else "it lacks"
    return f"{owner} the setting {key!r}; add it: {field.description}"


def _not_allowed(errors: Sequence[tuple[Place, str]], document: Mapping[str, Any]) -> str:
    """Say what was given and what is allowed, at the innermost place of the first error."""
    first = errors[0][0]
    place = max((each for each, _ in errors if each[: len(first)] == first), key=len)
    why = _joined([message for each, message in errors if each == place])
    value, depth = _found(document, place)
    table = f"[{_name(place[:depth])}] " if depth else ""
    return f"{table}{_name(place[depth:])} = {_shown(value)}, but it {why}"


def _joined(messages: Sequence[str]) -> str:
    """Join pydantic's "Input should be A" and "Input should be B" to "should be A or B", in the words of TOML."""
    noise = r"^Value error, |^\w+ (?=should )| after validation| or instance of \w+"
    plain = [re.sub(noise, "", message) for message in messages]
    joined = " or ".join([plain[0], *(each.removeprefix("should be ") for each in plain[1:])])
    for theirs, ours in _WORDS.items():
        joined = joined.replace(theirs, ours)
    return joined


_WORDS = {"dictionary": "table", "greater than or equal to": "at least", "less than or equal to": "at most"}


def _tables() -> list[Place]:
    return [(), *((name,) for name, field in RunConfig.model_fields.items() if _is_table(field.annotation))]


def _is_table(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _fields(table: Sequence[str | int]) -> Mapping[str, FieldInfo]:
    """Give the declared settings of a table, by name."""
    model: Any = RunConfig
    for part in table:
        model = model.model_fields[part].annotation
    fields: Mapping[str, FieldInfo] = model.model_fields
    return fields


def _place(loc: Place, document: Mapping[str, Any]) -> Place:
    """Keep those parts of pydantic's location that are in the document; the others name the types it tried."""
    place: list[str | int] = []
    value: Any = document
    for part in loc:
        with suppress(KeyError, IndexError, TypeError):
            value = value[part]
            place.append(part)
    return tuple(place)


def _found(document: Mapping[str, Any], place: Place) -> tuple[Any, int]:
    """Give the value at a place, and in how many tables it lies."""
    value: Any = document
    depth = -1  # the document itself is no table
    for part in place:
        depth += isinstance(value, dict)
        value = value[part]
    return value, depth


def _name(place: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _shown(value: object, most: int = 60) -> str:
    """Write a value as TOML would, or as Python would where TOML cannot; long ones are shortened."""
    try:
        text = _toml_value(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


# ---- writing


def dump(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write all settings of a run, defaults included, as TOML that `load` reads back equal."""
    Path(path).write_text(dumps(config), encoding="utf-8", newline="\n")


def dumps(config: RunConfig) -> str:
    """Give all settings of a run, defaults included, as TOML text."""
    return "\n".join(_toml_table(config.model_dump(mode="json"), ())) + "\n"


def _toml_table(table: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[str]:
    """Give the lines of a table: its header and values first, then the tables inside it."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    values = {key: value for key, value in table.items() if key not in inner and value is not None}
    if place and (values or not inner):  # a table that holds tables alone needs no header
        yield f"\n[{'.'.join(map(_toml_key, place))}]"
    yield from (f"{_toml_key(key)} = {_toml_value(value)}" for key, value in values.items())
    for key, value in inner.items():
        yield from _toml_table(value, (*place, key))


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_string(key)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # the shortest text that reads back to the same float; inf and nan are TOML's words too
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise TypeError(f"TOML has no value for {value!r}")


def _toml_string(text: str) -> str:
    """Quote a string: JSON's escapes are TOML's, except that TOML escapes the delete character too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
