"""Bad input through the real command line: one clear sentence on standard error, exit code 2, no traceback, nothing half-written."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import lordo
import lordo.cli
from test_train import micro_recipe


@dataclass
class Shell:
    """Runs `lordo` in this process, as from the folder of a micro recipe."""

    folder: Path
    capsys: pytest.CaptureFixture

    @property
    def recipe(self) -> Path:
        return self.folder / "micro.toml"

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        try:
            code = lordo.cli.main(arguments)
        except SystemExit as exit:
            code = exit.code
        return code, *self.capsys.readouterr()

    def refused(self, *arguments: str) -> str:
        """The sentence with which a command is refused."""
        before = sorted(self.folder.rglob("*"))
        code, _, errors = self.run(*arguments)
        assert code == 2, errors
        assert errors.count("\n") == 1, errors
        assert errors.endswith("\n")
        assert errors.startswith("lordo: ")
        assert "Traceback" not in errors
        assert "validation error" not in errors  # pydantic's own words
        assert sorted(self.folder.rglob("*")) == before, "something was left behind"
        return errors.removeprefix("lordo: ").strip()

    def edit(self, old: str, new: str) -> None:
        """Change the recipe."""
        text = self.recipe.read_text()
        assert text.count(old) == 1
        self.recipe.write_text(text.replace(old, new))


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    micro_recipe(tmp_path)
    return Shell(tmp_path, capsys)


def mentions(sentence: str, *words: str) -> bool:
    missing = [word for word in words if word not in sentence]
    assert not missing, f"{missing} not in: {sentence}"
    return True


# ---- commands


def test_unknown_command(shell):
    assert mentions(shell.refused("tran", "micro.toml"), "tran", "did you mean 'train'?")
    assert mentions(shell.refused("simulate"), "simulate", "train", "version")


@pytest.mark.parametrize("arguments", [(), ("train",)])
def test_too_little_shows_how_it_is_used(shell, arguments):
    code, printed, errors = shell.run(*arguments)
    assert code == 2
    assert "usage: lordo" in printed + errors


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("train", "--help"), ("train", "micro.toml", "--help"), ("version",)])
def test_help_and_version_are_no_errors(shell, arguments):
    code, printed, errors = shell.run(*arguments)
    assert code == 0
    assert errors == ""
    assert "lordo" in printed
    assert not (shell.folder / "runs").exists()


def test_help_on_a_recipe_names_every_setting(shell):
    _, printed, _ = shell.run("train", "micro.toml", "--help")
    for name in ("--workers", "--method.rank", "--method.sync_every", "--train.steps", "--data.source", "--batch.per_worker_sequences"):
        assert name in printed


# ---- the recipe


def test_missing_recipe(shell):
    assert mentions(shell.refused("train", "micr.toml"), "micr.toml does not exist", "did you mean", "micro.toml")
    assert mentions(shell.refused("train", "nowhere/micro.toml"), "nowhere/micro.toml does not exist", "folder nowhere")


def test_a_folder_or_something_else_as_recipe(shell):
    assert mentions(shell.refused("train", "."), "is a folder", "micro.toml")
    shell.recipe.write_text("name = micro")
    assert mentions(shell.refused("train", "micro.toml"), "micro.toml, line 1", "not TOML")
    shell.recipe.write_bytes(b"name = '\xff'")
    assert mentions(shell.refused("train", "micro.toml"), "micro.toml is not UTF-8 text")


# What is wrong; the line of the recipe and its bad version; the same as an option; what the sentence must say.
BAD_SETTINGS = {
    "unknown setting": ("rank = 4", "rnk = 4", ("--method.rnk", "4"), ("rnk", "did you mean 'rank'?")),
    "unknown table": ("[batch]", "[bacth]", ("--bacth.per_worker_sequences", "2"), ("bacth", "did you mean 'batch'?")),
    "rank zero": ("rank = 4", "rank = 0", ("--method.rank", "0"), ("rank = 0", "at least 1")),
    "rank negative": ("rank = 4", "rank = -3", ("--method.rank", "-3"), ("rank = -3", "at least 1")),
    "rank no number": ("rank = 4", 'rank = "few"', ("--method.rank", "few"), ("rank", "few", "integer")),
    "omega above 1": ("rank = 4", "rank = 4\nomega = 1.5", ("--method.omega", "1.5"), ("omega = 1.5", "at most 1")),
    "omega below 0": ("rank = 4", "rank = 4\nomega = -0.5", ("--method.omega", "-0.5"), ("omega = -0.5", "at least 0")),
    "K below 1": ("sync_every = 4", "sync_every = 0", ("--method.sync_every", "0"), ("sync_every = 0", "at least 1")),
    "no workers": ("workers = 4", "workers = 0", ("--workers", "0"), ("workers = 0", "at least 1")),
    "steps no number": ("steps = 50", "steps = 1.5", ("--train.steps", "1.5"), ("steps = 1.5", "integer")),
    "learning rate zero": ("lr = 6e-3", "lr = 0", ("--method.lr", "0"), ("lr = 0", "greater than 0")),
    "learning rate NaN": ("lr = 6e-3", "lr = nan", ("--method.lr", "nan"), ("lr = nan", "finite")),
    "unknown method": ('name = "lordo"', 'name = "lordoo"', ("--method.name", "lordoo"), ("lordoo", "did you mean 'lordo'?")),
    "unknown choice": ("rank = 4", 'rank = 4\nbasis = "svdd"', ("--method.basis", "svdd"), ("svdd", "'svd'", "'subspace'")),
    "setting the method lacks": ('name = "lordo"', 'name = "ddp-adamw"', ("--method.name", "ddp-adamw"), ("ddp-adamw", "rank")),
    "name with a slash": ('name = "micro"', 'name = "a/b"', ("--name", "a/b"), ("name", "a/b", "letters")),
    "missing data file": ("source = [", 'source = ["gone.txt", ', ("--data.source", '["gone.txt"]'), ("gone.txt", "does not exist")),
    "empty data": ("source = [", "source = []#", ("--data.source", "[]"), ("source = []", "at least 1")),
    "blocks too long": ("sequence_length = 32", "sequence_length = 64", ("--data.sequence_length", "64"), ("64", "max_position")),
    "warm-up too long": ("warmup_steps = 5", "warmup_steps = 51", ("--train.warmup_steps", "51"), ("51", "50", "lower warmup_steps")),
    "unknown model": ('model_type = "llama"', 'model_type = "lama"', ("--model.config.model_type", "lama"), ("lama", "mean 'llama'?")),
    "unknown model setting": ("hidden_size", "hiden_size", ("--model.config.hiden_size", "32"), ("hiden_size", "'hidden_size'")),
    "more workers than blocks": ("workers = 4", "workers = 3000", ("--workers", "3000"), ("blocks", "too few", "3000")),
}


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_bad_setting_in_the_recipe(shell, what):
    old, new, _, words = BAD_SETTINGS[what]
    shell.edit(old, new)
    assert mentions(shell.refused("train", "micro.toml"), *words)


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_bad_setting_as_an_option(shell, what):
    _, _, option, words = BAD_SETTINGS[what]
    assert mentions(shell.refused("train", "micro.toml", *option), *words)
    name, value = option
    assert mentions(shell.refused("train", "micro.toml", f"{name}={value}"), *words)


def test_the_sentence_says_where_the_setting_is(shell):
    shell.edit("rank = 4", "rank = 0")
    assert mentions(shell.refused("train", "micro.toml"), "micro.toml: [method] rank = 0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method.rank",), ("--method.rank", "value")),
        (("--method.rank", "--workers", "2"), ("--method.rank", "value")),
        (("8",), ("8", "--method.rank 8")),
        (("-method.rank", "8"), ("-method.rank",)),
        (("--",), ("--",)),
        (("--rank", "8"), ("rank", "[method]")),
        (("--method", "lordo"), ("method", "table")),
        (("--name.first", "x"), ("name", "setting", "not a table")),
    ],
)
def test_option_that_is_no_option(shell, options, words):
    assert mentions(shell.refused("train", "micro.toml", *options), *words)


# ---- the machine


def test_other_number_of_processes_than_workers(shell, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert mentions(shell.refused("train", "micro.toml"), "3 processes", "workers = 4", "--workers 3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert mentions(shell.refused("train", "micro.toml", "--workers", "2"), "4 processes", "workers = 2", "--workers 4")


@pytest.mark.parametrize("arguments", [("tran",), ("train", "micr.toml"), ("train", "micro.toml", "--method.rank", "0")])
def test_of_several_processes_the_first_one_speaks(shell, monkeypatch, arguments):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert shell.run(*arguments) == (2, "", "")


def test_gpu_that_is_not_there(shell, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert mentions(shell.refused("train", "micro.toml", "--train.device", "cuda"), "cuda", "no GPU", '"cpu"')


@pytest.mark.parametrize("output", ["taken", "taken/deeper"])
def test_output_that_is_a_file(shell, output):
    (shell.folder / "taken").write_text("")
    assert mentions(shell.refused("train", "micro.toml", "--output", output), "taken")
    assert (shell.folder / "taken").read_text() == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_output_that_cannot_be_written(shell):
    (shell.folder / "locked").mkdir(mode=0o500)
    assert mentions(shell.refused("train", "micro.toml", "--output", "locked"), "locked", "Permission denied")


def test_output_that_cannot_be_made(shell, monkeypatch):
    """The same for root, who may write anywhere."""

    mkdir = Path.mkdir

    def refuse(path, *args, **kwargs):
        if "locked" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert mentions(shell.refused("train", "micro.toml", "--output", "locked"), "locked", "Permission denied")


def test_disk_that_is_full_or_read_only_once_the_folder_is_there(shell, monkeypatch):
    def dump(*args):
        raise OSError(28, "No space left on device")

    (shell.folder / "runs").mkdir()
    monkeypatch.setattr("lordo.trainer.folder.dump", dump)
    assert mentions(shell.refused("train", "micro.toml"), "micro", "No space left on device")


@pytest.mark.slow
def test_the_installed_command(shell):
    """Once through a real process: the same sentence, and nothing else."""
    done = subprocess.run([sys.executable, "-m", "lordo", "train", "micr.toml"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"lordo: {shell.refused('train', 'micr.toml')}\n"
