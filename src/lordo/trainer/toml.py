"""Settings as TOML text: the standard library reads TOML but does not write it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def toml_table(table: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[str]:
    """Give the lines of a table: its header and values first, then the tables and the lists of tables inside it."""
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    lists = {key: value for key, value in table.items() if _is_list_of_tables(value)}
    values = {key: value for key, value in table.items() if key not in inner and key not in lists and value is not None}
    if place and (values or not (inner or lists)):  # a table that holds tables alone needs no header
        yield f"\n[{'.'.join(map(_toml_key, place))}]"
    yield from (f"{_toml_key(key)} = {toml_value(value)}" for key, value in values.items())
    for key, value in inner.items():
        yield from toml_table(value, (*place, key))
    for key, members in lists.items():
        for member in members:
            yield f"\n[[{'.'.join(map(_toml_key, (*place, key)))}]]"
            yield from (f"{_toml_key(name)} = {toml_value(value)}" for name, value in member.items() if value is not None)


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(member, dict) for member in value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_string(key)


def toml_value(value: object) -> str:
    """Give one value as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # the shortest text that reads back to the same float; inf and nan are TOML's words too
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"TOML has no value for {value!r}")


def _toml_string(text: str) -> str:
    """Quote a string: JSON's escapes are TOML's, except that TOML escapes the delete character too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
