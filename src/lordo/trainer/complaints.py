"""What is wrong with the settings of a run, in one sentence: what was given, where, and what to do."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from lordo.suggest import listed, nearest
from lordo.trainer.config import RunConfig
from lordo.trainer.settings import Settings
from lordo.trainer.toml import toml_value

Place = tuple[str | int, ...]
"""Where a setting is: the names of its tables, its own name, and a number inside a list."""


def complaint(error: ValidationError, document: Mapping[str, Any]) -> str:
    """Say the first thing that is wrong; unknown names first, since a mistyped name is also a lacking one."""
    errors = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    kind, loc = errors[0]["type"], errors[0]["loc"]
    if kind == "extra_forbidden":
        return _no_such_setting(loc)
    if kind == "missing":
        return _lacking(loc)
    if kind == "value_error" and loc in _tables():  # a law between the settings of one table, or between tables
        return f"[{_name(loc)}] {_joined([errors[0]['msg']])}" if loc else _joined([errors[0]["msg"]])
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
        return f"the table [{_name(loc)}] is missing; add it, with{'' if needed else ' some of'}: {listed(needed or list(_fields(loc)))}"
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
    return [(), *((name,) for name, field in RunConfig.model_fields.items() if _is_table(_member(field.annotation)))]


def _is_table(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _member(annotation: Any) -> Any:
    """What a list holds; anything else as it is."""
    return get_args(annotation)[0] if get_origin(annotation) is list else annotation


def _fields(table: Sequence[str | int]) -> Mapping[str, FieldInfo]:
    """Give the declared settings of a table, by name."""
    model: Any = RunConfig
    for part in table:
        if isinstance(part, str):  # a number leads to a member of a list of tables, which are all alike
            model = _member(model.model_fields[part].annotation)
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
    """Give the value at a place, and how many parts of the place lead to the table it lies in."""
    value: Any = document
    depth = 0
    for number, part in enumerate(place):
        depth = number if isinstance(value, dict) else depth
        value = value[part]
    return value, depth


def _name(place: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _shown(value: object, most: int = 60) -> str:
    """Write a value as TOML would, or as Python would where TOML cannot; long ones are shortened."""
    try:
        text = toml_value(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
