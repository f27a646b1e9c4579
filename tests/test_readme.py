"""Every command of the README runs as it is written there (training cut short), and every file it names exists."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = re.findall(r"```(?:sh|console)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line.removeprefix("$ ") for block in SHELL for line in block.splitlines() if line.startswith("$ ")]
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SHORT = ["--train.steps", "20", "--train.eval_sequences", "32"]


def installed(command: str) -> list[str]:
    """The command as this environment has it."""
    words = shlex.split(command, comments=True)
    if words[0] == "lordo":
        return [sys.executable, "-m", *words]
    if words[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return words


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_there_are_commands_to_test():
    assert len(COMMANDS) >= 6
    assert PYTHON


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder `runs`, as `lordo train recipes/tiny.toml` leaves it."""
    folder = tmp_path_factory.mktemp("trained")
    done = run([*installed("lordo train"), str(ROOT / "recipes" / "tiny.toml"), *SHORT], folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs"


SMALL = shlex.split(
    "--model.config.vocab_size 512 --data.sequence_length 16 --batch.per_worker_sequences 1 --train.warmup_steps 5 --train.decay_steps 5"
)


def write_texts(folder: Path) -> None:
    """Four files of English and Python."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("README.md", "CONTRIBUTING.md", "src/lordo/optimizer.py", "src/lordo/lowrank.py"):
        shutil.copy(ROOT / name, folder)


def prepare_texts(folder: Path) -> None:
    """What the command before this one does."""
    write_texts(folder / "path" / "to" / "texts")
    (command,) = [c for c in COMMANDS if c.startswith("lordo prepare")]
    done = run([word.replace("8192", "512") for word in installed(command)] + SMALL, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[0] in ("lordo", "torchrun", "python")])
def test_command_runs(command, tmp_path, runs):
    for name in ("recipes", "examples", "benchmarks", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    if " runs/" in command:
        shutil.copytree(runs, tmp_path / "runs")
    words = installed(command)
    if "path/to/texts" in command:
        words = [word.replace("8192", "512") for word in words] + SMALL
        if "train" in words:
            prepare_texts(tmp_path)
        write_texts(tmp_path / "path" / "to" / "texts")
    if "train" in words or "compare" in words:
        words += SHORT
    if "eval" in words:
        words += ["--max-tokens", "4096"]
    if "benchmarks/step.py" in words:
        words += ["--layers", "1", "--repeats", "1"]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_target_exists(command):
    done = run(["make", "--dry-run", *command.split()[1:]], ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("pip ")])
def test_extras_of_pip_commands_exist(command):
    extras = re.findall(r"\[([a-z,]+)\]", command)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = \[", text, flags=re.MULTILINE) for group in extras for extra in group.split(","))


def test_the_swap_trains():
    """The Python of the README, with a model and batches put before it."""
    before = """
import torch, lordo
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=96, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2))
tokens = torch.arange(64).repeat(4, 1)
loader, workers = [{"input_ids": tokens, "labels": tokens}] * 40, None
first = float(model(**loader[0]).loss)
"""
    names: dict[str, object] = {}
    exec(before + PYTHON[0], names)
    last = float(names["model"](**names["loader"][0]).loss)
    assert last < 0.5 * names["first"]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_link_leads_somewhere(target):
    assert (ROOT / target).exists()


def test_every_test_that_the_hazards_name_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "hazards.md").read_text()))
    present = {
        name for path in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 50
    assert not named - present


def test_the_tree_names_what_is_there():
    tree = re.search(r"```text\n(src/lordo/.*?)```", README, flags=re.DOTALL)[1]
    named = set(re.findall(r"([a-z_]+\.py)\b", tree))
    present = {path.name for path in (ROOT / "src" / "lordo").rglob("*.py")}
    assert named <= present
    assert present - named <= {"__init__.py", "__main__.py"}
