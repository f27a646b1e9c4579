"""TensorBoard and W&B, the real libraries (W&B offline): every number of `metrics.jsonl` is there too, and none of them can stop a run."""

import pytest

import lordo.cli
from lordo.trainer.trackers import numbers
from test_train import micro_recipe, train

SHORT = ("--train.steps", "8", "--train.log_every", "4", "--train.eval_every", "8")


def test_numbers_are_flat_and_without_texts():
    record = {"step": 3, "loss": 1.5, "perplexity": None, "kept_bases": ["a"], "sync": {"step": 2, "seconds": {"compute": 0.5}}}
    assert numbers(record) == {"loss": 1.5, "sync/seconds/compute": 0.5}


@pytest.mark.slow
def test_tensorboard_has_every_number_of_the_metrics(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(micro_recipe(tmp_path), *SHORT, "--train.trackers", '["tensorboard"]')
    events = event_accumulator.EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    found = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    expected = {(name, line["step"]): value for line in run.lines for name, value in numbers(line).items()}
    assert found == pytest.approx(expected, rel=1e-5)
    assert ("sync/gradient_share", 8) in found


@pytest.mark.slow
def test_wandb_records_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train(micro_recipe(tmp_path), *SHORT, "--train.trackers", '["wandb"]')
    [file] = run.folder.glob("wandb/offline-run-*/*.wandb")
    recorded = file.read_bytes()
    for name in ("validation_loss", "sync/gradient_share", "tokens_per_second"):
        assert name.encode() in recorded
    assert b"sync_every" in recorded  # the settings


def test_a_tracker_that_cannot_start_does_not_stop_the_run(tmp_path, monkeypatch):
    def refuse(folder, config):
        raise ConnectionError("no\nserver")

    monkeypatch.setitem(lordo.trainer.trackers.TRACKERS, "wandb", refuse)
    monkeypatch.setattr(lordo.trainer.launch, "check_installed", lambda names: None)
    run = train(micro_recipe(tmp_path), *SHORT, "--train.trackers", '["wandb"]')
    assert "wandb could not start, so the run goes on without it: no server" in run.printed
    assert run.lines[-1]["step"] == 8


def test_a_tracker_that_is_not_there_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    recipe = micro_recipe(tmp_path)
    monkeypatch.setattr(lordo.trainer.trackers, "find_spec", lambda name: None)
    assert lordo.cli.main(["train", str(recipe), "--train.trackers", '["wandb"]']) == 2
    assert "wandb is not installed: pip install 'lordo[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert lordo.cli.main(["train", str(recipe), "--train.trackers", '["wandbb"]']) == 2
    assert "'wandb'" in capsys.readouterr().err
