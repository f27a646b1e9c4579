"""`lordo train` from the recipe to the folder it leaves: in one process, under torchrun, as two launches; and stopped by Ctrl+C."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import lordo.cli
import lordo.trainer.launch
import lordo.trainer.loop
from lordo.sync import Comm
from lordo.trainer.alike import prepare_alike
from lordo.trainer.config import RunConfig
from lordo.trainer.data import load_blocks
from lordo.trainer.loop import Outcome
from lordo.trainer.loop import train as train_as_worker
from lordo.trainer.phases import lr_factor
from lordo.trainer.prepared import Prepared, prepare
from lordo.trainer.recipe import load, override
from lordo.trainer.records import Observer, Progress
from lordo.trainer.saving import Keeping
from lordo.trainer.settings import UsageError
from lordo.trainer.train_config import TrainConfig

NUM_WORKERS, STEPS, SYNC_EVERY, TOKENS_PER_STEP = 4, 50, 4, 4 * 2 * 32

MICRO = """
name = "micro"
workers = 4
output = "{folder}/runs"

[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true

[data]
source = [{files}]
sequence_length = 32

[batch]
per_worker_sequences = 2

[method]
name = "lordo"
lr = 6e-3
rank = 4
sync_every = 4

[train]
steps = 50
warmup_steps = 5
schedule = "cosine"
eval_every = 20
log_every = 1
threads = 1
device = "cpu"
"""


def micro_recipe(folder: Path) -> Path:
    """A recipe that trains a model of 29 thousand parameters on six small files of Python's own library."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("bisect", "heapq", "keyword", "shlex", "string", "textwrap")
    recipe = folder / "micro.toml"
    recipe.write_text(MICRO.format(folder=folder, files=", ".join(f'"{library / name}.py"' for name in names)))
    return recipe


def lines(folder: Path) -> list[dict]:
    """What `metrics.jsonl` has."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(line: dict) -> dict:
    """A line of the metrics without its seconds."""
    timed = ("seconds", "tokens_per_second")
    return {name: untimed(value) if isinstance(value, dict) else value for name, value in line.items() if name not in timed}


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@dataclass
class Run:
    """A finished run: its recipe, its folder, and what was printed."""

    recipe: Path
    folder: Path
    printed: str

    @property
    def lines(self) -> list[dict]:
        return lines(self.folder)

    @property
    def summary(self) -> dict:
        return summary(self.folder)

    @property
    def config(self) -> RunConfig:
        return load(self.folder / "config.toml")


def train(recipe: Path, *options: str) -> Run:
    """`lordo train` in this process; the run must succeed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = lordo.cli.main(["train", str(recipe), *options])
    assert code == 0, printed.getvalue()
    folder = Path(printed.getvalue().strip().splitlines()[-1].removeprefix("everything is in ").removesuffix("/"))
    return Run(recipe, folder, printed.getvalue())


def train_worker(prepared: Prepared, workers: Comm, folder: Path, observer: Observer | None = None) -> Outcome:
    """Train as one worker in this process, without a run's folder and checkpoints."""
    outcome = train_as_worker(prepared, workers, observer, keeping=Keeping(folder / "checkpoints", None, print))
    assert outcome is not None
    return outcome


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Run:
    """One run of the micro recipe; tests only look at it."""
    return train(micro_recipe(tmp_path_factory.mktemp("micro")))


# ---- what a run leaves behind


def test_the_settings_it_ran_with_load_equal(finished):
    assert finished.config == load(finished.recipe)
    assert finished.folder == finished.recipe.parent / "runs" / "micro"


def test_metrics_have_a_line_for_each_step(finished):
    metrics = finished.lines
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    names = {field.name for field in fields(Progress)}
    for line in metrics:
        assert set(line) == names
        assert line["loss_min"] <= line["loss"] <= line["loss_max"]
        assert line["tokens"] == line["step"] * TOKENS_PER_STEP
        assert line["steps_to_next_sync"] == SYNC_EVERY - line["step"] % SYNC_EVERY
        assert line["tokens_per_second"] > 0
        assert line["gradient_norm"] > 0
        assert line["lr"] == pytest.approx(6e-3 * lr_factor(line["step"], finished.config.train))
        assert (line["validation_loss"] is not None) == (line["step"] in (20, 40, STEPS))
    for name in ("seconds", "bytes_sent"):
        assert [line[name] for line in metrics] == sorted(line[name] for line in metrics)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    assert metrics[0]["overlap_with_first"] == pytest.approx(1, abs=1e-5)
    assert metrics[-1]["overlap_with_first"] < 0.9  # the full-rank term moves the basis


def test_bytes_are_sent_when_a_synchronisation_is_due_and_only_then(finished):
    sent = [0, *(line["bytes_sent"] for line in finished.lines)]
    steps_that_sent = [step for step in range(1, STEPS + 1) if sent[step] > sent[step - 1]]
    first_basis, last_average = 1, STEPS
    assert steps_that_sent == [first_basis, *range(SYNC_EVERY, STEPS, SYNC_EVERY), last_average]


def test_counted_bytes_are_the_predicted_ones(finished):
    total = finished.summary
    assert total["bytes_sent"] == total["bytes_predicted"]
    assert total["state_bytes"] == total["state_predicted"]
    assert sum(total["bytes_sent"].values()) == finished.lines[-1]["bytes_sent"]
    assert "differs" not in finished.printed


def test_summary_tells_the_result(finished):
    total, last = finished.summary, finished.lines[-1]
    assert total["validation_loss"] == last["validation_loss"]
    assert total["perplexity"] == last["perplexity"] == pytest.approx(math.exp(total["validation_loss"]))
    assert total["tokens"] == last["tokens"]
    assert total["skipped_steps"] == 0
    assert set(total["seconds"]) == {"compute", "basis refresh", "encoding", "communication", "evaluation"}
    assert sum(total["seconds"].values()) == pytest.approx(last["seconds"], rel=0.2)
    assert total["environment"]["torch"] == torch.__version__
    table = (finished.folder / "summary.txt").read_text()
    for text in (table, finished.printed):
        assert f"{total['perplexity']:.4f}" in text
        assert "less than DDP AdamW" in text
        assert "less than AdamW" in text
        assert "basis refresh" in text


def test_the_saved_model_has_the_perplexity_that_was_told(finished):
    model = AutoModelForCausalLM.from_pretrained(finished.folder / "model").eval()
    blocks = load_blocks(finished.config.data, finished.config.seed).validation.long()
    with torch.no_grad():
        logits = model(input_ids=blocks).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
    assert loss.exp().item() == pytest.approx(finished.summary["perplexity"], rel=1e-5)


def test_a_second_run_repeats_to_the_bit_and_overwrites_nothing(finished):
    before = {path: path.read_bytes() for path in finished.folder.rglob("*") if path.is_file()}
    again = train(finished.recipe)

    assert again.folder == finished.folder.with_name("micro-2")
    assert {path: path.read_bytes() for path in finished.folder.rglob("*") if path.is_file()} == before
    assert [untimed(line) for line in again.lines] == [untimed(line) for line in finished.lines]
    weights = Path("model") / "model.safetensors"
    assert (again.folder / weights).read_bytes() == (finished.folder / weights).read_bytes()


def test_every_recipe_setting_can_be_an_option(tmp_path):
    run = train(micro_recipe(tmp_path), "--train.steps", "3", "--workers", "2", "--train.warmup_steps", "0", "--method.omega", "0.5")
    assert run.config.workers == run.summary["workers"] == 2
    assert run.config.method.omega == 0.5
    assert [line["step"] for line in run.lines] == [1, 2, 3]


# ---- every method, any number of workers


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("name", lordo.METHODS)
def test_every_method_trains_and_counts_what_was_predicted(name, num_workers, tmp_path):
    recipe = micro_recipe(tmp_path)
    common = f'[method]\nname = "{name}"\nlr = 4e-3\n'
    own = {"rank": "rank = 4\n", "sync_every": "sync_every = 4\n"}
    table = common + "".join(line for setting, line in own.items() if setting in lordo.METHODS[name].settings)
    text = recipe.read_text()
    recipe.write_text(text[: text.index("[method]")] + table + "\n" + text[text.index("[train]") :])

    run = train(recipe, "--workers", str(num_workers), "--train.steps", "10")

    total = run.summary
    assert total["method"] == name
    assert total["bytes_sent"] == total["bytes_predicted"]
    assert total["state_bytes"] == total["state_predicted"]
    assert "differs" not in run.printed
    assert run.lines[-1]["loss"] < run.lines[0]["loss"]
    assert math.isfinite(total["perplexity"])


# ---- the same run on processes


def processes(*command: str, mark: str = "") -> subprocess.Popen:
    """Start a command in a session of its own; `mark` lets `survivors` find whatever it starts in turn."""
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LORDO_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def torchrun(num_processes: int) -> list[str]:
    """One launch, at a port that is free."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", str(num_processes)]
    return ["torch.distributed.run", *meeting, "-m", "lordo"]


def assert_ends_well(*started: subprocess.Popen) -> list[str]:
    """Wait for processes; returns what each wrote to standard output."""
    try:
        ends = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, ends, strict=True):
        assert process.returncode == 0, errors
        assert "terminate called" not in errors
    return [printed for printed, _ in ends]


def assert_same_run(folder: Path, finished: Run) -> None:
    """Losses within 1e-5 relative over all 50 steps, and the same bytes."""
    for line, expected in zip(lines(folder), finished.lines, strict=True):
        losses = [name for name in ("loss", "loss_min", "loss_max", "validation_loss") if expected[name] is not None]
        for name in losses:
            assert line[name] == pytest.approx(expected[name], rel=1e-5), (name, line["step"])
        assert line["bytes_sent"] == expected["bytes_sent"]
    total, expected = summary(folder), finished.summary
    for name in ("bytes_sent", "bytes_predicted", "ddp_bytes", "state_bytes", "tokens", "workers", "num_parameters"):
        assert total[name] == expected[name], name


@pytest.mark.slow
def test_processes_train_as_the_workers_of_one_process_do(finished, tmp_path):
    [printed] = assert_ends_well(processes(*torchrun(NUM_WORKERS), "train", str(finished.recipe), "--output", str(tmp_path)))
    assert_same_run(tmp_path / "micro", finished)
    assert os.listdir(tmp_path) == ["micro"]  # one folder, from worker 0
    assert printed.count(f"step {STEPS}/{STEPS}") == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "micro" / "model")


def launches(recipe: Path, output: Path, *options: tuple[str, ...], per_node: int) -> list[subprocess.Popen]:
    """One `torchrun` for each machine, that meet at a static master address; `options` has those of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = f"--nnodes {len(options)} --master-addr 127.0.0.1 --master-port {port} --nproc-per-node {per_node}".split()
    training = ["-m", "lordo", "train", str(recipe), "--output", str(output)]
    return [
        processes("torch.distributed.run", *meeting, "--node-rank", str(node), *training, *options_of_node)
        for node, options_of_node in enumerate(options)
    ]


@pytest.mark.slow
def test_two_launches_meet_and_train_the_same(finished, tmp_path):
    """As on two machines."""
    first, second = assert_ends_well(*launches(finished.recipe, tmp_path, (), (), per_node=2))
    assert_same_run(tmp_path / "micro", finished)
    assert "validation perplexity" in first
    assert second == ""


@pytest.mark.slow
def test_two_launches_that_differ_are_told_in_what(finished, tmp_path):
    options = ("--workers", "2")
    started = launches(finished.recipe, tmp_path, options, (*options, "--method.lr", "1e-3"), per_node=1)
    try:
        errors = [process.communicate(timeout=60)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode != 0 for process in started)
    sentence = "lordo: method.lr is 0.006 on worker 0 but 0.001 on worker 1: start every worker with the same recipe, options and files"
    for error in errors:  # each machine has a terminal of its own
        assert error.count(sentence) == 1, error
        assert "launch.py" not in error  # a traceback of ours


# ---- Ctrl+C


def survivors(mark: str) -> list[int]:
    """Processes, zombies left out, that descend from the one started with this mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"LORDO_TEST_MARK={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


# A run that was told to stop ends in a second or two by itself; one that does not would go on for hours.
ENDS_SECONDS = 90


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


@contextlib.contextmanager
def training(recipe: Path, *command: str, num_workers: int = NUM_WORKERS) -> Iterator[tuple[subprocess.Popen, str]]:
    """A run that would go on for hours, in the middle of its training; whatever is left of it at the end is killed."""
    mark = str(uuid.uuid4())
    endless = ["--train.steps", "1000000", "--train.schedule", "constant"]
    options = ["--workers", str(num_workers), "--output", str(recipe.parent / mark)]
    process = processes(*command, "train", str(recipe), *endless, *options, mark=mark)
    metrics = recipe.parent / mark / "micro" / "metrics.jsonl"
    try:
        assert wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > SYNC_EVERY, seconds=90)
        yield process, mark
    finally:
        for pid in survivors(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
    assert len(lines(metrics.parent)) > SYNC_EVERY  # what was recorded is whole
    assert not (metrics.parent / "summary.json").exists()


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")


@pytest.mark.slow
@needs_proc
def test_ctrl_c_stops_the_workers_of_one_process(finished):
    with training(finished.recipe, "lordo") as (process, mark):
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=ENDS_SECONDS)
        assert survivors(mark) == []

    assert process.returncode == 130, errors
    told = errors.strip().splitlines()
    assert len(told) == 1, errors
    assert told[0].startswith("lordo: interrupted")


@pytest.mark.slow
@needs_proc
def test_ctrl_c_stops_the_processes_of_torchrun(finished):
    with training(finished.recipe, *torchrun(2), num_workers=2) as (process, mark):
        assert len(survivors(mark)) == 1 + 2
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=ENDS_SECONDS)
        assert wait_until(lambda: survivors(mark) == [], seconds=ENDS_SECONDS)

    assert process.returncode != 0
    assert "terminate called" not in errors
    assert "lordo: interrupted" in errors
    assert errors.count("Traceback") <= 1  # torchrun's own


# ---- the learning rate


@st.composite
def schedules(draw) -> TrainConfig:
    steps = draw(st.integers(1, 300))
    return TrainConfig(
        steps=steps,
        warmup_steps=draw(st.integers(0, steps)),
        schedule=draw(st.sampled_from(["constant", "cosine", "linear"])),
        final_lr_fraction=draw(st.floats(0, 1)),
    )


def test_learning_rate_stays_at_its_peak_until_the_decay():
    """Warm-up, stable, decay."""
    config = TrainConfig(steps=100, warmup_steps=10, schedule="linear", decay_steps=20, final_lr_fraction=0.0)
    assert [lr_factor(step, config) for step in (5, 10, 50, 80)] == [0.5, 1, 1, 1]
    assert [lr_factor(step, config) for step in (81, 90, 100)] == pytest.approx([0.95, 0.5, 0])
    assert lr_factor(90, config.model_copy(update={"schedule": "cosine"})) == pytest.approx(0.5)


@given(schedules())
def test_learning_rate_rises_linearly_to_its_peak_and_falls_to_its_final_fraction(schedule):
    steps, warmup, final = schedule.steps, schedule.warmup_steps, schedule.final_lr_fraction
    factors = [lr_factor(step, schedule) for step in range(1, steps + 1)]

    assert factors[:warmup] == [step / warmup for step in range(1, warmup + 1)]
    after = factors[max(warmup - 1, 0) :]  # from the peak on, where there was a warm-up
    assert all(0 <= factor <= 1 for factor in factors)
    if schedule.schedule == "constant":
        assert set(factors[warmup:]) <= {1.0}
        return
    assert all(later <= factor + 1e-12 for factor, later in itertools.pairwise(after))
    if steps > warmup:
        assert factors[-1] == pytest.approx(final, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_learning_rate_is_half_way_down_half_way_through(schedule):
    config = TrainConfig(steps=110, warmup_steps=10, schedule=schedule, final_lr_fraction=0.2)
    assert lr_factor(60, config) == pytest.approx((1 + 0.2) / 2)
    fraction = (1 - math.cos(math.pi / 4)) / 2 if schedule == "cosine" else 1 / 4
    assert lr_factor(35, config) == pytest.approx(1 - 0.8 * fraction)


# ---- losses that are not finite


def spoil(monkeypatch, *, worker: int, steps: range) -> None:
    """Make the training loss of one worker NaN at some steps."""
    build = lordo.trainer.loop.build

    def spoiled(config, method, workers, *args, **kwargs):
        model, groups, optimizer = build(config, method, workers, *args, **kwargs)
        taken = 0

        def hook(module, inputs, output):
            nonlocal taken
            if module.training:
                taken += 1
                if taken in steps:
                    return dataclasses.replace(output, loss=output.loss * float("nan"))
            return None

        if workers.size > 1 and workers.rank == worker:
            model.register_forward_hook(hook)
        return model, groups, optimizer

    monkeypatch.setattr(lordo.trainer.loop, "build", spoiled)


@pytest.mark.filterwarnings("ignore:step .* skipped on this worker")
def test_steps_with_a_loss_that_is_nan_are_skipped_and_counted(monkeypatch, tmp_path):
    spoil(monkeypatch, worker=1, steps=range(3, 6))  # over a synchronisation, at step 4
    run = train(micro_recipe(tmp_path), "--train.steps", "10")

    assert run.summary["skipped_steps"] == 3
    assert [line["skipped_steps"] for line in run.lines] == [0, 0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert math.isfinite(run.summary["perplexity"])
    assert run.lines[-1]["loss"] < run.lines[0]["loss"]
    assert run.summary["bytes_sent"] == run.summary["bytes_predicted"]  # at a synchronisation the worker takes part as ever
    assert "3 steps skipped (gradient not finite)" in run.printed
    assert "skipped steps" in run.printed


@pytest.mark.filterwarnings("ignore:step .* skipped on this worker")
def test_metrics_are_json_even_where_a_loss_is_nan(monkeypatch, tmp_path):
    """NaN is no JSON: other readers than Python's refuse the whole line."""
    spoil(monkeypatch, worker=0, steps=range(2, 3))
    run = train(micro_recipe(tmp_path), "--train.steps", "5")

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.filterwarnings("ignore:step .* skipped on this worker")
def test_losses_that_stay_nan_end_the_run_with_one_sentence(monkeypatch, tmp_path, capsys):
    spoil(monkeypatch, worker=2, steps=range(5, 1000))
    assert lordo.cli.main(["train", str(micro_recipe(tmp_path))]) == 1

    [told] = capsys.readouterr().err.strip().splitlines()
    assert told.startswith("lordo: step ")
    assert "lower the learning rate or check the data" in told


# ---- the tiny recipe


@pytest.mark.slow
def test_the_full_rank_term_leads_the_tiny_recipe_out_of_its_first_subspace(tmp_path):
    """Overlap of the bases with the first ones, after one refresh: below 0.9 with the full-rank term, 1 without it."""
    recipe = Path(__file__).parents[1] / "recipes" / "tiny.toml"

    def overlap_of(*options: str) -> float:
        assert lordo.cli.main(["train", str(recipe), "--output", str(tmp_path), *SHORT, *options]) == 0
        folder = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return lines(folder)[-1]["overlap_with_first"]

    assert overlap_of() < 0.9
    assert overlap_of("--method.omega", "1.0", "--method.error_feedback", "false") == pytest.approx(1, abs=1e-4)


SHORT = ["--train.steps", "20", "--train.eval_sequences", "16", "--method.sync_every", "8"]


@pytest.mark.parametrize(
    ("settings", "cores", "expected"),
    [
        ({}, 2, 2),
        ({}, 16, 4),  # never more than there are workers
        ({"train.threads": 2}, 2, 1),
        ({"train.threads": 2}, 8, 4),
        ({"model.config": {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 256}}, 2, 1),  # drops out
    ],
)
def test_as_many_workers_compute_at_once_as_there_are_cores(monkeypatch, tmp_path, settings, cores, expected):
    monkeypatch.setattr(lordo.trainer.launch, "available_cores", lambda: cores)
    config = override(load(micro_recipe(tmp_path)), {"train.threads": None, **settings})
    assert lordo.trainer.launch.workers_at_once(prepare(config)) == expected


def test_what_one_machine_lacks_is_told_on_all(tmp_path):
    good = load(micro_recipe(tmp_path))
    lacking = override(good, {"data.source": [str(tmp_path / "not-here.py")]})

    def prepared_alike(workers):
        return prepare_alike(lacking if workers.rank == 1 else good, workers)

    with pytest.raises(UsageError, match=r"^worker 1: .*not-here\.py"):
        lordo.simulate(prepared_alike, 3)
