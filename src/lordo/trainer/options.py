"""Settings of a recipe as options of the command line: `--method.rank 8` stands for `rank = 8` under `[method]`."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lordo.trainer.config import RunConfig
from lordo.trainer.recipe import load
from lordo.trainer.settings import ConfigError, Settings


class Parser(argparse.ArgumentParser):
    """Options of a command; a mistake in them is told in one sentence."""

    def error(self, message: str) -> NoReturn:
        """One sentence, as for every other mistake."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help tells more")


class RecipeParser(Parser):
    """Options of a command whose first argument is a recipe; every option that is not its own is a setting of the recipe."""

    def __init__(self, command: str, description: str) -> None:
        """Without options of its own so far."""
        usage = f"{command} RECIPE [options] [--SECTION.SETTING VALUE …]"
        super().__init__(prog=command, usage=usage, allow_abbrev=False, description=description)

    def read(self, arguments: Sequence[str]) -> tuple[RunConfig, argparse.Namespace]:
        """The recipe with what its settings were changed to, and the command's own options.

        Raises:
            ConfigError: the recipe or an option cannot be used.
        """
        if not arguments or arguments[0].startswith("-"):
            self.parse_args(arguments)  # --help
            self.error("the recipe is missing: it comes first")
        asked, settings = self.parse_known_args(arguments[1:])  # argparse must not take a setting's value for the recipe
        return load_with_options(arguments[0], settings, command=self.prog), asked


def run_folder(path: str, *, resume: bool) -> Path | None:
    """The folder of a run if the path is one; None for a recipe.

    Raises:
        ConfigError: it is one, but the run is not to go on.
    """
    if not (Path(path) / "config.toml").is_file():
        return None
    if not resume:
        raise ConfigError(f"{path} is the folder of a run: add --resume to go on with it, or give a recipe to begin another one")
    return Path(path)


def take_option(name: str, options: Sequence[str], what: str) -> tuple[str | None, list[str]]:
    """The value of a command's own option, if it is among these, and the others.

    Raises:
        ConfigError: it has no value; `what` says what that should be.
    """
    for at, word in enumerate(options):
        given, equals, value = word.partition("=")
        if given != name:
            continue
        rest = [*options[:at], *options[at + (1 if equals else 2) :]]
        if not equals:
            value = options[at + 1] if at + 1 < len(options) else ""
        if not value or value.startswith("--"):
            raise ConfigError(f"option {name} lacks a value: give {what}")
        return value, rest
    return None, list(options)


def load_with_options(path: str, options: Sequence[str], *, command: str) -> RunConfig:
    """Read a recipe, and let options replace its settings.

    Args:
        path: the recipe. options: `--name value` or `--name=value`, values as in TOML, bare words are strings. command: for the help.

    Raises:
        ConfigError: the recipe or an option cannot be used.
        SystemExit: 0 after --help.
    """
    if "-h" in options or "--help" in options:
        print("\n".join(help_lines(load(path), f"{command} {path}")))
        raise SystemExit(0)
    return load(path, dict(_pairs(options)))


def _pairs(options: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and value of each option."""
    rest = list(options)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or name == "--":
            raise ConfigError(f"unexpected {word!r}: options are written --section.setting value, such as --method.rank 8")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"option {word} lacks a value: write {word} value")
            text = rest.pop(0)
        yield name.removeprefix("--"), read_value(text)


def read_value(text: str) -> Any:
    """A value as TOML reads it; "none" takes the setting out; anything else is a string."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def help_lines(config: RunConfig, usage: str) -> list[str]:
    """Every setting with what it means and its value in this recipe."""
    return [f"usage: {usage} [--SECTION.SETTING VALUE …]", "", *_described(config, "")]


def _described(settings: Settings, prefix: str) -> Iterator[str]:
    tables = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Settings):
            tables.append((name, value, field.description))
            continue
        yield f"  --{prefix}{name}  (here: {'not set' if value is None else value})"
        yield f"      {field.description}"
    for name, value, description in tables:
        yield from ("", f"[{prefix}{name}] {description}", *_described(value, f"{prefix}{name}."))
