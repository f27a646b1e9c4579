"""Recipes: the settings of a run as a TOML file, read, changed and written."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lordo.suggest import listed, nearest
from lordo.trainer.complaints import complaint
from lordo.trainer.config import RunConfig
from lordo.trainer.settings import ConfigError
from lordo.trainer.toml import toml_table


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
        raise ConfigError(f"{file}{changed}: {complaint(error, document)}") from error


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
        raise ConfigError(complaint(error, document)) from error


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
        if table.get(part) is None:  # not there, or not given
            table[part] = {}
        table = table[part]
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: cannot set {name!r}, because {part!r} is a setting, not a table")
    table[key] = value


def dump(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write all settings of a run, defaults included, as TOML that `load` reads back equal."""
    Path(path).write_text(dumps(config), encoding="utf-8", newline="\n")


def dumps(config: RunConfig) -> str:
    """Give all settings of a run, defaults included, as TOML text."""
    return "\n".join(toml_table(config.model_dump(mode="json"), ())) + "\n"


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
