"""`lordo compare`: its options, and the order of what it does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lordo.trainer.compare import check, compare
from lordo.trainer.config import CompareConfig
from lordo.trainer.figures import draw
from lordo.trainer.launch import under_torchrun
from lordo.trainer.options import RecipeParser
from lordo.trainer.page import print_table, write_page, write_results
from lordo.trainer.recipe import override
from lordo.trainer.settings import UsageError
from lordo.trainer.terminal import wide_console


def main(arguments: list[str]) -> int:
    """Compare; returns 0, or 1 if a member failed.

    Raises:
        UsageError, ConfigError: what was asked for cannot work.
    """
    config, asked = parser().read(arguments)
    if under_torchrun():
        raise UsageError("lordo compare trains all workers in one process: start it without torchrun")
    settings = given(asked)
    if "lr" in settings and "all" not in settings["lr"]:
        settings["lr"] = {**config.compare.lr, **settings["lr"]}  # the recipe's stand for the methods that were not named
    config = override(config, {f"compare.{name}": value for name, value in settings.items()})
    name = asked.name or f"{config.name}-compare"
    folder = Path(config.output) / name
    console = wide_console()
    check(config, config.compare)
    rows = compare(config, config.compare, folder, console)
    links = config.compare.bandwidth
    figures = draw(rows, links, folder)
    write_page(rows, links, figures, override(config, {"name": name}), folder / "report.html")
    write_results(rows, folder / "results.json")
    with (folder / "table.txt").open("w", encoding="utf-8") as file:
        print_table(rows, links, wide_console(file))
    print_table(rows, links, console)
    console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    return 1 if any(row.failures for row in rows) else 0


def parser() -> RecipeParser:
    """The options of `compare`; every other one is a setting of the recipe."""
    defaults = CompareConfig.model_fields
    p = RecipeParser(
        "lordo compare",
        "Train several methods from the same weights on the same text. Any setting of the recipe may be given too "
        "(--train.steps 100); finished members are kept, so an interrupted comparison continues where it was.",
    )
    p.add_argument("--name", help="folder of the comparison under the recipe's output folder (default: NAME-compare)")
    p.add_argument("--methods", metavar="A,B", help=defaults["methods"].description)
    p.add_argument("--seeds", type=int, metavar="N", help=defaults["seeds"].description)
    p.add_argument("--lr", nargs="+", metavar="METHOD=LR,LR", help="learning rates to try per method, or LR,LR for all; the best is shown")
    p.add_argument("--bandwidth", metavar="B,B", help=defaults["bandwidth"].description)
    p.add_argument("--vary", action="append", metavar="'SETTING=V,V …'", help=defaults["vary"].description)
    return p


def given(asked: argparse.Namespace) -> dict[str, Any]:
    """The settings of the comparison that were given as options."""
    settings: dict[str, Any] = {}
    for name in ("methods", "bandwidth"):
        if getattr(asked, name) is not None:
            settings[name] = [each.strip() for each in getattr(asked, name).split(",") if each.strip()]
    if asked.seeds is not None:
        settings["seeds"] = asked.seeds
    if asked.vary is not None:
        settings["vary"] = asked.vary
    if asked.lr is not None:
        settings["lr"] = dict(map(_learning_rates, asked.lr))
    return settings


def _learning_rates(text: str) -> tuple[str, list[float]]:
    """("lordo", [0.004, 0.006]) of "lordo=4e-3,6e-3"; ("all", …) without a name."""
    name, equals, values = text.rpartition("=")
    try:
        return name if equals else "all", [float(value) for value in values.split(",")]
    except ValueError:
        raise UsageError(f"--lr {text}: write METHOD=LR,LR,… with numbers, such as lordo=4e-3,6e-3") from None
