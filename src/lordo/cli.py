"""The command line: `lordo train recipe.toml`, and every setting of the recipe as an option."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from lordo.suggest import unknown

USAGE = """usage: lordo COMMAND …

  train RECIPE [--SECTION.SETTING VALUE …]   train a model as a recipe says
  train RECIPE|RUN --resume                  go on with a recipe's last run, or with the run in a folder
  train RECIPE --elastic LIGHTHOUSE          train as one of several workers that may be lost and come back
  train RECIPE --help                        every setting of a recipe, with its default and what it means
  check RECIPE                               what would stop a run, found without running it
  prepare RECIPE [--max-tokens N]            tokenize the [[data.mix]] of a recipe, once, before training on it
  compare RECIPE [--methods A,B …]           several methods on the same model and text: table, figures, report
  plan RECIPE [--workers M --bandwidth B]    what every method would send, hold and take; runs nothing
  report RUN [RUN …]                         figures and one HTML page of runs, also while they go on
  eval RUN [TEXT …]                          perplexity and bits per byte of a finished run
  generate RUN TEXT                          how a finished run's model goes on with a text
  export RUN FOLDER                          model and tokenizer as transformers opens them
  methods                                    the methods, a line each
  version                                    versions of lordo and of what it stands on

lordo COMMAND --help tells more about a command. https://arxiv.org/abs/2602.04396 is the method's paper.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (the run failed), 2 (asked for something that cannot work), 130 or 143 (interrupted)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        return _refuse(unknown("command", command, COMMANDS))
    try:
        return COMMANDS[command](rest)
    except KeyboardInterrupt:
        if _speaks():
            print("\nlordo: interrupted; what was recorded so far is in the run's folder", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        return _refuse(f"{error.name} is not installed: pip install 'lordo[train]'")


def entry() -> NoReturn:
    """The command: `main`, and out at once.

    Taking transformers and torch apart at exit costs a second, and gloo may abort in it (pytorch issue 190489), after everything is done.
    """
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        return _usage("lordo train RECIPE|RUN [--resume] [--elastic LIGHTHOUSE] [--SECTION.SETTING VALUE …]", arguments)
    from lordo.sync import DisagreementError, WorkerError
    from lordo.trainer.elastic_launch import run_elastic
    from lordo.trainer.launch import run
    from lordo.trainer.options import load_with_options, run_folder, take_option
    from lordo.trainer.settings import ConfigError, UsageError
    from lordo.trainer.stopping import Interrupted
    from lordo.trainer.terminal import wide_console

    try:
        resume = "--resume" in arguments
        path, *options = [word for word in arguments if word != "--resume"]
        lighthouse, options = take_option("--elastic", options, "the address of a lighthouse, such as http://10.0.0.1:29510")
        folder = run_folder(path, resume=resume)
        config = load_with_options(f"{folder}/config.toml" if folder else path, options, command="lordo train")
        if lighthouse is None:
            run(config, wide_console(), resume=folder or resume)
        else:
            run_elastic(config, wide_console(), lighthouse=lighthouse, resume=folder or resume)
    except Interrupted as stopped:
        if _speaks():
            print(f"lordo: {stopped}", file=sys.stderr)
        return 128 + stopped.number
    except (ConfigError, UsageError, DisagreementError) as error:
        return _refuse(str(error))
    except (WorkerError, FloatingPointError, OSError) as error:  # OSError: a disk that fills up
        hint = f"; {note[0]}" if (note := getattr(error, "__notes__", [])) else ""
        print(f"lordo: {error}{hint}", file=sys.stderr)
        return 1
    return 0


def _trainer_command(module: str) -> Callable[[list[str]], int]:
    """A command that is a module of the trainer, loaded when it is called."""

    def run(arguments: list[str]) -> int:
        from lordo.trainer.settings import ConfigError, UsageError

        try:
            code: int = import_module(f"lordo.trainer.{module}").main(arguments)
        except (ConfigError, UsageError) as error:
            return _refuse(str(error))
        return code

    return run


def _methods(arguments: list[str]) -> int:
    if arguments:
        return _usage("lordo methods", arguments)
    from lordo.methods import METHODS

    width = max(map(len, METHODS))
    for method in METHODS.values():
        print(f"{method.name:<{width}}  {method.summary}")
    return 0


def _version(arguments: list[str]) -> int:
    if arguments:
        return _usage("lordo version", arguments)
    from lordo.trainer.summary import environment

    for name, value in environment().items():
        print(f"{name}: {value}")
    return 0


def _usage(usage: str, arguments: list[str]) -> int:
    print(f"usage: {usage}")
    return 0 if arguments and arguments[0] in ("-h", "--help") else 2


def _speaks() -> bool:
    """Of the processes that torchrun starts on a machine, the first one speaks for all."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def _refuse(sentence: str) -> int:
    """Say why on standard error."""
    if _speaks():
        print(f"lordo: {sentence}", file=sys.stderr)
    return 2


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "check": _trainer_command("check_command"),
    "prepare": _trainer_command("prepare_command"),
    "compare": _trainer_command("compare_command"),
    "plan": _trainer_command("plan"),
    "report": _trainer_command("report"),
    "eval": _trainer_command("eval_command"),
    "generate": _trainer_command("generate"),
    "export": _trainer_command("export"),
    "methods": _methods,
    "version": _version,
}
