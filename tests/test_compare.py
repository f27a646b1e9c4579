"""`lordo compare`: the same weights and text for every method, results kept, failures told."""

import json
import shutil

import pytest
import torch

import lordo.cli
import lordo.trainer.compare
import lordo.trainer.compare_command
from lordo.methods import METHODS, find
from lordo.sync import Solo
from lordo.trainer.compare import check, learning_rates, member_config, variants
from lordo.trainer.prepared import build
from lordo.trainer.recipe import load, override
from lordo.trainer.settings import UsageError
from test_report import outside_pictures
from test_train import micro_recipe

SHORT = ["--train.steps", "6", "--train.eval_every", "3", "--train.warmup_steps", "1", "--method.sync_every", "3"]


@pytest.fixture
def recipe(tmp_path):
    return micro_recipe(tmp_path)


def compare(recipe, *arguments) -> int:
    return lordo.cli.main(["compare", str(recipe), *SHORT, *arguments])


def results(recipe, name="micro-compare"):
    return json.loads((recipe.parent / "runs" / name / "results.json").read_text())["rows"]


@pytest.mark.slow
def test_trains_each_writes_everything_and_continues_where_it_was(recipe, capsys):
    command = ["--methods", "lordo,ddp-adamw", "--seeds", "2", "--lr", "lordo=1e-3,1e-2,1e-4", "--bandwidth", "1Mbps"]
    assert compare(recipe, *command) == 0
    printed = capsys.readouterr().out
    folder = recipe.parent / "runs" / "micro-compare"
    assert {path.name for path in (folder / "members").iterdir()} == {
        *(f"lordo-lr{lr}-seed0" for lr in ("0.0001", "0.001", "0.01")),
        "lordo-lr0.01-seed1",
        "ddp-adamw-lr0.006-seed0",
        "ddp-adamw-lr0.006-seed1",
    }
    lordo_row, ddp_row = results(recipe)
    assert lordo_row["lr"] == 0.01
    assert lordo_row["lr_on_edge"]
    assert "0.01*" in printed
    assert not ddp_row["lr_on_edge"]
    assert len(lordo_row["perplexity_per_seed"]) == 2
    assert lordo_row["perplexity"] == pytest.approx(sum(lordo_row["perplexity_per_seed"]) / 2)
    assert "s at 1Mbps" in printed

    page = (folder / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(list(folder.glob("*.png"))) >= 4
    assert "http" not in outside_pictures(page).replace("https://arxiv.org", "")
    assert (folder / "table.txt").read_text() in printed

    # an interrupted comparison: one member lost, another half-written; the finished ones are not run again
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("members/*/summary.json")}
    shutil.rmtree(folder / "members" / "lordo-lr0.01-seed1")
    (folder / "members" / "ddp-adamw-lr0.006-seed1" / "summary.json").unlink()
    before = results(recipe)
    assert compare(recipe, *command) == 0
    assert results(recipe) == before
    untouched = {path: path.stat().st_mtime_ns for path in kept}
    rerun = {path for path in folder.glob("members/*/summary.json") if kept[path] != path.stat().st_mtime_ns}
    assert {path.parent.name for path in rerun} == {"lordo-lr0.01-seed1", "ddp-adamw-lr0.006-seed1"}

    # it may grow: one more seed runs that seed alone
    assert compare(recipe, *[*command[:3], "3", *command[4:]]) == 0
    assert len(results(recipe)[0]["perplexity_per_seed"]) == 3
    assert all(path.stat().st_mtime_ns == rerun_at for path, rerun_at in untouched.items())

    # other settings under the same name would mix two comparisons
    assert compare(recipe, *command, "--batch.per_worker_sequences", "1") == 2
    assert "made with other settings" in capsys.readouterr().err


@pytest.mark.slow
def test_varies_settings_together_and_leaves_out_what_a_method_lacks(recipe, capsys):
    vary = ["--vary", "method.rank=2,8", "--vary", "workers=1,2 batch.per_worker_sequences=2,1"]
    assert compare(recipe, "--methods", "lordo,local-adamw", *vary) == 0
    labels = [row["label"] for row in results(recipe)]
    together = [f"workers={workers} per_worker_sequences={sequences}" for workers, sequences in ((1, 2), (2, 1))]
    ranks = [f"lordo rank={rank} {rest}" for rank in (2, 8) for rest in together]
    assert labels == ranks + [f"local-adamw {rest}" for rest in together]
    assert "Perplexity against what is varied" in (recipe.parent / "runs" / "micro-compare" / "report.html").read_text()


