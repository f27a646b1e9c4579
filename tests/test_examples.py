"""Every example, run as a user runs it: it ends well, and what it prints is true."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = "torchrun"


def run(command: str, timeout_seconds: float = 120) -> str:
    """Run a command as its docstring has it, except that torchrun picks a free port of its own; returns what it printed."""
    program, *arguments = shlex.split(command)
    start = [sys.executable]
    if program == TORCHRUN:
        start += ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*start, *arguments],
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "terminate called" not in done.stderr  # gloo, at an end that is not clean
    return done.stdout


def documented(name: str) -> str:
    """The first command in an example's docstring."""
    docstring = (EXAMPLES / name).read_text().split('"""')[1]
    return next(line.strip() for line in docstring.splitlines() if line.startswith("    "))


def facts(printed: str) -> tuple[int, float, int, float]:
    """Workers, held-out loss, bytes sent per worker, and times less than averaging gradients, from what was printed."""
    trained = r"(\d+) workers, 320 steps: loss ([\d.]+) nats per byte on held-out text\n"
    sent = r"([\d,]+) bytes sent per worker, ([\d.]+) times less than averaging gradients at every step\n"
    found = re.fullmatch(trained + sent, printed)
    assert found, printed
    workers, loss, num_bytes, less = found.groups()
    return int(workers), float(loss), int(num_bytes.replace(",", "")), float(less)


def test_every_example_says_how_it_is_run():
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert names == ["alone.py", "fsdp.py", "lightning_module.py", "mesh.py", "processes.py", "simulated.py", "transformers_trainer.py"]
    for name in names:
        program, *_, script = documented(name).split()
        assert program in ("python", TORCHRUN)
        assert script == f"examples/{name}"


@pytest.mark.slow
def test_alone():
    printed = run(documented("alone.py"))

    loss = float(re.search(r"held-out text after 300 steps: ([\d.]+)", printed)[1])
    held, adamw = (int(each.replace(",", "")) for each in re.search(r"basis: ([\d,]+) bytes, AdamW holds ([\d,]+)", printed).groups())
    assert loss < 2.7  # 5.55 is a guess among 256 bytes
    assert adamw > 2 * held
    assert re.search(r"192×512 +24 +matrix", printed)
    assert re.search(r"256×32 +full +full-rank: embedding", printed)


@pytest.fixture(scope="module")
def simulated() -> tuple[int, float, int, float]:
    return facts(run(documented("simulated.py")))


@pytest.mark.slow
def test_simulated(simulated):
    """K = 32 and rank = side/8 make 25.6 times less of a matrix (algorithm.md); embedding, head and bases cost a part of it."""
    workers, loss, sent, less = simulated
    assert workers == 4
    assert loss < 2.6
    assert 15 < less < 25.6
    assert 1e6 < sent < 1e8


@pytest.mark.slow
def test_processes_print_the_same_as_simulated_workers(simulated):
    workers, loss, sent, less = facts(run(documented("processes.py")))
    assert (workers, sent, less) == (4, simulated[2], simulated[3])
    assert loss == pytest.approx(simulated[1], rel=1e-3)  # 320 steps apart; the first ones are equal to 1e-5, see test_train.py


@pytest.mark.slow
def test_mesh(simulated):
    workers, loss, sent, less = facts(run(documented("mesh.py")))
    assert workers == 2
    assert loss < 2.7
    assert sent == simulated[2] * 2 // 3  # (M − 1)/M of the same: 1/2 for two workers, 3/4 for four
    assert less == simulated[3]


@pytest.mark.slow
def test_fsdp():
    printed = run(documented("fsdp.py") + " --mixed-precision --checkpointing --compile aot_eager --steps 48", timeout_seconds=300)
    trained = re.search(r"2 workers of 2 devices, 48 steps: loss ([\d.]+) nats per byte on held-out text\n", printed)
    assert float(trained[1]) < 3.2, printed  # 5.55 is a guess among 256 bytes
    counted = re.search(
        r"each device: ([\d,]+) bytes sent to other workers, ([\d,]+) to its own for LoRDO, ([\d,]+) bytes of state", printed
    )
    assert all(int(each.replace(",", "")) > 0 for each in counted.groups())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library", "steps"), [("transformers_trainer.py", "accelerate", 40), ("lightning_module.py", "lightning", 96)]
)
def test_in_the_trainer_of_another_library(name, library, steps):
    """That gradients stay local and the mean is what is evaluated: see test_integrations.py."""
    pytest.importorskip(library)
    printed = run(documented(name), timeout_seconds=300)
    trained = re.search(rf"2 workers, {steps} steps: loss ([\d.]+) nats per byte on held-out text\n([\d,]+) bytes sent per worker", printed)
    assert trained, printed
    assert float(trained[1]) < 3.3  # 5.55 is a guess among 256 bytes
    assert int(trained[2].replace(",", "")) > 1e5
