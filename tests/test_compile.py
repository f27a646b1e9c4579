"""torch.compile as a setting: the same run under the same names, and a sentence where it cannot work."""

import pytest
import torch
from safetensors import safe_open

import lordo.cli
from lordo.trainer.checkpoint import Share, parts
from lordo.trainer.finished import open_run
from test_train import micro_recipe, train, untimed

SHORT = ("--workers", "2", "--train.steps", "6", "--train.eval_every", "3", "--train.checkpoint_every", "4", "--train.warmup_steps", "1")


def test_a_compiled_model_trains_to_the_same_bits_under_the_same_names(tmp_path):
    """With a backend that runs what was traced as it is; inductor rounds in other places."""
    recipe = micro_recipe(tmp_path)
    plain, compiled = train(recipe, *SHORT), train(recipe, *SHORT, "--model.compile", "eager")
    assert [untimed(line) for line in compiled.lines] == [untimed(line) for line in plain.lines]
    names = []
    for run in (plain, compiled):
        with safe_open(run.folder / "model" / "model.safetensors", "pt") as file:
            names.append((sorted(file.keys()), sorted(parts(run.folder / "checkpoints", 4, Share(0, 2))[0].names("weights.safetensors"))))
    assert names[0] == names[1]
    open_run(str(compiled.folder))

    resumed = train(recipe, *SHORT, "--train.steps", "8", "--model.compile", "eager", "--resume")
    assert resumed.folder == compiled.folder
    assert resumed.lines[-1]["step"] == 8


def test_where_nothing_can_be_compiled_it_is_told_before_the_run(tmp_path, capsys, monkeypatch):
    def no_compiler(*_, **__):
        raise RuntimeError("No working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1 for more")

    monkeypatch.setattr(torch, "compile", no_compiler)
    recipe = micro_recipe(tmp_path)
    for command in ("check", "train"):
        assert lordo.cli.main([command, str(recipe), "--model.compile", "inductor"]) == 2
        told = capsys.readouterr().err
        assert "model.compile = 'inductor' does not work on this machine (No working C++ compiler found): install" in told
        assert told.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("given", ["true", "tvm"])
def test_another_backend_is_refused(tmp_path, capsys, given):
    assert lordo.cli.main(["train", str(micro_recipe(tmp_path)), "--model.compile", given]) == 2
    assert "should be 'inductor', 'aot_eager' or 'eager'" in capsys.readouterr().err