@pytest.mark.slow
def test_a_member_that_fails_or_diverges_is_marked_and_the_others_go_on(recipe, capsys, monkeypatch):
    run = lordo.trainer.compare.run_in_threads

    def fails_for_lordo(prepared, folder, console, **more):
        if prepared.method.name == "lordo":
            raise FloatingPointError("a loss of no use")
        return run(prepared, folder, console, **more)

    monkeypatch.setattr(lordo.trainer.compare, "run_in_threads", fails_for_lordo)
    assert compare(recipe, "--methods", "lordo,ddp-adamw") == 1
    printed = capsys.readouterr().out
    assert "failed: lordo, lr 0.006, seed 0: FloatingPointError: a loss of no use" in printed
    failed, other = results(recipe)
    assert failed["perplexity"] is None
    assert other["perplexity"] > 1


def test_every_method_starts_from_the_same_weights(recipe):
    config = load(recipe)
    models = []
    for method in METHODS.values():
        own = member_config(config, method, (), lr=1e-3, seed=3)
        assert own.seed == 3
        models.append(build(own, method, Solo(), "cpu")[0])
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), model.parameters(), strict=True))


def test_learning_rates_come_from_the_method_from_all_or_from_the_recipe(recipe):
    config = load(recipe)
    options = override(config, {"compare.lr": {"lordo": [2e-3, 1e-3], "all": [5e-3]}}).compare
    assert learning_rates(config, options, "lordo") == [1e-3, 2e-3]
    assert learning_rates(config, options, "diloco") == [5e-3]
    assert learning_rates(config, config.compare, "diloco") == [config.method.lr]


def test_variants_are_all_combinations():
    assert variants([]) == [()]
    assert variants(["method.rank=2,4", "workers=1,2 train.steps=7,8"]) == [
        (("method.rank", rank), ("workers", workers), ("train.steps", steps)) for rank in (2, 4) for workers, steps in ((1, 7), (2, 8))
    ]
    for wrong in ("method.rank", "method.rank="):
        with pytest.raises(UsageError, match="cannot vary"):
            variants([wrong])
    with pytest.raises(UsageError, match="not of one length"):
        variants(["workers=1,2 train.steps=3"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--methods", "lordo,desloq"], "unknown method 'desloq'; did you mean 'desloc'"),
        (["--bandwidth", "3Mbits"], "unknown unit 'Mbits'; did you mean 'Mbps'"),
        (["--lr", "lordoo=1e-3"], "unknown method 'lordoo'"),
        (["--lr", "lordo=fast"], "write METHOD=LR,LR"),
        (["--lr", "lordo=-1"], "lr"),
        (["--seeds", "0"], "seeds"),
        (["--vary", "method.rnak=1,2"], "did you mean 'rank'"),
        (["--vary", "method.rank=0"], "rank = 0"),
        (["--vary", "method.lr=1e-3,1e-2"], "give --lr instead"),
        (["--vary", "seed=1,2"], "give --seeds instead"),
        (["--model.config.hidden_sze", "32"], "hidden_sze"),
        (["--seeds", "many"], "--seeds"),
        (["--nethods", "lordo"], "nethods"),
    ],
)
def test_refuses_in_one_sentence_before_anything_runs(recipe, capsys, arguments, sentence):
    assert compare(recipe, *arguments) == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert errors.count("\n") == 1
    assert not (recipe.parent / "runs").exists()


@pytest.mark.slow
def test_a_failure_at_a_learning_rate_that_is_not_the_best_is_told_too(recipe, capsys, monkeypatch):
    run = lordo.trainer.compare.run_in_threads

    def fails_at_one(prepared, folder, console, **more):
        if prepared.config.method.lr == 1e-3:
            raise RuntimeError("no luck")
        return run(prepared, folder, console, **more)

    monkeypatch.setattr(lordo.trainer.compare, "run_in_threads", fails_at_one)
    assert compare(recipe, "--methods", "lordo", "--lr", "lordo=1e-3,1e-2") == 1
    assert "failed: lordo, lr 0.001, seed 0: RuntimeError: no luck" in capsys.readouterr().out


def test_learning_rates_given_for_one_method_leave_the_recipes_for_the_others(recipe, monkeypatch):
    seen = {}
    monkeypatch.setattr(lordo.trainer.compare_command, "check", lambda config, options: seen.update(options.lr))
    monkeypatch.setattr(lordo.trainer.compare_command, "compare", lambda *_: [])
    monkeypatch.setattr(lordo.trainer.compare_command, "draw", lambda *_: {})
    monkeypatch.setattr(lordo.trainer.compare_command, "write_page", lambda *_: None)
    (recipe.parent / "runs" / "micro-compare").mkdir(parents=True)
    recipe.write_text(recipe.read_text() + "\n[compare.lr]\nlordo = [1e-3]\ndiloco = [2e-3]\n")
    compare(recipe, "--lr", "lordo=5e-3")
    assert seen == {"lordo": [5e-3], "diloco": [2e-3]}


def test_check_finds_a_setting_that_no_method_can_have(recipe):
    config = override(load(recipe), {"compare.methods": [find("lordo").name], "compare.vary": ["train.steps=0"]})
    with pytest.raises(ValueError, match="steps"):
        check(config, config.compare)
