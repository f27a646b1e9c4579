"""`lordo report`: one page from what runs recorded, finished or not."""

import json
import re
import shutil

import pytest

import lordo.cli
from test_train import Run, micro_recipe, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    """A run of lordo and one of ddp-adamw, ended after a few rounds."""
    recipe = micro_recipe(tmp_path_factory.mktemp("micro"))
    short = ("--train.steps", "12", "--train.eval_every", "4")
    adamw = ("--method.name", "ddp-adamw", "--method.rank", "none", "--method.sync_every", "none", "--name", "adamw")
    return [train(recipe, *short), train(recipe, *short, *adamw)]


def report(*arguments) -> int:
    return lordo.cli.main(["report", *(str(each) for each in arguments)])


def row(printed: str, name: str) -> list[str]:
    """The cells of a run in the printed table."""
    return next(line.split() for line in printed.splitlines() if line.split()[:1] == [name])


def outside_pictures(page: str) -> str:
    """A page without its encoded pictures, whose letters may spell anything."""
    return re.sub(r"data:image/png;base64,[^\"]*", "", page)


def test_one_page_tells_of_both_runs_and_needs_nothing_else(runs, tmp_path, capsys):
    (runs[0].folder / "evaluations.json").write_text(
        json.dumps({"validation": {"perplexity": 7.0, "bits_per_byte": 2.5}, "piqa": {"metrics": {"acc": 0.625}}})
    )
    assert report(*(run.folder for run in runs), "--output", tmp_path / "page") == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "page" / "report.html").read_text()
    pictures = list((tmp_path / "page").glob("*.png"))
    assert page.count('src="data:image/png;base64,') == len(pictures) == 7
    assert "http" not in outside_pictures(page)
    for run in runs:
        cells = row(printed, run.folder.name)
        assert f"{run.summary['perplexity']:.4f}" in cells
        assert "12/12" in cells
        assert f"{run.summary['perplexity']:.4f}" in page
    assert "2.5000" in row(printed, "micro")
    assert "acc 0.6250" in page
    assert "Not finished" not in page


def test_a_run_that_goes_on_is_reported_as_far_as_it_is(runs, tmp_path, capsys):
    going = tmp_path / "going"
    shutil.copytree(runs[0].folder, going, ignore=shutil.ignore_patterns("model", "summary.*", "evaluations.json"))
    lines = (going / "metrics.jsonl").read_text().splitlines(keepends=True)
    (going / "metrics.jsonl").write_text("".join(lines[:6]) + lines[6][:40])  # the seventh line is being written
    assert report(going) == 0
    assert "6/12" in row(capsys.readouterr().out, "going")
    assert "Not finished when this was written: going" in (going / "report" / "report.html").read_text()

    (going / "metrics.jsonl").write_text("")  # it has just begun
    assert report(going) == 0
    assert "0/12" in row(capsys.readouterr().out, "going")
    assert "<img" not in (going / "report" / "report.html").read_text()


def test_runs_of_one_name_keep_apart(runs, tmp_path, capsys):
    shutil.copytree(runs[0].folder, tmp_path / "micro")
    assert report(runs[0].folder, tmp_path / "micro", "--output", tmp_path) == 0
    printed = capsys.readouterr().out
    assert row(printed, str(runs[0].folder)) != row(printed, str(tmp_path / "micro"))


def test_what_cannot_be_reported(runs, tmp_path, capsys):
    for arguments, words in (
        ([tmp_path / "nowhere"], "is not a folder"),
        ([runs[0].folder.parent], "no config.toml"),
        ([runs[0].folder, "--output", runs[0].folder / "config.toml"], "cannot be written"),
        ([], "required: RUN"),
    ):
        assert report(*arguments) == 2
        errors = capsys.readouterr().err
        assert words in errors
        assert errors.count("\n") == 1
    broken = tmp_path / "broken"
    shutil.copytree(runs[0].folder, broken)
    (broken / "metrics.jsonl").write_text("{}}\n")
    assert report(broken) == 2
    assert "its records cannot be read" in capsys.readouterr().err
