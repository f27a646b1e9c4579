"""Settings of a recipe as options of the command line: `--method.rank 8` stands for `rank = 8` under `[method]`."""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from lordo.config import ConfigError, RunConfig, load


def load_with_options(path: str, options: Sequence[str], *, command: str) -> RunConfig:
    """Read a recipe, and let options replace its settings.

    Args:
        path: the recipe. options: from the command line. command: how the command is called, for its help.

    Raises:
        ConfigError: the recipe cannot be used.
        SystemExit: 2 for an option that does not exist or has a wrong value (tyro has then said so); 0 for --help.
    """
    config = load(path)
    if not options:
        return config
    return tyro.cli(RunConfig, default=config, args=list(options), prog=f"{command} {path}", description="Settings of a run.")


__all__ = ["ConfigError", "load_with_options"]
